"""Published numbers beside ours as a table of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvbench.report.tables.differences import notes_on
from kvbench.report.tables.published import Pair, Published, joined_tasks
from kvbench.report.tables.scores import AVERAGE
from kvbench.report.views import (
    INCOMPLETE,
    INTERVAL_NOTE,
    MISSING,
    OUTSIDE,
    View,
    interval_text,
    shown_text,
    unit_text,
)

MARGIN_NOTE = (
    "(±) is descriptive: how far two honest runs of our number of examples may be apart,"
    " 1.96 sqrt(2 f p (1 - p) / n) plus rounding of the print;"
    f" {OUTSIDE} the published number is further from ours. It is given for our own model only."
)


def margin_note(tables: Sequence[Published]) -> str:
    """The same with what f is in these tables."""
    shares = {t.rescored for t in tables}
    given = ", ".join(f"{100 * f:.2g} %" for f in sorted(f for f in shares if f is not None))
    parts = [f"f, the share of examples that such runs answer anew, is {given}."] if given else []
    if None in shares:
        parts.append(
            "f is 1, as for other examples than the paper's, where it was not measured"
            " (kvbench-report A --rescored B)."
        )
    return " ".join((MARGIN_NOTE, *parts))


def comparison_views(tables: Sequence[Published]) -> list[View]:
    """One table per published source and task: for each of our models a block of rows, for each
    method ours, its interval, what was published, and the difference."""
    tables = joined_tasks(tables)
    names = dict.fromkeys(map(comparison_name, tables))
    return [_view([t for t in tables if comparison_name(t) == name]) for name in names]


def comparison_name(table: Published) -> str:
    """The file name stem of the comparison that a table is part of."""
    field = "" if table.field is None else f"-{table.field}"
    return f"{table.source}-{table.part_of or table.task}{field}-published"


def _view(tables: Sequence[Published]) -> View:
    first = tables[0]
    columns = list(dict.fromkeys(c for table in tables for c in table.columns if c != AVERAGE))
    if any(AVERAGE in table.columns for table in tables):
        columns.append(AVERAGE)
    rows: list[tuple[str, ...]] = []
    parts: dict[str, int] = {}
    incomplete = False
    for table in tables:
        for line in table.rows:
            by_column = dict(zip(table.columns, line.pairs, strict=True))
            pairs = [by_column.get(column) for column in columns]
            incomplete |= any(pair is not None and not pair.cell.complete for pair in pairs)
            block = _lines(pairs, table.unit)
            rows += [(line.label if i == 0 else "", *texts) for i, texts in enumerate(block)]
            named = f"{table.model}; published: {line.model}" if line.model else table.model
            parts[named] = parts.get(named, 0) + len(block)
    notes = [INTERVAL_NOTE, margin_note(tables)]
    if incomplete:
        notes.append(
            f"{INCOMPLETE} some of our examples failed or are missing: their mean is left."
        )
    for table in tables:
        notes += [note for note in notes_on(table.differences) if note not in notes]
    return View(
        name=comparison_name(first),
        title=f"{first.task}: ours beside {first.source}{unit_text(first.unit)}",
        columns=("method", "", *columns),
        rows=tuple(rows),
        notes=tuple(notes),
        parts=tuple(parts.items()),
    )


def _lines(pairs: Iterable[Pair | None], unit: str) -> list[tuple[str, ...]]:
    """Four lines about one method: ours, interval, published, difference."""
    columns = [_cell(pair, unit) for pair in pairs]
    heads = ("ours", "95 % interval", "published", "difference")
    return [(head, *texts) for head, texts in zip(heads, zip(*columns, strict=True), strict=True)]


def _cell(pair: Pair | None, unit: str) -> tuple[str, str, str, str]:
    if pair is None:
        return ("", "", "", "")
    ours = pair.ours
    missing = math.isnan(ours.value)
    return (
        shown_text(ours.value, unit) + ("" if pair.cell.complete else f" {INCOMPLETE}"),
        MISSING if missing else interval_text(ours, unit, shown=True),
        (pair.printed or MISSING) + (f" {OUTSIDE}" if pair.beyond else ""),
        difference_text(pair, unit),
    )


def difference_text(pair: Pair, unit: str) -> str:
    """E.g. ``−49.0 (±31.0)``."""
    text = shown_text(pair.difference, unit, signed=True)
    return text if math.isnan(pair.margin) else f"{text} (±{shown_text(pair.margin, unit)})"
