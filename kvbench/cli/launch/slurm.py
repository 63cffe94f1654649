"""``launcher=slurm``: the jobs of a sweep as a Slurm job array."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, filter_overrides
from omegaconf import OmegaConf

from kvbench.cli.jobs import JobOutcome
from kvbench.cli.launch import queue
from kvbench.cli.launch.base import Launcher, Parameters, arrays_of, count_of, job_return
from kvbench.errors import FAILED, USAGE, complain, first_line

LATE = 60.0
"""Seconds by which a network file system may show a file late."""


class SlurmLauncher(Launcher):
    """The jobs of a sweep as one Slurm job array, or several where one may not be as large."""

    _EXECUTOR = "slurm"

    def __call__(self, *job: Any) -> JobReturn:
        """Runs the job, in the process that Slurm started."""
        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        try:
            with queue.requeued_in_time():
                return super().__call__(*job)
        except queue.NotRequeued as stop:
            named = tuple(filter_overrides(list(job[0])))
            return job_return(JobOutcome(named, error=stop.why, status=FAILED))

    def executor(self, folder: str) -> Any:
        """submitit's, with any options of sbatch. Since Slurm 22.05, srun takes no CPUs from sbatch."""
        assert self.config is not None
        executor = super().executor(folder)
        cpus = self.params.get("cpus_per_task")
        options = OmegaConf.to_container(self.config.launcher.sbatch or OmegaConf.create())
        assert isinstance(options, dict)
        executor.update_parameters(
            slurm_srun_args=[] if cpus is None else [f"--cpus-per-task={cpus}"],
            slurm_additional_parameters=self.params["additional_parameters"] | options,
        )
        return executor

    def submit(self, waiting: deque[tuple[int, Parameters]], running: dict[int, Any]) -> None:
        """All of them at once: Slurm queues them."""
        if not waiting:
            return
        from submitit.core.utils import FailedJobError

        assert self.config is not None
        self.poll_s = float(self.config.launcher.poll_s)
        self._ended_since: dict[int, float] = {}
        self._waited: str | None = None
        self._warn_of_earlier_jobs()
        said_by_sbatch = io.StringIO()
        try:
            executor = self.executor(self.params["submitit_folder"])
            size = queue.largest_array()
            while waiting:
                some = [waiting[at] for at in range(min(size, len(waiting)))]
                with redirect_stderr(said_by_sbatch), queue.without_job_environment():
                    jobs = executor.map_array(self, *zip(*(job for _, job in some), strict=True))
                for (index, _), job in zip(some, jobs, strict=True):
                    running[index] = job
                    waiting.popleft()
        except FailedJobError as error:  # what sbatch said is in it
            said = re.findall(r"^sbatch: error: (.*)", str(error), re.MULTILINE)
            complain(f"Slurm refused the jobs: {said[0] if said else first_line(error)}")
            raise SystemExit(USAGE) from error
        except RuntimeError as error:
            complain(
                f"launcher=slurm: {first_line(error)}; allowed: a machine with sbatch and srun"
            )
            raise SystemExit(USAGE) from error
        print(said_by_sbatch.getvalue(), end="", file=sys.stderr)
        jobs = list(running.values())
        complain(f"{count_of(jobs)} in Slurm: {arrays_of(jobs)}; logs: {jobs[0].paths.folder}")

    def _warn_of_earlier_jobs(self) -> None:
        """Jobs of a command that was interrupted may still run, and hold what these would wait for."""
        assert self.config is not None
        submissions = Path(self.config.hydra.sweep.dir).parent.glob("*/*_submitted.pkl")
        earlier = queue.jobs_left({path.name.partition("_")[0] for path in submissions})
        if earlier:
            complain(
                "Slurm still has jobs of an earlier command for these results; where both have the "
                f"same examples, these wait for those; to end those: scancel {' '.join(earlier)}"
            )

    def ended(self, running: dict[int, Any]) -> dict[int, str]:
        """Jobs that Slurm has seen the end of. A file system may show a result late: then it counts
        when Slurm has said so for three looks, or for `LATE` if the job ended well."""
        states = queue.states({job.job_id.partition("_")[0] for job in running.values()})
        if states is None:
            return {}
        found = {index: states.get(job.job_id, queue.GONE) for index, job in running.items()}
        self._say_what_waits(found)
        ended = {}
        for index, state in found.items():
            if state.alive:
                self._ended_since.pop(index, None)
                continue
            list(
                running[index].paths.folder.iterdir()
            )  # what refreshes a network file system's view
            waited = time.monotonic() - self._ended_since.setdefault(index, time.monotonic())
            failed = state.name not in ("COMPLETED", queue.GONE.name)
            if waited >= (2 * self.poll_s if failed else max(LATE, 2 * self.poll_s)):
                ended[index] = state.name
        return ended

    def _say_what_waits(self, found: Mapping[int, queue.JobState]) -> None:
        """Once for every set of reasons why jobs wait: some never go away."""
        line = queue.describe_waiting(found.values())
        reasons = line and line.partition(": ")[2]
        if line and reasons != self._waited:
            complain(line)
        self._waited = reasons or self._waited

    def abandon(self, jobs: Sequence[Any]) -> None:
        """Jobs in Slurm go on."""
        if jobs:
            assert self.config is not None
            results = Path(self.config.results_dir) / self.config.experiment_name
            complain(
                f"Slurm goes on with {count_of(jobs)}; to end that: scancel {arrays_of(jobs)}; "
                f"to see what came of it: kvbench-report {results}"
            )
