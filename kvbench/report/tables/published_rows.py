"""Published numbers and ours side by side: pairs, rows, and the table that shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvbench.report.stats.estimate import Estimate
from kvbench.report.table import (
    INCOMPLETE,
    MISSING,
    OUTSIDE,
    Column,
    Row,
    Table,
    long_table,
    unit_text,
    value_text,
)
from kvbench.report.tables.differences import notes_on
from kvbench.report.tables.score_notes import INTERVAL_NOTE
from kvbench.report.tables.scores import AVERAGE, NO_CELL, Cell

MARGIN_NOTE = (
    "(±) is descriptive: how far two honest runs of our number of examples may be apart,"
    " 1.96 sqrt(2 f p (1 - p) / n) plus rounding of the print;"
    f" {OUTSIDE} the published number is further from ours. It is given for our own model only."
)


@dataclass(frozen=True)
class Pair:
    """A published number and ours; NaN where one of them is missing. Both in the shown unit.

    Attributes:
        ours: our mean with its 95 % interval.
        cell: where ours comes from: how many examples were scored, which failed.
        printed: the published number as it was printed (before scaling: the same digits).
        margin: how far the two may be apart and say nothing (`margins`); NaN where it is not known:
            for another model, and for what is no fraction.
    """

    published: float
    ours: Estimate
    cell: Cell
    printed: str
    margin: float = math.nan

    @property
    def difference(self) -> float:
        """Ours minus the published one."""
        return self.ours.value - self.published

    @property
    def beyond(self) -> bool:
        """Whether the two are further apart than the margin."""
        return abs(self.difference) > self.margin


_NO_PAIR = Pair(math.nan, NO_CELL.score, NO_CELL, "")


@dataclass(frozen=True)
class PublishedRow:
    """One of our variants beside one published row; `model` is the one the paper used."""

    method: str
    model: str
    label: str
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Published:
    """A published table next to the variants that it has in common with ours.

    Attributes:
        columns: what both tables have, in the paper's order.
        field: the record field compared, None for the score.
        part_of: what several tasks with columns of this table are called together.
        differences: how our settings are known to differ from the paper's; None where the
            experiment does not say.
        rescored: share of examples that two honest runs answer anew, None where it is not known.
    """

    source: str
    task: str
    model: str
    unit: str
    columns: tuple[str, ...]
    rows: tuple[PublishedRow, ...]
    field: str | None = None
    part_of: str | None = None
    differences: tuple[str, ...] | None = None
    rescored: float | None = None

    @property
    def averages(self) -> dict[str, dict[str, float]]:
        """By the paper's model, each method's average (or only column), in the shown unit."""
        if AVERAGE not in self.columns and len(self.columns) != 1:
            return {}
        at = self.columns.index(AVERAGE) if AVERAGE in self.columns else 0
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            found.setdefault(row.model, {}).setdefault(row.method, row.pairs[at].published)
        return found


def joined_tasks(tables: Sequence[Published]) -> list[Published]:
    """The tables, those that are parts of one side by side: a row for each variant."""
    groups: dict[object, list[Published]] = {}
    for table in tables:
        key = (
            (table.source, table.part_of, table.field, table.model) if table.part_of else id(table)
        )
        groups.setdefault(key, []).append(table)
    return [_side_by_side(group) if group[0].part_of else group[0] for group in groups.values()]


def _side_by_side(tables: Sequence[Published]) -> Published:
    first = tables[0]
    columns = tuple(dict.fromkeys(column for table in tables for column in table.columns))
    found: dict[tuple[str, str, str], dict[str, Pair]] = {}
    for table in tables:
        for row in table.rows:
            pairs = found.setdefault((row.method, row.model, row.label), {})
            pairs.update(zip(table.columns, row.pairs, strict=True))
    rows = tuple(
        PublishedRow(*who, tuple(pairs.get(column, _NO_PAIR) for column in columns))
        for who, pairs in found.items()
    )
    return replace(
        first,
        task=first.part_of or first.task,
        columns=columns,
        rows=rows,
        differences=merged_differences([table.differences for table in tables]),
    )


def merged_differences(lists: Sequence[Sequence[str] | None]) -> tuple[str, ...] | None:
    """Every known difference once; None where no list is given."""
    said = [lines for lines in lists if lines is not None]
    return tuple(dict.fromkeys(line for lines in said for line in lines)) if said else None


def joined_rows(rows: Sequence[PublishedRow]) -> list[PublishedRow]:
    """Rows about the same variant and model as one where no column has a number in both: a table may
    print other columns for every rate, and a variant without a budget is in each of its rows."""
    found: list[PublishedRow] = []
    for row in rows:
        for i, other in enumerate(found):
            both = list(zip(other.pairs, row.pairs, strict=True))
            same = (other.label, other.model) == (row.label, row.model)
            if same and not any(a.printed and b.printed for a, b in both):
                found[i] = replace(other, pairs=tuple(a if a.printed else b for a, b in both))
                break
        else:
            found.append(row)
    return found


def best_rows(
    rows: Sequence[PublishedRow], choices: Mapping[str, Sequence[str]], *, lower_is_better: bool
) -> list[PublishedRow]:
    """For each of `choices` (a published method and the variants of ours that it may be) a row
    that has in every column the best variant's pair; none where fewer than two of the variants
    stand beside a published row.
    """
    found = []
    for theirs, ours in choices.items():
        beside: dict[tuple[str, ...], list[PublishedRow]] = {}
        for row in (row for row in rows if row.method in ours):
            printed = (row.model, *(pair.printed for pair in row.pairs))
            beside.setdefault(printed, []).append(row)
        for variants in (variants for variants in beside.values() if len(variants) > 1):
            columns = zip(*(variant.pairs for variant in variants), strict=True)
            pairs = tuple(_best(column, lower_is_better) for column in columns)
            label = f"{theirs}, best of {len(variants)}"
            found.append(replace(variants[0], method=theirs, label=label, pairs=pairs))
    return found


def _best(pairs: Sequence[Pair], lower_is_better: bool) -> Pair:
    """The pair whose score of ours is best; one without a score loses to any."""
    sign = -1.0 if lower_is_better else 1.0

    def rank(pair: Pair) -> float:
        return -math.inf if math.isnan(pair.ours.value) else sign * pair.ours.value

    return max(pairs, key=rank)


def margin_note(tables: Sequence[Published]) -> str:
    """The same with what f is in these tables."""
    shares = {t.rescored for t in tables}
    given = ", ".join(f"{100 * f:.2g} %" for f in sorted(f for f in shares if f is not None))
    parts = [f"f, the share of examples that such runs answer anew, is {given}."] if given else []
    if None in shares:
        parts.append(
            "f is 1, as for other examples than the paper's, where it was not measured"
            " (kvbench-report A --rescored B)."
        )
    return " ".join((MARGIN_NOTE, *parts))


def comparison_tables(tables: Sequence[Published]) -> list[Table]:
    """One table per published source and task: for each of our models a block of rows, for each
    method ours, its interval, what was published, and the difference."""
    joined = joined_tasks(tables)
    names = dict.fromkeys(map(comparison_name, joined))
    return [
        replace(
            _comparison([t for t in joined if comparison_name(t) == name]),
            long=_long([t for t in tables if comparison_name(t) == name]),
        )
        for name in names
    ]


def comparison_name(table: Published) -> str:
    """The file name stem of the comparison that a table is part of."""
    field = "" if table.field is None else f"-{table.field}"
    return f"{table.source}-{table.part_of or table.task}{field}-published"


def _comparison(tables: Sequence[Published]) -> Table:
    first = tables[0]
    names = list(dict.fromkeys(c for table in tables for c in table.columns if c != AVERAGE))
    names += [AVERAGE] * any(AVERAGE in table.columns for table in tables)
    rows: list[Row] = []
    for table in tables:
        for line in table.rows:
            pairs = dict(zip(table.columns, line.pairs, strict=True))
            group = f"{table.model}; published: {line.model}" if line.model else table.model
            aside = bool(line.model) and line.model != table.model
            rows += (replace(row, aside=aside) for row in _lines(line, pairs, table.unit, group))
    notes = [INTERVAL_NOTE, margin_note(tables)]
    if any(INCOMPLETE in mark for row in rows for mark in row.marks.values()):
        notes.append(
            f"{INCOMPLETE} some of our examples failed or are missing: their mean is left."
        )
    notes += dict.fromkeys(note for table in tables for note in notes_on(table.differences))
    named = first.field is not None and first.unit != "s"  # of seconds the unit says it
    what = f", {str(first.field).replace('_', ' ')}" if named else ""
    return Table(
        name=comparison_name(first),
        title=f"{first.task}{what}: ours beside {first.source}{unit_text(first.unit)}",
        columns=(
            Column("variant", "method", "label"),
            Column("line", "", "label", total=True),
            *(Column(name, name, "label", total=name == AVERAGE) for name in names),
        ),
        rows=tuple(rows),
        notes=tuple(notes),
        sortable=False,
    )


def _lines(line: PublishedRow, pairs: Mapping[str, Pair], unit: str, group: str) -> Iterable[Row]:
    """Four rows about one method: ours, interval, published, difference."""
    score, change = Column("", kind="score", unit=unit), Column("", kind="difference", unit=unit)
    texts: dict[str, tuple[str, ...]] = {}
    for name, pair in pairs.items():
        ours, interval = score.text(_unscaled(pair.ours, unit))
        difference = change.text(_unscaled(Estimate(pair.difference, math.nan, math.nan), unit))[0]
        if not math.isnan(pair.margin):
            apart = pair.margin / 100 if unit == "fraction" else pair.margin
            difference += f" (±{value_text(apart, unit)})"
        texts[name] = ours, interval or MISSING, pair.printed or MISSING, difference
    marks = {
        "ours": {name: INCOMPLETE * (not pair.cell.complete) for name, pair in pairs.items()},
        "published": {name: OUTSIDE * pair.beyond for name, pair in pairs.items()},
    }
    return [
        Row(
            {"variant": line.label if head == "ours" else "", "line": head}
            | {name: four[i] for name, four in texts.items()},
            marks=marks.get(head, {}),
            group=group,
            method=line.method if head == "ours" else None,
        )
        for i, head in enumerate(("ours", "95 % interval", "published", "difference"))
    ]


def _unscaled(estimate: Estimate, unit: str) -> Estimate:
    """Of an estimate in the shown unit (per cent) the fraction that it stands for."""
    factor = 0.01 if unit == "fraction" else 1.0
    return Estimate(estimate.value * factor, estimate.low * factor, estimate.high * factor)


def _long(tables: Sequence[Published]) -> Table:
    """One row per variant, published row and column."""
    lines = [
        {
            "source": table.source,
            "task": table.task,
            "model": table.model,
            "published_model": row.model,
            "method": row.method,
            "variant": row.label,
            "column": column,
            "unit": table.unit,
            "published": pair.published,
            "score": pair.ours,
            "difference": pair.difference,
            "margin": pair.margin,
            "beyond_margin": pair.beyond,
            "scored": pair.cell.scored,
            "expected": pair.cell.expected,
        }
        for table in tables
        for row in table.rows
        for column, pair in zip(table.columns, row.pairs, strict=True)
    ]
    return long_table(lines, score="median")
