"""One unit of work and everything that may go wrong in it: always one outcome per record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvbench.engine.faults import device_is_usable, free_memory
from kvbench.engine.limits import time_limit
from kvbench.errors import FAILED, UserError, one_line, traceback_of
from kvbench.run.plan import BatchPlan, Methods, Outcome, Plan, Unit, status_of
from kvbench.run.session import Session
from kvbench.run.termination import asks_to_stop

log = logging.getLogger(__name__)

RETRIED_ALONE = ("oom", "timeout")
"""Failures that the other methods or examples of a batch may have caused: tried again alone."""


class DeviceLost(UserError, RuntimeError):
    """The device answers nothing any more."""

    status = FAILED


def outcomes_of(
    plan: Plan,
    unit: Unit,
    methods: Methods,
    session: Session,
    save: Callable[[Sequence[Outcome]], None],
) -> list[Outcome]:
    """What a unit gives, failures included, in the order of the methods.

    All methods run together. Then those that ran out of memory or time, and those that a failure of
    the whole unit took along, run once more, one at a time; their records say ``retried``.

    Args:
        save: writes outcomes; called from another thread before the process ends, when code that
            runs no Python hangs longer than the session's `example_timeout`.
    """
    if not methods:
        return []
    outcomes, again = _attempt(plan, unit, methods, session, save, [])
    if len(methods) == 1 or not again or not device_is_usable(session.device):
        return outcomes
    log.info("%s: once more, one at a time: %s", unit.id, ", ".join(again))
    for label in again:
        free_memory(session.device)
        others = [outcome for outcome in outcomes if outcome.method != label]
        alone, _ = _attempt(plan, unit, {label: methods[label]}, session, save, others)
        outcomes = [*others, *(replace(o, fields={**o.fields, "retried": True}) for o in alone)]
    order = list(methods)
    return sorted(outcomes, key=lambda outcome: order.index(outcome.method))


def outcomes_together(
    plan: BatchPlan,
    work: Sequence[tuple[Unit, Methods]],
    session: Session,
    save: Callable[[Sequence[Outcome]], None],
) -> Sequence[Sequence[Outcome]]:
    """What several units give that run at once; a failure of the whole is raised."""

    def hung() -> None:
        error = f"hung in a batch of {len(work)} examples; batch_size=1 tells which it is"
        log.error("%s ... %s; recorded; the same command goes on after them", work[0][0].id, error)
        for unit, methods in work:
            save(missing_outcomes(unit, methods, "timeout", error))

    seconds = session.example_timeout
    answers = sum(unit.answers for unit, _ in work)
    with time_limit(None if seconds is None else seconds * answers, hung):
        return plan.run_batch(work, session)


def missing_outcomes(
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


def _attempt(
    plan: Plan,
    unit: Unit,
    methods: Methods,
    session: Session,
    save: Callable[[Sequence[Outcome]], None],
    others: Sequence[Outcome],
) -> tuple[list[Outcome], list[str]]:
    """Run methods together; after a failure, every record that is missing says why.

    Returns:
        Their outcomes, and the methods for which running alone may end differently.
    """
    outcomes: list[Outcome] = []

    def hung() -> None:
        error = f"hung: no answer long after example_timeout={session.example_timeout:g}"
        log.error("%s %s; recorded; the same command goes on after it", unit.id, error)
        save([*others, *outcomes, *missing_outcomes(unit, methods, "timeout", error, outcomes)])

    failed: list[Outcome] = []
    try:
        seconds = session.example_timeout
        with time_limit(None if seconds is None else seconds * unit.answers, hung):
            for outcome in plan.run(unit, methods, session):
                outcomes.append(outcome)  # what was told before a failure counts
    except BaseException as failure:
        if asks_to_stop(failure):
            raise
        log.warning("%s: %s", unit.id, one_line(failure))
        log.debug("%s", traceback_of(failure))
        failed = missing_outcomes(unit, methods, status_of(failure), one_line(failure), outcomes)
    again = dict.fromkeys(outcome.method for outcome in failed)
    again |= dict.fromkeys(
        outcome.method for outcome in outcomes if outcome.fields.get("status") in RETRIED_ALONE
    )
    return [*outcomes, *failed], [label for label in methods if label in again]
