"""``kvbench reproduce <experiment> [key=value ...]``: a paper's table or figure, by one command.

Where it takes several runs, they run one after another, on one page. What a script of scripts/papers
makes is made by a process of its own. ``limit=`` is of every dataset where there are several; with a
model that comes with the package the rest is made small, too. ``all`` runs every experiment of the
papers and writes a page that links them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import Template

from kvbench.cli.catalogue import catalogue
from kvbench.cli.jobs import report_error
from kvbench.cli.papers import (
    PaperItem,
    experiment_called,
    folder_name,
    limit_key,
    paper_items,
    script_path,
)
from kvbench.errors import UserError, nearest

ALL = "all"
SMALL_MODELS = ("recall_mini", "tiny_random")
"""Models of conf/model that come with the package."""


def reproduce(arguments: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run an experiment, or all of them.

    Args:
        arguments: its name, then overrides.
        run: runs one command line and returns its exit status.

    Returns:
        The largest exit status; of ``all``, every experiment is tried.

    Raises:
        UserError: no such experiment, or a folder that it reads was not named.
    """

    def started(line: Sequence[str]) -> int:
        return run_script(line) if line[0].startswith("script=") else run(line)

    name, *overrides = arguments or [""]
    if name != ALL:
        return max(map(started, command_lines(name, overrides)))
    items = [item for item in paper_items().values() if item.status not in _NOT_RUN]
    within = {line for item in items for line in item.runs}  # those that others bring with them
    made = {i.experiment: i.name for i in reversed(items) if f"experiment={i.name}" not in within}
    statuses: list[int] = []
    for name in reversed(made.values()):
        print(f"\n{name}", flush=True)
        try:
            statuses += map(started, command_lines(name, overrides))
        except Exception as error:  # noqa: BLE001 - the others are tried all the same
            statuses.append(report_error(error)[1])
    _index(overrides, list(reversed(made)))
    return max(statuses)


def run_script(line: Sequence[str]) -> int:
    """Run a script of scripts/papers as a process of its own; its exit status."""
    path = script_path(line[0].removeprefix("script="))
    return subprocess.run([sys.executable, path, *line[1:]], check=False).returncode


_OF_JOBS = (
    "batch_size",
    "decode",
    "example_timeout",
    "launcher",
    "logger",
    "retry_failed",
    "shards",
)
_NOT_RUN = ("no data", "missing")


def command_lines(name: str, overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of every run that an experiment takes, ``experiment=`` first; or a script's
    arguments, ``script=`` first.

    Raises:
        UserError: see `reproduce`.
    """
    experiment = experiment_called(name)
    known = catalogue("experiments")
    items = paper_items()
    script = items[experiment].script if experiment in items else ""
    if experiment not in known and not script:
        item = items.get(experiment)
        if item is not None:
            raise UserError(f"{name} has no experiment: {item.no_data or item.status}")
        hint = nearest(name, [*known, *items])
        raise UserError(f"unknown experiment {name!r}{hint}; allowed: {', '.join([*known, ALL])}")
    item = (
        items.get(experiment if script else name)
        or items.get(experiment)
        or PaperItem("", experiment, "", "")
    )
    given = dict(text.partition("=")[::2] for text in overrides)
    small = shlex.split(item.small if given.get("model") in SMALL_MODELS else "")
    if script:  # which knows nothing of jobs
        overrides = [text for text in overrides if re.split(r"[.=]", text)[0] not in _OF_JOBS]
    key = "limit" if script else limit_key(experiment)
    own = [f"{key}={text[6:]}" if text.startswith("limit=") else text for text in overrides]
    if any(word.startswith("model=") for word in small):  # another small model, which it needs
        own = [text for text in own if not text.startswith("model=")]
    first = [f"script={script}", f"name={experiment}"] if script else [f"experiment={name}"]
    for number, line in enumerate(item.runs):
        words = shlex.split(line)
        if line.startswith("experiment="):
            yield from command_lines(line.partition("=")[2], overrides)
            continue
        if number and "model" in given and any(word.startswith("model=") for word in words):
            continue
        if not small:
            words = [_expanded(word, item) for word in words]
        settings = {word.partition("=")[0]: word for word in (*words, *small)}
        asked = {word.partition("=")[0] for word in own}
        rest = [word for key, word in settings.items() if key not in asked]
        yield [*first, *rest, *own]


def _expanded(word: str, item: PaperItem) -> str:
    """A word of a run with the folders that the environment names.

    Raises:
        UserError: one is not named.
    """
    try:
        return Template(word).substitute(os.environ)
    except KeyError as error:
        raise UserError(
            f"{error.args[0]} is not set; {item.name} needs {item.needs}: allowed:"
            f" {error.args[0]}=<folder> in the environment or of make"
        ) from error


def _index(overrides: Sequence[str], experiments: Sequence[str]) -> None:
    """The page that links those that were run."""
    from kvbench.report.render.landing import write_landing

    given = dict(text.partition("=")[::2] for text in overrides)
    place = Path(given.get("results_dir", "runs")).expanduser()
    folders = dict.fromkeys(place / folder_name(experiment) for experiment in experiments)
    print(f"page: {write_landing(list(folders))}")
