"""A table as CSV, Markdown, LaTeX, and in the terminal.

Names, answers and errors may be any text that records hold. Each form shows them as they are, and keeps
the program that shows them from taking them for a formula, markup or an escape sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import rich.console
import rich.table
from pandas.api.types import is_numeric_dtype
from rich import box
from rich.markup import escape as escape_markup
from rich.measure import Measurement
from rich.padding import Padding

from kvbench.errors import printable, printable_lines
from kvbench.records.read import StoreError
from kvbench.records.store import replace_file
from kvbench.report.table import Cell, Column, Table, footer

PAGE_MARK = " · kvbench</title>"
"""How the title of every page ends (templates/base.html.j2), by which kvbench knows its own
(`write_text`)."""
NARROW, GAP = 46, 2.5
"""Characters of a row that one column of a paper holds, and how many the space of a table's column takes
(LaTeX's article in ten points: 229 pt, 5 pt a character, 12 pt a column)."""
_HEADING = 12
"""Characters in a line of a heading in the terminal."""
_FORMULA = tuple("=+-@\t\n＝＋－＠")
"""Characters that a formula begins with in some spreadsheet."""
_MATH = {
    "Δ": "Delta",
    "±": "pm",
    "σ": "sigma",
    "∞": "infty",
    "×": "times",
    "≤": "leq",
    "≈": "approx",
    "†": "dagger",
    "▲": "triangle",
    "↓": "downarrow",
}
_LATEX = (
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {character: f"$\\{name}$" for character, name in _MATH.items()}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": "$<$", ">": "$>$", "|": "$|$", "[": "{[}", "−": "$-$", "–": "--", "…": r"\dots{}"}
)
"""How LaTeX writes characters that mean something to it, or that its fonts lack."""


def write_text(path: Path, text: str, mark: str = "") -> Path:
    """Replace the file in one step, so that an open page is never half a page. What has no UTF-8 form
    (a folder may be named in other bytes) becomes a question mark.

    Args:
        mark: a text that every such file of kvbench's holds, for a name that a user's own file may have.
    """
    if mark and path.exists() and mark.encode() not in path.read_bytes():
        raise StoreError(f"{path} is not kvbench's and stays as it is; allowed: move or rename it")
    replace_file(path, text.encode("utf-8", errors="replace"))
    return path


def csv(frame: pd.DataFrame, comments: Sequence[str] = ()) -> str:
    """A frame's rows, numbers in six digits. A text that a spreadsheet would take for a formula has an
    apostrophe before it; a number stays one.

    Args:
        comments: stand above the rows, each behind a # (``pandas.read_csv(..., comment="#")``).
    """
    safe = frame.rename(columns=_no_formula).apply(
        lambda column: column if is_numeric_dtype(column) else column.map(_no_formula)
    )
    above = "".join(f"# {printable(line)}\n" for line in comments)
    return above + str(safe.to_csv(index=False, float_format="%.6g"))


def _no_formula(cell: Any) -> Any:
    if not isinstance(cell, str):
        return cell
    cell = printable_lines(cell)  # \r would end the row, quoted or not
    if not cell.startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def markdown(table: Table) -> str:
    """A pipe table under its title, a line for each row group, notes below."""
    lines = [[plain(column.name) for column in table.columns]]
    lines.append(["---" if i == 0 else "---:" for i in range(len(table.columns))])
    for heading, rows in table.groups():
        if heading:
            lines.append([f"*{plain(heading)}*", *[""] * (len(table.columns) - 1)])
        for row in rows:
            cells = [table.cell(row, column) for column in table.columns]
            lines.append([f"**{plain(c.text)}**" if c.is_bold else plain(c.text) for c in cells])
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    notes = "".join(f"- {plain(line)}\n" for line in footer(table.notes))
    return f"### {plain(table.title)}\n\n{body}\n\n{notes}"


def plain(text: str) -> str:
    """Text that Markdown shows as it is and in its cell: no links or images, and no HTML where a viewer
    lets that through."""
    text = printable(text.replace("\n", " ")).replace("\\", "\\\\").replace("|", "\\|")
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", re.sub(r"\](?=[(\[:])", r"]\\", text))


def latex(table: Table) -> str:
    """A table environment with booktabs rules, its notes in the caption. One that is wider than
    `NARROW` spans both columns of a paper and is made as small as that takes. A paper that inputs it
    needs ``\\usepackage{booktabs,graphicx}``."""
    rows = [(heading, row) for heading, rows in table.groups() for row in rows]
    has_groups = any(heading for heading, _ in rows)
    names = [column.name for column in table.columns]
    if has_groups:
        names.insert(0, "")
    texts, bold = [], []
    widths = [len(name) for name in names]
    for heading, row in rows:
        cells = [table.cell(row, column) for column in table.columns]
        if has_groups:
            cells.insert(0, Cell(heading))
        texts.append([_escape(cell.text) for cell in cells])
        widths = [max(w, len(cell.text)) for w, cell in zip(widths, cells, strict=True)]
        bold.append(["textbf:--rwrap;" if cell.is_bold else "" for cell in cells])
    frame = pd.DataFrame(texts, columns=range(len(names)))
    # pandas formats these: braces of a name would be fields.
    heads = [_escape(name).replace("{", "{{").replace("}", "}}") for name in names]
    style = frame.style.hide(axis="index").relabel_index(heads, axis=1)
    style = style.apply(lambda _: pd.DataFrame(bold, frame.index, frame.columns), axis=None)
    label = "tab:" + re.sub(r"[^A-Za-z0-9.:-]", "-", table.name)
    columns_of_text = 2 if has_groups else 1
    form = "l" * columns_of_text + "r" * (len(names) - columns_of_text)
    caption = _escape(" ".join([f"{table.title}.", *table.notes]))
    look: dict[str, Any] = {"caption": caption, "label": label, "column_format": form}
    if sum(widths) + GAP * len(widths) <= NARROW:
        return str(style.to_latex(hrules=True, **look))
    text = str(style.to_latex(hrules=True, environment="table*", **look))
    begin, end = "\\begin{tabular}", "\\end{tabular}"
    text = text.replace(begin, f"\\resizebox{{\\textwidth}}{{!}}{{%\n{begin}", 1)
    return text.replace(end, f"{end}}}", 1)


def _escape(text: str) -> str:
    return "".join(_LATEX.get(c, c if " " <= c <= "~" else "") for c in printable(text))


def terminal(tables: Iterable[Table], console: rich.console.Console | None = None) -> None:
    """Print tables one below the other, each below what it says, then their notes, each once.

    A table that is too wide lacks columns at its end that have no intervals, or else the intervals, but
    for the last column's where there is room, or at last any columns at its end; a note says so.
    """
    out = console or rich.console.Console()
    notes: dict[str, None] = {}
    hidden: dict[str, None] = {}
    for table in tables:
        columns = _fitting(table, out)
        for line in table.answer:
            out.print(escape(line), highlight=False)
        out.print(_rich_table(table, columns))
        notes |= dict.fromkeys(table.notes_on(columns))
        shown = {column.key: column.bounds for column in columns}
        hidden |= {column.name: None for column in table.columns if column.key not in shown}
        if any(column.bounds and not shown.get(column.key, True) for column in table.columns):
            hidden["intervals"] = None
    if hidden:
        notes[f"On a wider terminal also: {', '.join(hidden)}."] = None
    for line in footer(notes):
        out.print(Padding(escape(line), (0, 0, 0, 2)), style="dim", highlight=False)


def _fitting(table: Table, console: rich.console.Console) -> list[Column]:
    full = list(table.columns)
    count = len(full)
    while count > 2 and f"{full[count - 1].key}_low" not in table.frame:
        count -= 1
    bare = [replace(column, bounds=False) for column in full]
    choices = [full[:n] for n in range(len(full), count - 1, -1)]
    choices.append([*bare[:-1], *full[-1:]])
    choices += [bare[:n] for n in range(len(full), 1, -1)]
    unlimited = console.options.update(width=10_000)
    for columns in choices:
        made = _rich_table(table, columns)
        if Measurement.get(console, unlimited, made).maximum <= console.width:
            return columns
    return choices[-1]


def _rich_table(table: Table, columns: Sequence[Column]) -> rich.table.Table:
    look = {"title_justify": "left", "title_style": "italic", "box": box.SIMPLE_HEAD}
    made = rich.table.Table(title=escape(table.title), pad_edge=False, **look)  # type: ignore[arg-type]
    for i, column in enumerate(columns):
        name = _broken(escape(column.name))
        made.add_column(name, justify="right" if i else "left", overflow="fold", vertical="bottom")
    for heading, rows in table.groups():
        if heading:
            made.add_row(f"[italic]{escape(heading)}[/italic]".replace(", ", ",\n"))
        for row in rows:
            cells = [table.cell(row, column) for column in columns]
            texts = (
                f"[bold]{escape(c.text)}[/bold]" if c.is_bold else escape(c.text) for c in cells
            )
            made.add_row(*texts)
        made.add_section()
    return made


def _broken(name: str) -> str:
    """A heading in lines of about `_HEADING` characters, broken at blanks and behind underscores."""
    lines = [""]
    for part in re.findall(r"[^ _]*_|[^ _]* ?", name):
        if len(lines[-1] + part.rstrip()) > _HEADING and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def escape(text: str) -> str:
    """Text that neither rich nor the terminal takes for markup or an escape sequence."""
    return escape_markup(printable(text))
