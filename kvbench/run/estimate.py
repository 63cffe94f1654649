"""How long a job will take, measured on one of its examples: for a dry run and for ``confirm=true``."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbench.engine.estimate import is_cheap
from kvbench.engine.limits import in_main_thread, time_limit
from kvbench.errors import complain, one_line
from kvbench.run.encoding import Asked
from kvbench.run.plan import Outcome, Unit
from kvbench.run.runner import Job

LONGEST_TRIAL = 10.0
"""Seconds that trying an example with a short answer may take in a dry run."""


@dataclass(frozen=True)
class Estimate:
    """Seconds a job would take, and how that was found."""

    seconds: float | None
    how: str

    def __str__(self) -> str:
        return self.how if self.seconds is None else f"about {duration(self.seconds)} ({self.how})"


def estimate(job: Job, todo: Sequence[Unit], *, any_model: bool) -> Estimate:
    """Run the unit of median length, keep nothing, and scale.

    Of a benchmark the prefill is scaled by prompt tokens and the decoding by new tokens, of which there
    are at most as many as the task allows; of other plans the whole by prompt tokens. Attention grows
    faster than the prompt: where the longest prompts are far beyond the median, the time is
    underestimated. Decoding several prompts together makes it an overestimate.

    Args:
        todo: the units still to run.
        any_model: whether to load a model that is large or not on this machine.

    Raises:
        ModelError: the model cannot be loaded (`any_model` only).
    """
    if not todo:
        return Estimate(0.0, "everything is on disk")
    if any_model:
        job.session.model  # noqa: B018 - a model that cannot be loaded is the job's failure
    elif not is_cheap(job.spec):
        return Estimate(None, "unknown (measured only for small models on this machine)")
    known = sorted(
        (unit for unit in todo if prompt_tokens(unit) is not None),
        key=lambda u: prompt_tokens(u) or 0,
    )
    middle = known[len(known) // 2] if known else todo[0]
    patience = math.inf if any_model else LONGEST_TRIAL
    try:
        if _run_once(job, with_short_answer(middle), patience)[0] > patience:  # warms the device up
            return Estimate(None, f"unknown (example {middle.id} takes too long to try)")
        seconds, outcomes = _run_once(job, middle)
    except Exception as failure:  # noqa: BLE001 - the job will record it
        return Estimate(None, f"unknown (example {middle.id} fails: {one_line(failure)})")
    failed = [str(o.fields.get("error")) for o in outcomes if o.fields.get("status", "ok") != "ok"]
    if failed:
        return Estimate(None, f"unknown (example {middle.id} fails: {failed[0]})")
    if isinstance(middle.payload, Asked):
        return _of_benchmark(job, todo, middle, outcomes)
    tokens = prompt_tokens(middle)
    scale = sum(map(prompt_tokens, known)) / tokens if tokens else len(todo)  # type: ignore[arg-type]
    return Estimate(seconds * scale, f"{middle.id}, of median length, took {duration(seconds)}")


def _of_benchmark(
    job: Job, todo: Sequence[Unit], middle: Unit, outcomes: Sequence[Outcome]
) -> Estimate:
    once = [o for o in outcomes if o.example_id == middle.record_ids[0]]  # of one answer per method
    prefill = _column(once, "prefill_s")
    reading = max(prefill) + sum(_column(once, "compress_s"))
    steps = max(_column(outcomes, "new_tokens")) - 1
    # per new token of one answer, all methods
    writing = sum(_column(outcomes, "decode_s")) / max(1.0, steps) / len(middle.record_ids)
    asked = [unit.payload for unit in todo if isinstance(unit.payload, Asked)]
    seconds = sum(reading / middle.payload.n * a.n + writing * a.new_tokens for a in asked)
    return Estimate(
        seconds,
        f"at most, if answers are short of their limit; {middle.id} with {middle.payload.n:,} tokens "
        f"took {duration(reading)} to read, {duration(writing)} per new token",
    )


def _column(outcomes: Sequence[Outcome], name: str) -> list[float]:
    return [float(outcome.fields.get(name) or 0.0) for outcome in outcomes]


def _run_once(job: Job, unit: Unit, patience: float = math.inf) -> tuple[float, list[Outcome]]:
    """How long a unit takes, and its outcomes; soon after `patience` seconds it is given up."""
    start, outcomes = time.perf_counter(), []
    limit = patience if math.isfinite(patience) and in_main_thread() else None
    try:
        with time_limit(limit, lambda: complain(f"example {unit.id} takes too long to try")):
            for outcome in job.plan.run(unit, job.methods, job.session):
                outcomes.append(outcome)
                if time.perf_counter() - start > patience:
                    break
    except TimeoutError:
        pass
    return time.perf_counter() - start, outcomes


def prompt_tokens(unit: Unit) -> int | None:
    """Prompt tokens of a unit, None where its plan does not tell."""
    if isinstance(unit.payload, tuple) and unit.payload and isinstance(unit.payload[0], int):
        return unit.payload[0]  # the throughput probe's (tokens, setting, run)
    n = getattr(unit.payload, "n", None)
    return n if isinstance(n, int) else None


def with_short_answer(unit: Unit) -> Unit:
    """The same unit, with a short answer."""
    if not isinstance(unit.payload, Asked):
        return unit
    examples = tuple(
        replace(each, example=replace(each.example, max_new_tokens=4))
        for each in unit.payload.examples
    )
    return replace(unit, payload=replace(unit.payload, examples=examples))


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
