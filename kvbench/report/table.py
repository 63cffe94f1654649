"""A table: a frame with the format of each column, and the notes below it.

`kvbench.report.render` writes it as text, CSV, Markdown and LaTeX, `kvbench.report.page` as HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvbench.report.runs import words

MISSING = "–"
MARKS = {"incomplete": "†", "tied": "≈", "better": "▲"}
"""The sign of a mark behind a value; "best" and "shown" set it in bold, others are for files."""
LIMITS = {"at_most": "≤", "more_than": ">"}
"""The sign of a mark before a value."""
LEGEND = {
    "best": "Bold: the best mean of the compressed methods at its rate.",
    "tied": "≈: not significantly different from the best (adjusted p of 0.05 or more).",
    "better": "▲: significantly better than the best, over the examples that both scored.",
    "worse": "No mark: significantly worse than the best (adjusted p below 0.05).",
    "average": "Averages alone are compared so, not the columns of single datasets.",
    "few": "Differences are not tested where there are fewer than ten prompts.",
    "incomplete": "†: some examples failed or are missing; the mean is over the others.",
    "at_most": "≤: at the lowest rate that was run, too.",
    "more_than": ">: not within these rates.",
}
"""Each mark's meaning, in a sentence; "average" and "few" are no marks, but said of them."""
INTERVAL = "[low, high]: 95 % confidence interval over prompts, of each number by itself."
TESTED = (
    "p: exact McNemar test of right and wrong answers, else paired t test; adjusted by the discrete Holm"
    " method for all pairs at one rate, as marks are."
)
DIFFERENCE = "Δ exact: paired difference to the exact cache, over the examples that both scored."
RATIOS = (
    "ratio: of geometric means, paired (values that are never negative are compared by ratios)."
)
TIMES = "× exact: ratio to the exact cache's value, of geometric means, paired."
ABOUT_INTERVALS = (INTERVAL, TESTED, DIFFERENCE, RATIOS, TIMES)
ENOUGH = (
    "95 % at ratio: the bytes, over the exact cache's, from which on a method keeps 95 % of its score;"
    " between the rates that were run by a straight line. 0 or ∞ in its interval: beyond these rates."
)
LOWER = "↓: lower is better."


@dataclass(frozen=True)
class Column:
    """A column that readers see, under its heading or the key.

    ``frame[key]`` has the values. Where the frame has them, ``<key>_low`` and ``<key>_high`` hold the
    interval, which is shown if `bounds`, and ``<key>_mark`` the marks, words separated by blanks.
    """

    key: str
    heading: str = ""
    text: Callable[[Any], str] = str
    bounds: bool = True

    @property
    def name(self) -> str:
        return self.heading or self.key


METHOD = Column("variant", "method")


def with_values(frame: pd.DataFrame, columns: Sequence[Column]) -> tuple[Column, ...]:
    filled = (frame.notna() & ~frame.isin([""])).any()
    names = {str(name) for name in frame.columns[filled.to_numpy()]}
    return tuple(column for column in columns if column.key in names)


@dataclass(frozen=True)
class Cell:
    """A value as readers see it: the written value, "[low, high]" and the signs of its marks. By the
    number rows are sorted; it is None for text."""

    value: str
    interval: str = ""
    signs: str = ""
    is_bold: bool = False
    number: float | None = None

    @property
    def text(self) -> str:
        return " ".join(filter(None, (self.value, self.interval, self.signs)))


