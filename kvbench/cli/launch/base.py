"""Launchers for sweeps, through submitit.

hydra-submitit-launcher submits and runs the jobs; what is added is that a job which dies (killed,
cancelled, its node lost) is one line and an exit status and leaves the others alone, that jobs are
found dead without Slurm's accounting, and that several GPUs are fed from one queue.
"""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import OmegaConf

from kvbench.cli.jobs import JobOutcome, Jobs, names
from kvbench.errors import FAILED, complain
from kvbench.records.durable import remove

Parameters = tuple[Any, ...]
"""Arguments of `BaseSubmititLauncher.__call__`; the first are the job's overrides."""


class Launcher(BaseSubmititLauncher):
    """Submits jobs, waits until each has a result or can have none any more."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs; what they came to is added to the task function's outcomes."""
        assert self.config is not None
        assert isinstance(self.task_function, Jobs)
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # jobs find there all they need to know
        remove(folder / "multirun.yaml")  # Hydra's copy of what manifests hold
        waiting: deque[tuple[int, Parameters]] = deque()
        for index, overrides in enumerate(job_overrides, initial_job_idx):
            state = Singleton.get_state()
            job = (list(overrides), "hydra.sweep.dir", index, f"job_{index}", state)
            waiting.append((index, job))
        called = names(job_overrides)
        running: dict[int, Any] = {}
        outcomes: dict[int, JobOutcome] = {}
        try:
            while waiting or running:
                self.submit(waiting, running)
                ended = self.ended(running)
                for index, job in list(running.items()):
                    overrides = job_overrides[index - initial_job_idx]
                    outcome = _outcome(job, overrides, ended.get(index))
                    if outcome is not None:
                        del running[index]
                        outcomes[index] = outcome
                        self.release(index)
                        _announce(called[index - initial_job_idx], outcome, len(outcomes))
                if running:
                    time.sleep(self.poll_s)
        except BaseException:
            self.abandon(list(running.values()))
            raise
        in_order = [outcomes[index] for index in sorted(outcomes)]
        self.task_function.outcomes.extend(in_order)
        self.task_function.elsewhere = True
        return [job_return(outcome) for outcome in in_order]

    def executor(self, folder: str) -> Any:
        """submitit's executor with the parameters of ``hydra.launcher``."""
        import submitit  # not above: Hydra imports plugins at every start

        everywhere = set(OmegaConf.structured(BaseQueueConf).keys())
        timeouts = self.params.get("max_num_timeout")
        options = {} if timeouts is None else {f"{self._EXECUTOR}_max_num_timeout": timeouts}
        executor = submitit.AutoExecutor(folder=folder, cluster=self._EXECUTOR, **options)
        executor.update_parameters(
            **{
                key if key in everywhere else f"{self._EXECUTOR}_{key}": value
                for key, value in self.params.items()
                if key not in ("submitit_folder", "max_num_timeout") and value is not None
            }
        )
        return executor

    poll_s: float

    @abstractmethod
    def submit(self, waiting: deque[tuple[int, Parameters]], running: dict[int, Any]) -> None:
        """Move jobs that can start from `waiting` to `running`."""

    @abstractmethod
    def ended(self, running: dict[int, Any]) -> dict[int, str]:
        """Jobs that will write no result any more if they have not yet, and how they ended."""

    def release(self, index: int) -> None:
        """Take back what an ended job held; a queue of Slurm's does that itself."""

    @abstractmethod
    def abandon(self, jobs: Sequence[Any]) -> None:
        """This process ends before these jobs do."""


def _outcome(job: Any, overrides: Sequence[str], ended: str | None) -> JobOutcome | None:
    """What a job came to; None while it may still write its result."""
    if not job.paths.result_pickle.exists():
        if ended is None:
            return None
        return _lost(job, overrides, f"ended without a result ({ended})")
    try:
        value = job.results()[0].return_value
    except Exception as error:  # noqa: BLE001 - submitit's, with the job's traceback in it
        lines = [line for line in str(error).splitlines() if line and not line.startswith("---")]
        said = next(
            (line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exit)\b", line)), ""
        )
        return _lost(job, overrides, said or "failed")
    assert isinstance(value, JobOutcome)
    return value


def _lost(job: Any, overrides: Sequence[str], what: str) -> JobOutcome:
    named = tuple(filter_overrides(list(overrides)))
    log = job.paths.stderr
    where = f"log: {log}" if log.exists() else f"no log: it never began, or cannot write {log}"
    return JobOutcome(named, error=f"job {job.job_id} {what}; {where}", status=FAILED)


def _announce(name: str, outcome: JobOutcome, done: int) -> None:
    records = f"{outcome.records} records, {outcome.failed} failed"
    complain(f"{done} done: {name}: {outcome.error or records}")


def job_return(outcome: JobOutcome) -> JobReturn:
    returned = JobReturn(overrides=outcome.overrides, status=JobStatus.COMPLETED)
    returned.return_value = outcome
    return returned


def arrays_of(jobs: Sequence[Any]) -> str:
    return " ".join(sorted({job.job_id.partition("_")[0] for job in jobs}))


def count_of(jobs: Sequence[Any]) -> str:
    return f"{len(jobs)} job{'s' * (len(jobs) > 1)}"
