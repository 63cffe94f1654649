"""The page of a paper's table or figure that a script of scripts/papers makes: how it differs from the
paper, figure, means, what was published, the command.

In: what each run of the script left in the item's folder (a CSV, a PNG, and a `RunNote` as JSON beside
them). Out: report.html in that folder.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from kvbench.report.page import PAGE, html
from kvbench.report.papers import HEADING, paper_folders
from kvbench.report.render import write_text
from kvbench.report.table import Column, Table, number

COMMENT = "#"
"""What the first line of a small run's CSV begins with; pandas skips it with ``comment="#"``."""


@dataclass(frozen=True)
class RunNote:
    """How one run of a script is drawn, and what it was made with.

    Attributes:
        subject: what was measured: a model, or synthetic data. command: that makes it again.
        y, x, by, panel: columns of the CSV: what is measured, against what, a line of the figure for
            each `by`, a panel for each `panel`.
        small: the sentence that says what a small run reduces; empty for the paper's own settings.
    """

    subject: str
    command: str
    y: str
    x: str
    by: str
    panel: str
    small: str = ""

    def write(self, place: Path) -> None:
        """Beside the run's CSV and PNG, at the same path but for the ending."""
        write_text(Path(f"{place}.json"), json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True)
class Part:
    """What the page shows of one run."""

    subject: str
    command: str
    caption: str
    address: str
    table: Table


def write_item_page(
    folder: Path, *, title: str, paper: str, shows: str, differs: Sequence[str]
) -> Path:
    """Write the page of the item whose runs lie in a folder; returns its path.

    Args:
        title: the item's name, which results/paper has published numbers under, if any.
        shows: what the paper has there.
    """
    notes = [
        (path, RunNote(**json.loads(path.read_text("utf-8")))) for path in folder.glob("*.json")
    ]
    page = html(
        "item.html.j2",
        title=title,
        paper=paper,
        shows=shows,
        differs=[f"{HEADING}: {line}" for line in differs],
        small=dict.fromkeys(note.small for _, note in notes if note.small),
        parts=[_part(path, note) for path, note in sorted(notes)],
        published=[] if any(note.small for _, note in notes) else _published(title),
    )
    return write_text(folder / PAGE, page)


def means_of(frame: pd.DataFrame, note: RunNote) -> pd.DataFrame:
    """The mean of `y`: a row for each panel and x, a column for each `by`."""
    rows = list(dict.fromkeys([note.panel, note.x]))
    return frame.pivot_table(note.y, rows, note.by, sort=False)


def _part(path: Path, note: RunNote) -> Part:
    frame = pd.read_csv(path.with_suffix(".csv"), comment=COMMENT)
    means = means_of(frame, note).reset_index()
    means.columns = means.columns.map(str)
    first = means.columns[: len(dict.fromkeys([note.panel, note.x]))]
    columns = tuple(
        Column(name) if name in first else Column(name, text=number) for name in means.columns
    )
    picture = base64.b64encode(path.with_suffix(".png").read_bytes()).decode()
    caption = f"Mean {note.y} against {note.x}, by {note.by}"
    return Part(
        note.subject,
        note.command,
        caption.replace("_", " "),
        f"data:image/png;base64,{picture}",
        Table(path.stem, f"mean {note.y.replace('_', ' ')}", means, columns),
    )


def _published(name: str) -> list[Table]:
    for file in (place / f"{name}.csv" for place in paper_folders()):
        if file.is_file():
            frame = pd.read_csv(file, dtype=str, keep_default_na=False)
            columns = tuple(Column(str(column)) for column in frame)
            return [Table(name, f"{name}, as printed", frame, columns)]
    return []
