"""The numbered tables and figures of the papers, the experiment or script that makes each
(results/paper/experiments.yaml), and what ``kvbench list`` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import yaml

from kvbench.catalogue import sections_of
from kvbench.errors import UserError
from kvbench.report.papers import paper_folders

OWN = "measurements of our own about a paper, which has no such item"
"""The title of items that no paper has."""


@dataclass(frozen=True)
class PaperItem:
    """A numbered table, figure or theorem of a paper, e.g. `id` table1 of the paper called h2o, or a
    measurement of our own about it (whose `title` is `OWN`). The comment at the head of
    experiments.yaml explains the other attributes."""

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

    @property
    def name(self) -> str:
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
                about = {"title": title, "experiment": name, "published": name, **entry}
                items[name] = PaperItem(paper, number, **about)
    return theirs | own


def item_called(name: str) -> PaperItem | None:
    """The item of a name, of an alias, or of a number that one paper alone has; None for other text."""
    items = paper_items()
    named = [key for key, item in items.items() if name in (key, item.id)]
    if len(named) > 1:
        raise UserError(f"{name} is of several papers; allowed: {', '.join(named)}")
    return items[items[named[0]].alias or named[0]] if named else None


def experiment_called(name: str) -> str:
    """The experiment of an item; any other name as it is."""
    item = item_called(name)
    return name if item is None else item.experiment


def listed(kind: str) -> dict[str, dict[str, str]]:
    """The choices of a kind as ``kvbench list`` prints them: by the title of each section the names, and
    a text about each. A paper's table or figure has its status, what it shows and what the paper's own
    run needs."""
    if kind != "experiments":
        return sections_of(kind)
    (ours, of_ours), (theirs, of_papers) = sections_of(kind).items()
    items: dict[str, dict[str, str]] = {theirs: {}, OWN: {}}
    for name, item in paper_items().items():
        text = f"{item.status:9}  {item.shows}; {item.no_data or 'needs ' + item.needs}"
        if item.alias:
            text = f"{'alias':9}  {item.title}: {item.alias}"
        items[OWN if item.title == OWN else theirs][name] = text
    for name, text in of_papers.items():
        if name not in paper_items():
            items[theirs][name] = f"{'':9}  {text}"
    return {ours: of_ours, **items}
