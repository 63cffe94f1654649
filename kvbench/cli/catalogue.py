"""The numbered tables and figures of the papers with what makes them (results/paper/experiments.yaml),
and what ``kvbench list experiments`` says of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from kvbench.catalogue import catalogue
from kvbench.report.papers import paper_folders


@dataclass(frozen=True)
class PaperItem:
    """A numbered table, figure or theorem of a paper.

    Attributes:
        paper: short name of the paper. id: ``table1``, ``figure2a`` and so on. title: the paper's.
        others: as experiments.yaml explains them.
    """

    paper: str = ""
    id: str = ""
    title: str = ""
    shows: str = ""
    published: str = ""
    needs: str = ""
    no_data: str | None = None
    alias: str = ""
    experiment: str = ""
    script: str = ""
    runs: Sequence[str] = ("",)
    differs: Sequence[str] = ()
    small: str = ""
    was: Sequence[str] = ()

    @property
    def name(self) -> str:
        return f"{self.paper}_{self.id}"

    @property
    def status(self) -> str:
        """``no data``, ``published`` (the paper's numbers stand beside ours) or ``ours`` (they could
        not be read from the paper, or there are none)."""
        if self.no_data:
            return "no data"
        beside = any((folder / f"{self.published}.csv").is_file() for folder in paper_folders())
        return "published" if beside else "ours"


@lru_cache(maxsize=1)
def paper_items() -> Mapping[str, PaperItem]:
    """Every item by its name, in the order of the papers."""
    file = next(path for f in paper_folders() if (path := f / "experiments.yaml").is_file())
    found: dict[str, PaperItem] = {}
    for paper, part in yaml.safe_load(file.read_text(encoding="utf-8")).items():
        for number, said in part["items"].items():
            name = f"{paper}_{number}"
            given: dict[str, Any] = {"experiment": name, "published": name, **said}
            found[name] = PaperItem(paper, number, part["title"], **given)
    return found


def item_called(name: str) -> PaperItem | None:
    """The item of this name, or of which this is an alias or an older name."""
    items = paper_items()
    found = items.get(name) or next((one for one in items.values() if name in one.was), None)
    return items[found.alias] if found is not None and found.alias else found


def about_item(item: PaperItem) -> str:
    """An item that no experiment of conf makes, in a few lines of YAML."""
    facts: dict[str, Any] = {"name": item.name, "paper": item.title, "shows": item.shows}
    if item.no_data:
        facts["no_data"] = item.no_data
    else:
        command = f"python scripts/papers/{item.script}.py name={item.name}"
        facts["needs"] = item.needs
        facts["differs"] = list(item.differs)
        facts["commands"] = [f"{command} {run}".strip() for run in item.runs]
        facts["all of it"] = f"kvbench reproduce {item.name}"
    return str(yaml.safe_dump(facts, sort_keys=False, width=120, allow_unicode=True)).rstrip()


def experiment_called(name: str) -> str:
    """The experiment that an item's name or an older name stands for; any other name as it is."""
    item = item_called(name)
    return name if item is None else item.experiment


def experiment_lines() -> dict[str, str]:
    """What ``kvbench list experiments`` says of each, every numbered table and figure among them:
    status, what is shown and what the paper's own run needs."""
    lines = {
        name: f"{'alias':9}  {item.title}: {item.alias}"
        if item.alias
        else f"{item.status:9}  {item.shows}; {item.no_data or 'needs ' + item.needs}"
        for name, item in paper_items().items()
    }
    others = catalogue("experiments").items()
    return lines | {name: f"{'':9}  {text}" for name, text in others if name not in lines}
