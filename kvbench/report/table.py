"""One table between every analysis and every form of output.

An analysis returns a `Table`: columns with kinds, rows of values. The kind of a column says what its
values look like to a reader (terminal, Markdown, LaTeX, page) and which numbers they are in a file (CSV,
W&B); no renderer knows where a table comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.report.stats.estimate import Estimate

MISSING = "–"
INCOMPLETE = "†"
TIED = "≈"
OUTSIDE = "‡"
UNPAIRED = "*"
MARKS = {
    INCOMPLETE: "failed or missing examples",
    TIED: "not shown to differ from the best at this rate",
    OUTSIDE: "further from ours than honest runs differ",
    UNPAIRED: "unpaired: too few common examples",
}
"""Marks behind a value, and what each means."""

NOTHING = Estimate(math.nan, math.nan, math.nan)

INTERVAL = "[low, high]"
"""What a note is about that explains intervals."""


class Note(str):
    """A note about some columns (or `INTERVAL`), by their keys: for where one of them is shown."""

    about: frozenset[str]

    def __new__(cls, text: str, *about: str) -> Note:
        note = super().__new__(cls, text)
        note.about = frozenset(about)
        return note


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: its name in files; the bounds of an estimate are ``<key>_low`` and ``<key>_high``.
        heading: what readers see; None: the column is for files only.
        kind: a key of `KINDS`.
        unit: of scores: "fraction" (shown and saved as per cent), or any other.
        bounds: whether readers see the interval of an estimate.
        saved: whether files have the column.
        total: whether it sums up the others; the page shows it first, where a wide table scrolls.
        remark: small print below the heading.
        ascending: the smallest value is the best, and comes first where a reader sorts.
        optional: whether a terminal without room may leave it out.
        of: its value of an item (see `Table.of`); None: the item's attribute, or entry, named `key`.
    """

    key: str
    heading: str | None = None
    kind: str = "text"
    unit: str = ""
    bounds: bool = True
    saved: bool = True
    total: bool = False
    remark: str = ""
    ascending: bool = False
    optional: bool = False
    of: Callable[[Any], Any] | None = None

    def value(self, item: Any) -> Any:
        """What stands in the row of an item."""
        if self.of is not None:
            return self.of(item)
        return item.get(self.key) if isinstance(item, Mapping) else getattr(item, self.key)

    def text(self, value: Any) -> tuple[str, str]:
        """A value as readers see it: the value itself, and its interval (or an empty string)."""
        if value is None:
            return "", ""
        kind = KINDS[self.kind]
        if not isinstance(value, Estimate):
            return kind.text(value, self.unit), ""
        if math.isnan(value.value):
            return MISSING, ""
        main = kind.text(value.value, self.unit)
        if not self.bounds or (math.isnan(value.low) and not kind.dash):
            return main, ""
        bounds = (value.low, value.high)
        inside = (
            MISSING if math.isnan(value.low) else ", ".join(kind.text(b, self.unit) for b in bounds)
        )
        return main, f"[{inside}]"

    def numbers(self, value: Any) -> dict[str, Any]:
        """A value as the fields of a file."""
        kind = KINDS[self.kind]
        if kind.parts:
            both = value if value is not None else (None, None)
            summed = (sum(x.values()) if isinstance(x, Mapping) else x for x in both)
            return dict(zip((part.format(self.key) for part in kind.parts), summed, strict=True))
        factor = 100.0 if kind.scaled and self.unit == "fraction" else 1.0
        if not kind.estimate:
            if isinstance(value, Mapping):
                return {self.key: failures_text(value)}
            return {self.key: value * factor if factor != 1.0 and value is not None else value}
        found = NOTHING if value is None else value
        return {name: x * factor for name, x in found.named(self.key).items()}


@dataclass(frozen=True)
class Row:
    """One row: values by column key; what is absent is empty.

    Attributes:
        marks: by column, signs behind the value. bold: columns whose value is set in bold.
        group: heading of the row group that it is in. method: whose colour it has.
        shown: whether readers see it; files have every row.
        aside: about something else than the rest, and folded on the page.
    """

    values: Mapping[str, Any]
    marks: Mapping[str, str] = field(default_factory=dict)
    bold: frozenset[str] = frozenset()
    group: str = ""
    method: str | None = None
    shown: bool = True
    aside: bool = False


