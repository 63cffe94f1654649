"""The command line ``kvbench``: Hydra composes the config of model, methods and task, and jobs are run.

An error is one line on stderr. Exit status: 0 no failure, 1 examples failed (their records say why) or
something else failed while running, 2 a wrong command, 130 interrupted, 143 terminated after the example
in progress. This module imports no torch, so that --help, list, show and refusals come at once.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from inspect import cleandoc
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import NoReturn

import yaml
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from kvbench import __version__, wait_asleep
from kvbench.catalogue import KINDS, config_dir, files_of, sections_of
from kvbench.cli import hints
from kvbench.cli.config import (
    GROUPS,
    SEVERAL,
    Settings,
    expanded,
    explaining,
    hydra_of_conf,
    job_config,
    jobs_of,
    missing_files_shown,
    values_of,
)
from kvbench.cli.items import item_called, listed
from kvbench.cli.jobs import Jobs, report_error
from kvbench.cli.reproduce import reproduce
from kvbench.cli.results import print_scores, prune, score_by, write_page
from kvbench.errors import FAILED, UserError, check_known, complain, redact
from kvbench.records.store import safe_name
from kvbench.run.termination import TERMINATED, Terminated, terminable

ROWS = re.compile(r"(?i)\.(jsonl|json|csv|tsv|parquet)(\.gz)?$|[*?]")
"""A word that this finds names files, be they there or not, and no data set of the Hub."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``kvbench`` and ``python -m kvbench``."""
    wait_asleep()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with terminable():
            options = _parsed(words)
            command = COMMANDS.get(next(iter(options.overrides), ""))
            if command is None:
                status = run(words)
            elif options.help:
                print(cleandoc(command.__doc__ or ""))
                status = 0
            else:
                words.remove(options.overrides[0])
                status = command(words)
    except (KeyboardInterrupt, Terminated) as stop:
        status = TERMINATED if isinstance(stop, Terminated) else 130
        ended = "terminated" if status == TERMINATED else "interrupted"
        complain(f"{ended}; what is done is on disk, the same command goes on from there")
    except BrokenPipeError:  # kvbench list methods | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = FAILED
    except Exception as error:  # noqa: BLE001 - every error becomes a line and an exit status
        _, status = report_error(error)
    sys.exit(status)


def list_kind(arguments: Sequence[str]) -> int:
    """kvbench list methods|models|tasks|experiments|loggers|launchers

    A line for each: its name and what it is, below a line that says what they
    are where there are several sorts.
    """
    kind = " ".join(arguments).removesuffix("s") + "s"
    check_known(f"cannot list {arguments}", kind, KINDS, UserError)
    sections = listed(kind)
    width = max((len(name) for lines in sections.values() for name in lines), default=0)
    for title, lines in sections.items():
        if title:
            print(f"# {title}")
        for name, text in lines.items():
            print(f"{name:{width}}  {text}".rstrip())
    return 0


def show_config(arguments: Sequence[str]) -> int:
    """kvbench show [key=value ...], kvbench show <name>

    The config that these overrides compose to, resolved; of a sweep (-m, or an
    experiment's own) that of its first job, and above it the values of all. Of
    a paper's table or figure also how it differs from the paper; of one that no
    experiment makes, what is known of it.
    """
    name = arguments[0].removeprefix("experiment=") if len(arguments) == 1 else ""
    item = item_called(name)
    if item is not None and (item.script or item.no_data):
        facts = {"name": item.name} | {key: value for key, value in vars(item).items() if value}
        text = str(yaml.safe_dump(facts, sort_keys=False, width=120, allow_unicode=True))
        print(redact(text.rstrip()))
        return 0
    if item is not None:
        arguments = [f"experiment={name}"]
    options = _parsed(arguments)
    with hydra_of_conf() as hydra, missing_files_shown():
        config, jobs = jobs_of(hydra, _overrides_of(options), multirun=options.multirun)
        settings = Settings.of(job_config(hydra, config, jobs[0]) if jobs else config)
    settings.check_paper_table()
    if len(jobs) > 1:
        print(redact(f"# sweep of {len(jobs)} jobs, the first below: {_swept(jobs)}"))
    for line in settings.differs or ():
        print(redact(f"# differs from the paper: {line}"))
    print(redact(OmegaConf.to_yaml(vars(settings))), end="")
    return 0


