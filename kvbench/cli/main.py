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
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import NoReturn

import hydra
from hydra import compose
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench import __version__
from kvbench.cli.catalogue import config_dir
from kvbench.cli.check import (
    Checked,
    UsageError,
    check_command,
    composer,
    one_line_errors,
    refuse_if,
)
from kvbench.cli.compose import job_config
from kvbench.cli.info import list_kind, show_config
from kvbench.cli.jobs import FAILED, USAGE, JobOutcome, Jobs, explained
from kvbench.cli.meant import as_meant
from kvbench.cli.reproduce import reproduce
from kvbench.cli.start import SHORT_HELP, announce
from kvbench.errors import complain, nearest, redact, traceback_of
from kvbench.run.progress import counted
from kvbench.run.termination import TERMINATED, Terminated, Termination

INTERRUPTED = 130
GOES_ON = "what is done is on disk, the same command goes on from there"


def main(argv: Sequence[str] | None = None, outcomes: list[JobOutcome] | None = None) -> None:
    """Entry point of ``kvbench`` and ``python -m kvbench``.

    Args:
        outcomes: gets what the jobs came to.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["list"]:
            status = list_kind(arguments[1:])
        elif arguments[:1] == ["released"]:
            from kvbench.cli.released import pair_released

            with one_line_errors():
                status = pair_released(arguments[1:])
        elif arguments[:1] == ["show"]:
            status = show_config(arguments[1:])
        elif arguments[:1] == ["reproduce"]:
            with Termination():
                status = reproduce(arguments[1:], _run)
        else:
            with Termination():
                status = _run(arguments, outcomes)
    except UsageError as error:
        complain(str(error))
        status = USAGE
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
    except OSError as error:  # a full disk, say, where no job runs
        known = explained(error)
        complain(known[0] if known else str(error))
        status = FAILED
    except Exception as error:  # noqa: BLE001 - a bug: its traceback, but no secrets
        print(traceback_of(error), file=sys.stderr, end="", flush=True)
        status = FAILED
    sys.exit(status)


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Hydra's options, with -v and --version our own, and one line for what is wrong.

    Raises:
        UsageError: unknown options.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        options = [o for action in parser._actions for o in action.option_strings]
        unknown = message.partition("unrecognized arguments: ")[2].split()
        hint = nearest(unknown[0], [*options, "--verbose"]) if unknown else ""
        raise UsageError(f"{message}{hint}; allowed: key=value and the options of --help")

    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_intermixed_args(list(arguments))
    refuse_if(_wrong_options(options))
    return options


_COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")
_SHELLS = ("bash", "fish", "zsh")


def _wrong_options(options: argparse.Namespace) -> str | None:
    """What is wrong with Hydra's options; None if nothing."""
    for name in ("config_path", "config_name", "experimental_rerun"):
        if getattr(options, name) is not None:
            return (
                f"--{name.replace('_', '-')} would put another program's config in place of kvbench's; "
                "allowed: --config-dir with YAML files beside kvbench's own"
            )
    given = [name for name in _COMMANDS if getattr(options, name)]
    if len(given) > 1:
        wanted = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        return f"{wanted} ask for different things; allowed: one of them"
    for name, with_ in (("resolve", "--cfg"), ("package", "--cfg")):
        if getattr(options, name) and options.cfg is None:
            return f"--{name} is given without {with_}; allowed: together with {with_}"
    if options.config_dir is not None and not Path(options.config_dir).is_dir():
        return f"--config-dir is {options.config_dir!r}; allowed: a folder with YAML files"
    words = [text.partition("=") for text in options.overrides]
    if options.shell_completion and not (
        len(words) == 1
        and words[0][0] in ("install", "uninstall", "query")
        and words[0][2] in _SHELLS
    ):
        return (
            f"--shell-completion takes one of install=, uninstall=, query= and {', '.join(_SHELLS)}"
        )
    return None


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
    typed = [sys.argv[0], *arguments]
    arguments = _own_options(arguments)
    options = _arguments(arguments)
    if options.hydra_help:
        return _run_hydra(["--hydra-help"], Jobs(typed, sweep=False))
    if options.config_dir is not None:  # as an override, which is composed wherever a config is
        searched = Path(options.config_dir).resolve()
        options.overrides.append(f"hydra.searchpath=['file://{searched}']")
    options.overrides = as_meant(options.overrides)
    # Hydra wants the overrides in one piece.
    overrides = list(options.overrides)
    flags = _flags(options)
    jobs = Jobs(typed, sweep=options.multirun, outcomes=outcomes)
    asked = bool(options.help or options.cfg or options.info)
    with ExitStack() as stack:
        if not options.shell_completion:
            checked = check_command(
                options.overrides, sweep=options.multirun, kept=jobs.compositions
            )
            config = checked.first
            if options.cfg is not None:
                refuse_if(_cannot_show(config, options))
            if not asked:
                split = _shards(checked, options.overrides)
                with one_line_errors():  # an interpolation that leads nowhere
                    announce(checked, split.count("/") if split else 1)
                jobs.sweep = bool(options.multirun or split or _is_sweep(config))
                if jobs.sweep:
                    _check_jobs(checked)
                    overrides += _sweep_folder(config, options.overrides)
                if config.dry_run or (jobs.sweep and _runs_here(config)):
                    # Hydra leaves a file in the folder of a sweep
                    folder = stack.enter_context(tempfile.TemporaryDirectory())
                    overrides.append(f"hydra.sweep.dir={folder}")
                if split and not config.dry_run:
                    overrides.append(split)
                    flags += [] if options.multirun else ["--multirun"]
        with _said_without_secrets() if asked else nullcontext():
            status = _run_hydra([*overrides, *flags], jobs)
        if jobs.sweep and jobs.outcomes and config.dry_run:
            jobs.print_plan(config.launcher.name, split.count("/") if split else 1)
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


