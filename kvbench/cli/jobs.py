"""The jobs of one command: each is checked before the first runs, and one that fails leaves the others
alone. With ``launcher=gpus`` each runs in a worker, ``python -m kvbench.cli.jobs``, one per GPU.

Hydra imports this module at every start, and workers before they choose a device: no torch here.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, filter_overrides
from hydra.errors import HydraException
from hydra.plugins import launcher, sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench import errors
from kvbench.cli.config import Settings, explain, explaining, hydra_of_conf
from kvbench.cli.construct import methods_of
from kvbench.errors import FAILED, USAGE, UserError, complain, presentable
from kvbench.errors.options import Count, fits, refusal
from kvbench.records.durable import make_folder, replace
from kvbench.run.termination import asks_to_stop, end_if_asked, terminable


def report_error(error: BaseException) -> tuple[str, int]:
    """Say on stderr what is wrong: one line, before it the traceback if it is a bug.

    Returns:
        The line and the exit status: 2 for usage, 1 for the disk, the device, a process, a bug.
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
    """What one job came to.

    Attributes:
        overrides: what the job was asked for. runs: the run folders of its methods.
        said: how many records there are and how many failed, or why it did not get to its end.
        status: the exit status it would have alone.
    """

    overrides: Sequence[str] = ()
    runs: Sequence[str] = ()
    said: str = ""
    status: int = 0


class Jobs:
    """Runs the jobs of a command in this process; keeps what they came to.

    Args:
        argv: what the user typed, which manifests hold.

    Attributes:
        names: of a sweep, what sets each job apart from the others; the sweeper fills it. Of several
            jobs each is announced in one line, and prints no tables: the command prints those of all.
        outcomes: of the jobs that have ended.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)
        self.names: list[str] = []
        self.outcomes: list[JobOutcome] = []
        self._shared: dict[str, Any] = {}  # model, tokenizer, examples

    def __call__(self, config: DictConfig) -> None:
        """Run one job; a failure is a line (after a traceback if it is a bug) and an outcome."""
        sys.argv = self.argv  # where the manifest looks for the command
        # as typed: a ${...} in them has another meaning, or none, where Hydra keeps them
        typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        several = len(self.names) > 1
        if several:
            number = len(self.outcomes)
            name = self.names[number]
            print(presentable(f"job {number + 1} of {len(self.names)}: {name}"), flush=True)
        end_if_asked()  # of the job before this one
        try:
            methods_of(Settings.of(config).methods)  # before the libraries of models are imported
            from kvbench.cli.build import run_config

            done = run_config(config, self._shared, print_tables=not several)
            runs = tuple(map(str, done.folders.values()))
            said = f"{done.records} records, {done.failed} of them failed"
            outcome = JobOutcome(typed, runs, said, FAILED if done.failed else 0)
        except BaseException as error:
            if asks_to_stop(error) or isinstance(error, SystemExit):
                raise
            outcome = JobOutcome(typed, (), *report_error(error))
        self.outcomes.append(outcome)

    def check(self, config: DictConfig, name: str = "") -> None:
        """Make a job without running it; in a dry run print what it would do, in one line if it has a
        name. Raises a UserError for what the job would be refused for."""
        methods_of(Settings.of(config).methods)  # before the libraries of models are imported
        from kvbench.cli.build import build_job, settings_checked
        from kvbench.run.preview import print_dry_run

        job = build_job(config, self._shared)
        if config.dry_run:
            print(presentable(settings_checked(job)), flush=True)
            print_dry_run(job, name=name)

    @property
    def folders(self) -> list[Path]:
        """The experiments that have new records or had them already."""
        return list(dict.fromkeys(Path(run).parents[2] for o in self.outcomes for run in o.runs))

    @property
    def status(self) -> int:
        """The command's exit status: 0, 2 if all that is wrong is usage, else 1."""
        return min((o.status for o in self.outcomes if o.status), default=0)

    def print_summary(self) -> None:
        """One line about all jobs, and one for each that failed."""
        count = sum(outcome.status != 0 for outcome in self.outcomes)
        head = f"{count} of them failed" if count else "all well"
        print(f"\n{len(self.outcomes)} jobs, {head}")
        called = names([outcome.overrides for outcome in self.outcomes])
        for name, outcome in zip(called, self.outcomes, strict=True):
            if outcome.status:
                print(errors.presentable(f"  {name}: {outcome.said}"))


