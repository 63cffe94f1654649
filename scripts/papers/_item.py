"""The page of a paper's table or figure that a script of scripts/papers makes.

In: what each run of the script left in the item's folder: a CSV, a PNG, and a `RunNote` as JSON. Out:
report.html in that folder, with how the runs differ from the paper, their figures and means, the
published numbers, and the commands.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.report.page import PAGE, html
from kvbench.report.papers import HEADING, paper_folders
from kvbench.report.render import PAGE_MARK, write_text
from kvbench.report.runs import words
from kvbench.report.table import Column, Table, number

COMMENT = "#"
"""The first line of a small run's CSV begins with it; pandas skips that line with ``comment="#"``."""


@dataclass(frozen=True)
class RunNote:
    """How one run of a script is drawn, and what made it: the column `y` of its CSV against `x`, a line
    for each value of `by`, a panel for each of `panel`.

    Attributes:
        subject: what was measured: a model, or synthetic data.
        small: by how much the run is smaller than the paper's; empty where it is not.
    """

    subject: str
    command: str
    y: str
    x: str
    by: str
    panel: str
    small: str = ""

    def write(self, place: Path) -> None:
        write_text(Path(f"{place}.json"), json.dumps(asdict(self), indent=1) + "\n")


def write_item_page(
    folder: Path, *, title: str, paper: str, shows: str, differs: Sequence[str]
) -> Path:
    """Write the page of the item whose runs lie in a folder. Published numbers are in the file of
    results/paper that is called as the item is (`title`)."""
    notes = [
        (path, RunNote(**json.loads(path.read_text("utf-8")))) for path in folder.glob("*.json")
    ]
    published: list[Table] = []
    files = [place / f"{title}.csv" for place in paper_folders()]
    if not any(note.small for _, note in notes):
        for file in [file for file in files if file.is_file()][:1]:
            frame = pd.read_csv(file, dtype=str, keep_default_na=False)
            columns = tuple(Column(str(column)) for column in frame)
            published = [Table(title, f"{title}, as printed", frame, columns)]
    page = html(
        "item.html.j2",
        title=title,
        paper=paper,
        shows=shows,
        differs=[f"{HEADING}: {line}" for line in differs],
        small=dict.fromkeys(note.small for _, note in notes if note.small),
        parts=[_part(path, note) for path, note in sorted(notes)],
        published=published,
    )
    return write_text(folder / PAGE, page, PAGE_MARK)


def means_of(frame: pd.DataFrame, note: RunNote) -> pd.DataFrame:
    """The mean of `y`: a row for each panel and x, a column for each `by`."""
    rows = list(dict.fromkeys([note.panel, note.x]))
    return frame.pivot_table(note.y, rows, note.by, sort=False)


def _part(path: Path, note: RunNote) -> dict[str, Any]:
    frame = pd.read_csv(path.with_suffix(".csv"), comment=COMMENT)
    means = means_of(frame, note).reset_index()
    means.columns = means.columns.map(str)
    first = means.columns[: len(dict.fromkeys([note.panel, note.x]))]
    columns = tuple(
        Column(name) if name in first else Column(name, text=number) for name in means.columns
    )
    picture = base64.b64encode(path.with_suffix(".png").read_bytes()).decode()
    return {
        "subject": note.subject,
        "command": note.command,
        "caption": words(f"Mean {note.y} against {note.x}, by {note.by}"),
        "address": f"data:image/png;base64,{picture}",
        "table": Table(path.stem, words(f"mean {note.y}"), means, columns),
    }
