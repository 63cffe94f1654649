"""Which units run together: groups of a size that is given, or found by trial.

The answers do not depend on the groups; how long they take and the memory they need do. What runs
out of memory or time in a group, and a group that fails as a whole, runs again in halves, down to single
units, so that a record of such a failure is always that of a unit which failed alone.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kvbench.engine import memory
from kvbench.engine.faults import device_is_usable, free_memory, is_out_of_memory
from kvbench.errors import is_integer, one_line
from kvbench.kv import KVError
from kvbench.run.attempts import RETRIED_ALONE, missing_outcomes, outcomes_of, outcomes_together
from kvbench.run.plan import BatchPlan, Methods, Outcome, Plan, Unit
from kvbench.run.session import Session
from kvbench.run.termination import asks_to_stop

log = logging.getLogger(__name__)

Work = tuple[Unit, Methods]
"""A unit, and the methods it is still to run with."""

AUTO_MOST = 64
"""Units per group up to which `auto` grows: records are written when a group is done."""

SAFE = 0.85
"""Share of all memory that a doubled group may be expected to take."""


def check_batch_size(value: object) -> int | str:
    """`value`, if it is a batch size.

    Raises:
        KVError: otherwise.
    """
    if value == "auto" or is_integer(value, 1):
        return value  # type: ignore[return-value]
    raise KVError(f"batch_size is {value!r}; allowed: an integer >= 1, or auto")


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
        check_batch_size(self.setting)
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

    def restore(self, before: BatchSize) -> None:
        """Return to an earlier size: a single unit was too large, not the batch."""
        self.now, self.most = before.now, before.most
        log.info("one of them fits nowhere; going on with %d again", self.now)


def groups(work: Sequence[Work], size: BatchSize, plan: Plan) -> Iterator[Sequence[Work]]:
    """All of `work` in its order, so many units at a time as `size` says by then."""
    done = 0
    while done < len(work):
        group = work[done : done + (size.now if isinstance(plan, BatchPlan) else 1)]
        done += len(group)
        yield group


def run_group(
    plan: Plan,
    group: Sequence[Work],
    session: Session,
    size: BatchSize,
    save: Callable[[Sequence[Outcome]], None],
) -> Iterator[Sequence[Outcome]]:
    """The outcomes of each unit of a group as soon as they are final; those of units
    that ran out of memory or time in a batch come later.

    Args:
        save: see `kvbench.run.attempts.outcomes_of`.
    """
    size.begin()
    if len(group) == 1 or not isinstance(plan, BatchPlan):
        for unit, methods in group:
            outcomes = outcomes_of(plan, unit, methods, session, save)
            if not _failed_as(outcomes, ("oom",)):
                size.went_well(1)
            yield outcomes
        return
    again: Sequence[Work] = group
    out_of_memory = False
    try:
        together = outcomes_together(plan, group, session, save)
    except BaseException as failure:  # smaller groups tell whose failure it is
        if asks_to_stop(failure):
            raise
        out_of_memory = is_out_of_memory(failure)
        error = one_line(failure)
        log.info("batch of %d: %s", len(group), error)
        if not device_is_usable(session.device):
            for unit, methods in group:
                yield missing_outcomes(
                    unit, methods, "error", f"{error} (in a batch of {len(group)})"
                )
            return
    else:
        final = [not _failed_as(outcomes, RETRIED_ALONE) for outcomes in together]
        out_of_memory = any(_failed_as(outcomes, ("oom",)) for outcomes in together)
        again = [work for work, well in zip(group, final, strict=True) if not well]
        yield from (outcomes for outcomes, well in zip(together, final, strict=True) if well)
        del together
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
        for each in run_group(plan, again[start : start + half], session, size, save):
            fits_nowhere |= all(_failed_as([outcome], ("oom",)) for outcome in each)
            yield each
    if fits_nowhere:
        size.restore(before)


def _failed_as(outcomes: Sequence[Outcome], statuses: Sequence[str]) -> bool:
    return any(outcome.fields.get("status") in statuses for outcome in outcomes)
