"""The numbered tables and figures of the papers, the experiment or script that makes each
(results/paper/experiments.yaml), and the lines of ``kvbench list experiments``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from kvbench.catalogue import catalogue
from kvbench.report.papers import paper_folders

OWN = "No items of the papers: measurements of our own"
"""The title of items that no paper has."""


@dataclass(frozen=True)
class PaperItem:
    """A numbered table, figure or theorem of a paper, or a measurement of our own about it.

    Attributes:
        paper: short name of the paper.
        id: ``table1``, ``figure2a`` and so on.
        title: of the paper; `OWN` of what is no item of it.

    The comment at the head of experiments.yaml explains the other attributes.
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
        """The name on the command line, e.g. ``h2o_table7``."""
        return f"{self.paper}_{self.id}"

    @property
    def status(self) -> str:
        """``no data``; ``published`` where the page shows the paper's numbers beside those of kvbench;
        ``ours`` where the paper prints no numbers or they could not be read; ``own`` where it has no
        such item."""
        if self.no_data:
            return "no data"
        if self.title == OWN:
            return "own"
        files = [folder / f"{self.published}.csv" for folder in paper_folders()]
        return "published" if any(file.is_file() for file in files) else "ours"


@lru_cache(maxsize=1)
def paper_items() -> Mapping[str, PaperItem]:
    """Every item by its name, in the order of the papers; after them those of our own."""
    files = [folder / "experiments.yaml" for folder in paper_folders()]
    text = next(file for file in files if file.is_file()).read_text(encoding="utf-8")
    theirs: dict[str, PaperItem] = {}
    own: dict[str, PaperItem] = {}
    for paper, part in yaml.safe_load(text).items():
        for items, key, title in (theirs, "items", part["title"]), (own, "own", OWN):
            for number, entry in part.get(key, {}).items():
                name = f"{paper}_{number}"
                attributes: dict[str, Any] = {"experiment": name, "published": name, **entry}
                items[name] = PaperItem(paper, number, title, **attributes)
    return theirs | own


def item_called(name: str) -> PaperItem | None:
    """The item that a name, an alias or an older name stands for; None for any other text."""
    items = paper_items()
    renamed = (item for item in items.values() if name in item.was)
    item = items.get(name) or next(renamed, None)
    return items[item.alias] if item is not None and item.alias else item


def about_item(item: PaperItem) -> str:
    """A few lines of YAML about an item that no experiment of conf makes: what it shows, and the
    commands of the script that makes it or the reason why there is none."""
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
    """The line of ``kvbench list experiments`` about each experiment and each numbered table and figure,
    by name: its status, what it shows and what the paper's own run needs."""
    lines = {
        name: f"{'alias':9}  {item.title}: {item.alias}"
        if item.alias
        else f"{item.status:9}  {item.shows}; {item.no_data or 'needs ' + item.needs}"
        for name, item in paper_items().items()
    }
    others = catalogue("experiments").items()
    return lines | {name: f"{'':9}  {text}" for name, text in others if name not in lines}
