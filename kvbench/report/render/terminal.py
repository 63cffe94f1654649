"""A table on a terminal, laid out for its width: nothing is cut, nothing wraps inside a number.

The columns that a reader needs come first; the optional ones fill what room is left. A value has its
interval beside it where that fits, else below it, else (of many columns) none; a table that is still too
wide is printed in several parts.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import rich.table
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape as escape_markup

from kvbench.errors import printable
from kvbench.report.table import INTERVAL, KINDS, CellText, Column, Note, Row, Table

_FILE_WIDTH = 140
"""Where output is no terminal and COLUMNS says nothing."""
_GAP = 2
_WORDS = 24
"""Columns of words may become as narrow as this; what is longer goes on in the next line."""


class Style(IntEnum):
    """Where a value's interval stands."""

    BESIDE = 0
    BELOW = 1
    NONE = 2


def print_tables(tables: Iterable[Table], console: Console | None = None) -> None:
    """Print tables on a terminal; once at the end, what their marks and columns mean, as far as they
    are shown, and what there was no room for."""
    free = sys.stdout.isatty() or "COLUMNS" in os.environ
    out = console or Console(width=None if free else _FILE_WIDTH)
    notes: dict[str, None] = {}
    hidden: dict[str, None] = {}
    for table in tables:
        parts = list(_parts(table, out.width))
        out.print(f"\n[italic]{escape(table.title)}[/italic]", highlight=False)
        for part in parts:
            out.print(part.rendered())
        notes |= dict.fromkeys(_notes(table, parts))
        kept = {column.key for part in parts for column in part.columns}
        hidden |= dict.fromkeys(c.heading for c in table.shown if c.heading and c.key not in kept)
    if hidden:
        notes[f"On a wider terminal also: {', '.join(hidden)}."] = None
    out.print()
    for note in notes:
        out.print(f"  {escape(note)}", style="dim", highlight=False)


def escape(text: str) -> str:
    """Text that neither rich nor the terminal takes for anything else."""
    return escape_markup(printable(text))


@dataclass(frozen=True)
class _Part:
    """Some columns of a table, side by side."""

    table: Table
    columns: tuple[Column, ...]
    style: Style

    @property
    def width(self) -> int:
        """Characters that it takes at least."""
        return sum(map(self._needed, self.columns)) + _GAP * (len(self.columns) - 1)

    def _is_words(self, column: Column) -> bool:
        return column is self.columns[0] or KINDS[column.kind].left

    def _cells(self, column: Column) -> list[CellText]:
        return [self.table.cell(row, column) for row in _rows(self.table)]

    def _split(self, cell: CellText) -> tuple[str, str, str]:
        """What stands side by side in a cell: its value, interval and marks."""
        return cell.text, cell.interval if self.style is Style.BESIDE else "", cell.marks

    def _widths(self, column: Column) -> list[int]:
        """Characters of each of these, in the widest cell."""
        split = zip(*map(self._split, self._cells(column)), strict=True)
        return [max(map(cell_len, part)) for part in split] or [0, 0, 0]

    def _texts(self, column: Column) -> list[str]:
        """The column's cells as markup; of numbers, their parts below one another."""
        widths = self._widths(column)
        texts = []
        for cell in self._cells(column):
            text, interval, marks = self._split(cell)
            value = f"[bold]{escape(text)}[/bold]" if cell.bold else escape(text)
            shown = value if self._is_words(column) else " " * (widths[0] - cell_len(text)) + value
            if widths[1]:
                shown += f" {escape(interval)}{' ' * (widths[1] - cell_len(interval))}"
            if widths[2]:
                shown += f" {escape(marks)}{' ' * (widths[2] - cell_len(marks))}"
            if self.style is Style.BELOW and cell.interval:
                shown += f"\n{escape(cell.interval)}"
            texts.append(shown)
        return texts

    def _content(self, column: Column) -> int:
        """Characters of the widest value of a column."""
        widths, below = self._widths(column), self.style is Style.BELOW
        under = max((cell_len(c.interval) for c in self._cells(column)), default=0) if below else 0
        return max(sum(widths) + sum(map(bool, widths[1:])), under)

    def _needed(self, column: Column) -> int:
        content = self._content(column)
        if self._is_words(column):
            content = min(content, _WORDS)
        return max(content, *map(cell_len, _folded(column.heading or "", content)))

    def rendered(self) -> rich.table.Table:
        """The part as rich's table."""
        made = rich.table.Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0)
        )
        heads = [_folded(column.heading or "", self._content(column)) for column in self.columns]
        height = max(map(len, heads))
        for column, head in zip(self.columns, heads, strict=True):
            first, words = column is self.columns[0], self._is_words(column)
            made.add_column(
                "\n" * (height - len(head)) + "\n".join(map(escape, head)),
                justify="left" if words else "right",
                no_wrap=not words,
                overflow="fold",
                style="bold" if first else None,
            )
        lines = zip(*map(self._texts, self.columns), strict=True)
        for heading, rows in self.table.groups():
            if heading:
                made.add_row(f"[italic]{escape(heading)}[/italic]")
            for _ in rows:
                made.add_row(*next(lines))
            made.add_section()
        return made


def _rows(table: Table) -> list[Row]:
    return [row for _, rows in table.groups() for row in rows]


def _parts(table: Table, width: int) -> Iterator[_Part]:
    """The table as the terminal has room for it."""
    columns = table.shown
    needed = [column for column in columns if not column.optional or _tells(table, column)]
    for style in Style:
        kept = needed
        if _Part(table, tuple(kept), style).width > width:
            continue
        for column in columns:
            more = [c for c in columns if c in kept or c.heading == column.heading]
            if column not in kept and _Part(table, tuple(more), style).width <= width:
                kept = more
        yield _Part(table, tuple(kept), style)
        return
    part = _Part(table, tuple(needed[:1]), Style.BELOW)
    for column in needed[1:]:
        more_of_it = _Part(table, (*part.columns, column), Style.BELOW)
        if more_of_it.width > width and len(part.columns) > 1:
            yield part
            more_of_it = _Part(table, (needed[0], column), Style.BELOW)
        part = more_of_it
    yield part


def _tells(table: Table, column: Column) -> bool:
    """Whether an optional column must be seen: something failed."""
    return column.kind == "failures" and any(row.values.get(column.key) for row in _rows(table))


def _folded(heading: str, width: int) -> list[str]:
    """A heading in lines no wider than the column's values, broken behind blanks and underscores."""
    lines = [""]
    for word in re.findall(r"[^_ ]+[_ ]?|[_ ]", heading):
        if lines[-1] and cell_len((lines[-1] + word).rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def _notes(table: Table, parts: Sequence[_Part]) -> Iterator[str]:
    """The table's notes but for those about what is not shown, and the columns' remarks."""
    columns = {column.key: column for part in parts for column in part.columns}
    shown = set(columns)
    if any(part.style is not Style.NONE for part in parts):
        shown.add(INTERVAL)
    for note in table.notes:
        if not isinstance(note, Note) or not note.about or shown & note.about:
            yield note
    for column in columns.values():
        if column.remark:
            yield f"{column.heading}: {column.remark}."
