"""What Slurm says of jobs, asked with squeue and scontrol, which need no accounting."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kvbench.errors import first_line
from kvbench.run.termination import Terminated

ALIVE = frozenset(
    (
        *("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "RESIZING", "REQUEUED"),
        *("REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SIGNALING", "SPECIAL_EXIT"),
        *("STAGE_OUT", "STOPPED"),
    )
)
"""States after which a job may still write a result. A job that was preempted and goes back into the
queue is PENDING; PREEMPTED is one that does not."""

USUAL_ARRAY = 1001
"""Jobs of one array where Slurm does not say how many it takes: its default."""


@dataclass(frozen=True)
class JobState:
    """A job's state and, while it waits, why, in Slurm's words."""

    name: str
    reason: str = ""

    @property
    def alive(self) -> bool:
        """Whether the job may still write a result."""
        return self.name in ALIVE


_SQUEUE = ("squeue", "--noheader", "--array", "--states=all", "--format=%i %T %r")

GONE = JobState("gone")
"""Slurm remembers no such job."""


def states(arrays: Collection[str]) -> dict[str, JobState] | None:
    """State by job id of the jobs and job arrays, for as long as Slurm remembers them; None if it does
    not answer."""
    found: dict[str, JobState] = {}
    for array in arrays:
        said = subprocess.run(
            [*_SQUEUE, f"--jobs={array}"], capture_output=True, text=True, check=False
        )
        if said.returncode and "Invalid job id" not in said.stderr:
            return None
        for line in said.stdout.splitlines():
            job_id, name, *reason = line.split(maxsplit=2)
            found[job_id] = JobState(name, *reason)
    return found


def jobs_left(arrays: Collection[str]) -> list[str]:
    """Those of the jobs and arrays that wait or run."""
    return [
        array
        for array in sorted(arrays)
        if any(job.alive for job in (states([array]) or {}).values())
    ]


def describe_waiting(jobs: Collection[JobState]) -> str | None:
    """One line on jobs that wait in the queue, e.g. "3 run, 5 wait: Resources"; None if none waits for
    a reason."""
    counts = Counter(job.name == "PENDING" for job in jobs if job.alive)
    reasons = {job.reason for job in jobs if job.name == "PENDING"} - {"", "None"}
    if not reasons:
        return None
    return f"{counts[False]} run, {counts[True]} wait: {', '.join(sorted(reasons))}"


def largest_array() -> int:
    """How many jobs one array may have (MaxArraySize)."""
    said = subprocess.run(
        ["scontrol", "show", "config"], capture_output=True, text=True, check=False
    )
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", said.stdout, re.MULTILINE)
    return max(1, int(found[1])) if found else USUAL_ARRAY


@contextmanager
def without_job_environment() -> Iterator[None]:
    """Within a job of Slurm (an interactive one, say), without the variables that describe it, which
    sbatch would take for wishes. SLURM_CONF and the user's own SBATCH_* stay."""
    hidden = {}
    if "SLURM_JOB_ID" in os.environ:
        names = [name for name in os.environ if name.startswith(("SLURM_", "SLURMD_", "SRUN_"))]
        hidden = {name: os.environ.pop(name) for name in names if name != "SLURM_CONF"}
    try:
        yield
    finally:
        os.environ.update(hidden)


class NotRequeued(Terminated):
    """A job's time was over, and it could not be put back into the queue: `why`."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why


@contextmanager
def requeued_in_time() -> Iterator[None]:
    """In a job that submitit runs: what happens when Slurm announces the end of its time.

    submitit's handler puts the job back into the queue and exits, or raises an error if it cannot.
    Neither may pass for a failure of the example that runs: here both are a wish to stop.

    Raises:
        Terminated: the job is back in the queue.
        NotRequeued: it is not.
    """
    from submitit import JobEnvironment

    number = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
    before = signal.getsignal(number)
    if not callable(before):
        raise RuntimeError(f"{number.name} has no handler of submitit's")
    signal.signal(number, stop_instead(before))
    try:
        yield
    finally:
        signal.signal(number, before)


def stop_instead(
    requeue: Callable[[int, FrameType | None], Any],
) -> Callable[[int, FrameType | None], None]:
    """submitit's handler `requeue`, with its exit and its errors as wishes to stop."""

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            requeue(number, frame)
        except SystemExit as done:
            raise Terminated from done
        except Exception as error:
            raise NotRequeued(f"out of time: {first_line(error)}") from error

    return handle
