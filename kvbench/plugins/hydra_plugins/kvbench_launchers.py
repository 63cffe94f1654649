"""Hydra launchers for sweeps on Slurm and on the GPUs of one machine, through submitit.

hydra-submitit-launcher submits and runs the jobs; what is added is that a job which dies (killed,
cancelled, its node lost) is one line and an exit status and leaves the others alone, that jobs are
found dead without Slurm's accounting, and that several GPUs are fed from one queue.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import OmegaConf

from kvbench import slurm
from kvbench.durable import remove
from kvbench.jobs import FAILED, USAGE, JobOutcome, Jobs, names
from kvbench.messages import complain, first_line

PATIENCE = 30.0
"""Seconds for workers to finish their examples when the command is interrupted."""

LATE = 60.0
"""Seconds by which a network file system may show a file late."""

Parameters = tuple[Any, ...]
"""Arguments of `BaseSubmititLauncher.__call__`; the first are the job's overrides."""


class _Launcher(BaseSubmititLauncher):
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
                        self.freed(index)
                        _tell(called[index - initial_job_idx], outcome, len(outcomes))
                if running:
                    time.sleep(self.poll_s)
        except BaseException:
            self.abandon(list(running.values()))
            raise
        in_order = [outcomes[index] for index in sorted(outcomes)]
        self.task_function.outcomes.extend(in_order)
        self.task_function.elsewhere = True
        return [_job_return(outcome) for outcome in in_order]

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

    @abstractmethod
    def freed(self, index: int) -> None:
        """The job is over."""

    @abstractmethod
    def abandon(self, jobs: Sequence[Any]) -> None:
        """This process ends before these jobs do."""


class SlurmLauncher(_Launcher):
    """The jobs of a sweep as one Slurm job array, or several where one may not be as large."""

    _EXECUTOR = "slurm"

    def __call__(self, *job: Any) -> JobReturn:
        """Runs the job, in the process that Slurm started."""
        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        try:
            with slurm.requeued_in_time():
                return super().__call__(*job)
        except slurm.NotRequeued as stop:
            named = tuple(filter_overrides(list(job[0])))
            return _job_return(JobOutcome(named, error=stop.why, status=FAILED))

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
            size = slurm.largest_array()
            while waiting:
                some = [waiting[at] for at in range(min(size, len(waiting)))]
                with redirect_stderr(said_by_sbatch), slurm.outside_of_jobs():
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
        complain(f"{_count(jobs)} in Slurm: {_arrays(jobs)}; logs: {jobs[0].paths.folder}")

    def _warn_of_earlier_jobs(self) -> None:
        """Jobs of a command that was interrupted may still run, and hold what these would wait for."""
        assert self.config is not None
        submissions = Path(self.config.hydra.sweep.dir).parent.glob("*/*_submitted.pkl")
        earlier = slurm.still_there({path.name.partition("_")[0] for path in submissions})
        if earlier:
            complain(
                "Slurm still has jobs of an earlier command for these results; where both have the "
                f"same examples, these wait for those; to end those: scancel {' '.join(earlier)}"
            )

    def ended(self, running: dict[int, Any]) -> dict[int, str]:
        """Jobs that Slurm has seen the end of. A file system may show a result late: then it counts
        when Slurm has said so for three looks, or for `LATE` if the job ended well."""
        states = slurm.states({job.job_id.partition("_")[0] for job in running.values()})
        if states is None:
            return {}
        found = {index: states.get(job.job_id, slurm.GONE) for index, job in running.items()}
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
            failed = state.name not in ("COMPLETED", slurm.GONE.name)
            if waited >= (2 * self.poll_s if failed else max(LATE, 2 * self.poll_s)):
                ended[index] = state.name
        return ended

    def _say_what_waits(self, found: Mapping[int, slurm.JobState]) -> None:
        """Once for every set of reasons why jobs wait: some never go away."""
        line = slurm.waiting(found.values())
        reasons = line and line.partition(": ")[2]
        if line and reasons != self._waited:
            complain(line)
        self._waited = reasons or self._waited

    def freed(self, index: int) -> None:
        """Slurm knows."""

    def abandon(self, jobs: Sequence[Any]) -> None:
        """Jobs in Slurm go on."""
        if jobs:
            assert self.config is not None
            results = Path(self.config.results_dir) / self.config.experiment_name
            complain(
                f"Slurm goes on with {_count(jobs)}; to end that: scancel {_arrays(jobs)}; to see what "
                f"came of it: kvbench-report {results}"
            )


