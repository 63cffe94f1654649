"""A comparison of two experiments as files: compare.html, compare.md and compare.csv."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kvbench.errors import disk_line
from kvbench.records.read import StoreError
from kvbench.report.files import write_text
from kvbench.report.render.answers import clip
from kvbench.report.render.page import environment, page_parts
from kvbench.report.render.text import frame_csv, markdown, plain
from kvbench.report.tables.change_tables import change_tables, every_change
from kvbench.report.tables.compare import Comparison, Flip, Match, TaskComparison

_FLIPS_SHOWN = 60


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write compare.html, compare.md and compare.csv; returns their paths.

    Raises:
        StoreError: the folder cannot be written.
    """
    tables = change_tables(comparison)
    first, second = comparison.names
    text = plain(f"# {first} → {second}") + "\n\n"
    text += plain(f"first: {first}; second: {second}") + "\n\n"
    text += "\n".join(markdown(table) for table in tables)
    for name, runs in only_lines(comparison):
        text += "\n" + plain(f"Only in {name}:") + "\n\n"
        text += "".join(f"- {plain(run)}\n" for run in runs)
    lines = [line for task in comparison.tasks for line in every_change(task).records()]
    template = environment().get_template("compare.html.j2")
    page = template.render(
        **page_parts(),
        comparison=comparison,
        tables=tables,
        only=only_lines(comparison),
        flips=_shown_flips(comparison),
        total_flips=sum(len(m.flips) for t in comparison.tasks for m in t.matches),
        clip=clip,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            write_text(folder / "compare.html", page),
            write_text(folder / "compare.md", text),
            write_text(folder / "compare.csv", frame_csv(pd.DataFrame(lines))),
        ]
    except OSError as error:
        raise StoreError(f"cannot write the comparison in {folder}: {disk_line(error)}") from error


def only_lines(comparison: Comparison) -> list[tuple[str, tuple[str, ...]]]:
    """Of each experiment, the runs that the other lacks, where there are any."""
    both = zip(comparison.names, comparison.only, strict=True)
    return [(name, lines) for name, lines in both if lines]


def _shown_flips(comparison: Comparison) -> list[tuple[TaskComparison, Match, Flip]]:
    """Some of each method and task, as many as fit."""
    groups = [(t, m) for t in comparison.tasks for m in t.matches if m.flips]
    each = max(1, _FLIPS_SHOWN // max(1, len(groups)))
    return [(t, m, flip) for t, m in groups for flip in m.flips[:each]][:_FLIPS_SHOWN]
