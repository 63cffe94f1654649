"""A table as CSV, Markdown and LaTeX (booktabs). Names, answers and errors are whatever
the records hold: in each form they are shown, and mean nothing to the program that shows them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from kvbench.errors import printable
from kvbench.report.table import INCOMPLETE, KINDS, MISSING, OUTSIDE, TIED, CellText, Column, Table

_NARROW, _UPRIGHT = 7, 10
"""LaTeX tables with more columns are scaled to the width of the page; with still more, their heads stand
upright."""

_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"${character}$" for character in "<>|"},
    "−": "$-$",
    "Δ": r"$\Delta$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "σ": r"$\sigma$",
    "≤": r"$\le$",
    "∞": r"$\infty$",
    "…": r"\dots{}",
    "·": r"$\cdot$",
    MISSING: "--",
    INCOMPLETE: r"$^\dagger$",
    TIED: r"$^\approx$",
    OUTSIDE: r"$^\ddagger$",
}


def csv(table: Table) -> str:
    """What the table's rows hold as numbers (its long form where it has one), in six digits."""
    return frame_csv(pd.DataFrame(table.records()))


def frame_csv(frame: pd.DataFrame) -> str:
    """A frame's rows, numbers in six digits. A text that a spreadsheet would take for a formula has an
    apostrophe before it; a number stays one."""
    safe = frame.rename(columns=_no_formula)
    for place, (_, column) in enumerate(frame.items()):
        if not (pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column)):
            texts = [_no_formula(cell) for cell in column]
            safe.isetitem(place, pd.Series(texts, dtype=object).to_numpy())
    return str(safe.to_csv(index=False, float_format="%.6g"))


_FORMULA = tuple("=+-@\t\n＝＋－＠")
"""What a formula begins with, in some spreadsheet."""


def _no_formula(cell: Any) -> Any:
    if not isinstance(cell, str):
        return cell
    cell = cell.replace("\r", "\\r")  # it would end the row, quoted or not
    if not cell.startswith(_FORMULA):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def markdown(table: Table) -> str:
    """A pipe table under its title, a line for each row group, notes below."""
    columns = table.shown
    lines: list[list[str]] = []
    for heading, rows in table.groups():
        if heading:
            lines.append([f"*{plain(heading)}*", *[""] * (len(columns) - 1)])
        for row in rows:
            lines.append([_starred(table.cell(row, column)) for column in columns])
    heads = [plain(column.heading or "") for column in columns]
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    dashes = zip(_left(columns), widths, strict=True)
    rule = "|".join(f":{'-' * (w + 1)}" if left else f"{'-' * (w + 1)}:" for left, w in dashes)
    notes = "".join(f"- {plain(note)}\n" for note in table.notes)
    body = "\n".join(map(line, lines))
    return f"### {plain(table.title)}\n\n{line(heads)}\n|{rule}|\n{body}\n\n{notes}"


def latex(table: Table) -> str:
    """A table environment with booktabs rules, the notes as small print below it.

    Needs ``\\usepackage{booktabs}``, and ``graphicx`` where the table is scaled to the page's width.
    """
    columns = table.shown
    wide = len(columns) > _NARROW
    body = [
        r"\begin{tabular}{" + "".join("l" if left else "r" for left in _left(columns)) + "}",
        r"\toprule",
        " & ".join(_heads(columns)) + r" \\",
    ]
    for heading, rows in table.groups():
        body.append(r"\midrule")
        if heading:
            span = rf"\multicolumn{{{len(columns)}}}{{l}}"
            body.append(rf"{span}{{\emph{{{_escape(heading)}}}}} \\")
        body += [" & ".join(_cell(table.cell(row, c)) for c in columns) + r" \\" for row in rows]
    body += [r"\bottomrule", r"\end{tabular}"]
    if wide:
        narrow = r"\setlength{\tabcolsep}{5pt}" if len(columns) > _UPRIGHT else ""
        body = [narrow + r"\resizebox{\textwidth}{!}{%", *body[:-1], body[-1] + "}"]
    notes = " ".join(map(_escape, table.notes))
    star = "*" if wide else ""
    lines = [
        r"% needs \usepackage{booktabs}" + (r" and \usepackage{graphicx}" if wide else ""),
        rf"\begin{{table{star}}}",
        r"\centering",
        rf"\caption{{{_escape(table.title)}.}}",
        r"\label{tab:" + re.sub(r"[^\w.:-]", "-", table.name).replace("_", "-") + "}",
        *body,
        *([r"\par\smallskip", rf"\parbox{{\linewidth}}{{\footnotesize {notes}}}"] if notes else []),
        rf"\end{{table{star}}}",
    ]
    return "\n".join(lines) + "\n"


def _left(columns: Sequence[Column]) -> list[bool]:
    """Which columns are words, and so aligned to the left."""
    return [i == 0 or KINDS[column.kind].left for i, column in enumerate(columns)]


def _heads(columns: Sequence[Column]) -> list[str]:
    heads = [_escape(column.heading or "") for column in columns]
    if len(heads) <= _UPRIGHT:
        return heads
    return [heads[0], *(rf"\rotatebox{{90}}{{{head}}}" if head else "" for head in heads[1:])]


def plain(text: str) -> str:
    """Text that Markdown shows as it is and in its cell: no links or images, and no HTML where a viewer
    lets that through."""
    text = printable(text.replace("\n", " ")).replace("\\", "\\\\").replace("|", "\\|")
    return _TAG.sub("&lt;", _LINK.sub(r"]\\", text))


def _starred(cell: CellText) -> str:
    text = plain(cell.text)
    return str(
        replace(cell, text=f"**{text}**" if cell.bold else text, interval=plain(cell.interval))
    )


def _cell(cell: CellText) -> str:
    """A cell; of a value with its interval only the value in bold, and marks beyond the right edge."""
    shown = rf"\textbf{{{_escape(cell.text)}}}" if cell.bold else _escape(cell.text)
    if shown.startswith("["):  # else an argument of the line break before it
        shown = f"{{{shown[0]}}}{shown[1:]}"
    marks = _escape(cell.marks.replace(" ", ""))
    interval = _escape(f" {cell.interval}" if cell.interval else "")
    return shown + interval + (rf"\rlap{{{marks}}}" if marks else "")


_TAG = re.compile(r"<(?=[A-Za-z/!?])")
"""What begins HTML in Markdown; "<0.001" does not."""

_LINK = re.compile(r"\](?=[(\[:])")
"""Where a link's or an image's text ends and its address begins; an interval's bracket does not."""


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character) or _plain(character) for character in text)


def _plain(character: str) -> str:
    """What LaTeX's default fonts have; an accent is dropped, anything else shown by its number."""
    if character in "\n\r\t":
        return " "
    if " " <= character <= "~":
        return character
    base = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    seen = "".join(_LATEX.get(c, c) for c in base if c.isprintable())
    return seen or rf"\texttt{{U+{ord(character):04X}}}"
