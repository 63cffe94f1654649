"""``kvbench reproduce <name>|all [key=value ...]``: a paper's table or figure, by one command.

Where it takes several runs, they run one after another, on one page; a script of scripts/papers runs
in a process of its own. ``limit=`` is of every dataset where there are several; with a model that comes
with the package the rest is made small, too.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvbench.cli.catalogue import PaperItem, catalogue, config_dir, experiment_called, paper_items
from kvbench.cli.config import composed, hydra_of_conf, results_folder
from kvbench.cli.jobs import report_error
from kvbench.errors import UserError, nearest

Run = Callable[[Sequence[str]], int]
ALL = "all"
SMALL_MODELS = ("recall_mini", "tiny_random")
"""Models of conf/model that come with the package."""
_OF_JOBS = [
    "batch_size",
    "decode",
    "example_timeout",
    "launcher",
    "logger",
    "retry_failed",
    "shards",
]
"""Keys that mean nothing to a script."""


def reproduce(arguments: Sequence[str], run: Run) -> int:
    """Run what makes an item, or an experiment, or all items; of ``all``, every item is tried.

    Args:
        arguments: its name, then overrides.
        run: runs one command line and returns its exit status, of which the largest is returned.
    """
    name, *overrides = arguments or [""]
    if name != ALL:
        lines = command_lines(name, overrides)
        return max(run_script(line) if line[0][:7] == "script=" else run(line) for line in lines)
    from kvbench.report.page import write_index

    items = [item for item in paper_items().values() if item.status not in ("no data", "missing")]
    within = {line for item in items for line in item.runs}  # those that others bring with them
    made = {i.experiment: i.name for i in reversed(items) if f"experiment={i.name}" not in within}
    statuses, folders = [0], []
    for experiment, name in reversed(made.items()):
        print(f"\n{name}", flush=True)
        try:
            statuses.append(reproduce([name, *overrides], run))
        except Exception as error:  # noqa: BLE001 - the others are tried all the same
            statuses.append(report_error(error)[1])
        if not paper_items().get(experiment, PaperItem()).script:
            folders.append(_config_of(experiment).experiment_name)
    given = dict(text.partition("=")[::2] for text in overrides)
    place = results_folder(given.get("results_dir", "runs"))
    print(f"page: {write_index([place / name for name in dict.fromkeys(folders)])}")
    return max(statuses)


def run_script(line: Sequence[str]) -> int:
    """Run a script of scripts/papers; its exit status."""
    place = Path("scripts", "papers", f"{line[0].removeprefix('script=')}.py")
    file = config_dir().resolve().parent / place
    if not file.is_file():
        raise UserError(f"{place} is not installed; allowed: kvbench's repository, where it is")
    return subprocess.run([sys.executable, file, *line[1:]], check=False).returncode


def command_lines(name: str, overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of every run that an experiment takes, ``experiment=`` first; or a script's
    arguments, ``script=`` first. An unknown experiment and a folder that is not named are refused."""
    experiment = experiment_called(name)
    items, known = paper_items(), catalogue("experiments")
    script = items[experiment].script if experiment in items else ""
    item = items.get(experiment if script else name) or items.get(experiment) or PaperItem()
    if experiment not in known and not script:
        if name in items:
            raise UserError(f"{name} has no experiment: {item.no_data or item.status}")
        hint = nearest(name, [*known, *items])
        raise UserError(f"unknown experiment {name!r}{hint}; allowed: {', '.join([*known, ALL])}")
    own = list(overrides)
    given = dict(text.partition("=")[::2] for text in own)
    small = shlex.split(item.small if given.get("model") in SMALL_MODELS else "")
    if script:
        own = [text for text in own if re.split(r"[.=]", text)[0] not in _OF_JOBS]
    elif "limit" in given and "per_dataset" in _config_of(experiment).task:
        own = [t.replace("limit=", "task.per_dataset=") if t[:6] == "limit=" else t for t in own]
    if any(word.startswith("model=") for word in small):  # another small model, which it needs
        own = [text for text in own if not text.startswith("model=")]
    first = [f"script={script}", f"name={experiment}"] if script else [f"experiment={name}"]
    for number, line in enumerate(item.runs):
        if line.startswith("experiment="):
            yield from command_lines(line.partition("=")[2], overrides)
            continue
        words = [word if small else os.path.expandvars(word) for word in shlex.split(line)]
        for unset in re.findall(r"\$\{(\w+)\}", "" if small else " ".join(words)):
            raise UserError(
                f"{unset} is not set; {item.name} needs {item.needs}: allowed: {unset}=<folder> in "
                "the environment or of make"
            )
        if number and "model" in given and any(word.startswith("model=") for word in words):
            continue
        settings = {word.partition("=")[0]: word for word in (*words, *small)}
        asked = {word.partition("=")[0] for word in own}
        yield [*first, *(word for key, word in settings.items() if key not in asked), *own]


def _config_of(experiment: str) -> Any:
    """The config that an experiment composes to."""
    with hydra_of_conf() as hydra:
        return composed(hydra, [f"experiment={experiment}"])