@dataclass(frozen=True)
class CellText:
    """A value as readers see it; see `Column.text`."""

    text: str
    interval: str = ""
    marks: str = ""
    bold: bool = False

    def __str__(self) -> str:
        return " ".join(part for part in (self.text, self.interval, self.marks) if part)


@dataclass(frozen=True)
class Table:
    """Columns, rows, and what to keep in mind.

    Attributes:
        name: file name stem, unique within an experiment.
        notes: what the marks mean, and more.
        long: the same as one row per value, which files hold in its place.
        sortable: whether rows stand for themselves, so that the page may reorder them.
        filed: whether its numbers are written as CSV.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    long: Table | None = None
    sortable: bool = True
    filed: bool = True

    @staticmethod
    def of(
        name: str,
        title: str,
        columns: Iterable[Column],
        items: Iterable[Any],
        notes: Iterable[str] = (),
        row: Callable[[Any], Mapping[str, Any]] = lambda _: {},
        **more: Any,
    ) -> Table:
        """One row for each item, with each column's value of it.

        Args:
            row: further attributes of an item's `Row`. more: those of the table.
        """
        columns = tuple(columns)
        rows = tuple(Row({c.key: c.value(item) for c in columns}, **row(item)) for item in items)
        return Table(name, title, columns, rows, tuple(notes), **more)

    @property
    def shown(self) -> list[Column]:
        """The columns that readers see."""
        return [column for column in self.columns if column.heading is not None]

    @property
    def saved(self) -> bool:
        """Whether there are numbers to write."""
        return self.long is not None or (self.filed and any(c.saved for c in self.columns))

    def only(self, columns: Collection[str]) -> Table:
        """The table with these of its columns alone."""
        return replace(self, columns=tuple(c for c in self.columns if c.key in columns))

    def groups(self) -> Iterator[tuple[str, list[Row]]]:
        """Row groups in order of appearance, each with its heading."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            if row.shown:
                found.setdefault(row.group, []).append(row)
        yield from found.items()

    def cell(self, row: Row, column: Column) -> CellText:
        """One value as readers see it."""
        text, interval = column.text(row.values.get(column.key))
        marks = row.marks.get(column.key, "")
        return CellText(text, interval, marks, column.key in row.bold)

    def records(self) -> list[dict[str, Any]]:
        """One mapping per row, as files have them."""
        if self.long is not None:
            return self.long.records()
        kept = [column for column in self.columns if column.saved]
        return [
            {key: x for c in kept for key, x in c.numbers(row.values.get(c.key)).items()}
            for row in self.rows
        ]


def long_table(lines: Sequence[Mapping[str, Any]], unit: str = "", **kinds: str) -> Table:
    """A row for each line, for files alone; its keys are the columns.

    Args:
        unit: of the scores. kinds: by key, where values are not written as they are.
    """
    keys = lines[0] if lines else ()
    return Table.of("", "", [Column(k, kind=kinds.get(k, "text"), unit=unit) for k in keys], lines)


@dataclass(frozen=True)
class Kind:
    """How values of a kind look.

    Attributes:
        text: of a number (and the column's unit).
        left: set to the left, as words are. estimate: files have value and bounds.
        dash: an estimate without bounds says so. scaled: a fraction is saved as per cent.
        parts: names of the two values of a pair in files, made from the column's key.
    """

    text: Callable[[Any, str], str]
    left: bool = False
    estimate: bool = False
    dash: bool = False
    scaled: bool = False
    parts: tuple[str, ...] = ()


def value_text(value: float, unit: str, *, signed: bool = False) -> str:
    """Fractions as per cent with one decimal, anything else with three significant digits."""
    if math.isnan(value):
        return MISSING
    text = f"{100 * value:.1f}" if unit == "fraction" else number(value)
    if float(text) == 0:
        text = text.lstrip("-")
    if signed and float(text) > 0:
        text = f"+{text}"
    return text.replace("-", "−")


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


