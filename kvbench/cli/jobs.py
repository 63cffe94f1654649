"""Runs the jobs of one command. All are checked before the first runs, and the others go on when one
fails. With ``launcher=gpus`` jobs run in worker processes, ``python -m kvbench.cli.jobs``, one per GPU.

This module imports no torch: Hydra imports it at every start, and a worker before its device is set.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, filter_overrides
from hydra.errors import HydraException
from hydra.plugins import launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench import errors
from kvbench.cli.config import (
    Settings,
    explain,
    hydra_of_conf,
    job_config,
    jobs_of,
    run_composed,
)
from kvbench.cli.construct import methods_of
from kvbench.cli.results import print_scores
from kvbench.errors import FAILED, USAGE, UserError, complain, presentable
from kvbench.errors.options import Count, checked
from kvbench.records.store import replace_file
from kvbench.run.termination import terminable

if TYPE_CHECKING:
    from kvbench.run.job import Job


def report_error(error: BaseException) -> tuple[str, int]:
    """Print one line about an error on stderr, and before it the traceback if the error is a bug.

    Returns:
        The line and the exit status: 2 for a wrong command; 1 for a failure of the disk, the device or a
        process, and for a bug.
    """
    if isinstance(error, UserError):
        line, status = str(error), error.status
    elif isinstance(error, HydraException | OmegaConfBaseException):  # e.g. of an interpolation
        line, status = explain(error), USAGE
    elif isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        line, status = errors.disk_line(error), FAILED
    else:
        print(errors.traceback_of(error), file=sys.stderr, end="", flush=True)
        line, status = errors.one_line(error), FAILED
    complain(line)
    return errors.presentable(line), status


@dataclass(frozen=True)
class JobOutcome:
    """The result of one job: its overrides, the run folders of its methods, how many records there are
    and how many failed (or why the job did not finish), and the exit status of a command with this job
    alone."""

    overrides: Sequence[str] = ()
    runs: Sequence[str] = ()
    summary: str = ""
    status: int = 0


class Jobs:
    """Checks the jobs of a command, runs them and keeps their outcomes.

    Args:
        argv: the command line as typed, which manifests hold.

    Attributes:
        names: the names of a sweep's jobs. Each of several jobs is announced by its name in one line.
        outcomes: those of the jobs that have ended.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)
        self.names: list[str] = []
        self.outcomes: list[JobOutcome] = []
        self._shared: dict[str, Any] = {}  # model, tokenizer and examples, see `Session.once`

    def run(self, hydra: Hydra, overrides: Sequence[str], *, multirun: bool) -> None:
        """Run the job that these overrides compose to, or let Hydra run those of a sweep, each split
        into its shards. Every job of a sweep is checked before the first runs. A dry run prints what
        each job would do."""
        config, sweep = jobs_of(hydra, overrides, multirun=multirun)
        jobs = [Settings.of(job_config(hydra, config, words)) for words in sweep]
        jobs = jobs or [Settings.of(config)]
        for settings in jobs:
            settings.check_places()
        first, shards = jobs[0], shard_count(jobs[0]) if sweep else 1
        print(first.announcement(len(jobs) * shards), flush=True)
        if sweep or first.dry_run:
            for number, (name, settings) in enumerate(
                zip(names(sweep) or [""], jobs, strict=True), 1
            ):
                self._check(settings, f"job {number}: {name}" if len(jobs) > 1 else "")
        if first.dry_run and sweep:
            print(f"{len(jobs) * shards} jobs; launcher={first.launcher['name']}")
        elif sweep:
            parts = [f"{index}/{shards}" for index in range(1, shards + 1)]
            if shards > 1:
                sweep = [[*words, f"shard={part}"] for words in sweep for part in parts]
                overrides = [*overrides, f"shard={','.join(parts)}"]
            self.names = names(sweep)
            with TemporaryDirectory() as folder:  # Hydra's multirun.yaml holds what was typed
                here = [f"hydra.sweep.dir={folder}"] if first.launcher["name"] == "local" else []
                hydra.multirun("config", self, [*overrides, *here])
        elif not first.dry_run:
            run_composed(hydra, config, self)

    def _check(self, settings: Settings, name: str) -> None:
        """Make a job without running it; in a dry run, print what it would do, in one line where it
        has a name."""
        if settings.launcher["name"] == "slurm":  # here need not be the devices of the nodes
            settings = replace(settings, device="cpu")
        job = self._job(settings)
        if settings.dry_run:
            from kvbench.cli.build import settings_checked
            from kvbench.run.preview import print_dry_run

            print(presentable(settings_checked(job)), flush=True)
            print_dry_run(job, name=name)

    def _job(self, settings: Settings) -> Job:
        methods_of(settings.methods)  # refuses them before the libraries of models are imported
        from kvbench.cli.build import build_job

        return build_job(settings, self._shared)

    def __call__(self, config: DictConfig) -> None:
        """Run one job and add its outcome. An error is reported by `report_error`, not raised."""
        sys.argv = self.argv  # the manifest takes the command from here
        since = time.monotonic()
        # Not resolved: a ${...} in an override refers to the job's config, and these lie in Hydra's own.
        typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        if len(self.names) > 1:
            number = len(self.outcomes)
            complain(f"job {number + 1} of {len(self.names)}: {self.names[number]}")
        try:
            settings = Settings.of(config)
            job = self._job(settings)
            from kvbench.cli.build import run_logged

            result = run_logged(job, settings.logger, since=since)
            summary = f"{result.records} records, {result.failed} of them failed"
            status = FAILED if result.failed else 0
            outcome = JobOutcome(typed, [*map(str, result.folders.values())], summary, status)
        except Exception as error:  # noqa: BLE001 - the next job goes on
            outcome = JobOutcome(typed, (), *report_error(error))
        self.outcomes.append(outcome)
        if len(self.names) > len(self.outcomes) == 1 and outcome.runs and config.shard is None:
            # Somebody waits for a first number; the command prints the tables of all jobs at its end.
            runs = [Path(run) for run in outcome.runs]
            with suppress(BrokenPipeError):  # kvbench -m ... | head: the other jobs go on
                print_scores(runs[0].parents[2], runs)

    @property
    def runs(self) -> dict[Path, list[Path]]:
        """The folders of the experiments that the jobs belong to, each with the jobs' run folders, in
        the order of the jobs."""
        runs: dict[Path, list[Path]] = {}
        for run in (Path(run) for outcome in self.outcomes for run in outcome.runs):
            runs.setdefault(run.parents[2], []).append(run)
        return runs

    @property
    def status(self) -> int:
        """The command's exit status: 0 if no job failed, 2 if every job that failed was a wrong command,
        else 1."""
        statuses = [outcome.status for outcome in self.outcomes]
        return min(filter(None, statuses), default=0)

    def print_summary(self) -> None:
        """Print one line about all jobs, and one for each that failed."""
        count = sum(outcome.status != 0 for outcome in self.outcomes)
        head = f"{count} of them failed" if count else "all well"
        print(f"\n{len(self.outcomes)} jobs, {head}")
        job_names = names([outcome.overrides for outcome in self.outcomes])
        for name, outcome in zip(job_names, self.outcomes, strict=True):
            if outcome.status:
                print(errors.presentable(f"  {name}: {outcome.summary}"))


