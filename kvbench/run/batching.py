"""Units of work, one at a time or in groups, and everything that may go wrong in them: always one
outcome per record.

The answers do not depend on the groups; how long they take and the memory they need do. What runs
out of memory or time in a group, and a group that fails as a whole, runs again in halves, down to single
units, and a unit's methods then one at a time, so that a record of such a failure is always that of a
method which failed alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from kvbench.engine import memory
from kvbench.engine.faults import device_is_usable, free_memory, is_out_of_memory
from kvbench.engine.limits import time_limit
from kvbench.errors import FAILED, UserError, one_line, traceback_of
from kvbench.run.plan import Methods, Outcome, Plan, Unit, status_of
from kvbench.run.session import Session
from kvbench.run.termination import asks_to_stop, finished_first

log = logging.getLogger(__name__)

Work = tuple[Unit, Methods]
"""A unit, and the methods it is still to run with."""
Save = Callable[[Sequence[Outcome]], None]

RETRIED_ALONE = ("oom", "timeout")
"""Failures that the other methods or examples of a group may have caused: tried again alone."""
AUTO_MOST = 64
"""Units per group up to which `auto` grows: records are written when a group is done."""
SAFE = 0.85
"""Share of all memory that a doubled group may be expected to take."""
GOES_ON = "the same command goes on after it"


class DeviceLost(UserError, RuntimeError):
    """The device answers nothing any more."""

    status = FAILED


class Runner:
    """Runs units in groups.

    With batch_size ``auto`` a group starts with one unit, doubles while twice the last group's need
    fits in memory, and is halved by a group that ran out of it; beyond that size it does not grow
    again. A unit that does not fit even alone says nothing about the others: they go on at the size
    before.

    Args:
        batch_size: units of a group, an integer or "auto".
        save: writes outcomes; called from another thread before the process ends, when code that
            runs no Python hangs longer than the session's `example_timeout`.

    Attributes:
        size: units of the next group. most: never more than these.
    """

    def __init__(self, plan: Plan, session: Session, batch_size: int | str, save: Save) -> None:
        self.plan, self.session, self.save = plan, session, save
        self.grows = batch_size == "auto"
        self.size, self.most = (1, AUTO_MOST) if isinstance(batch_size, str) else (batch_size,) * 2
        self._before: int | None = None  # bytes in use when a group began
        self._need = 0.0  # bytes that a unit took at most

    def run(self, work: Sequence[Work]) -> Iterator[Sequence[Outcome]]:
        """The outcomes of each unit as soon as they are final, failures included; those that ran out
        of memory or time in a group come after the others of it.

        Raises:
            DeviceLost: nothing more can be run in this process.
        """
        device, done = self.session.device, 0
        while done < len(work):
            group = work[done : done + (self.size if self.plan.batches_units else 1)]
            done += len(group)
            failed = False
            with finished_first(more=done == len(work)):  # left when its outcomes have been taken
                for outcomes in self._run_group(group):
                    failed |= any(outcome.fields.get("error") is not None for outcome in outcomes)
                    yield outcomes
            if failed and not device_is_usable(device):
                raise DeviceLost(
                    f"{device} answers nothing any more after example {group[-1][0].id!r}, whose "
                    f"records say why; {GOES_ON}"
                )

    def _went_well(self, units: int) -> None:
        """Let the next group be larger, after one of so many units fitted into memory."""
        if not self.grows or self.size == self.most:
            return
        device = self.session.device
        peak, total = memory.peak_bytes(device), memory.total_bytes(device)
        if self._before is None or peak is None or total is None:
            self.most = self.size  # nothing can be said, so nothing is risked
            return
        # The most a unit ever took: a later group may find the memory of an earlier one resident.
        self._need = max(self._need, (peak - self._before) / units)
        doubled = min(2 * self.size, self.most)
        if units == self.size and self._before + doubled * self._need <= SAFE * total:
            self.size = doubled

    def _run_group(self, group: Sequence[Work]) -> Iterator[Sequence[Outcome]]:
        device = self.session.device
        if self.grows and memory.reset_peak(device):  # what it takes from here on is its own
            self._before = memory.used_bytes(device)
        if len(group) == 1:
            outcomes = self._run_unit(*group[0])
            if not _failed_as(outcomes, ("oom",)):
                self._went_well(1)
            yield outcomes
            return
        together, failure = self._attempt(group)
        again: list[Work] = []
        out_of_memory = failure is not None and is_out_of_memory(failure)
        lost = failure is not None and not device_is_usable(device)
        for work, outcomes in zip(group, together, strict=True):
            if lost:
                error = f"{one_line(failure)} (in a batch of {len(group)})"  # type: ignore[arg-type]
                yield _missing(*work, "error", error)
            elif failure is not None or _failed_as(outcomes, RETRIED_ALONE):
                again.append(work)
                out_of_memory |= _failed_as(outcomes, ("oom",))
            else:
                yield outcomes
        del together, failure
        before = self.size, self.most
        if out_of_memory:
            self.size = self.most = max(1, min(self.most, len(group) // 2))
            log.info("batch of %d ran out of memory; going on with %d", len(group), self.size)
        elif not again:
            self._went_well(len(group))
        if not again:
            return
        log.info("%d of them run again in smaller batches", len(again))
        self.session.graphs.kept.clear()
        free_memory(device)
        half = len(group) // 2
        fits_nowhere = False
        for start in range(0, len(again), half):
            for each in self._run_group(again[start : start + half]):
                fits_nowhere |= all(_failed_as([outcome], ("oom",)) for outcome in each)
                yield each
        if fits_nowhere:
            self.size, self.most = before
            log.info("one of them fits nowhere; going on with %d again", self.size)

    def _run_unit(self, unit: Unit, methods: Methods) -> list[Outcome]:
        """The outcomes of one unit, in the order of the methods.

        All methods run together. Then those that ran out of memory or time, and those without an
        outcome because the whole unit failed, run once more, one at a time; their records say
        ``retried``.
        """

        def run_together(
            methods: Methods, others: Sequence[Outcome]
        ) -> tuple[list[Outcome], set[str]]:
            """One outcome for every record of these methods, and those of them that may not fail when
            they run alone."""
            (outcomes,), failure = self._attempt([(unit, methods)], others)
            failed = []
            if failure is not None:
                failed = _missing(unit, methods, status_of(failure), one_line(failure), outcomes)
            shared = [outcome for outcome in outcomes if _failed_as([outcome], RETRIED_ALONE)]
            return [*outcomes, *failed], {outcome.method for outcome in (*shared, *failed)}

        outcomes, again = run_together(methods, [])
        if len(methods) > 1 and again and device_is_usable(self.session.device):
            log.info("%s: once more, one at a time: %s", unit.id, ", ".join(sorted(again)))
            for label in (label for label in methods if label in again):
                self.session.graphs.kept.clear()
                free_memory(self.session.device)
                others = [outcome for outcome in outcomes if outcome.method != label]
                alone, _ = run_together({label: methods[label]}, others)
                retried = [
                    replace(outcome, fields={**outcome.fields, "retried": True})
                    for outcome in alone
                ]
                outcomes = [*others, *retried]
        order = list(methods)
        return sorted(outcomes, key=lambda outcome: order.index(outcome.method))

    def _attempt(
        self, work: Sequence[Work], others: Sequence[Outcome] = ()
    ) -> tuple[list[list[Outcome]], BaseException | None]:
        """Run a group of units.

        Args:
            others: outcomes that these units have already; saved with the new ones if code hangs.

        Returns:
            the outcomes of each unit, and what failed as a whole: then only the outcomes of a single
            unit before that failure are there. None where nothing failed as a whole.
        """
        outcomes: list[list[Outcome]] = [[] for _ in work]
        name = work[0][0].id if len(work) == 1 else f"{work[0][0].id} ..."
        seconds = self.session.example_timeout

        def hung() -> None:
            error = f"hung: no answer long after example_timeout={seconds:g}"
            if len(work) > 1:
                error = f"hung in a batch of {len(work)} examples; batch_size=1 tells which it is"
            log.error("%s %s; recorded; the same command goes on after it", name, error)
            for (unit, methods), known in zip(work, outcomes, strict=True):
                missing = _missing(unit, methods, "timeout", error, known)
                self.save([*others, *known, *missing])

        limit = None if seconds is None else seconds * sum(unit.answers for unit, _ in work)
        try:
            with time_limit(limit, hung):
                if len(work) > 1:
                    outcomes[:] = map(list, self.plan.run_batch(work, self.session))
                else:
                    for outcome in self.plan.run(*work[0], self.session):
                        outcomes[0].append(outcome)  # those before a failure count
        except BaseException as failure:
            if asks_to_stop(failure):
                raise
            if self.session.spec.parallel is not None:  # other ranks wait for this one's part
                raise SystemExit(f"kvbench: {name}: {one_line(failure)}") from failure
            level = logging.INFO if len(work) > 1 else logging.WARNING
            log.log(level, "%s: %s", name, one_line(failure))
            log.debug("%s", traceback_of(failure))
            return outcomes, failure
        return outcomes, None


def _missing(
    unit: Unit, methods: Methods, status: str, error: str, outcomes: Sequence[Outcome] = ()
) -> list[Outcome]:
    """A failed outcome for every record of a unit that is not among `outcomes`."""
    known = {(outcome.method, outcome.example_id) for outcome in outcomes}
    return [
        Outcome(
            label, record_id, {**unit.fields.get(record_id, {}), "status": status, "error": error}
        )
        for label in methods
        for record_id in unit.record_ids
        if (label, record_id) not in known
    ]


def _failed_as(outcomes: Sequence[Outcome], statuses: Collection[str]) -> bool:
    return any(outcome.fields.get("status") in statuses for outcome in outcomes)
