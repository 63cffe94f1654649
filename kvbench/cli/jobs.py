"""The jobs of one command: each checked before the first runs, what each came to, and what the command
says and returns in the end.

This module imports no torch: other processes unpickle what is in it before they choose a device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper as HydraSweeper
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench import __version__
from kvbench.cli.config import Settings, explain, explaining
from kvbench.errors import (
    FAILED,
    USAGE,
    UserError,
    complain,
    disk_line,
    one_line,
    presentable,
    printable,
    redact,
    traceback_of,
)
from kvbench.run.termination import asks_to_stop

WHOLE = 10
"""Jobs of a dry run up to which each is told in full; of more, each is a line."""


def report_error(error: BaseException) -> tuple[str, int]:
    """Say on stderr what is wrong: one line, before it the traceback if it is a bug.

    Returns:
        The line and the exit status: 2 for usage, 1 for the disk, the device, another process, a bug.
    """
    if isinstance(error, UserError):
        line, status = str(error), error.status
    elif isinstance(error, OmegaConfBaseException):  # an interpolation that leads nowhere
        line, status = explain(error), USAGE
    elif isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        line, status = disk_line(error), FAILED
    else:
        print(traceback_of(error), file=sys.stderr, end="", flush=True)
        line, status = one_line(error), FAILED
    complain(line)
    return presentable(line), status


@dataclass(frozen=True)
class JobOutcome:
    """What one job came to.

    Attributes:
        overrides: what the job was asked for.
        folder: the experiment's folder, None where nothing ran.
        records, failed, written: records of this job there are, those of them whose status is not
            ok, and those written now.
        error: one line: why the job did not get to its end.
        status: the exit status it would have alone.
        runs: the run folders of its methods.
    """

    overrides: Sequence[str] = ()
    folder: str | None = None
    records: int = 0
    failed: int = 0
    written: int = 0
    error: str | None = None
    status: int = 0
    runs: Sequence[str] = ()

    def __float__(self) -> float:
        """The score that Hydra's sweepers optimise, see `kvbench.report.objective`; NaN without one."""
        from kvbench.report.objective import objective_of

        return objective_of(self.runs)["score"]


class Jobs:
    """Runs the jobs of a command, here or, pickled, in other processes, and keeps what they came to.

    Args:
        argv: what the user typed, which manifests hold.

    Attributes:
        elsewhere: whether a launcher ran them in other processes.
    """

    def __init__(self, argv: Sequence[str], outcomes: list[JobOutcome] | None = None) -> None:
        self.argv = list(argv)
        self.elsewhere = False
        self.outcomes = [] if outcomes is None else outcomes
        self._examples: dict[str, Any] = {}

    def __call__(self, config: DictConfig) -> JobOutcome:
        """Run one job. A failure is a line (after a traceback if it is a bug) and an outcome, so that it
        leaves other jobs alone."""
        from kvbench.cli.build import run_config

        sys.argv = self.argv  # where the manifest looks for the command
        # as typed: a ${...} in them has another meaning, or none, where Hydra keeps them
        typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        try:
            folder, result = run_config(config)
        except BaseException as error:
            if asks_to_stop(error) or isinstance(error, SystemExit):
                raise
            line, status = report_error(error)
            outcome = JobOutcome(tuple(typed), error=line, status=status)
        else:
            outcome = JobOutcome(
                tuple(typed),
                str(folder),
                result.records,
                result.failed,
                result.written,
                status=FAILED if result.failed else 0,
                runs=tuple(map(str, result.folders.values())),
            )
        self.outcomes.append(outcome)
        return outcome

    def check(self, config: DictConfig, name: str = "") -> None:
        """Make a job without running it; in a dry run print what it would do, in one line if it has a name.

        Raises:
            UserError: what the job would be refused for.
        """
        from kvbench.cli.build import build_job

        job = build_job(config, self._examples)
        if config.dry_run:
            from kvbench.run.preview import print_dry_run

            print_dry_run(job, name=name)

    @property
    def folders(self) -> list[str]:
        """The experiments that have new records or had them already."""
        return list(dict.fromkeys(o.folder for o in self.outcomes if o.folder is not None))

    @property
    def status(self) -> int:
        """The command's exit status: 0, 2 if all that is wrong is usage, else 1."""
        wrong = {outcome.status for outcome in self.outcomes} - {0}
        return 0 if not wrong else USAGE if wrong == {USAGE} else FAILED

    def print_summary(self) -> None:
        """One line about all jobs, and one for each that failed: what it was, what is wrong."""
        wrong = sum(outcome.status != 0 for outcome in self.outcomes)
        head = f"{len(self.outcomes)} jobs, " + (f"{wrong} of them failed" if wrong else "all well")
        records, new = (
            sum(getattr(o, name) for o in self.outcomes) for name in ("records", "written")
        )
        print(f"\n{head}; {records} records, {new} of them new")
        called = names([outcome.overrides for outcome in self.outcomes])
        for name, outcome in zip(called, self.outcomes, strict=True):
            if outcome.status or outcome.error is not None:
                what = outcome.error or f"{outcome.failed} of {outcome.records} examples failed"
                print(f"  {printable(name)}: {what}")


