"""``kvbench reproduce <name>|all [key=value ...]``: a paper's table or figure, by one command.

Where one takes several runs, they run one after another, on one page. ``limit=`` is of every dataset
where there are several; with a model that comes with the package the rest is made small, too.
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

from kvbench.cli.catalogue import PaperItem, catalogue, experiment_called, paper_items
from kvbench.cli.config import composed, hydra_of_conf
from kvbench.cli.jobs import report_error
from kvbench.errors import UserError, nearest

Run = Callable[[Sequence[str]], int]
ALL = "all"
SCRIPTS = Path(__file__).parents[2] / "scripts" / "papers"
SMALL_MODELS = ("recall_mini", "tiny_random")
"""Models of conf/model that come with the package."""


def reproduce(arguments: Sequence[str], run: Run) -> int:
    """Run what makes an item, or an experiment, or all items.

    Args:
        arguments: its name, then overrides.
        run: runs one command line and returns its exit status.

    Returns:
        The largest exit status; of ``all``, every item is tried.

    Raises:
        UserError: no such experiment, a folder that it reads was not named, or a script is not here.
    """
    name, *overrides = arguments or [""]
    if name != ALL:
        item = paper_items().get(name)
        if item is not None and item.script:
            return _run_script(item, overrides)
        return max(map(run, command_lines(name, overrides)))
    from kvbench.report.render.landing import write_landing

    items = [i for i in paper_items().values() if i.status not in ("no data", "missing")]
    within = {line for item in items for line in item.runs}  # those that others bring with them
    made = {i.script or i.experiment: i for i in items if f"experiment={i.name}" not in within}
    statuses, folders = [0], []
    for item in made.values():
        print(f"\n{item.name}", flush=True)
        try:
            statuses.append(reproduce([item.name, *overrides], run))
        except UserError as error:
            statuses.append(report_error(error)[1])
        if not item.script:
            folders.append(_config_of(item.experiment).experiment_name)
    given = dict(text.partition("=")[::2] for text in overrides)
    place = Path(given.get("results_dir", "runs")).expanduser()
    print(f"page: {write_landing([place / name for name in dict.fromkeys(folders)])}")
    return max(statuses)


def _run_script(item: PaperItem, overrides: Sequence[str]) -> int:
    script, *own = shlex.split(item.script)
    file = SCRIPTS / f"{script}.py"
    if not file.is_file():
        raise UserError(
            f"{item.name} is made by scripts/papers/{script}.py, which this installation has not; "
            "allowed: kvbench's repository or its source distribution"
        )
    return subprocess.run([sys.executable, str(file), *own, *overrides], check=False).returncode


def command_lines(name: str, overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of every run that an experiment takes.

    Raises:
        UserError: see `reproduce`.
    """
    experiment = experiment_called(name)
    items, known = paper_items(), catalogue("experiments")
    item = items.get(name) or items.get(experiment) or PaperItem("", experiment, "", "")
    if experiment not in known:
        if name in items:
            raise UserError(f"{name} has no experiment: {item.no_data or item.status}")
        hint = nearest(name, [*known, *items])
        raise UserError(f"unknown experiment {name!r}{hint}; allowed: {', '.join([*known, ALL])}")
    given = dict(text.partition("=")[::2] for text in overrides)
    small = shlex.split(item.small if given.get("model") in SMALL_MODELS else "")
    own = list(overrides)
    if "limit" in given and "per_dataset" in _config_of(experiment).task:
        own = [t.replace("limit=", "task.per_dataset=") if t[:6] == "limit=" else t for t in own]
    if any(word.startswith("model=") for word in small):  # another small model, which it needs
        own = [text for text in own if not text.startswith("model=")]
    for line in item.runs:
        if line.startswith("experiment="):
            yield from command_lines(line.partition("=")[2], overrides)
            continue
        words = [word if small else os.path.expandvars(word) for word in shlex.split(line)]
        for unset in re.findall(r"\$\{(\w+)\}", "" if small else " ".join(words)):
            raise UserError(
                f"{unset} is not set; {name} needs {item.needs}: allowed: {unset}=<folder> in the "
                "environment or of make"
            )
        if "model" in given and any(word.startswith("model=") for word in words):
            continue
        settings = {word.partition("=")[0]: word for word in (*words, *small)}
        asked = {word.partition("=")[0] for word in own}
        yield [f"experiment={name}", *(w for key, w in settings.items() if key not in asked), *own]


def _config_of(experiment: str) -> Any:
    """The config that an experiment composes to."""
    with hydra_of_conf() as hydra:
        return composed(hydra, [f"experiment={experiment}"])
