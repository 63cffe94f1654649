"""A view as Markdown or as LaTeX (booktabs), a frame as CSV. Names, answers and errors are whatever the
records hold: in each form they are shown, and mean nothing to the program that shows them."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import pandas as pd

from kvbench.errors import printable
from kvbench.report.views import INCOMPLETE, MISSING, OUTSIDE, TIED, View

_NARROW, _UPRIGHT = 7, 10
"""LaTeX tables with more columns are scaled to the width of the page; with still more, their heads stand
upright."""

_MARKS = f" {INCOMPLETE}{TIED}{OUTSIDE}"

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
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


def csv(frame: pd.DataFrame) -> str:
    """The frame's rows, numbers in six digits. A text that a spreadsheet would take for a formula has an
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


def markdown(view: View) -> str:
    """A pipe table under its title, a line for each row group, notes below."""
    rows: list[tuple[str, ...]] = []
    for heading, block in view.blocks:
        if heading:
            rows.append((f"*{plain(heading)}*", *[""] * (len(view.columns) - 1)))
        for i in block:
            texts = enumerate(map(plain, view.rows[i]))
            rows.append(tuple(_starred(t) if (i, j) in view.bold else t for j, t in texts))
    columns = tuple(map(plain, view.columns))
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    dashes = zip(_left(view), widths, strict=True)
    rule = "|".join(f":{'-' * (w + 1)}" if left else f"{'-' * (w + 1)}:" for left, w in dashes)
    notes = "".join(f"- {plain(note)}\n" for note in view.notes)
    body = "\n".join(map(line, rows))
    return f"### {plain(view.title)}\n\n{line(columns)}\n|{rule}|\n{body}\n\n{notes}"


def latex(view: View) -> str:
    """A table environment with booktabs rules, the notes as small print below it.

    Needs ``\\usepackage{booktabs}``, and ``graphicx`` where the table is scaled to the page's width.
    """
    wide = len(view.columns) > _NARROW
    body = [
        r"\begin{tabular}{" + "".join("l" if left else "r" for left in _left(view)) + "}",
        r"\toprule",
        " & ".join(_heads(view)) + r" \\",
    ]
    for heading, block in view.blocks:
        body.append(r"\midrule")
        if heading:
            span = rf"\multicolumn{{{len(view.columns)}}}{{l}}"
            body.append(rf"{span}{{\emph{{{_escape(heading)}}}}} \\")
        body += [
            " & ".join(_cell(text, (i, j) in view.bold) for j, text in enumerate(view.rows[i]))
            + r" \\"
            for i in block
        ]
    body += [r"\bottomrule", r"\end{tabular}"]
    if wide:
        narrow = r"\setlength{\tabcolsep}{5pt}" if len(view.columns) > _UPRIGHT else ""
        body = [narrow + r"\resizebox{\textwidth}{!}{%", *body[:-1], body[-1] + "}"]
    notes = " ".join(map(_escape, view.notes))
    star = "*" if wide else ""
    lines = [
        r"% needs \usepackage{booktabs}" + (r" and \usepackage{graphicx}" if wide else ""),
        rf"\begin{{table{star}}}",
        r"\centering",
        rf"\caption{{{_escape(view.title)}.}}",
        r"\label{tab:" + re.sub(r"[^\w.:-]", "-", view.name).replace("_", "-") + "}",
        *body,
        *([r"\par\smallskip", rf"\parbox{{\linewidth}}{{\footnotesize {notes}}}"] if notes else []),
        rf"\end{{table{star}}}",
    ]
    return "\n".join(lines) + "\n"


def _left(view: View) -> list[bool]:
    """Which columns are text, and so aligned to the left."""
    return [i == 0 or i in view.texts for i in range(len(view.columns))]


def _heads(view: View) -> list[str]:
    heads = list(map(_escape, view.columns))
    if len(heads) <= _UPRIGHT:
        return heads
    return [heads[0], *(rf"\rotatebox{{90}}{{{head}}}" if head else "" for head in heads[1:])]


def plain(text: str) -> str:
    """Text that Markdown shows as it is and in its cell: no links or images, and no HTML where a viewer
    lets that through."""
    text = printable(text.replace("\n", " ")).replace("\\", "\\\\").replace("|", "\\|")
    return _TAG.sub("&lt;", _LINK.sub(r"]\\", text))


def _starred(text: str) -> str:
    value, bracket, rest = text.partition(" [")
    return f"**{value}**{bracket}{rest}"


def _cell(text: str, bold: bool) -> str:
    """A cell; of a value with its interval only the value in bold, and marks beyond the right edge."""
    marks = text[len(text.rstrip(_MARKS)) :].replace(" ", "")
    value, bracket, rest = text[: len(text.rstrip(_MARKS))].partition(" [")
    shown = rf"\textbf{{{_escape(value)}}}" if bold else _escape(value)
    if shown.startswith("["):  # else an argument of the line break before it
        shown = f"{{{shown[0]}}}{shown[1:]}"
    return shown + _escape(bracket + rest) + (rf"\rlap{{{_escape(marks)}}}" if marks else "")


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
