"""A view as Markdown or as LaTeX (booktabs)."""

from __future__ import annotations

from kvbench.report.views import INCOMPLETE, MISSING, WORSE, View

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
    "−": "$-$",
    "Δ": r"$\Delta$",
    MISSING: "--",
    INCOMPLETE: r"$^\dagger$",
    WORSE: r"$\downarrow$",
}


def markdown(view: View) -> str:
    """A pipe table under its title, notes below."""
    widths = [max(map(len, column)) for column in zip(view.columns, *view.rows, strict=True)]

    def line(cells: tuple[str, ...]) -> str:
        padded = (
            cell.replace("|", "\\|").ljust(width) for cell, width in zip(cells, widths, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = "|".join([":" + "-" * (widths[0] + 1), *("-" * (w + 1) + ":" for w in widths[1:])])
    notes = "".join(f"- {note}\n" for note in view.notes)
    rows = "\n".join(map(line, view.rows))
    return f"### {view.title}\n\n{line(view.columns)}\n|{rule}|\n{rows}\n\n{notes}"


def latex(view: View) -> str:
    """A table environment with booktabs rules; needs ``\\usepackage{booktabs}``."""
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        r"\caption{" + _escape(f"{view.title}. {' '.join(view.notes)}") + "}",
        r"\label{tab:" + view.name.replace("_", "-") + "}",
        r"\begin{tabular}{l" + "r" * (len(view.columns) - 1) + "}",
        r"\toprule",
        " & ".join(map(_escape, view.columns)) + r" \\",
        r"\midrule",
        *(" & ".join(map(_escape, row)) + r" \\" for row in view.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