def names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """A name for each job, from its overrides: those that not all jobs have; ``job 1`` and so on where
    it has none."""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    distinct = (" ".join(text for text in overrides if text not in common) for overrides in jobs)
    return [errors.redact(name) or f"job {number}" for number, name in enumerate(distinct, 1)]


def shard_count(settings: Settings) -> int:
    """The number of shards that a job is split into: `shards`; with launcher=gpus the number of workers
    where neither `shards` nor `shard` is set; else 1."""
    if None not in (settings.shards, settings.shard):
        raise UserError(
            f"shards is {settings.shards} and shard is given, too; allowed: one of them"
        )
    if settings.shards is settings.shard is None and settings.launcher["name"] == "gpus":
        return len(devices_of(settings.launcher, settings.device))
    return settings.shards or 1


class Launcher(launcher.Launcher):
    """Runs each job of a sweep by `work` in another process, and prints a line as each ends.

    Attributes:
        folder: holds orders, outcomes and logs; no other user can read it.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self.jobs, self.config = task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs, and add their outcomes to those of the command, which take the place of what
        Hydra's launchers return."""
        self.folder = Path(self.config.hydra.sweep.dir).expanduser()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        (self.folder / "multirun.yaml").unlink(missing_ok=True)  # Hydra's, with what was typed
        self.names, self.outcomes = names(job_overrides), dict[int, JobOutcome]()
        self.overrides = [filter_overrides(list(overrides)) for overrides in job_overrides]
        hydras: Any = OmegaConf.to_container(self.config.hydra.overrides.hydra, resolve=False)
        orders = []
        for number, overrides in enumerate(job_overrides):
            order = [self.jobs.argv, [*hydras, *overrides, "hydra.mode=RUN"]]
            orders.append((f"{self.folder}/{number}.json", json.dumps(order)))
        self.run(orders)
        self.jobs.outcomes.extend(self.outcomes[number] for number in sorted(self.outcomes))
        return []

    @abstractmethod
    def run(self, orders: Sequence[tuple[str, str]]) -> None:
        """Call `work` with each order's arguments in another process, and `ended` when that ends."""

    def ended(self, number: int, failure: str, log: Path) -> None:
        """Read the outcome that a job has written, and print a line about it.

        Args:
            failure: how the job ended if it has written no outcome.
            log: the file with its output, which the line about a failure names.
        """
        path = self.folder / f"{number}.json"
        if path.exists():
            outcome = JobOutcome(**json.loads(path.read_text()))
        else:
            summary = f"job {failure}; log: {log}"
            outcome = JobOutcome(self.overrides[number], (), summary, FAILED)
        self.outcomes[number] = outcome
        complain(f"{len(self.outcomes)} done: {self.names[number]}: {outcome.summary}")


