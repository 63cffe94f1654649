"""The jobs of one command: what each came to, and what the command says and returns in the end.

This module imports no torch: other processes unpickle what is in it before they choose a device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from kvbench.cli.compose import Compositions
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
    text_of,
    traceback_of,
)
from kvbench.run.termination import asks_to_stop

if TYPE_CHECKING:
    from kvbench.run.runner import JobResult


def explanation_of(error: BaseException) -> tuple[str, int] | None:
    """One line and an exit status for an error that names a thing, its value and what is allowed:
    2 for usage, 1 for the disk, the device or another process. None: the error is a bug."""
    if isinstance(error, InstantiationException):
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            return None
        return " ".join(text_of(error.__cause__ or error).split()), USAGE
    if isinstance(error, OmegaConfBaseException):  # an interpolation that leads nowhere
        return " ".join(str(error).split()), USAGE
    if isinstance(error, UserError):
        return str(error), error.status
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return disk_line(error), FAILED
    return None


def report_error(error: BaseException) -> tuple[str, int]:
    """Say on stderr what is wrong, in one line, before it the traceback if it is a bug; the line and the
    exit status."""
    known = explanation_of(error)
    if known is None:
        print(traceback_of(error), file=sys.stderr, end="", flush=True)
        known = one_line(error), FAILED
    complain(known[0])
    return known


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

    overrides: tuple[str, ...] = ()
    folder: str | None = None
    records: int = 0
    failed: int = 0
    written: int = 0
    error: str | None = None
    status: int = 0
    runs: tuple[str, ...] = ()

    def __float__(self) -> float:
        """What sweepers of Hydra make better or worse: `kvbench.report.objective.objective_of`'s score;
        NaN where the job came to nothing."""
        from kvbench.report.objective import objective_of

        return objective_of(self.runs)["score"]


class Jobs:
    """Runs the jobs of a command, here or, pickled, in other processes, and keeps what they came to.

    Args:
        argv: what the user typed; Hydra is given more, and other processes are given nothing like it.
        sweep: whether a job that fails must leave the others alone.
        outcomes: a list that is to hold what the jobs came to.

    Attributes:
        elsewhere: whether a launcher ran them in other processes and told what they came to.
        compositions: what composing one config leaves for the next.
    """

    def __init__(
        self, argv: Sequence[str], *, sweep: bool, outcomes: list[JobOutcome] | None = None
    ) -> None:
        self.argv = list(argv)
        self.sweep = sweep
        self.elsewhere = False
        self.outcomes = [] if outcomes is None else outcomes
        self.compositions = Compositions()
        self._parts: Any = None

    def __call__(self, config: DictConfig) -> JobOutcome:
        """Run one job. An error that can be explained is one line; another is a bug, and a traceback
        before the line. Neither stops the other jobs."""
        sys.argv = self.argv  # where the manifest looks for the command
        # as typed: a ${...} in them has another meaning, or none, where Hydra keeps them
        typed: Any = OmegaConf.to_container(HydraConfig.get().overrides, resolve=False)
        outcome = self._run(config, tuple(typed["task"]))
        self.outcomes.append(outcome)
        return outcome

    def check_briefly(self, config: DictConfig, number: int, name: str) -> None:
        """Check one of many jobs of a dry run, and say in a line what it is."""
        from kvbench.cli.build import SharedParts, check_briefly

        self._parts = self._parts or SharedParts()
        self.outcomes.append(
            self._run(config, (name,), lambda job: check_briefly(job, self._parts, number, name))
        )

    def _run(
        self,
        config: DictConfig,
        overrides: tuple[str, ...],
        run: Callable[[DictConfig], tuple[Path, JobResult] | None] | None = None,
    ) -> JobOutcome:
        from kvbench.cli.build import run_config

        try:
            done = (run or run_config)(config)
        except BaseException as error:
            if asks_to_stop(error) or isinstance(error, SystemExit):
                raise
            line, status = report_error(error)
            return JobOutcome(overrides, error=presentable(line), status=status)
        if done is None:  # a dry run
            return JobOutcome(overrides)
        folder, result = done
        return JobOutcome(
            overrides,
            str(folder),
            result.records,
            result.failed,
            result.written,
            status=FAILED if result.failed else 0,
            runs=tuple(map(str, result.folders.values())),
        )

    @property
    def folders(self) -> list[str]:
        """The experiments that have new records or had them already."""
        return list(dict.fromkeys(o.folder for o in self.outcomes if o.folder is not None))

    @property
    def status(self) -> int:
        """The command's exit status: 0, 2 if all that is wrong is usage, else 1."""
        wrong = {outcome.status for outcome in self.outcomes} - {0}
        return 0 if not wrong else USAGE if wrong == {USAGE} else FAILED

    def print_plan(self, launcher: str, shards: int) -> None:
        """One line at the end of a dry run of a sweep."""
        count = len(self.outcomes)
        each = f", each in {shards} shards: {count * shards} jobs" if shards > 1 else ""
        print(f"{count} job{'s' * (count > 1)}{each}; launcher={launcher}")

    def print_summary(self, console: Console | None = None) -> None:
        """One line about all jobs, and one for each that failed: what it was, what is wrong."""
        out = console or Console(width=None if sys.stdout.isatty() else 140)
        wrong = sum(outcome.status != 0 for outcome in self.outcomes)
        head = f"{len(self.outcomes)} jobs, " + (f"{wrong} of them failed" if wrong else "all well")
        records, new = (
            sum(getattr(o, name) for o in self.outcomes) for name in ("records", "written")
        )
        out.print(f"\n{head}; {records} records, {new} of them new", highlight=False)
        called = names([outcome.overrides for outcome in self.outcomes])
        for name, outcome in zip(called, self.outcomes, strict=True):
            if outcome.status or outcome.error is not None:
                what = outcome.error or f"{outcome.failed} of {outcome.records} examples failed"
                out.print(f"  {escape(printable(name))}: {escape(what)}", highlight=False)


def names(jobs: Sequence[Sequence[str]]) -> list[str]:
    """What sets each job apart from the others: of its overrides those that not all have."""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    own = (" ".join(text for text in overrides if text not in common) for overrides in jobs)
    return [redact(name) or f"job {number}" for number, name in enumerate(own, 1)]