def make_item(arguments: Sequence[str]) -> int:
    """kvbench reproduce <name>|all [key=value ...]

    Make a paper's table or figure with the paper's settings; all: every one.
    kvbench list experiments has the names. With model=recall_mini it runs small
    and offline, in a folder of its own. dry_run=true checks settings alone.
    """
    if not arguments:
        return list_kind(["experiments"])
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("-cd", "--config-dir")
    known, others = options.parse_known_args(arguments)
    return reproduce([*others, *_search_path(known)], run)


def run_own(arguments: Sequence[str]) -> int:
    """kvbench own <file, folder or Hub data set> [key=value ...]

    Methods on your own rows (JSON lines, CSV, parquet): task=jsonl on them.
    Context, question and answers are found by usual names of fields, and it is
    said which; others by 'task.fields={context: text, answers: gold}'. Results
    are named after the file or data set.

        kvbench own my.jsonl method=snapkv,h2o budget.rate=0.5,0.25
    """
    return run(own_task(arguments))


def own_task(arguments: Sequence[str]) -> list[str]:
    """The words of ``task=jsonl`` that those of ``kvbench own`` stand for."""
    words = _parsed(arguments).overrides
    named = [word for word in words if "=" not in word or Path(word).exists()]
    if len(named) != 1:
        raise UserError(
            f"kvbench own has {named or 'nothing'}; allowed: one file, folder or data set of the Hub"
        )
    (rows,) = named
    words = [word for word in arguments if word != rows]
    if Path(rows).exists() or ROWS.search(rows) or not re.fullmatch(r"[\w.-]+/[\w.-]+", rows):
        quoted = rows.replace("\\", "\\\\").replace("'", "\\'")
        source = f"task.files=['{quoted}']"
    else:
        source = f"task.dataset={rows}"
    label = safe_name(Path(rows).name.partition(".")[0].strip("*?[]") or "own")
    named_after = [] if any(word.startswith("task_label=") for word in words) else [label]
    return ["task=jsonl", source, *(f"task_label='{name}'" for name in named_after), *words]


def score_folder(arguments: Sequence[str]) -> int:
    """kvbench score <folder of an experiment> metric=<metric>

    Score the stored answers by another metric, without the model: a name of
    task=jsonl (kvbench show task=jsonl) or a function, my.module.function. The
    records stay; the scores go to <folder>/scores/<metric>.csv.
    """
    metric = values_of(arguments).get("metric")
    folders = [word for word in arguments if not word.startswith("metric=")]
    if len(folders) != 1 or not metric:
        raise UserError(
            f"kvbench score has {list(arguments) or 'nothing'}; allowed: an experiment's folder and "
            "metric=<metric>"
        )
    score_by(Path(folders[0]).expanduser(), metric)
    return 0


def prune_folder(arguments: Sequence[str]) -> int:
    """kvbench prune <folder of an experiment> [yes=true]

    List the runs whose records are of other code or weights than a later run of
    the same settings, and remove them: asked first, or with yes=true.
    """
    folders = [word for word in arguments if word != "yes=true"]
    if len(folders) != 1:
        raise UserError(
            f"kvbench prune has {folders or 'nothing'}; allowed: an experiment's folder"
        )
    prune(Path(folders[0]).expanduser(), sure="yes=true" in arguments)
    return 0


def _swept(jobs: Sequence[Sequence[str]]) -> str:
    """The overrides of a sweep that have several values, e.g. ``seed=0,1 task=a,b``."""
    keys = [word.partition("=")[0] for word in jobs[0]]
    values = [
        dict.fromkeys(w.partition("=")[2] for w in column) for column in zip(*jobs, strict=True)
    ]
    swept = zip(keys, values, strict=True)
    return " ".join(f"{key}={','.join(several)}" for key, several in swept if len(several) > 1)


def run(arguments: Sequence[str]) -> int:
    """Run a job, or the jobs of a sweep; print their results; return the exit status."""
    options = _parsed(arguments)
    if options.help or not arguments:
        _print_help(complete=options.help)
        return 0
    if options.shell_completion:  # the shell passes the words typed so far in the environment
        with hydra_of_conf() as hydra:
            hydra.shell_completion("config", options.overrides)
        return 0
    overrides = _overrides_of(options)
    if options.cfg or options.info or options.hydra_help:
        _print_hydra(options, overrides)
        return 0
    jobs = Jobs([sys.argv[0], *arguments])
    with hydra_of_conf() as hydra:
        jobs.run(hydra, overrides, multirun=options.multirun)
    written = [write_page(folder) for folder in jobs.runs]  # before a closed pipe ends the command
    for folder, runs in jobs.runs.items():
        print_scores(folder, runs)
    if len(jobs.outcomes) > 1 and (written or jobs.status):
        jobs.print_summary()
    for lines in written:
        print("\n".join(lines))
    return jobs.status


