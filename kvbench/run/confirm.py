"""``confirm=true``: before a long job, what it will take, measured on this device; on a terminal, a
question."""

from __future__ import annotations

import os
import sys

from kvbench.errors import presentable
from kvbench.run.encoding import Asked
from kvbench.run.estimate import estimate
from kvbench.run.preview import units_to_run
from kvbench.run.runner import Job


def go_on(job: Job, *, ask: bool = True) -> bool:
    """Print examples, tokens and time of what is still to run; False if the user would rather not.

    Args:
        ask: whether to wait for an answer, which is done on a terminal only, and never under CI.

    Raises:
        KVError, TaskError, ModelError: what the job itself would be refused for.
    """
    todo = units_to_run(job)
    title = presentable(f"{job.spec.label} x {job.task}")
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
    print(f"{title}: time {estimate(job, todo, any_model=True)}", flush=True)
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")
    if not ask or not terminal:
        return True
    return input("Go on? [Y/n] ").strip().lower() in ("", "y", "yes")
