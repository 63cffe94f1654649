"""The command line: Hydra composes model x methods x task; errors are one line and an exit status.

Exit status: 0 all well, 1 examples failed (their records say why), 2 wrong usage, 130 interrupted,
143 terminated after the example in progress.
This module imports no torch, so that --help, list, show and usage errors come at once.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import NoReturn

from hydra import compose, version
from hydra._internal.utils import _run_hydra as run_hydra
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench import __version__
from kvbench.cli.aliases import expand_aliases
from kvbench.cli.catalogue import config_dir
from kvbench.cli.check import Checked, check_command, composer
from kvbench.cli.compose import job_config
from kvbench.cli.info import SHORT_HELP, announce, list_kind, show_config
from kvbench.cli.jobs import FAILED, JobOutcome, Jobs, report_error
from kvbench.cli.reproduce import reproduce
from kvbench.errors import UserError, complain, nearest, redact
from kvbench.run.progress import with_progress
from kvbench.run.termination import TERMINATED, Terminated, Termination

INTERRUPTED = 130
GOES_ON = "what is done is on disk, the same command goes on from there"


def main(argv: Sequence[str] | None = None, outcomes: list[JobOutcome] | None = None) -> None:
    """Entry point of ``kvbench`` and ``python -m kvbench``.

    Args:
        outcomes: gets what the jobs came to.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = arguments[:1], arguments[1:]
    try:
        with Termination():
            if command == ["list"]:
                status = list_kind(rest)
            elif command == ["released"]:
                from kvbench.cli.released import pair_released

                status = pair_released(rest)
            elif command == ["show"]:
                status = show_config(rest)
            elif command == ["reproduce"]:
                status = reproduce(rest, _run)
            else:
                status = _run(arguments, outcomes)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another ends at once, untraced
        complain("interrupted; " + GOES_ON)
        status = INTERRUPTED
    except Terminated:
        complain("terminated; " + GOES_ON)
        status = TERMINATED
    except BrokenPipeError:  # kvbench list methods | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = FAILED
    except Exception as error:  # noqa: BLE001 - what is wrong is told, whatever it is
        _, status = report_error(error)
    sys.exit(status)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Hydra's options, with -v our own, and one line for what is wrong.

    Raises:
        UserError: unknown options, or some that do not go together.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        options = [o for action in parser._actions for o in action.option_strings]
        unknown = message.partition("unrecognized arguments: ")[2].split()
        hint = nearest(unknown[0], [*options, "--verbose"]) if unknown else ""
        raise UserError(f"{message}{hint}; allowed: key=value and the options of --help")

    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_intermixed_args(_own_options(arguments))
    _check_options(options)
    return options


_COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")
_SHELLS = ("bash", "fish", "zsh")


def _check_options(options: argparse.Namespace) -> None:
    """Refuse what Hydra's options cannot mean here.

    Raises:
        UserError: naming the option.
    """
    for name in ("config_path", "config_name", "experimental_rerun"):
        if getattr(options, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} would put another program's config in place of kvbench's; "
                "allowed: --config-dir with YAML files beside kvbench's own"
            )
    given = [f"--{name.replace('_', '-')}" for name in _COMMANDS if getattr(options, name)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} ask for different things; allowed: one of them")
    for name in ("resolve", "package"):
        if getattr(options, name) and options.cfg is None:
            raise UserError(f"--{name} is given without --cfg; allowed: together with --cfg")
    if options.config_dir is not None and not Path(options.config_dir).is_dir():
        raise UserError(
            f"--config-dir is {options.config_dir!r}; allowed: a folder with YAML files"
        )
    shells = [f"{verb}={shell}" for verb in ("install", "uninstall", "query") for shell in _SHELLS]
    if options.shell_completion and (
        len(options.overrides) != 1 or options.overrides[0] not in shells
    ):
        raise UserError(
            f"--shell-completion takes one of install=, uninstall=, query= and {', '.join(_SHELLS)}"
        )


def _own_options(arguments: Sequence[str]) -> list[str]:
    """-v and -vv as Hydra's overrides."""
    levels = {"-v": "kvbench", "--verbose": "kvbench", "-vv": "true"}
    others = [argument for argument in arguments if argument not in levels]
    verbose = [levels[argument] for argument in arguments if argument in levels]
    if len(verbose) > 1:
        verbose = ["true"]
    return [*others, *(f"hydra.verbose={level}" for level in verbose)]


def _run(arguments: Sequence[str], outcomes: list[JobOutcome] | None = None) -> int:
    """Everything but list and show: Hydra's own options, a job, or the jobs of a sweep."""
    if "--version" in arguments:
        print(f"kvbench {__version__}")
        return 0
    if not arguments:
        print(SHORT_HELP, end="")
        return 0
    options = _parsed(arguments)
    jobs = Jobs([sys.argv[0], *arguments], sweep=options.multirun, outcomes=outcomes)
    if options.hydra_help or options.shell_completion:
        return _run_hydra(options, jobs)
    if options.config_dir is not None:  # as an override, which is composed wherever a config is
        searched = Path(options.config_dir).resolve()
        options.overrides.append(f"hydra.searchpath=['file://{searched}']")
        options.config_dir = None
    options.overrides = expand_aliases(options.overrides)
    checked = check_command(options.overrides, sweep=options.multirun, kept=jobs.compositions)
    if options.help or options.cfg or options.info:
        _check_shown(checked.first, options)
        with _said_without_secrets():
            return _run_hydra(options, jobs)
    return _run_jobs(options, checked, jobs)


