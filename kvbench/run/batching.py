"""Units of work, one at a time or in groups, and everything that may go wrong in them: always one
outcome per record.

The answers do not depend on the groups; how long they take and the memory they need do. What runs
out of memory or time in a group, and a group that fails as a whole, runs again in halves, down to single
units, and a unit's methods then one at a time, so that a record of such a failure is always that of a
method which failed alone.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

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


@dataclass
class BatchSize:
    """How many units run together.

    ``auto`` starts with one, doubles while twice the last group's need fits in memory, and is halved
    by a group that ran out of it; beyond that size it does not grow again. A unit that does not fit
    even alone says nothing about the others: they go on at the size before.

    Attributes:
        setting: as configured, an integer or "auto".
        now: units of the next group.
        most: never more than these.
    """

    setting: int | str
    device: torch.device
    now: int = field(init=False)
    most: int = field(init=False)
    _before: int | None = field(default=None, init=False)
    _need: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.now = 1 if isinstance(self.setting, str) else self.setting
        self.most = AUTO_MOST if isinstance(self.setting, str) else self.setting

    def begin(self) -> None:
        """A group is about to run: what it takes from here on is its own."""
        if self.setting == "auto" and memory.reset_peak(self.device):
            self._before = memory.used_bytes(self.device)

    def went_well(self, units: int) -> None:
        """A group of so many units fitted."""
        if self.setting != "auto" or self.now == self.most:
            return
        peak, total = memory.peak_bytes(self.device), memory.total_bytes(self.device)
        if self._before is None or peak is None or total is None:
            self.most = self.now  # nothing can be said, so nothing is risked
            return
        # The most a unit ever took: a later group may find the memory of an earlier one resident.
        self._need = max(self._need, (peak - self._before) / units)
        doubled = min(2 * self.now, self.most)
        if units == self.now and self._before + doubled * self._need <= SAFE * total:
            self.now = doubled

    def ran_out(self, units: int) -> None:
        """A group of so many units did not fit."""
        self.now = self.most = max(1, min(self.most, units // 2))
        log.info("batch of %d ran out of memory; going on with %d", units, self.now)


def run_units(
    plan: Plan,
    work: Sequence[Work],
    session: Session,
    batch_size: int | str,
    save: Save,
) -> Iterator[Sequence[Outcome]]:
    """The outcomes of each unit as soon as they are final, failures included; those that ran out of
    memory or time in a group come after the others of it.

    Args:
        save: writes outcomes; called from another thread before the process ends, when code that
            runs no Python hangs longer than the session's `example_timeout`.

    Raises:
        DeviceLost: nothing more can be run in this process.
    """
    size = BatchSize(batch_size, session.device)
    done = 0
    while done < len(work):
        group = work[done : done + (size.now if hasattr(plan, "run_batch") else 1)]
        done += len(group)
        failed = False
        with finished_first():  # left when its outcomes have been taken
            for outcomes in _run_group(plan, group, session, size, save):
                failed |= any(outcome.fields.get("error") is not None for outcome in outcomes)
                yield outcomes
        if failed and not device_is_usable(session.device):
            raise DeviceLost(
                f"{session.device} answers nothing any more after example {group[-1][0].id!r}, "
                f"whose records say why; {GOES_ON}"
            )


def _run_group(
    plan: Plan, group: Sequence[Work], session: Session, size: BatchSize, save: Save
) -> Iterator[Sequence[Outcome]]:
    size.begin()
    if len(group) == 1:
        outcomes = _run_unit(plan, *group[0], session, save)
        if not _failed_as(outcomes, ("oom",)):
            size.went_well(1)
        yield outcomes
        return
    together, failure = _attempt(plan, group, session, save)
    again: list[Work] = []
    out_of_memory = failure is not None and is_out_of_memory(failure)
    lost = failure is not None and not device_is_usable(session.device)
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
    before = copy.copy(size)
    if out_of_memory:
        size.ran_out(len(group))
    elif not again:
        size.went_well(len(group))
    if not again:
        return
    log.info("%d of them run again in smaller batches", len(again))
    free_memory(session.device)
    half = len(group) // 2
    fits_nowhere = False
    for start in range(0, len(again), half):
        for each in _run_group(plan, again[start : start + half], session, size, save):
            fits_nowhere |= all(_failed_as([outcome], ("oom",)) for outcome in each)
            yield each
    if fits_nowhere:
        size.now, size.most = before.now, before.most
        log.info("one of them fits nowhere; going on with %d again", size.now)


def _run_unit(
    plan: Plan, unit: Unit, methods: Methods, session: Session, save: Save
) -> list[Outcome]:
    """The outcomes of one unit, in the order of the methods.

    All methods run together. Then those that ran out of memory or time, and those that a failure of
    the whole unit took along, run once more, one at a time; their records say ``retried``.
    """

    def settled(methods: Methods, others: Sequence[Outcome]) -> tuple[list[Outcome], set[str]]:
        """One outcome for every record, and the methods that may end differently alone."""
        (told,), failure = _attempt(plan, [(unit, methods)], session, save, others)
        failed = []
        if failure is not None:
            failed = _missing(unit, methods, status_of(failure), one_line(failure), told)
        shared = [outcome for outcome in told if _failed_as([outcome], RETRIED_ALONE)]
        return [*told, *failed], {outcome.method for outcome in (*shared, *failed)}

    outcomes, again = settled(methods, [])
    if len(methods) > 1 and again and device_is_usable(session.device):
        log.info("%s: once more, one at a time: %s", unit.id, ", ".join(sorted(again)))
        for label in (label for label in methods if label in again):
            free_memory(session.device)
            others = [outcome for outcome in outcomes if outcome.method != label]
            alone, _ = settled({label: methods[label]}, others)
            outcomes = [*others, *(replace(o, fields={**o.fields, "retried": True}) for o in alone)]
    order = list(methods)
    return sorted(outcomes, key=lambda outcome: order.index(outcome.method))


def _attempt(
    plan: Plan,
    work: Sequence[Work],
    session: Session,
    save: Save,
    others: Sequence[Outcome] = (),
) -> tuple[list[list[Outcome]], BaseException | None]:
    """The outcomes of each unit of a group up to a failure of the whole, and that failure.

    Args:
        others: outcomes of these units that there are already; saved with the rest when code hangs.
    """
    told: list[list[Outcome]] = [[] for _ in work]
    name = work[0][0].id if len(work) == 1 else f"{work[0][0].id} ..."
    seconds = session.example_timeout

    def hung() -> None:
        error = f"hung: no answer long after example_timeout={seconds:g}"
        if len(work) > 1:
            error = f"hung in a batch of {len(work)} examples; batch_size=1 tells which it is"
        log.error("%s %s; recorded; the same command goes on after it", name, error)
        for (unit, methods), some in zip(work, told, strict=True):
            save([*others, *some, *_missing(unit, methods, "timeout", error, some)])

    limit = None if seconds is None else seconds * sum(unit.answers for unit, _ in work)
    try:
        with time_limit(limit, hung):
            if len(work) > 1:
                told[:] = map(list, plan.run_batch(work, session))  # type: ignore[attr-defined]
            else:
                for outcome in plan.run(*work[0], session):
                    told[0].append(outcome)  # what was told before a failure counts
    except BaseException as failure:
        if asks_to_stop(failure):
            raise
        log.log(
            logging.INFO if len(work) > 1 else logging.WARNING, "%s: %s", name, one_line(failure)
        )
        log.debug("%s", traceback_of(failure))
        return told, failure
    return told, None


def _missing(
    unit: Unit, methods: Methods, status: str, error: str, found: Sequence[Outcome] = ()
) -> list[Outcome]:
    """One failed outcome for every record of a unit that has none yet."""
    known = {(outcome.method, outcome.example_id) for outcome in found}
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