def _flags(options: argparse.Namespace) -> list[str]:
    """Hydra's options as it takes them."""
    named = {"--cfg": options.cfg, "--package": options.package, "--info": options.info}
    flags = [word for name, value in named.items() if value is not None for word in (name, value)]
    alone = ("help", "resolve", "run", "multirun", "shell_completion")
    return flags + [f"--{name.replace('_', '-')}" for name in alone if getattr(options, name)]


def _cannot_show(config: DictConfig, options: argparse.Namespace) -> str | None:
    """Why ``--cfg`` cannot show what is asked for; None if it can."""
    shown = [
        key
        for key in map(str, config)
        if options.cfg in ("all", "hydra" if key == "hydra" else "job")
    ]
    package = options.package
    try:
        if options.resolve:
            OmegaConf.to_container(config, resolve=True)
        part = OmegaConf.masked_copy(config, shown)
        found = package in (None, "_global_") or OmegaConf.select(part, package) is not None
    except OmegaConfBaseException as error:
        return " ".join(str(error).split())
    if found:
        return None
    return (
        f"--package is {package!r}{nearest(package, shown)}; allowed: _global_, {', '.join(shown)}, or "
        "a key in one of these"
    )


def _run_hydra(arguments: Sequence[str], jobs: Jobs) -> int:
    """Let Hydra run what the arguments ask for; say what the jobs came to, rebuild the pages."""
    sys.argv = [sys.argv[0], *arguments]
    decorate = hydra.main(
        version_base="1.3", config_path=str(config_dir().resolve()), config_name="config"
    )
    stopped = 0
    try:
        decorate(jobs)()
    except (KeyboardInterrupt, Terminated):  # nobody then wants to wait for figures
        raise
    except (HydraException, OmegaConfBaseException) as error:  # before any job
        raise UsageError(" ".join(str(error).split())) from error
    except SystemExit as stop:  # Hydra's or a launcher's, after a message
        stopped = stop.code if isinstance(stop.code, int) else FAILED
    if jobs.folders or jobs.status:
        from kvbench.cli.build import finish, print_scores

        with one_line_errors():
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
        UsageError: several numbers of shards, or one shard and their number.
    """
    if len(checked.shards) > 1:
        values = ", ".join(map(str, checked.shards))
        raise UsageError(f"shards has several values ({values}); allowed: one")
    (count,) = checked.shards
    one = any(text.partition("=")[0] == "shard" for text in overrides)
    if count is not None and one:
        raise UsageError(f"shards is {count} and shard is given, too; allowed: one of the two")
    if count is None and not one and checked.first.launcher.name == "gpus":
        from kvbench.cli.launch.devices import devices_of

        with one_line_errors():
            count = len(devices_of(checked.first))
    if count in (None, 1):
        return None
    return "shard=" + ",".join(f"{index}/{count}" for index in range(1, count + 1))


def _sweep_folder(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """The override for where Hydra and the launchers write scripts and logs, if ``~`` is in it: Hydra
    would make a folder of that name.

    Raises:
        SystemExit: a link below the results folder would place it somewhere else.
    """
    from kvbench.cli.build import results_folder
    from kvbench.records.durable import check_inside

    if config.dry_run or _runs_here(config):
        return []
    root = results_folder(config.results_dir)
    folder = Path(config.hydra.sweep.dir).expanduser()
    with one_line_errors():
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
    from kvbench.cli.build import Made, build_job

    made = Made()
    with composer(checked.kept), one_line_errors():
        for sample in counted(checked.samples, "jobs checked"):
            job = job_config(compose("config", overrides=sample, return_hydra_config=True))
            if job.launcher.name == "slurm":
                job.device = "cpu"
            build_job(job, made)
