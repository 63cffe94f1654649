"""``launcher=slurm``: the jobs of a sweep as Slurm job arrays, through submitit.

A job that dies (killed, cancelled, its node lost) leaves the others alone and is found dead without
Slurm's accounting; one that is preempted or whose time is over goes on where it was.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from types import FrameType
from typing import Any

from kvbench.cli.jobs import Launcher, work
from kvbench.errors import UserError, complain, first_line, needs_extra
from kvbench.run.termination import Terminated

ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
        "gone",
    }
)
"""Slurm's states in which a job has ended, and ``gone`` for a job that squeue no longer lists. A job
that was preempted and goes back into the queue is PENDING."""
LATE = 60.0
"""Seconds by which a network file system may show a result late."""


class Work:
    """Runs `kvbench.cli.jobs.work` in the process that Slurm started; submitit pickles this object to
    put the job back into the queue."""

    def __call__(self, outcome: str, order: str) -> None:
        """Run the job. When Slurm announces the end of its time, submitit puts it back into the queue
        and exits, or raises an error if it cannot. Both are raised as `Terminated`, so that they are not
        recorded as a failure of the example that runs."""
        from submitit import JobEnvironment

        number = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
        requeue: Any = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None) -> None:
            try:
                requeue(number, frame)
            except BaseException as done:
                raise Terminated from done

        signal.signal(number, handle)
        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        work(outcome, order)

    def checkpoint(self, *order: str) -> Any:
        """What submitit runs when the job comes out of the queue again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *order)


class SlurmLauncher(Launcher):
    """Submits the jobs, and waits until each has a result or can have none any more."""

    def run(self, orders: Sequence[tuple[str, str]]) -> None:
        """Carry out each order as a job of Slurm's; refused where there is no Slurm, or by it."""
        jobs = dict(enumerate(self._submitted(orders)))
        arrays = sorted({job.job_id.partition("_")[0] for job in jobs.values()})
        where = f"{' '.join(arrays)}; logs: {self.folder}"
        complain(f"{len(jobs)} jobs in Slurm: {where}; they go on without this command")
        ended_at: dict[int, float] = {}  # when a job without a result was first seen to have ended
        while jobs:
            time.sleep(float(self.config.launcher.poll_s))
            list(self.folder.iterdir())  # refreshes a network file system's view
            states = states_of(arrays)
            for number, job in list(jobs.items()):
                state = (states or {}).get(job.job_id, "gone")
                has_result = Path(orders[number][0]).exists()
                if not has_result and (states is None or state not in ENDED):
                    ended_at.pop(number, None)
                    continue
                since = ended_at.setdefault(number, time.monotonic())
                if has_result or time.monotonic() - since >= LATE:
                    how = f"{job.job_id} ended without a result ({state})"
                    self.ended(number, how, jobs.pop(number).paths.stderr)

    def _submitted(self, orders: Sequence[tuple[str, str]]) -> list[Any]:
        """Submit the orders as one job array.

        Raises:
            UserError: submitit is not installed, there is no Slurm, or Slurm refuses the jobs.
        """
        try:
            import submitit
            from submitit.core.utils import FailedJobError
        except ModuleNotFoundError as error:
            raise UserError("launcher=slurm: " + needs_extra("submitit", "slurm")) from error
        options = {
            str(k): v for k, v in self.config.launcher.items() if k not in ("name", "poll_s")
        }
        cpus, timeouts = options["cpus_per_task"], options.pop("max_num_timeout")
        options |= {
            # since Slurm 22.05, srun takes no CPUs from sbatch
            "srun_args": [] if cpus is None else [f"--cpus-per-task={cpus}"],
            "additional_parameters": {"requeue": True, **(options.pop("sbatch") or {})},
            "signal_delay_s": 120,  # before the time limit: put the job back into the queue
            "setup": list(options["setup"]),
            "name": "kvbench",
        }
        everywhere = ("name", "gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min")
        options = {
            k if k in everywhere else f"slurm_{k}": v for k, v in options.items() if v is not None
        }
        warnings_of_submitit = io.StringIO()
        # Within a job, sbatch would read the variables that describe that job as options.
        kept = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or k[:7] == "SBATCH_"}
        try:
            executor = submitit.AutoExecutor(self.folder, "slurm", slurm_max_num_timeout=timeouts)
            executor.update_parameters(**options)
            with redirect_stderr(warnings_of_submitit), submitit.helpers.clean_env():
                os.environ.update(kept)
                jobs = executor.map_array(Work(), *zip(*orders, strict=True))
        except FailedJobError as error:  # what sbatch said is in it
            errors = re.findall(r"^sbatch: error: (.*)", str(error), re.MULTILINE)
            line = errors[0] if errors else first_line(error)
            raise UserError(f"Slurm refused the jobs: {line}") from error
        except RuntimeError as error:
            raise UserError(
                f"launcher=slurm: {first_line(error)}; allowed: a machine with sbatch and srun"
            ) from error
        print(warnings_of_submitit.getvalue(), end="", file=sys.stderr)
        return jobs


def states_of(arrays: Sequence[str]) -> dict[str, str] | None:
    """The state of every job of these arrays, in Slurm's words, by job id; None if Slurm does not
    answer. It asks squeue, which unlike sacct needs no accounting."""
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T"]
    states: dict[str, str] = {}
    for array in arrays:
        output = subprocess.run([*command, f"--jobs={array}"], capture_output=True, text=True)
        if output.returncode and "Invalid job id" not in output.stderr:
            return None
        states |= dict(line.split() for line in output.stdout.splitlines())
    return states
