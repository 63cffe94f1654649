"""``launcher=slurm``: the jobs of a sweep as Slurm job arrays, through hydra-submitit-launcher.

Added to it are that a job which dies (killed, cancelled, its node lost) leaves the others alone, that
it is found dead without Slurm's accounting, and that a job whose time is over loses no example.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import OmegaConf

from kvbench.cli.jobs import Collected, JobOutcome, log_folder
from kvbench.errors import UserError, complain, first_line
from kvbench.run.termination import Terminated

ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED "
ENDED += "TIMEOUT gone"
"""States of Slurm's after which a job writes no result any more; gone: Slurm has forgotten it. One
that was preempted and goes back into the queue is PENDING."""
ARRAY = 1000
"""Jobs of one array that Slurm takes by default."""
LATE = 60.0
"""Seconds by which a network file system may show a result late."""


class SlurmLauncher(BaseSubmititLauncher):
    """Submits the jobs, and waits until each has a result or can have none any more."""

    _EXECUTOR = "slurm"

    def __call__(self, *job: Any) -> JobReturn:
        """Run a job, in the process that Slurm started."""
        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        with requeued_in_time():
            return super().__call__(*job)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """As `BaseSubmititLauncher`; refused where there is no Slurm, or by it."""
        config, task_function = self.config, self.task_function
        assert config is not None
        collected = Collected(task_function, job_overrides)
        folder = log_folder(config)
        jobs = dict(enumerate(self._submitted(folder, job_overrides)))
        arrays = sorted({job.job_id.partition("_")[0] for job in jobs.values()})
        count = f"{len(jobs)} job{'s' * (len(jobs) > 1)}"
        complain(f"{count} in Slurm: {' '.join(arrays)}; logs: {folder}")
        ended: dict[int, float] = {}
        told = None
        try:
            while jobs:
                time.sleep(float(config.launcher.poll_s))
                list(folder.iterdir())  # refreshes a network file system's view
                for number in [n for n, job in jobs.items() if job.paths.result_pickle.exists()]:
                    job = jobs.pop(number)
                    collected.add(number, *_result(job), job.paths.stderr)
                states = states_of(arrays)
                if states is None:
                    continue
                line = waiting_line(list(states.values()))
                if line and line != told:  # some never go away
                    complain(line)
                told = line or told
                for number, job in list(jobs.items()):
                    state, _ = states.get(job.job_id, ("gone", ""))
                    if state not in ENDED:
                        ended.pop(number, None)
                    elif time.monotonic() - ended.setdefault(number, time.monotonic()) >= LATE:
                        how = f"{job.job_id} ended without a result ({state})"
                        collected.add(number, None, how, jobs.pop(number).paths.stderr)
        except BaseException:
            complain(
                f"Slurm goes on with {count}; to end that: scancel {' '.join(arrays)}; to see what "
                f"came of it: kvbench-report {Path(config.results_dir) / config.experiment_name}"
            )
            raise
        return collected.returned()

    def _submitted(self, folder: Path, job_overrides: Sequence[Sequence[str]]) -> list[Any]:
        import submitit
        from submitit.core.utils import FailedJobError

        assert self.config is not None
        options = {k: v for k, v in self.params.items() if v is not None and k != "submitit_folder"}
        timeouts, cpus = options.pop("max_num_timeout"), options.get("cpus_per_task")
        # since Slurm 22.05, srun takes no CPUs from sbatch
        options["srun_args"] = [] if cpus is None else [f"--cpus-per-task={cpus}"]
        options["additional_parameters"] |= dict(self.config.launcher.sbatch or {})
        everywhere = set(OmegaConf.structured(BaseQueueConf).keys())
        options = {k if k in everywhere else f"slurm_{k}": v for k, v in options.items()}
        state, jobs, said = Singleton.get_state(), [], io.StringIO()
        # within a job, sbatch would take the variables that describe that job for wishes
        kept = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or k[:7] == "SBATCH_"}
        try:
            executor = submitit.AutoExecutor(folder, "slurm", slurm_max_num_timeout=timeouts)
            executor.update_parameters(**options)
            with redirect_stderr(said), submitit.helpers.clean_env():
                os.environ.update(kept)
                for at in range(0, len(job_overrides), ARRAY):
                    some = enumerate(job_overrides[at : at + ARRAY], at)
                    told = [(list(o), "hydra.run.dir", n, f"job_{n}", state) for n, o in some]
                    jobs += executor.map_array(self, *zip(*told, strict=True))
        except FailedJobError as error:  # what sbatch said is in it
            why = re.findall(r"^sbatch: error: (.*)", str(error), re.MULTILINE)
            line = why[0] if why else first_line(error)
            raise UserError(f"Slurm refused the jobs: {line}") from error
        except RuntimeError as error:
            raise UserError(
                f"launcher=slurm: {first_line(error)}; allowed: a machine with sbatch and srun"
            ) from error
        print(said.getvalue(), end="", file=sys.stderr)
        return jobs


def _result(job: Any) -> tuple[JobOutcome | None, str]:
    try:
        return job.results()[0].return_value, ""
    except Exception as error:  # noqa: BLE001 - submitit's, with the job's traceback in it
        lines = re.findall(r"^[\w.]+(?:Error|Exit)\b.*", str(error), re.MULTILINE)
        return None, f"{job.job_id} {lines[-1] if lines else 'failed'}"


def states_of(arrays: Sequence[str]) -> dict[str, tuple[str, str]] | None:
    """State and reason, in Slurm's words, by job id of what is in job arrays; None if Slurm does not
    answer. squeue, unlike sacct, needs no accounting."""
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T %r"]
    found: dict[str, tuple[str, str]] = {}
    for array in arrays:
        said = subprocess.run([*command, f"--jobs={array}"], capture_output=True, text=True)
        if said.returncode and "Invalid job id" not in said.stderr:
            return None
        for line in said.stdout.splitlines():
            job_id, state, *reason = line.split(maxsplit=2)
            found[job_id] = state, " ".join(reason)
    return found


def waiting_line(states: Sequence[tuple[str, str]]) -> str | None:
    """One line on jobs that wait in the queue, e.g. "3 run, 5 wait: Resources"; None if none waits
    for a reason."""
    counts = Counter(state == "PENDING" for state, _ in states if state not in ENDED)
    reasons = {reason for state, reason in states if state == "PENDING"} - {"", "None"}
    said = f"{counts[False]} run, {counts[True]} wait: {', '.join(sorted(reasons))}"
    return said if reasons else None


@contextmanager
def requeued_in_time() -> Iterator[None]:
    """In a job of submitit's: what happens when Slurm announces the end of its time. submitit puts
    the job back into the queue and exits, or raises an error if it cannot, which the log says: both
    are `Terminated` here, as neither may pass for a failure of the example that runs."""
    from submitit import JobEnvironment

    number = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
    requeue: Any = signal.getsignal(number)

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            requeue(number, frame)
        except BaseException as done:
            if not isinstance(done, SystemExit):
                complain(f"out of time: {first_line(done)}")
            raise Terminated from done

    signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, requeue)