class GpuLauncher(_Launcher):
    """One worker per GPU of this machine; whichever is free takes the next job."""

    _EXECUTOR = "local"
    poll_s = 0.2

    def submit(self, waiting: deque[tuple[int, Parameters]], running: dict[int, Any]) -> None:
        """A job for every free device, each in a process of its own."""
        if not hasattr(self, "_free"):
            self._free = deque(self._devices())
            self._workers = len(self._free)
            self._at: dict[int, str] = {}
        while waiting and self._free:
            index, job = waiting.popleft()
            device = self._free.popleft()
            # A folder for each: submitit names jobs by process ids, which come again.
            folder = f"{self.params['submitit_folder']}/{index}"
            call = _OnDevice(self._clean(), device, self._workers, os.getpid())
            with _deaf_to_interrupts():
                running[index] = self.executor(folder).submit(call, *job)
            self._at[index] = device

    def _clean(self) -> BaseSubmititLauncher:
        """What is sent to the worker: this launcher without the processes it has started."""
        plain = type(self)(**self.params)
        assert self.hydra_context is not None
        assert self.task_function is not None
        assert self.config is not None
        plain.setup(
            hydra_context=self.hydra_context, task_function=self.task_function, config=self.config
        )
        return plain

    def _devices(self) -> list[str]:
        from kvbench.devices import DeviceError, devices_of

        assert self.config is not None
        try:
            return devices_of(self.config)
        except DeviceError as error:
            complain(str(error))
            raise SystemExit(USAGE) from error

    def freed(self, index: int) -> None:
        """Its device takes the next."""
        self._free.append(self._at.pop(index))

    def ended(self, running: dict[int, Any]) -> dict[int, str]:
        """Processes that are no more."""
        return {index: "killed" for index, job in running.items() if job.state != "RUNNING"}

    def abandon(self, jobs: Sequence[Any]) -> None:
        """Nobody would wait for the workers: each finishes its example and ends."""
        patience = time.monotonic() + PATIENCE
        for _ in range(2):  # a second SIGTERM ends the example, too
            for job in jobs:
                if job.state == "RUNNING":
                    os.kill(int(job.job_id), signal.SIGTERM)
            while time.monotonic() < patience and any(job.state == "RUNNING" for job in jobs):
                time.sleep(0.1)


class _OnDevice:
    """A job that sees one device only. submitit calls it in the worker's process."""

    def __init__(
        self, launcher: BaseSubmititLauncher, device: str, workers: int, command: int
    ) -> None:
        self.launcher, self.device, self.workers = launcher, device, workers
        self.command = command

    def __call__(self, *job: Any) -> JobReturn:
        from kvbench.devices import see_only

        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it
        _end_with(self.command)
        see_only(self.device, self.workers)
        return self.launcher(*job)


def _end_with(command: int) -> None:
    """When that process is no more, however it died, let this one finish its example and end."""

    def watch() -> None:
        while _runs(command):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)
        os._exit(1)  # what hangs hears no signal

    threading.Thread(target=watch, name="command", daemon=True).start()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started here ignore the terminal's Ctrl-C: the command hears it and ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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


def _tell(name: str, outcome: JobOutcome, done: int) -> None:
    records = f"{outcome.records} records, {outcome.failed} failed"
    complain(f"{done} done: {name}: {outcome.error or records}")


def _job_return(outcome: JobOutcome) -> JobReturn:
    returned = JobReturn(overrides=outcome.overrides, status=JobStatus.COMPLETED)
    returned.return_value = outcome
    return returned


def _arrays(jobs: Sequence[Any]) -> str:
    return " ".join(sorted({job.job_id.partition("_")[0] for job in jobs}))


def _count(jobs: Sequence[Any]) -> str:
    return f"{len(jobs)} job{'s' * (len(jobs) > 1)}"