@dataclass(frozen=True)
class Table:
    """A frame with the columns that readers see, their formats, and notes.

    Attributes:
        name: file name stem, unique within an experiment.
        frame: the rows. A column ``group`` holds the headings of row groups, ``method`` the method
            whose colour a row has.
        notes: sentences that explain what stands in the table (`footer` puts them below it).
        answer: sentences that say what the table shows, above it in the terminal and on the page.
        data: the numbers that the table's CSV file holds; None: there is no such file.
        kind: "overview" of a table of one model on all tasks.
    """

    name: str
    title: str
    frame: pd.DataFrame
    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()
    data: pd.DataFrame | None = None
    kind: str = ""
    answer: tuple[str, ...] = ()

    def cell(self, row: Mapping[str, Any], column: Column) -> Cell:
        value = row.get(column.key)
        if _is_missing(value):
            return Cell(MISSING if f"{column.key}_low" in row else "")
        low, high = row.get(f"{column.key}_low"), row.get(f"{column.key}_high")
        interval = ""
        if column.bounds and not _is_missing(low):
            interval = f"[{column.text(low)}, {column.text(high)}]"
        marks = str(row.get(f"{column.key}_mark") or "").split()
        signs = "".join(MARKS.get(mark, "") for mark in marks)
        number_of: float | None = None
        if isinstance(value, int | float) and not isinstance(value, bool):
            number_of = float(value)
        limit = "".join(LIMITS.get(mark, "") for mark in marks)
        return Cell(
            limit + column.text(value),
            interval,
            signs,
            is_bold="best" in marks or "shown" in marks,
            number=number_of,
        )

    def groups(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Row groups in order of appearance, each with its heading and rows."""
        rows_of: dict[str, list[dict[str, Any]]] = {}
        for row in self.frame.to_dict("records"):
            heading = str(row.get("group", ""))
            rows_of.setdefault(heading, []).append({str(key): row[key] for key in row})
        return list(rows_of.items())

    def notes_on(self, columns: Sequence[Column]) -> list[str]:
        """The notes that apply where these columns alone are shown, with intervals where they say so."""
        keys = {column.key for column in columns}
        explained = legend(self.frame, columns)
        rows = self.frame.to_dict("records")
        has_interval = any(self.cell(row, c).interval for row in rows for c in columns)  # type: ignore[arg-type]
        about = {INTERVAL: has_interval}
        about |= {DIFFERENCE: "difference" in keys, TIMES: "times" in keys}
        of_marks = LEGEND.keys() - {"average", "few"}
        about |= {LEGEND[word]: LEGEND[word] in explained for word in of_marks}
        return [note for note in self.notes if about.get(note, True)]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def footer(notes: Iterable[str]) -> list[str]:
    """Notes in at most three lines: intervals and differences, then marks, then everything else."""
    each = list(dict.fromkeys(notes))
    about = [note for note in each if note in ABOUT_INTERVALS]
    marks = [note for note in each if note in LEGEND.values()]
    others = [note for note in each if note not in (*about, *marks)]
    return [" ".join(line) for line in (about, marks, others) if line]


def wide(
    rows: pd.DataFrame,
    index: Sequence[str],
    columns: str,
    names: Sequence[str] = (),
    *,
    marks: bool = True,
) -> pd.DataFrame:
    """A tidy frame with one row for each `index`: for each value of `columns`, and for these `names`
    although no row has them, its mean, bounds and, if wanted, marks."""
    rows = rows.set_index(rows.groupby(list(index), sort=False, dropna=False).ngroup())
    made = [rows.loc[~rows.index.duplicated(), list(index)]]
    parts: dict[Any, pd.DataFrame] = dict.fromkeys(names, rows[:0])
    parts |= dict(list(rows.groupby(columns, sort=False)))
    ends = ("low", "high", "mark") if marks else ("low", "high")
    for name, part in parts.items():
        named = {"mean": name} | {end: f"{name}_{end}" for end in ends}
        made.append(part[[*named]].rename(columns=named))
    return pd.concat(made, axis=1)


def legend(frame: pd.DataFrame, columns: Sequence[Column]) -> list[str]:
    marks = [name for column in columns if (name := f"{column.key}_mark") in frame]
    present = set(" ".join(frame[marks].fillna("").astype(str).to_numpy().ravel()).split())
    return [text for word, text in LEGEND.items() if word in present]


def in_percent(
    frame: pd.DataFrame, columns: Sequence[str] = ("mean", "low", "high")
) -> pd.DataFrame:
    """Rows whose unit is "fraction" as per cent, as files hold them."""
    share = frame["unit"].eq("fraction")
    changed = {name: frame[name].where(~share, 100 * frame[name]) for name in columns}
    return frame.assign(**changed, unit=frame["unit"].where(~share, "%"))


def score_format(unit: str, *, signed: bool = False) -> Callable[[float], str]:
    """A format of scores: fractions as per cent, and per cent, with one decimal; anything else with
    three significant digits."""
    percent = {"fraction": 100, "%": 1}.get(unit)

    def text_of(value: float) -> str:
        if math.isnan(value):
            return MISSING
        text = f"{percent * value:.1f}" if percent else number(value)
        text = text.lstrip("-") if float(text) == 0 else text
        return f"+{text}" if signed and float(text) > 0 else text.replace("-", "−")

    return text_of


def unit_text(unit: str) -> str:
    """The unit behind "score" in a heading."""
    return ", %" if unit == "fraction" else f", {words(unit)}"


def number(value: float) -> str:
    """Three significant digits, no exponent within reason."""
    if math.isnan(value):
        return MISSING
    if value == 0 or math.isinf(value):
        return "0" if value == 0 else "∞"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = 2 - math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return f"{value:.{max(0, digits)}f}"


def whole(value: float) -> str:
    """A count; infinite where there is nothing to find."""
    return "∞" if math.isinf(value) else f"{value:,.0f}"


ENOUGH_COLUMN = Column("ratio_at_95", "95 % at ratio", number)


def size(value: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{number(value)} {unit}"
        value /= 1024
    return f"{number(value)} GiB"


def p_text(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"
