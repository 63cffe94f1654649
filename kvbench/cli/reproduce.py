"""``kvbench reproduce``: makes a table or figure of a paper with the paper's settings, whatever that
takes: one command, several, or a script of scripts/papers. With a small model (model=recall_mini) it
runs offline on invented texts, in a folder of its own, with no published table beside it.
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
from kvbench.cli.config import composed, explaining, hydra_of_conf, values_of
from kvbench.cli.items import PaperItem, item_called, paper_items
from kvbench.cli.jobs import report_error
from kvbench.errors import UserError, check_known, needs_extra

ALL = "all"
SMALL_MODELS = ("recall_mini", "tiny_random")
"""Models of the package. They read no English."""
FIXTURES = "${FIXTURES}"
INVENTED = (FIXTURES, "haystack_files=[]", "dataset=null", "task.files=[]")
"""In the overrides of a small run: its texts are invented, and its task is called fixture_<task>."""
OF_JOBS = {"batch_size", "decode", "dry_run", "example_timeout"}
OF_JOBS |= {"launcher", "logger", "rerun", "retry_failed", "shards"}
"""Keys of jobs, which scripts do not have."""


def reproduce(arguments: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Make an item, an experiment, or all items; returns the largest exit status."""
    name, *overrides = arguments
    with explaining():  # before anything is made, so that ``all`` says it once
        OverridesParser.create().parse_overrides(list(overrides))
    dry = "dry_run=true" in overrides
    if name == ALL:
        return _reproduce_all(overrides, run, dry)
    lines = list(command_lines(name, overrides))
    for difference in getattr(item_called(name), "differs", ()):
        print(f"differs from the paper: {difference}", flush=True)
    statuses = []
    for first, *others in lines:
        key, _, value = first.partition("=")
        by_script = key == "script"
        statuses.append(
            run_script(f"papers/{value}", others, dry) if by_script else run([first, *others])
        )
    return max(statuses)


def _reproduce_all(overrides: Sequence[str], run: Callable[[Sequence[str]], int], dry: bool) -> int:
    """Make every item, and an index of all pages; returns the largest exit status."""
    from kvbench.report.page import write_index

    statuses = [0]
    for name, item in paper_items().items():
        print(f"\n{name}" + (f": {item.no_data}" if item.no_data else ""), flush=True)
        if item.no_data:
            continue
        try:
            statuses.append(reproduce([name, *overrides], run))
        except Exception as error:  # noqa: BLE001 - the next item is tried all the same
            statuses.append(report_error(error)[1])
    if not dry:
        results = Path(values_of(overrides).get("results_dir", "runs")).expanduser()
        pages = sorted(results.glob("*/report.html"))
        print(f"page: {write_index([page.parent for page in pages])}")
    return max(statuses)


def run_script(name: str, arguments: Sequence[str], dry: bool = False) -> int:
    """Run a script of scripts/ in a process of its own; returns its exit status.

    Args:
        name: its path below scripts/, without ``.py``.
        dry: print the command, and let the script check its settings only.
    """
    path = Path("scripts", f"{name}.py")
    file = config_dir().resolve().parent / path
    if not file.is_file():
        raise UserError(f"{path} is not installed; use kvbench's repository, where it is")
    command = [sys.executable, str(file), *arguments]
    if dry:
        print(shlex.join(["python", str(path), *arguments]), flush=True)
        command.append("dry_run=true")
    return subprocess.run(command, check=False).returncode


def command_lines(name: str, overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of every run that an item or an experiment takes, ``experiment=`` first; of an item
    that a script makes, the script's arguments, ``script=`` first.

    Args:
        name: of an item or an experiment.
        overrides: those of the user, which take the place of the item's own.
    """
    item = item_called(name)
    if item is None:
        known = [*sorted({*catalogue("experiments"), *paper_items()}), ALL]
        check_known(f"unknown experiment {name!r}", name, known, UserError)
        item = PaperItem(experiment=name)
    if item.no_data:
        raise UserError(f"{name} has no experiment: {item.no_data}")
    values = values_of(overrides)
    small = values.get("model") in SMALL_MODELS
    invented = any(part in item.small for part in INVENTED)
    sentence = f"small='{_small_sentence(item, values, invented)}'"
    if item.script:
        first = [f"script={item.script}", f"name={item.name}{'_small' if small else ''}"]
        first += [sentence] if small else []
        typed = [word for word in overrides if re.split(r"[.=]", word)[0] not in OF_JOBS]
    else:
        config = _config_of(item, name)
        first = [f"experiment={item.experiment}"]
        if small:
            first += [
                f"experiment_name={config.experiment_name}_small",
                "paper_table=null",
                sentence,
            ]
            label: Any = OmegaConf.to_container(config, resolve=False)["task_label"]  # type: ignore[index, call-overload]
            first += [f"task_label='fixture_{label}'"] if invented else []
        typed = list(overrides)
        if "per_dataset" in config.task:
            typed = [re.sub("^limit=", "task.per_dataset=", word) for word in typed]
    smaller = shlex.split(item.small.replace(FIXTURES, _fixtures())) if small else []
    typed_keys = values_of(typed).keys()
    for number, line in enumerate(item.runs):
        if line.startswith("experiment="):
            yield from command_lines(line.removeprefix("experiment="), overrides)
            continue
        words = shlex.split(line) if small else _with_environment(line, item)
        if number and "model" in values and any(word.startswith("model=") for word in words):
            continue  # a run of another model of the paper's
        if small and invented:
            words = [re.sub("^task_label=", "task_label=fixture_", word) for word in words]
        settings = {word.partition("=")[0]: word for word in (*words, *smaller)}
        yield [*first, *(word for key, word in settings.items() if key not in typed_keys), *typed]


def _config_of(item: PaperItem, name: str) -> Any:
    with hydra_of_conf() as hydra:
        config = composed(hydra, [f"experiment={item.experiment}"])
    needs = re.search(r"kvbench\.(tasks\.longbench|lm_eval)\.", OmegaConf.to_yaml(config.task))
    if needs and find_spec("lm_eval") is None:
        raise UserError(f"{name}: " + needs_extra("lm-eval", "lm-eval"))
    return config


def _fixtures() -> str:
    """The folder of invented texts: of the package where it is installed, else of the repository."""
    in_package = config_dir().parent / "fixtures"
    in_repository = config_dir().resolve().parent / "tests" / "data"
    return str(in_package if in_package.is_dir() else in_repository)


def _with_environment(line: str, item: PaperItem) -> list[str]:
    """The words of an item's run with the values of the environment variables that they name."""
    words = [os.path.expandvars(word) for word in shlex.split(line)]
    unset = re.search(r"\$\{(\w+)\}", " ".join(words))
    if unset:
        raise UserError(
            f"{unset[1]} is not set; {item.name} needs {item.needs}: allowed: {unset[1]}=<folder> in "
            "the environment or of make"
        )
    return words


def _small_sentence(item: PaperItem, values: dict[str, str], invented: bool) -> str:
    """The sentence that a small run's page, tables and figures begin with: what is smaller in it than in
    the paper's run."""
    parts = [f"model {values.get('model')}"]
    parts += ["invented texts"] if invented else []
    parts += [f"{values['limit']} examples of each dataset"] if "limit" in values else []
    changed = [word for word in shlex.split(item.small) if FIXTURES not in word]
    parts += [f"with {' '.join(changed)}"] if changed else []
    return f"A small run, not that of the paper: {', '.join(parts)}".replace("'", "") + "."
