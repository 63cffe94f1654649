"""Tables on a terminal, in characters that are all to be seen."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from kvbench.errors import printable
from kvbench.report.views import View


def print_views(views: Iterable[View], console: Console | None = None) -> None:
    """Print tables, with their notes once at the end."""
    out = console or Console(width=None if sys.stdout.isatty() else 140)
    notes: dict[str, None] = {}
    for view in views:
        out.print(rich_table(view))
        notes |= dict.fromkeys(view.notes)
    for note in notes:
        out.print(f"  {escape(note)}", style="dim", highlight=False)


def rich_table(view: View) -> Table:
    """One view as a rich table: intervals on their own line, so that it fits a terminal."""
    table = Table(
        title=escape(view.title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for index, column in enumerate(view.columns):
        table.add_column(
            escape(column),
            justify="right" if index and index not in view.texts else "left",
            no_wrap=index == 0,
            style="bold" if index == 0 else None,
        )
    for heading, block in view.blocks:
        if heading:
            table.add_row(f"[italic]{escape(heading)}[/italic]")
        for i in block:
            cells = (_cell(t, (i, j) in view.bold) for j, t in enumerate(view.rows[i][1:], 1))
            table.add_row(escape(view.rows[i][0]), *cells)
        table.add_section()
    return table


def escape(text: str) -> str:
    """Text that neither rich nor the terminal takes for anything else."""
    return escape_markup(printable(text))


def _cell(text: str, bold: bool) -> str:
    """Rich markup of a cell: its interval on a line of its own."""
    value, bracket, rest = text.partition(" [")
    interval = f"\n{escape(bracket.lstrip() + rest)}" if bracket else ""
    return (f"[bold]{escape(value)}[/bold]" if bold else escape(value)) + interval
