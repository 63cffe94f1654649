"""Runs units of work, one at a time or in groups, and makes every record, also where something fails.

The size of the groups changes the time and the memory that the answers need, not the answers. Units that
ran out of memory or time in a group, and all units of a group that failed as a whole, run again in
groups of half the size, down to single units. If a single unit fails in this way, its methods run again
one at a time. A record of such a failure is therefore always that of a method which failed alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import Module

from kvbench.engine import memory
from kvbench.engine.device import device_is_usable, free_memory, is_out_of_memory
from kvbench.errors import FAILED, UserError, one_line, traceback_of
from kvbench.run.plan import Fields, Methods, Plan, Unit, status_of
from kvbench.run.progress import decoder_layers
from kvbench.run.session import Session

log = logging.getLogger(__name__)

Work = tuple[Unit, Methods]
"""A unit, and the methods that it is still to be run with."""

RETRIED_ALONE = ("oom", "timeout")
"""Statuses of failures that other methods or units of a group may have caused. What fails in this way is
run again alone."""

LARGEST_AUTO_GROUP = 64
"""The most units of a group with batch_size "auto". Records are written only when a group is done."""

SAFE_SHARE = 0.85
"""A group is doubled only if it is then expected to take at most this share of all memory."""


class DeviceLost(UserError, RuntimeError):
    """The device (a GPU after a fault) can run nothing any more in this process, since `when`."""

    status = FAILED

    def __init__(self, device: torch.device, when: str) -> None:
        super().__init__(
            f"{device} answers nothing any more {when}; the same command goes on after it"
        )


class GroupSize:
    """How many units the next group has.

    With batch_size "auto" the first group has one unit. The size doubles as long as a group of twice the
    size is expected to fit into memory. After a group that ran out of memory it is halved, and does not
    grow again, unless one unit of that group does not fit even alone: then the others are not to blame.

    Attributes:
        now: units of the next group.
        most: the largest size that `now` may grow to.
    """

    def __init__(self, batch_size: int | str, device: torch.device) -> None:
        self.device = device
        self.grows = isinstance(batch_size, str)
        self.now = 1 if isinstance(batch_size, str) else batch_size
        self.most = LARGEST_AUTO_GROUP if isinstance(batch_size, str) else batch_size
        self._bytes_before_group: int | None = None
        self._most_bytes_of_a_unit = 0.0

    def group_begins(self) -> None:
        """Note how much memory is in use before a group runs."""
        if self.grows and memory.reset_peak(self.device):
            self._bytes_before_group = memory.used_bytes(self.device)

    def group_fitted(self, units: int) -> None:
        """Double the size, if memory allows it, after a group of this many units fitted."""
        if not self.grows or self.now == self.most:
            return
        before = self._bytes_before_group
        peak = memory.peak_bytes(self.device)
        total = memory.total_bytes(self.device)
        if before is None or peak is None or total is None:
            self.most = self.now  # a size whose need cannot be measured is not tried
            return
        # The most that a unit of any group took. A later group may seem to take less, as it uses memory
        # that an earlier one has left allocated.
        self._most_bytes_of_a_unit = max(self._most_bytes_of_a_unit, (peak - before) / units)
        doubled = min(2 * self.now, self.most)
        expected = before + doubled * self._most_bytes_of_a_unit
        if units == self.now and expected <= SAFE_SHARE * total:
            self.now = doubled

    def group_ran_out(self, units: int) -> None:
        """Halve the size, after a group of this many units ran out of memory."""
        self.now = self.most = max(1, min(self.most, units // 2))


class Runner:
    """Runs the units of a plan in groups (`GroupSize`)."""

    def __init__(self, plan: Plan, session: Session, batch_size: int | str) -> None:
        self.plan = plan
        self.session = session
        self.size = GroupSize(batch_size, session.device)
        self.seconds = session.example_timeout
        if self.seconds is not None and plan.meta().get("subject") is not None:
            self.seconds = None  # the numbers are not about a model, whose passes could be timed

    def run(self, work: Sequence[Work]) -> Iterator[Sequence[Fields]]:
        """Run all units. Yields the records of each unit, failures included, as soon as they are final;
        units that run again come after the others of their group."""
        device = self.session.device
        done = 0
        while done < len(work):
            size = self.size.now if self.plan.batches_units else 1
            group = work[done : done + size]
            done += len(group)
            failed = False
            for records in self._run_group(group):
                failed |= any(record.get("error") is not None for record in records)
                yield records
            if failed and not device_is_usable(device):
                unit, _ = group[-1]
                raise DeviceLost(device, f"after example {unit.id!r}, whose records say why")

    def _run_group(self, group: Sequence[Work]) -> Iterator[Sequence[Fields]]:
        """Run a group. Yields the records of each unit: first those that are final, then those of the
        units that run again in groups of half the size."""
        self.size.group_begins()
        if len(group) == 1:
            records = self._run_unit(*group[0])
            if not _failed_as(records, ("oom",)):
                self.size.group_fitted(1)
            yield records
            return
        by_unit, failure = self._attempt(group)
        again: list[Work] = []
        out_of_memory = failure is not None and is_out_of_memory(failure)
        device_lost = failure is not None and not device_is_usable(self.session.device)
        for (unit, methods), records in zip(group, by_unit, strict=True):
            if failure is not None and device_lost:
                error = f"{one_line(failure)} (in a batch of {len(group)})"
                yield _missing(unit, methods, "error", error)
            elif failure is not None or _failed_as(records, RETRIED_ALONE):
                again.append((unit, methods))
                out_of_memory |= _failed_as(records, ("oom",))
            else:
                yield records
        # They refer to tensors, which would otherwise stay in memory while the units run again.
        del by_unit, failure
        if not again:
            self.size.group_fitted(len(group))
            return
        log.info("%d of a batch of %d run again in smaller ones", len(again), len(group))
        self._give_back_memory()
        fits_nowhere = False
        half = len(group) // 2
        for start in range(0, len(again), half):
            for retried in self._run_group(again[start : start + half]):
                fits_nowhere |= all(_failed_as([record], ("oom",)) for record in retried)
                yield retried
        if out_of_memory and not fits_nowhere:
            self.size.group_ran_out(len(group))
            log.info("a batch of %d did not fit; going on with %d", len(group), self.size.now)

    def _give_back_memory(self) -> None:
        """Free the decoding steps that were captured for later prompts, and the device's unused
        memory."""
        self.session.steps.kept.clear()
        free_memory(self.session.device)

    def _run_unit(self, unit: Unit, methods: Methods) -> list[Fields]:
        """Run one unit. Returns its records, in the order of the methods.

        All methods run together. Those that ran out of memory or time, and those without a record
        because the unit failed as a whole, then run once more, one at a time; their records say
        ``retried``.
        """
        (records,), failure = self._attempt([(unit, methods)])
        again = {record["method"] for record in records if _failed_as([record], RETRIED_ALONE)}
        if failure is not None:
            missing = _missing(unit, methods, status_of(failure), one_line(failure), records)
            again |= {record["method"] for record in missing}
            records += missing
        del failure  # it refers to tensors, as above
        if len(methods) > 1 and again and device_is_usable(self.session.device):
            log.info("%s: once more, one at a time: %s", unit.id, ", ".join(sorted(again)))
            for label in methods:
                if label in again:
                    self._give_back_memory()
                    alone = self._run_unit(unit, {label: methods[label]})
                    records = [record for record in records if record["method"] != label]
                    records += [{**record, "retried": True} for record in alone]
        order = list(methods)
        return sorted(records, key=lambda record: order.index(record["method"]))

    def _attempt(self, work: Sequence[Work]) -> tuple[list[list[Fields]], Exception | None]:
        """Run a group of units once.

        Returns:
            the records of each unit, and the exception that ended the group, or None. A group of several
            units that an exception ended has no records; a single unit has those that were final before.
        """
        records: list[list[Fields]] = [[] for _ in work]
        with ExitStack() as stack:
            if self.seconds is not None:
                answers = sum(unit.answers for unit, _ in work)
                stack.enter_context(time_limit(self.session.model, self.seconds * answers))
            try:
                if len(work) > 1:
                    records[:] = map(list, self.plan.run_batch(work, self.session))
                else:
                    for record in self.plan.run(*work[0], self.session):
                        records[0].append(record)  # records before a failure are kept
            except Exception as failure:  # noqa: BLE001 - it becomes the units' records
                name = work[0][0].id if len(work) == 1 else f"{work[0][0].id} ..."
                level = logging.INFO if len(work) > 1 else logging.WARNING
                log.log(level, "%s: %s", name, one_line(failure))
                log.debug("%s", traceback_of(failure))
                return records, failure
        return records, None


@contextmanager
def time_limit(model: Module, seconds: float) -> Iterator[None]:
    """Raise TimeoutError between two layers of a prefill that is still running after `seconds`. Decoding
    steps are left to `Stopping.timeout_s`, which stops one method's answer at a time."""
    end = time.monotonic() + seconds

    def check(_: Module, arguments: tuple[Any, ...]) -> None:
        is_prefill = bool(arguments) and arguments[0].dim() == 3 and arguments[0].shape[1] > 1
        if is_prefill and not is_compiling() and time.monotonic() > end:
            raise TimeoutError(f"the example took more than {seconds:g} s")

    hooks = [layer.register_forward_pre_hook(check) for layer in decoder_layers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _missing(
    unit: Unit, methods: Methods, status: str, error: str, records: Sequence[Fields] = ()
) -> list[Fields]:
    """A failed record for each of a unit that is not among `records`."""
    known = {(record["method"], record["example_id"]) for record in records}
    return [
        {
            "method": label,
            "example_id": record_id,
            **unit.fields.get(record_id, {}),
            "status": status,
            "error": error,
        }
        for label in methods
        for record_id in unit.record_ids
        if (label, record_id) not in known
    ]


def _failed_as(records: Sequence[Fields], statuses: Collection[str]) -> bool:
    return any(record.get("status") in statuses for record in records)
