"""``confirm=true``: before a long job, what it will take, measured on this device; on a terminal, a
question."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvbench.errors import one_line, presentable
from kvbench.run.encoding import Asked
from kvbench.run.plan import Outcome, Unit
from kvbench.run.preview import Estimate, duration, few_tokens, units_to_run
from kvbench.run.runner import Job


def go_on(job: Job, *, ask: bool = True) -> bool:
    """Print examples, tokens and time of what is still to run; False if the user would rather not.

    Args:
        ask: whether to wait for an answer, which is done on a terminal only, and never under CI.

    Raises:
        KVError, TaskError, ModelError: what the job itself would be refused for.
    """
    todo = units_to_run(job)
    title = presentable(f"{job.spec.name} x {job.task}")
    if not todo:
        print(f"{title}: everything is on disk", flush=True)
        return True
    asked = [unit.payload for unit in todo if isinstance(unit.payload, Asked)]
    tokens, most = sum(each.n for each in asked), sum(each.new_tokens for each in asked)
    print(
        f"{title}: {len(todo)} examples to run with {len(job.methods)} methods on "
        f"{job.session.device}; {tokens:,} prompt tokens, up to {most:,} new ones per method",
        flush=True,
    )
    print(f"{title}: {calibrate(job, todo)}", flush=True)
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")
    if not ask or not terminal:
        return True
    return input("Go on? [Y/n] ").strip().lower() in ("", "y", "yes")


def calibrate(job: Job, todo: Sequence[Unit]) -> Estimate:
    """Run the example of median length, keep nothing, and scale its prefill by prompt tokens and its
    decoding by new tokens, of which there are at most as many as the task allows.

    Attention grows faster than the prompt: where the longest prompts are far beyond the median, the
    time is underestimated. Decoding several prompts together makes it an overestimate.

    Raises:
        ModelError: the model cannot be loaded.
    """
    units = [unit for unit in todo if isinstance(unit.payload, Asked)]
    if not units:
        return Estimate(None, "time unknown (only benchmark tasks are measured beforehand)")
    units.sort(key=lambda unit: unit.payload.n)
    middle = units[len(units) // 2]
    job.session.model  # noqa: B018 - a model that cannot be loaded is the job's failure
    try:
        list(job.plan.run(few_tokens(units[0]), job.methods, job.session))  # warms the device up
        outcomes = list(job.plan.run(middle, job.methods, job.session))
    except Exception as failure:  # noqa: BLE001 - the job will record it
        return Estimate(None, f"time unknown (example {middle.id} fails: {one_line(failure)})")
    failed = [str(o.fields.get("error")) for o in outcomes if o.fields.get("status") != "ok"]
    if failed:
        return Estimate(None, f"time unknown (example {middle.id} fails: {failed[0]})")
    shared = job.session.prefill == "shared"
    once = [o for o in outcomes if o.example_id == middle.record_ids[0]]  # of one answer per method
    prefill = _column(once, "prefill_s")
    reading = (max(prefill) if shared else sum(prefill)) + sum(_column(once, "compress_s"))
    steps = max(_column(outcomes, "new_tokens")) - 1
    # per new token of one answer, all methods
    writing = sum(_column(outcomes, "decode_s")) / max(1.0, steps) / len(middle.record_ids)
    seconds = sum(
        reading / middle.payload.n * unit.payload.n + writing * unit.payload.new_tokens
        for unit in units
    )
    return Estimate(
        seconds,
        f"at most, if answers are short of their limit; {middle.id} with {middle.payload.n:,} tokens "
        f"took {duration(reading)} to read, {duration(writing)} per new token",
    )


def _column(outcomes: Sequence[Outcome], name: str) -> list[float]:
    return [float(outcome.fields.get(name) or 0.0) for outcome in outcomes]