def names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """What sets each job apart from the others: of its overrides those that not all have."""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    own = (" ".join(text for text in overrides if text not in common) for overrides in jobs)
    return [redact(name) or f"job {number}" for number, name in enumerate(own, 1)]


def announce(settings: Settings, jobs: int = 1) -> None:
    """One line: what will be run and where it goes, and why nothing moves for some seconds."""
    methods = list(settings.methods)
    what = f"{settings.model.get('name')} x {settings.task_label}, "
    what += ", ".join(methods) if len(methods) < 4 else f"{len(methods)} methods"
    what = f"{jobs} jobs, the first: {what}" if jobs > 1 else what
    where = f"-> {settings.results_dir}/{settings.experiment_name}"
    where = "dry run" if settings.dry_run else where
    print(presentable(f"kvbench {__version__}: {what} {where}"), flush=True)
    print("loading torch and transformers ...", flush=True)


class Sweeper(HydraSweeper):
    """Checks every job of a sweep before the first runs; in a dry run tells each as it is planned.

    Args:
        params: ``hydra.sweeper.params``, the sweep that an experiment brings.
    """

    def __init__(self, max_batch_size: int | None = None, params: Any = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """As `hydra.plugins.sweeper.Sweeper`."""
        self.jobs: Jobs = task_function
        self.loader, self.config = hydra_context.config_loader, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run the jobs of these overrides, each split into its shards.

        Raises:
            UserError: the first job that is wrong.
        """
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # Hydra loads it anew

        loader = self.loader
        with explaining():
            parser = OverridesParser.create(config_loader=loader)
            parsed = parser.parse_overrides(
                [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
            )
            (jobs,) = BasicSweeper.split_arguments(parsed, None)
        shards: set[int] = set()
        for number, (overrides, name) in enumerate(zip(jobs, names(jobs), strict=True), 1):
            with explaining():
                config = loader.load_sweep_config(self.config, list(overrides))
                config.hydra.job.num = number - 1
            HydraConfig.instance().set_config(config)
            settings = Settings.of(config)
            shards.add(self._shards(settings))
            if len(shards) > 1:
                raise UserError(f"shards has several values ({shards}); allowed: one")
            if number == 1:
                announce(settings, len(jobs) * max(shards))
            self.jobs.check(config, f"job {number}: {name}" if len(jobs) > WHOLE else "")
        (count,) = shards
        if count > 1:
            parts = [f"shard={index}/{count}" for index in range(1, count + 1)]
            jobs = [[*overrides, part] for overrides in jobs for part in parts]
        if self.config.dry_run:
            each = f", each in {count} shards" if count > 1 else ""
            print(f"{len(jobs)} jobs{each}; launcher={self.config.launcher.name}")
            return []
        return self.launcher.launch(jobs, initial_job_idx=0)

    def _shards(self, settings: Settings) -> int:
        """Into how many jobs each is split: with launcher=gpus as many as there are workers."""
        if settings.shards is not None and settings.shard is not None:
            raise UserError(
                f"shards is {settings.shards} and shard is given, too; allowed: one of the two"
            )
        if settings.shard is not None:
            return 1
        if settings.shards is None and settings.launcher.get("name") == "gpus":
            from kvbench.cli.launchers import devices_of

            return len(devices_of(settings.launcher, settings.device))
        return settings.shards or 1