def _print_help(*, complete: bool) -> None:
    """Print the first part of conf/help.txt, or all of it with the names that each group has."""
    first, _, rest = (config_dir() / "help.txt").read_text("utf-8").partition("\n\n\n")
    print(first)
    if not complete:
        return
    lines = []
    for group in GROUPS:
        for number, (title, choices) in enumerate(sections_of(group).items()):
            sort = f" ({title.partition(':')[0]})" if number else ""
            line = f"  {group}{sort}: {', '.join(choices)}"
            lines.append(fill(line, 80, subsequent_indent="    "))
    print("\n" + rest.rstrip().format(groups="\n".join(lines)))


def _overrides_of(options: argparse.Namespace) -> list[str]:
    """The overrides for Hydra: `expanded`, and those that the options stand for. A sweep over tasks or
    models gets one experiment name, so that all of its jobs are on one page."""
    overrides = expanded(options.overrides)
    values = values_of(overrides)
    several = re.compile(r"[^\[{'\"(]*[,(]")  # a,b or range(2), no list or quoted text
    swept = {key for key in ("task", "model") if several.match(values.get(key, ""))}
    if swept and not {"experiment", "experiment_name"} & set(values):
        name = "'${folder:${model.name}}'" if "task" in swept else "'${task_label}'"
        overrides.append(f"experiment_name={'sweep' if len(swept) > 1 else name}")
    if options.verbose:
        overrides.append(f"hydra.verbose={'kvbench' if options.verbose == 1 else 'true'}")
    return [*overrides, *_search_path(options)]


def _search_path(options: argparse.Namespace) -> list[str]:
    if options.config_dir is None:
        return []
    folder = Path(options.config_dir)
    if not folder.is_dir():
        raise UserError(f"--config-dir is {options.config_dir!r}; allowed: a folder")
    for kind in KINDS:
        for name, ours in files_of(kind).items():
            theirs = folder / kind.removesuffix("s") / f"{name}.yaml"
            if theirs.is_file() and theirs.read_bytes() != ours.read_bytes():
                raise UserError(
                    f"{theirs} would not be read, since kvbench has a {name}; rename it"
                )
    return [f"hydra.searchpath=['file://{folder.resolve()}']"]


def _print_hydra(options: argparse.Namespace, overrides: list[str]) -> None:
    """Print what Hydra's own options ask for without a run: ``--cfg``, ``--info``, ``--hydra-help``."""
    with hydra_of_conf() as hydra, redirect_stdout(StringIO()) as output, explaining():
        if options.hydra_help:
            hydra.hydra_help("config", get_args_parser(), options)
        elif options.info:
            hydra.show_info(options.info, "config", overrides)
        else:
            hydra.show_cfg("config", overrides, options.cfg, options.package, options.resolve)
    print(redact(output.getvalue()), end="")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, and its words without a dash as `overrides`."""
    parser = argparse.ArgumentParser("kvbench", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-v", "--verbose", action="count", default=0)
    parser.add_argument("-cd", "--config-dir")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("-p", "--package")
    parser.add_argument("--resolve", action="store_true")
    topics = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    parser.add_argument("-i", "--info", nargs="?", const="all", choices=topics)
    parser.add_argument("-sc", "--shell-completion", action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("--version", action="version", version=f"kvbench {__version__}")
    parser.add_argument("-h", "--help", action="store_true")

    def refuse(message: str) -> NoReturn:
        meant = hints.of_option(message)
        raise UserError(f"{message}{meant}; allowed: key=value and the options of kvbench --help")

    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_intermixed_args(list(arguments))
    # Several tasks or models are a sweep with and without -m.
    values = values_of(options.overrides)
    options.multirun |= any(SEVERAL.fullmatch(values.get(key, "")) for key in ("task", "model"))
    return options


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "list": list_kind,
    "show": show_config,
    "own": run_own,
    "reproduce": make_item,
    "score": score_folder,
    "prune": prune_folder,
}
"""The commands beside `run`. Each gets the words after its name, and its docstring is its help."""