def names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """What sets each job apart from the others: of its overrides those that not all have."""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    own = (" ".join(text for text in overrides if text not in common) for overrides in jobs)
    return [errors.redact(name) or f"job {number}" for number, name in enumerate(own, 1)]


class Sweeper(sweeper.Sweeper):
    """Checks every job of a sweep before the first runs; in a dry run tells each as it is planned.

    Args:
        params: ``hydra.sweeper.params``, the sweep that an experiment brings.
    """

    def __init__(self, max_batch_size: int | None = None, params: Any = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Take the command's config and launcher. Hydra calls it before `sweep`."""
        self.jobs: Jobs = task_function
        self.loader, self.settings = hydra_context.config_loader, config
        with explaining():
            self.launcher: Any = Plugins.instance().instantiate_launcher(
                hydra_context=hydra_context, task_function=task_function, config=config
            )

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run the jobs of these overrides, each split into its shards, with launcher=gpus into as many
        as there are workers; refuses the first wrong one."""
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # Hydra loads it anew

        params = [f"{key}={value}" for key, value in self.params.items()]
        with explaining():
            parser = OverridesParser.create(config_loader=self.loader)
            parsed = parser.parse_overrides([*params, *arguments])
            (jobs,) = BasicSweeper.split_arguments(parsed, None)
        # What is wrong with any job is told before the first one is made, which imports torch.
        configs = []
        for overrides in jobs:
            with explaining():
                config = self.loader.load_sweep_config(self.settings, list(overrides))
            HydraConfig.instance().set_config(config)
            settings = Settings.of(config)
            settings.check_places()
            configs.append((config, settings))
        parts: list[list[str]] = []
        for number, (overrides, name) in enumerate(zip(jobs, names(jobs), strict=True), 1):
            config, settings = configs[number - 1]
            HydraConfig.instance().set_config(config)
            if config.launcher.name == "slurm":
                config.device = "cpu"  # jobs run on a node's devices
            if None not in (settings.shards, settings.shard):
                said = f"shards is {settings.shards} and shard is given, too"
                raise UserError(f"{said}; allowed: one of them")
            count = settings.shards or 1
            if settings.shards is settings.shard is None and config.launcher.name == "gpus":
                count = len(devices_of(settings.launcher, settings.device))
            if number == 1:
                print(settings.announcement(len(jobs) * count), flush=True)
            self.jobs.check(config, f"job {number}: {name}" if len(jobs) > 1 else "")
            of = (
                [[f"shard={index}/{count}"] for index in range(1, count + 1)] if count > 1 else [[]]
            )
            parts += [[*overrides, *shard] for shard in of]
        if self.settings.dry_run:
            print(f"{len(parts)} jobs; launcher={self.settings.launcher.name}")
            return []
        self.jobs.names = names(parts)
        return self.launcher.launch(parts, 0)


class Launcher(launcher.Launcher):
    """Runs the jobs of a sweep in other processes, each by `work`, and tells as they end.

    Attributes:
        folder: for scripts, outcomes and logs, made for this user alone.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """Take the command's jobs and config. Hydra's sweeper calls it before `launch`."""
        self.jobs, self.config = task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs of these overrides, and return what Hydra expects of each.

        Raises:
            StoreError: a folder below `results_dir` is a link.
        """
        self.folder = Path(self.config.hydra.sweep.dir).expanduser()
        make_folder(self.folder, Path(self.config.results_dir).expanduser())
        self.folder.chmod(0o700)
        self.names, self.outcomes = names(job_overrides), dict[int, JobOutcome]()
        self.overrides = [filter_overrides(list(each)) for each in job_overrides]
        own: Any = OmegaConf.to_container(self.config.hydra.overrides.hydra, resolve=False)
        orders = ([self.jobs.argv, [*own, *each, "hydra.mode=RUN"]] for each in job_overrides)
        self.run([(f"{self.folder}/{n}.json", json.dumps(o)) for n, o in enumerate(orders)])
        self.jobs.outcomes.extend(self.outcomes[number] for number in sorted(self.outcomes))
        return []

    @abstractmethod
    def run(self, orders: Sequence[tuple[str, str]]) -> None:
        """Have each order, `work`'s arguments, carried out; `ended` is called for every one."""

    def ended(self, number: int, how: str, log: Path) -> None:
        """Take the outcome of a job; if it left none, it ended as `how` says."""
        told = self.folder / f"{number}.json"
        outcome = JobOutcome(self.overrides[number], (), f"job {how}; log: {log}", FAILED)
        if told.exists():
            outcome = JobOutcome(**json.loads(told.read_text()))
        self.outcomes[number] = outcome
        complain(f"{len(self.outcomes)} done: {self.names[number]}: {outcome.said}")


def devices_of(launcher: Mapping[str, Any], device: str) -> list[str]:
    """The GPUs of each worker as CUDA_VISIBLE_DEVICES names them; empty: the CPU. More workers than
    GPUs share them in turn.

    Args:
        launcher: the config of ``launcher=gpus``, with `workers` and `gpus_per_worker`.
        device: the config's device; one that names a GPU is refused, as are too few GPUs.
    """
    from torch.cuda import device_count

    workers, each = launcher["workers"], launcher["gpus_per_worker"] or 1
    for name in ("workers", "gpus_per_worker"):
        if not fits(Count | None, launcher[name]):
            raise UserError(refusal(f"launcher.{name}", launcher[name], Count | None))
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device is {device!r}; allowed with launcher=gpus: auto, cuda, cpu")
    count = 0 if device == "cpu" else device_count()  # asks the driver, starts nothing on a GPU
    if count < each and (count or device == "cuda" or workers is None):
        raise UserError(
            f"launcher=gpus finds {count or 'no'} GPU, and gpus_per_worker is {each}; allowed: a "
            "machine with GPUs, or device=cpu and launcher.workers=N for N workers on its CPUs"
        )
    if not count:
        return [""] * workers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    gpus = [name.strip() for name in visible.split(",")]
    gpus = gpus if gpus[0].startswith("MIG-") else gpus[:count]  # of several MIG, torch counts one
    groups = [",".join(gpus[at : at + each]) for at in range(0, len(gpus) - each + 1, each)]
    return [groups[index % len(groups)] for index in range(workers or len(groups))]


class GpuLauncher(Launcher):
    """``launcher=gpus``: one worker per GPU; whichever is free takes the next job."""

    def run(self, orders: Sequence[tuple[str, str]]) -> None:
        """Carry out each order in a process group of its own: the command tells it of the terminal's
        Ctrl-C. A worker's standard input stays open for as long as the command lives, see `_watch`."""
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
                    how = f"{number} ended without a result (exit status {worker.returncode})"
                    self.ended(number, how, self.folder / f"{number}.log")


def work(outcome: str, order: str) -> None:
    """Run a job in this process and write its outcome.

    Args:
        outcome: the file to write. order: JSON of the command as typed and the job's overrides.
    """
    argv, overrides = json.loads(order)
    jobs = Jobs(argv)
    with terminable(), hydra_of_conf() as hydra:
        hydra.run("config", jobs, overrides)
    replace(Path(outcome), json.dumps(asdict(jobs.outcomes[0])).encode())


_end_process = os._exit  # which `kvbench.engine.guard` takes from a method's code


def _watch() -> None:
    """End a worker after its example when its standard input ends: the command is no more."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)  # to finish the example
    _end_process(FAILED)  # what hangs hears no signal


if __name__ == "__main__":
    threading.Thread(target=_watch, daemon=True).start()
    work(*sys.argv[1:])
