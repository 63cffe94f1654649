"""Tables for tests: made of texts, or read as frames."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvbench.report.table import Column, Row, Table


def frame(*tables: Table) -> pd.DataFrame:
    """What the tables' files hold."""
    return pd.DataFrame([line for table in tables for line in table.records()])


def shown(table: Table) -> list[list[str]]:
    """The cells of every row, as readers see them."""
    return [
        [str(table.cell(row, column)) for column in table.shown]
        for _, rows in table.groups()
        for row in rows
    ]


def heads(table: Table) -> list[str]:
    """What readers see above the columns."""
    return [column.heading or "" for column in table.shown]


def bold(table: Table) -> set[tuple[int, int]]:
    """Row and column of the cells in bold."""
    rows = [row for _, group in table.groups() for row in group]
    return {
        (i, j)
        for i, row in enumerate(rows)
        for j, column in enumerate(table.shown)
        if column.key in row.bold
    }


def made_of(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    name: str = "name",
    title: str = "title",
    notes: Sequence[str] = (),
    bold: Sequence[tuple[int, int]] = (),
    groups: Sequence[str] = (),
    marks: dict[tuple[int, int], str] | None = None,
) -> Table:
    """A table of texts; `bold` and `marks` by row and column."""
    marks = marks or {}
    keys = [f"c{j}" for j in range(len(columns))]
    return Table(
        name,
        title,
        tuple(Column(k, head, "label", saved=False) for k, head in zip(keys, columns, strict=True)),
        tuple(
            Row(
                dict(zip(keys, row, strict=True)),
                marks={keys[j]: mark for (r, j), mark in marks.items() if r == i},
                bold=frozenset(keys[j] for r, j in bold if r == i),
                group=groups[i] if groups else "",
            )
            for i, row in enumerate(rows)
        ),
        tuple(notes),
    )
