"""A table: a frame with formats. `kvbench.report.render` shows it in every form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

MISSING = "–"
MARKS = {"incomplete": "†", "tied": "≈", "better": "▲", "beyond": "‡", "untold": "?"}
"""The sign of a mark behind a value; "best" and "shown" set it in bold, others are for files."""
LEGEND = {
    "best": "Bold: the best mean of the compressed methods at its rate.",
    "tied": "≈: not shown to differ from the best.",
    "better": "▲: shown better than the bold one, over the examples that both scored.",
    "worse": "A compressed method without a mark is shown worse than the best.",
    "few": "Of fewer than ten prompts nothing is said about differences.",
    "incomplete": "† some examples failed or are missing: the mean is over the others, a difference over"
    " the examples that both scored.",
    "beyond": "‡ the published number is further from ours than honest runs differ.",
    "untold": "? cannot be told: fewer than 50 examples, or nobody measured how many answers an honest"
    " rerun changes (paper_table.rescored).",
}
INTERVAL = "[low, high] is a 95 % interval over examples as a sample of all such examples."
TOGETHER = (
    "Differences at one rate, between compressed methods and to the exact cache, are one family: in 95"
    " of 100 tables all their intervals hold the truth. A difference is shown where its interval"
    " excludes 0, which is where p, adjusted for all pairs of the rate, is below 0.05."
)


@dataclass(frozen=True)
class Column:
    """A column that readers see.

    Attributes:
        key: of the frame; its interval is in ``<key>_low`` and ``<key>_high``, its marks (words) in
            ``<key>_mark``, where the frame has them.
        heading: by default the key. text: the format of a value. bounds: whether its interval is shown.
    """

    key: str
    heading: str = ""
    text: Callable[[Any], str] = str
    bounds: bool = True

    @property
    def name(self) -> str:
        """The heading, or the key."""
        return self.heading or self.key


@dataclass(frozen=True)
class Table:
    """A frame with formats.

    Attributes:
        name: file name stem, unique within an experiment.
        frame: a row for each row; a column ``group`` holds headings of row groups, ``method`` the method
            whose colour a row has.
        data: what files hold as numbers; None: nothing.
    """

    name: str
    title: str
    frame: pd.DataFrame
    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()
    data: pd.DataFrame | None = None

    def cell(self, row: Mapping[str, Any], column: Column) -> tuple[str, bool]:
        """A value as readers see it, with interval and marks, and whether it is bold."""
        value = row.get(column.key)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return (MISSING if f"{column.key}_low" in row else ""), False
        low, high = row.get(f"{column.key}_low", math.nan), row.get(f"{column.key}_high", math.nan)
        text = column.text(value)
        if column.bounds and low == low and low is not None:
            text += f" [{column.text(low)}, {column.text(high)}]"
        marks = str(row.get(f"{column.key}_mark") or "").split()
        signs = "".join(MARKS.get(mark, "") for mark in marks)
        return f"{text} {signs}".strip(), "best" in marks or "shown" in marks

    def groups(self) -> list[tuple[str, list[dict[str, Any]]]]:
        """Row groups in order of appearance, each with its heading and rows."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in self.frame.to_dict("records"):
            found.setdefault(str(row.get("group", "")), []).append(
                {str(k): v for k, v in row.items()}
            )
        return list(found.items())


def wide(rows: pd.DataFrame, index: Sequence[str], columns: str) -> pd.DataFrame:
    """Of a tidy frame one row per `index`: for each value of `columns` its mean, bounds and marks."""
    rows = rows.set_index(rows.groupby(list(index), sort=False, dropna=False).ngroup())
    parts = [rows.loc[~rows.index.duplicated(), list(index)]]
    for name, part in rows.groupby(columns, sort=False):
        named = {"mean": name, "low": f"{name}_low", "high": f"{name}_high", "mark": f"{name}_mark"}
        parts.append(part[[*named]].rename(columns=named))
    return pd.concat(parts, axis=1)


def legend(frame: pd.DataFrame) -> list[str]:
    """The meaning of the marks in a frame."""
    marks = [column for column in frame if str(column).endswith("mark")]
    words = set(" ".join(frame[marks].fillna("").astype(str).to_numpy().ravel()).split())
    return [text for word, text in LEGEND.items() if word in words]


def in_percent(
    frame: pd.DataFrame, columns: Sequence[str] = ("mean", "low", "high")
) -> pd.DataFrame:
    """Rows whose unit is "fraction" as per cent, as files hold them."""
    share = frame["unit"].eq("fraction")
    changed = {name: frame[name].where(~share, 100 * frame[name]) for name in columns}
    return frame.assign(**changed, unit=frame["unit"].where(~share, "%"))


def score_format(unit: str, *, signed: bool = False) -> Callable[[float], str]:
    """The format of a score of this unit."""
    return partial(value_text, unit=unit, signed=signed)


def value_text(value: float, unit: str, *, signed: bool = False) -> str:
    """Fractions as per cent with one decimal, anything else with three significant digits."""
    if math.isnan(value):
        return MISSING
    text = f"{100 * value:.1f}" if unit == "fraction" else number(value)
    text = text.lstrip("-") if float(text) == 0 else text
    return f"+{text}" if signed and float(text) > 0 else text.replace("-", "−")


def unit_text(unit: str) -> str:
    """What follows "score" in a heading."""
    return ", %" if unit == "fraction" else f", {unit.replace('_', ' ')}"


def number(value: float) -> str:
    """Three significant digits, no exponent within reason."""
    if math.isnan(value):
        return MISSING
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = 2 - math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return f"{value:.{max(0, digits)}f}"


def whole(value: float) -> str:
    """A count; infinite where there is nothing to find."""
    return "∞" if math.isinf(value) else f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{number(value)} {unit}"
        value /= 1024
    return f"{number(value)} GiB"


def p_text(p: float) -> str:
    """A p-value to two digits."""
    return "<0.001" if p < 0.001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"