def _run_jobs(options: argparse.Namespace, checked: Checked, jobs: Jobs) -> int:
    """A job, or the jobs of a sweep."""
    config = checked.first
    split = _shards(checked, options.overrides)
    shards = split.count("/") if split else 1
    announce(checked, shards)
    jobs.sweep = bool(options.multirun or split or _is_sweep(config))
    with ExitStack() as stack:
        if jobs.sweep:
            _check_jobs(checked)
            options.overrides += _sweep_folder(config, options.overrides)
        if config.dry_run or (jobs.sweep and _runs_here(config)):
            # Hydra leaves a file in the folder of a sweep
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            options.overrides.append(f"hydra.sweep.dir={folder}")
        if split and not config.dry_run:
            options.overrides.append(split)
            options.multirun, options.run = True, False
        status = _run_hydra(options, jobs)
    if jobs.sweep and jobs.outcomes and config.dry_run:
        jobs.print_plan(config.launcher.name, shards)
    return status


@contextmanager
def _said_without_secrets() -> Iterator[None]:
    """What Hydra prints of a config goes out without the tokens and keys that are in it, and its help
    without the YAML files that only others of their group use."""
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            yield
    finally:
        print(redact(said.getvalue()).replace(": _base, ", ": "), end="")


def _check_shown(config: DictConfig, options: argparse.Namespace) -> None:
    """Refuse what ``--cfg`` cannot show.

    Raises:
        UserError: naming the package, or the interpolation that leads nowhere.
    """
    if options.cfg is None:
        return
    hydras = {"all": (True, False), "hydra": (True,), "job": (False,)}[options.cfg]
    shown = [key for key in map(str, config) if (key == "hydra") in hydras]
    package = options.package
    if options.resolve:
        OmegaConf.to_container(config, resolve=True)
    part = OmegaConf.masked_copy(config, shown)
    if package not in (None, "_global_") and OmegaConf.select(part, package) is None:
        raise UserError(
            f"--package is {package!r}{nearest(package, shown)}; allowed: _global_, "
            f"{', '.join(shown)}, or a key in one of these"
        )


def _run_hydra(options: argparse.Namespace, jobs: Jobs) -> int:
    """Let Hydra do what the options ask for; say what the jobs came to, rebuild the pages."""
    version.setbase("1.3")
    stopped = 0
    try:
        run_hydra(options, get_args_parser(), jobs, str(config_dir().resolve()), "config")
    except (KeyboardInterrupt, Terminated):  # nobody then wants to wait for figures
        raise
    except (HydraException, OmegaConfBaseException) as error:  # before any job
        raise UserError(" ".join(str(error).split())) from error
    except SystemExit as stop:  # Hydra's or a launcher's, after a message
        stopped = stop.code if isinstance(stop.code, int) else FAILED
    if jobs.folders or jobs.status:
        from kvbench.cli.build import finish, print_scores

        several = len(jobs.outcomes) > 1
        for folder in jobs.folders if several or jobs.elsewhere else []:
            print_scores(Path(folder), every=jobs.elsewhere)
        if several:
            jobs.print_summary()
        for folder in jobs.folders:
            finish(Path(folder))
    return stopped or jobs.status


def _runs_here(config: DictConfig) -> bool:
    """Whether the jobs of a sweep run in this process, one after another."""
    return str(config.hydra.launcher._target_).endswith("BasicLauncher")


def _is_sweep(config: DictConfig) -> bool:
    """Whether the config itself asks for a sweep, as experiments and launchers do."""
    return str(config.hydra.mode).endswith("MULTIRUN")


def _shards(checked: Checked, overrides: Sequence[str]) -> str | None:
    """The override that splits every job, None where none is asked for.

    Raises:
        UserError: several numbers of shards, or one shard and their number.
    """
    if len(checked.shards) > 1:
        values = ", ".join(map(str, checked.shards))
        raise UserError(f"shards has several values ({values}); allowed: one")
    (count,) = checked.shards
    one = any(text.partition("=")[0] == "shard" for text in overrides)
    if count is not None and one:
        raise UserError(f"shards is {count} and shard is given, too; allowed: one of the two")
    if count is None and not one and checked.first.launcher.name == "gpus":
        from kvbench.cli.launch.devices import devices_of

        count = len(devices_of(checked.first))
    if count in (None, 1):
        return None
    return "shard=" + ",".join(f"{index}/{count}" for index in range(1, count + 1))


def _sweep_folder(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """The override for where Hydra and the launchers write scripts and logs, if ``~`` is in it: Hydra
    would make a folder of that name.

    Raises:
        OSError: a link below the results folder would place it somewhere else.
    """
    from kvbench.cli.build import results_folder
    from kvbench.records.durable import check_inside

    if config.dry_run or _runs_here(config):
        return []
    root = results_folder(config.results_dir)
    folder = Path(config.hydra.sweep.dir).expanduser()
    if folder.is_relative_to(root):
        check_inside(folder, root)
    if folder == Path(config.hydra.sweep.dir) or any("hydra.sweep.dir=" in o for o in overrides):
        return []
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.sweep.dir='{quoted}'"]


def _check_jobs(checked: Checked) -> None:
    """Make the job of every value of a sweep, so that a wrong one is told before the first runs.

    The jobs of a cluster run on its devices, not on this machine's.
    """
    from kvbench.cli.build import SharedParts, build_job

    made = SharedParts()
    with composer(checked.kept):
        for sample in with_progress(checked.samples, "jobs checked"):
            job = job_config(compose("config", overrides=sample, return_hydra_config=True))
            if job.launcher.name == "slurm":
                job.device = "cpu"
            build_job(job, made)