def size(value: float) -> str:
    """Bytes in binary units."""
    if math.isnan(value):
        return MISSING
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{number(value)} {unit}"
        value /= 1024
    return f"{number(value)} GiB"


def p_text(p: float) -> str:
    """A p-value to two digits."""
    if math.isnan(p):
        return MISSING
    return "<0.001" if p < 0.001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def count_text(count: float) -> str:
    """A number of examples; infinite where there is nothing to find."""
    if math.isnan(count):
        return MISSING
    return "∞" if math.isinf(count) else f"{count:,.0f}"


def signed_text(value: float, digits: int = 2) -> str:
    """So many decimals with a proper minus sign, and none before zero."""
    if math.isnan(value):
        return MISSING
    text = f"{value:.{digits}f}"
    return (text.lstrip("-") if float(text) == 0 else text).replace("-", "−")


def published_text(difference: float, unit: str) -> str:
    """A published difference: to two decimals where it is in per cent, as papers print scores."""
    if unit != "fraction":
        return value_text(difference, unit, signed=True)
    return MISSING if math.isnan(difference) else f"{difference:+.2f}".replace("-", "−")


def failures_text(failures: Mapping[str, int]) -> str:
    """E.g. ``2 oom, 1 missing``; empty where nothing failed."""
    return ", ".join(f"{count} {status}" for status, count in failures.items())


def estimate_text(estimate: Estimate, unit: str, *, signed: bool = False) -> str:
    """The value with its interval, or with a dash where it has none."""
    kind = "difference" if signed else "score"
    return str(CellText(*Column("", "", kind, unit).text(estimate)))


def ratio_text(estimate: Estimate) -> str:
    """A ratio of errors with its interval, in a sentence."""
    if math.isnan(estimate.low):
        return f"{estimate.value:.2f} (no interval)"
    low, value, high = (
        f"{x:.2f}" if x >= 0.1 or math.isnan(x) else f"{x:.2g}"
        for x in (estimate.low, estimate.value, estimate.high)
    )
    return f"{value} [{low}, {high}]"


def percent_text(value: float) -> str:
    """A relative change, in per cent with its sign."""
    return MISSING if math.isnan(value) else f"{100 * value:+.1f}".replace("-", "−")


def arrow_text(pair: Sequence[Any], text: Callable[[Any], str]) -> str:
    """What was and what is; one of them where they are the same."""
    first, second = map(text, pair)
    return first if first == second else f"{first} → {second}"


KINDS: dict[str, Kind] = {
    "text": Kind(lambda v, _: str(v), left=True),
    "label": Kind(lambda v, _: str(v)),
    "score": Kind(value_text, estimate=True, dash=True, scaled=True),
    "difference": Kind(
        lambda v, unit: value_text(v, unit, signed=True), estimate=True, dash=True, scaled=True
    ),
    "deviation": Kind(value_text, scaled=True),
    "number": Kind(lambda v, _: number(v)),
    "median": Kind(lambda v, _: number(v), estimate=True),
    "slope": Kind(lambda v, _: signed_text(v), estimate=True, dash=True),
    "change": Kind(lambda v, _: percent_text(v), estimate=True, dash=True),
    "times": Kind(lambda v, _: f"{number(v)} x"),
    "plain": Kind(lambda v, _: MISSING if math.isnan(v) else f"{v:g}"),
    "count": Kind(lambda v, _: MISSING if math.isnan(v) else f"{v:.0f}"),
    "needed": Kind(lambda v, _: count_text(v)),
    "bytes": Kind(lambda v, _: size(v)),
    "published": Kind(lambda v, unit: published_text(v, unit)),
    "p": Kind(lambda v, _: p_text(v)),
    "failures": Kind(lambda v, _: failures_text(v) or "0"),
    "spread": Kind(lambda v, _: " / ".join(map(number, v)), parts=("{}_min", "{}_median")),
    "both": Kind(lambda v, _: arrow_text(v, number), parts=("first_{}", "second_{}")),
    "failed": Kind(
        lambda v, _: arrow_text(v, lambda f: failures_text(f) or "0"),
        parts=("first_{}", "second_{}"),
    ),
}
"""What values of each kind look like."""
