"""``launcher=slurm``: runs the jobs of a sweep as one Slurm job array, through submitit.

The other jobs go on when one ends without a result (killed, cancelled, its node lost); noticing that
does not need Slurm's accounting. A job that is preempted, or whose time is over, continues where it was.
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
"""Slurm's states in which a job has ended, and ``gone`` for a job that squeue does not list any more. A
preempted job that is back in the queue is PENDING."""
LATE = 60.0
"""How much later than the end of a job a network file system may show its result, in seconds."""


class SlurmJob:
    """Calls `kvbench.cli.jobs.work` in the process that Slurm started. submitit pickles this object when
    it submits the job, and when it puts it back into the queue."""

    def __call__(self, outcome: str, order: str) -> None:
        """Run the job.

        When Slurm signals that the job's time is about to end, submitit's handler puts the job back into
        the queue and exits, or raises an error if it cannot. Either becomes `Terminated` here: it would
        otherwise be recorded as a failure of the example in progress.
        """
        from submitit import JobEnvironment

        number = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
        requeue: Any = signal.getsignal(number)

        def handle(number: int, frame: FrameType | None) -> None:
            try:
                requeue(number, frame)
            except (Exception, SystemExit) as error:
                raise Terminated from error

        signal.signal(number, handle)
        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        work(outcome, order)

    def checkpoint(self, *order: str) -> Any:
        """The call that submitit makes when the job starts again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *order)


class SlurmLauncher(Launcher):
    """``launcher=slurm``: submits the jobs, and waits until each has written its outcome or has ended
    without one."""

    def run(self, orders: Sequence[tuple[str, str]]) -> None:
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
                    failure = f"{job.job_id} ended without a result ({state})"
                    self.ended(number, failure, jobs.pop(number).paths.stderr)

    def _submitted(self, orders: Sequence[tuple[str, str]]) -> list[Any]:
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
            # Since Slurm 22.05, srun does not take the number of CPUs over from sbatch.
            "srun_args": [] if cpus is None else [f"--cpus-per-task={cpus}"],
            "additional_parameters": {"requeue": True, **(options.pop("sbatch") or {})},
            "signal_delay_s": 120,  # before the time limit, for what `SlurmJob` does then
            "setup": list(options["setup"]),
            "name": "kvbench",
        }
        shared = ("name", "gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min")
        options = {  # submitit prefixes the options that not all of its executors share
            key if key in shared else f"slurm_{key}": value
            for key, value in options.items()
            if value is not None
        }
        warnings_of_submitit = io.StringIO()
        # If this command runs within a Slurm job itself, sbatch would take the variables that describe
        # that job for options. submitit removes them all, of which these are options of the user's.
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == "SLURM_CONF" or name.startswith("SBATCH_")
        }
        try:
            executor = submitit.AutoExecutor(self.folder, "slurm", slurm_max_num_timeout=timeouts)
            executor.update_parameters(**options)
            with redirect_stderr(warnings_of_submitit), submitit.helpers.clean_env():
                os.environ.update(kept)
                jobs = executor.map_array(SlurmJob(), *zip(*orders, strict=True))
        except FailedJobError as error:  # its message contains sbatch's
            errors = re.findall(r"^sbatch: error: (.*)", str(error), re.MULTILINE)
            line = errors[0] if errors else first_line(error)
            raise UserError(f"Slurm refused the jobs: {line}") from error
        except RuntimeError as error:
            raise UserError(
                f"launcher=slurm: {first_line(error)}; use a machine with sbatch and srun"
            ) from error
        print(warnings_of_submitit.getvalue(), end="", file=sys.stderr)
        return jobs


def states_of(arrays: Sequence[str]) -> dict[str, str] | None:
    """The state of every job, by job id; None if Slurm does not answer. squeue is asked, since sacct
    needs Slurm's accounting."""
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T"]
    states: dict[str, str] = {}
    for array in arrays:
        output = subprocess.run([*command, f"--jobs={array}"], capture_output=True, text=True)
        if output.returncode and "Invalid job id" not in output.stderr:
            return None
        states |= dict(line.split() for line in output.stdout.splitlines())
    return states