def devices_of(launcher: Mapping[str, Any], device: str) -> list[str]:
    """The value of CUDA_VISIBLE_DEVICES for each worker: its GPUs, or empty text for the CPU. More
    workers than GPUs share these.

    Args:
        launcher: the config of ``launcher=gpus``, with `workers` and `gpus_per_worker`.
        device: the config's device.
    """
    from torch.cuda import device_count

    workers, per_worker = launcher["workers"], launcher["gpus_per_worker"] or 1
    for name in ("workers", "gpus_per_worker"):
        checked(f"launcher.{name}", launcher[name], Count | None)
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device is {device!r}; allowed with launcher=gpus: auto, cuda, cpu")
    count = 0 if device == "cpu" else device_count()  # asks the driver, takes no memory of a GPU
    if count < per_worker and (count or device == "cuda" or workers is None):
        raise UserError(
            f"launcher=gpus finds {count or 'no'} GPU, and gpus_per_worker is {per_worker}; allowed: a "
            "machine with GPUs, or device=cpu and launcher.workers=N for N workers on its CPUs"
        )
    if not count:
        return [""] * workers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    gpus = [name.strip() for name in visible.split(",")]
    if not gpus[0].startswith("MIG-"):  # of several MIG instances, torch counts one
        gpus = gpus[:count]  # CUDA ignores names after the first that is not there
    starts = range(0, len(gpus) - per_worker + 1, per_worker)
    groups = [",".join(gpus[start : start + per_worker]) for start in starts]
    return [groups[index % len(groups)] for index in range(workers or len(groups))]


class GpuLauncher(Launcher):
    """``launcher=gpus``: a process per job, and one job at a time on each GPU. The local executor of
    submitit refuses GPUs named by UUID, starts all jobs at once, and its jobs outlive a killed command.
    """

    def run(self, orders: Sequence[tuple[str, str]]) -> None:
        """A worker is in a process group of its own, so that Ctrl-C in the terminal reaches the command
        alone. When the command ends, however it ends, the worker's standard input ends, see `_watch`.
        """
        free = deque(devices_of(self.config.launcher, self.config.device))
        threads = str(max(1, (os.cpu_count() or 1) // len(free)))
        waiting = deque(enumerate(orders))
        running: dict[int, tuple[subprocess.Popen[Any], str]] = {}
        while waiting or running:
            while waiting and free:
                (number, order), device = waiting.popleft(), free.popleft()
                environment = {"OMP_NUM_THREADS": threads, **os.environ}
                environment["CUDA_VISIBLE_DEVICES"] = device
                command = [sys.executable, "-m", "kvbench.cli.jobs", *order]
                with open(self.folder / f"{number}.log", "w") as log:
                    pipes: Any = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
                    worker = subprocess.Popen(command, env=environment, process_group=0, **pipes)
                running[number] = worker, device
            time.sleep(0.2)
            for number, (worker, device) in list(running.items()):
                if worker.poll() is not None:
                    del running[number]
                    free.append(device)
                    failure = f"{number} ended without a result (exit status {worker.returncode})"
                    self.ended(number, failure, self.folder / f"{number}.log")


def work(outcome: str, order: str) -> None:
    """Run a job in this process and write its outcome.

    Args:
        outcome: the file to write.
        order: JSON of the command line as typed and the job's overrides.
    """
    argv, overrides = json.loads(order)
    jobs = Jobs(argv)
    with terminable(), hydra_of_conf() as hydra:
        hydra.run("config", jobs, overrides)
    replace_file(Path(outcome), json.dumps(asdict(jobs.outcomes[0])).encode())


def _watch() -> None:
    """Wait for the end of standard input, which means that the command has ended; then end this worker,
    by force after 30 seconds."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)  # to unwind
    os._exit(FAILED)  # a worker that hangs handles no signal


if __name__ == "__main__":
    threading.Thread(target=_watch, daemon=True).start()
    work(*sys.argv[1:])
