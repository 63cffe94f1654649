"""``kvbench reproduce <name>|all [key=value ...]``: a paper's table or figure, by one command.

Where it takes several runs, they run one after another, on one page; a script of scripts/papers runs
in a process of its own. ``limit=`` is of every dataset where there are several; with a model that comes
with the package the rest is made small, too, and stands by itself, with nothing published beside it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from kvbench.catalogue import catalogue, config_dir
from kvbench.cli.catalogue import PaperItem, item_called, paper_items
from kvbench.cli.config import composed, explaining, hydra_of_conf
from kvbench.cli.jobs import report_error
from kvbench.errors import UserError, nearest, needs_extra

Run = Callable[[Sequence[str]], int]
ALL = "all"
FIXTURES = "${FIXTURES}"
INVENTED = (FIXTURES, "haystack=generated", "dataset_name=null", "task.files=[]")
"""In the overrides of a small run: its texts are invented, and its task is called fixture_<task>."""
OF_JOBS = {"batch_size", "decode", "dry_run", "example_timeout"}
OF_JOBS |= {"launcher", "logger", "retry_failed", "shards"}
"""Keys that mean nothing to a script."""


def reproduce(arguments: Sequence[str], run: Run) -> int:
    """Run what makes an item, or an experiment, or all items; of ``all``, every item is tried.

    Args:
        arguments: its name, then overrides.
        run: runs one command line and returns its exit status, of which the largest is returned.
    """
    name, *overrides = arguments
    with explaining():  # once, whatever is made
        OverridesParser.create().parse_overrides(list(overrides))
    dry = "dry_run=true" in overrides
    if name != ALL:
        lines = command_lines(name, overrides)
        for line in getattr(item_called(name), "differs", ()):
            print(f"differs from the paper: {line}", flush=True)
        return max(
            run_script(f"papers/{line[0][7:]}", line[1:], dry)
            if line[0][:7] == "script="
            else run(line)
            for line in lines
        )
    from kvbench.report.page import write_index

    statuses = [0]
    for name, item in paper_items().items():
        print(f"\n{name}" + (f": {item.no_data}" if item.no_data else ""), flush=True)
        try:
            statuses += [] if item.no_data else [reproduce([name, *overrides], run)]
        except Exception as error:  # noqa: BLE001 - the others are tried all the same
            statuses.append(report_error(error)[1])
    if not dry:
        given = dict(text.partition("=")[::2] for text in overrides)
        pages = Path(given.get("results_dir", "runs")).expanduser().glob("*/report.html")
        print(f"page: {write_index([page.parent for page in sorted(pages)])}")
    return max(statuses)


def run_script(name: str, given: Sequence[str], dry: bool = False) -> int:
    """Run a script of scripts/; its exit status. In a dry run the script only checks its settings."""
    place = Path("scripts", f"{name}.py")
    file = config_dir().resolve().parent / place
    if not file.is_file():
        raise UserError(f"{place} is not installed; allowed: kvbench's repository, where it is")
    if dry:
        print(shlex.join(["python", str(place), *given]), flush=True)
        given = [*given, "dry_run=true"]
    return subprocess.run([sys.executable, file, *given], check=False).returncode


def command_lines(name: str, overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of every run that an item or experiment takes, ``experiment=`` first; or a
    script's arguments, ``script=`` first. An unknown name, a package that is not installed and a
    folder that is not named are refused."""
    known = sorted({*catalogue("experiments"), *paper_items()})
    item = item_called(name) or (PaperItem(experiment=name) if name in known else None)
    if item is None:
        hint = nearest(name, known)
        raise UserError(f"unknown experiment {name!r}{hint}; allowed: {', '.join([*known, ALL])}")
    if item.no_data:
        raise UserError(f"{name} has no experiment: {item.no_data}")
    given = dict(text.partition("=")[::2] for text in overrides)
    small = given.get("model") in ("recall_mini", "tiny_random")  # they read no English
    # in a wheel they are in the package
    places = config_dir().parent / "fixtures", config_dir().resolve().parent / "tests" / "data"
    invented = next(str(place) for place in places if place.is_dir())
    less = item.small.replace(FIXTURES, invented) if small else ""
    if item.script:
        own = [text for text in overrides if re.split(r"[.=]", text)[0] not in OF_JOBS]
        first = [f"script={item.script}", f"name={item.name}{'_small' * small}"]
        first += [f"small='{_small_sentence(item, given)}'"] if small else []
    else:
        with hydra_of_conf() as hydra:
            config = composed(hydra, [f"experiment={item.experiment}"])
        its = re.search(r"kvbench\.(tasks\.longbench|lm_eval)\.", OmegaConf.to_yaml(config.task))
        if its and find_spec("lm_eval") is None:
            raise UserError(f"{name}: " + needs_extra("lm-eval", "lm-eval"))
        several = "per_dataset" in config.task
        own = [re.sub("^limit=", "task.per_dataset=", t) if several else t for t in overrides]
        first = [f"experiment={item.experiment}"]
        first += _by_itself(item, config, given) if small else []
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
        if small and _is_invented(item):
            words = [re.sub("^task_label=", "task_label=fixture_", word) for word in words]
        settings = {word.partition("=")[0]: word for word in (*words, *shlex.split(less))}
        asked = {word.partition("=")[0] for word in own}
        yield [*first, *(word for key, word in settings.items() if key not in asked), *own]


def _by_itself(item: PaperItem, config: Any, given: dict[str, str]) -> list[str]:
    """What keeps a small run apart from the paper's: folder, no published table, a line that says so."""
    words = [f"experiment_name={config.experiment_name}_small", "paper_table=null"]
    words.append(f"small='{_small_sentence(item, given)}'")
    plain: Any = OmegaConf.to_container(config, resolve=False)
    return [*words, f"task_label='fixture_{plain['task_label']}'"] if _is_invented(item) else words


def _is_invented(item: PaperItem) -> bool:
    """Whether the texts of the item's small run are invented."""
    return any(part in item.small for part in INVENTED)


def _small_sentence(item: PaperItem, given: dict[str, str]) -> str:
    """The sentence that a small run's page, tables and figures begin with: what it reduces."""
    parts = [f"model {given.get('model')}"]
    if _is_invented(item):
        parts.append("invented texts")
    if "limit" in given:
        parts.append(f"{given['limit']} examples of each dataset")
    smaller = [word for word in shlex.split(item.small) if FIXTURES not in word]
    sentence = f"A small run, not that of the paper: {', '.join(parts)}"
    changed = " ".join(smaller).replace("'", "")
    return f"{sentence}; changed: {changed}." if changed else f"{sentence}."
