"""The numbered tables and figures of the papers, and the experiments that make them: what
results/paper/experiments.yaml says of each, and what follows from the files beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from kvbench.cli.catalogue import config_dir, describe
from kvbench.report.tables.differences import paper_folders


@dataclass(frozen=True)
class PaperItem:
    """A numbered table, figure or theorem of a paper.

    Attributes:
        paper: short name of the paper. id: ``table1``, ``figure2a`` and so on.
        title: the paper's.
        shows, needs, no_data, script, runs, small, was: as experiments.yaml explains them.
        experiment: the experiment that makes it, or another item's name; its own where a script does.
    """

    paper: str
    id: str
    title: str
    shows: str
    needs: str = ""
    no_data: str | None = None
    experiment: str = ""
    script: str = ""
    runs: Sequence[str] = ("",)
    small: str = ""
    was: Sequence[str] = ()

    @property
    def name(self) -> str:
        return f"{self.paper}_{self.id}"

    @property
    def status(self) -> str:
        """``no data``, ``missing`` (no experiment yet), ``published`` (numbers of the paper stand beside
        ours) or ``ours`` (they could not be read from the paper, or there are none)."""
        if self.no_data is not None:
            return "no data"
        script = (paper_items().get(self.experiment) or self).script
        config = config_dir() / "experiment" / f"{self.experiment}.yaml"
        if not config.is_file() and not script:
            return "missing"
        files = (folder / f"{self.experiment}.csv" for folder in paper_folders())
        beside = any(file.is_file() for file in files)
        return "published" if beside or (not script and "paper_table" in _yaml(config)) else "ours"


@lru_cache(maxsize=1)
def paper_items() -> Mapping[str, PaperItem]:
    """Every item by its name, in the order of the papers."""
    file = next(
        path for folder in paper_folders() if (path := folder / "experiments.yaml").is_file()
    )
    papers = yaml.safe_load(file.read_text(encoding="utf-8"))
    allowed = {field.name for field in fields(PaperItem)} - {"paper", "id", "title"}
    found: dict[str, PaperItem] = {}
    for paper, part in papers.items():
        for number, said in part["items"].items():
            name = f"{paper}_{number}"
            unknown = set(said) - allowed
            if unknown:
                raise ValueError(f"{file}: {name} has unknown keys {', '.join(sorted(unknown))}")
            given: dict[str, Any] = {"experiment": name, **said}
            found[name] = PaperItem(paper, number, part["title"], **given)
    return found


def experiment_called(name: str) -> str:
    """The experiment that an item's name or an older name stands for; any other name as it is."""
    items = paper_items()
    was = (item.experiment for item in items.values() if name in item.was)
    return items[name].experiment if name in items else next(was, name)


def experiment_lines() -> dict[str, str]:
    """What ``kvbench list experiments`` says of each: of those of the papers, every numbered table and
    figure among them, status, what is shown and what the paper's own run needs."""
    items = paper_items()
    lines = {
        name: f"{item.status:9}  {item.shows}; "
        + (item.no_data if item.no_data is not None else f"needs {item.needs}")
        for name, item in items.items()
    }
    folder = config_dir() / "experiment"
    others = (path for path in sorted(folder.glob("[!_]*.yaml")) if path.stem not in items)
    return lines | {path.stem: f"{'':9}  {describe(path)}" for path in others}


def script_path(script: str) -> Path:
    """The file of a script of scripts/papers, which ships inside the package."""
    return config_dir().resolve().parent / "scripts" / "papers" / f"{script}.py"


def folder_name(experiment: str) -> str:
    """The folder below ``results_dir`` that an experiment's runs go to, or a script's files."""
    item = paper_items().get(experiment)
    if item is not None and item.script:
        return item.name
    return str(_yaml(config_dir() / "experiment" / f"{experiment}.yaml")["experiment_name"])


def limit_key(experiment: str) -> str:
    """The key that limits an experiment's examples: of every dataset, where its task has several."""
    tasks = _tasks_of(config_dir() / "experiment" / f"{experiment}.yaml", "override /task")
    files = (config_dir() / "task" / f"{task}.yaml" for task in tasks)
    return "task.per_dataset" if any(_has(file, "per_dataset") for file in files) else "limit"


def _tasks_of(path: Path, key: str) -> list[str]:
    """The tasks that an experiment chooses, or one that it begins with."""
    found = []
    for choice in _yaml(path).get("defaults", ()):
        if isinstance(choice, dict) and key in choice:
            found.append(str(choice[key]))
        elif isinstance(choice, str) and choice != "_self_":
            found += _tasks_of(path.with_name(f"{choice}.yaml"), key)
    return found


def _has(path: Path, key: str) -> bool:
    """Whether a task has an option, of its own or of the one that it begins with."""
    said = _yaml(path)
    bases = (c for c in said.get("defaults", ()) if isinstance(c, str) and c.isidentifier())
    return key in said or any(
        _has(path.with_name(f"{base}.yaml"), key) for base in bases if base != "_self_"
    )


def _yaml(path: Path) -> Mapping[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
