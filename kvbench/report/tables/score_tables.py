"""Scores as tables: of one task, as papers print them, of all tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvbench.report.experiment import Group
from kvbench.report.table import (
    MISSING,
    NOTHING,
    Column,
    Row,
    Table,
    unit_text,
)
from kvbench.report.tables.score_notes import INTERVAL_NOTE, notes_of
from kvbench.report.tables.scores import AVERAGE, COSTS, NO_CELL, ScoreTable, VariantScores
from kvbench.report.tables.strata import natural_order

_WIDE = 4
"""With more columns than this, intervals are shown for the average only."""


def as_table(table: ScoreTable, *, narrow: bool = False) -> Table:
    """Scores, paired differences, cost and failures; in files one row per variant and column.

    Args:
        narrow: of many datasets show the average only, as a terminal has no room for more.
    """
    whole, wide = table.by == "dataset", len(table.columns) > _WIDE
    shown = (AVERAGE,) if narrow and wide and AVERAGE in table.columns else table.columns
    columns = [Column("variant", "method", "label"), *_score_columns(table, shown, wide)]
    if whole:
        columns += _difference_column(table)
        columns += [c for c in _cost_columns(table) if c.heading]
    columns += [
        Column("scored", "scored", "label", optional=True),
        Column("failures", "failed", "failures", optional=True),
    ]
    title = f"{table.task} on {table.model}: score{unit_text(table.unit)}"
    if shown != table.columns:
        title += f"; average of {len(table.columns) - 1} datasets"
    return Table(
        name=f"{table.task}-{table.model}" + ("" if whole else f"-by-{table.by}"),
        title=title if whole else f"{title} by {table.by}",
        columns=tuple(columns),
        rows=tuple(_table_row(table, row, shown) for row in table.rows),
        notes=tuple(notes_of([table])),
        long=_long(table),
    )


def paper_layout(tables: Sequence[ScoreTable], order: Sequence[str] = ()) -> Table:
    """One task as papers print it: datasets as columns, a block of rows for each model.

    Args:
        tables: of one task by dataset, one per model.
        order: columns that go first, where there are such.
    """
    first = tables[0]
    found = dict.fromkeys(c for t in tables for c in t.columns if c != AVERAGE)
    names = list(dict.fromkeys([*(c for c in order if c in found), *found]))
    names += [AVERAGE] * any(AVERAGE in table.columns for table in tables)
    failed = any(row.total.failures for table in tables for row in table.rows)
    scores = _score_columns(first, names, len(names) > _WIDE)
    return Table(
        name=f"{first.task}-paper",
        title=f"{first.task}: score{unit_text(first.unit)}",
        columns=(
            Column("variant", "method", "label", saved=False),
            *scores,
            Column("ratio", "ratio", "number", saved=False),
            *([Column("failures", "failed", "failures", saved=False)] * failed),
        ),
        rows=tuple(
            replace(_table_row(table, row, names), group=table.model)
            for table in tables
            for row in table.rows
        ),
        notes=tuple(notes_of(tables)),
    )


def difference_table(table: ScoreTable) -> Table:
    """The paired difference to the baseline, per column."""
    named = "" if table.by == "dataset" else f" by {table.by}"
    return Table(
        name=f"{table.task}-{table.model}{named.replace(' ', '-')}-difference",
        title=f"{table.task} on {table.model}: paired difference to"
        f" {table.baseline}{unit_text(table.unit)}{named}",
        columns=(
            Column("variant", "method", "label", saved=False),
            *(
                Column(c, c, "difference", table.unit, saved=False, total=c == AVERAGE)
                for c in table.columns
            ),
        ),
        rows=tuple(
            Row(
                {
                    "variant": row.variant.label,
                    **{c: row.cells[c].difference for c in table.columns},
                },
                method=row.variant.method,
            )
            for row in table.rows
            if row.total.difference is not None
        ),
        notes=(INTERVAL_NOTE, "Differences are over the examples that both scored."),
    )


def overview_tables(tables: Sequence[ScoreTable]) -> list[Table]:
    """Of each model with several tasks, every variant on all of them."""
    by_model: dict[str, list[ScoreTable]] = {}
    for table in sorted(tables, key=lambda table: table.model):
        by_model.setdefault(table.model, []).append(table)
    return [_overview(model, of) for model, of in by_model.items()]


def _overview(model: str, tables: Sequence[ScoreTable]) -> Table:
    variants = sorted(
        {row.variant for t in tables for row in t.rows}, key=lambda variant: variant.sort_key
    )
    labels = Counter(variant.label for variant in variants)
    columns = [Column("variant", "method", "label", saved=False)]
    for table in tables:
        remark = "lower is better" if table.lower_is_better else ""
        heading = f"{table.task}{unit_text(table.unit)}"
        columns.append(
            Column(
                table.task,
                heading,
                "score",
                table.unit,
                saved=False,
                remark=remark,
                ascending=table.lower_is_better,
            )
        )
    columns.append(
        Column("ratio", "ratio", "label", saved=False, total=True, ascending=True, optional=True)
    )
    rows = []
    for variant in variants:
        # of the same label: tasks may have been run at different rates
        named = labels[variant.label] > 1 and variant.rate is not None
        values: dict[str, object] = {
            "variant": f"{variant.label}, rate {variant.rate:g}" if named else variant.label
        }
        marks, bold, ratios = {}, set(), []
        for table in tables:
            row = table.row(variant)
            values[table.task] = NOTHING
            if row is not None:
                values[table.task] = row.total.score
                ratios.append(row.ratio)
                marks[table.task] = row.total.marks
                bold |= {table.task} if row.total.best else set()
        values["ratio"] = span_text(ratios)
        rows.append(Row(values, marks, frozenset(bold), method=variant.method))
    return Table(
        name=f"overview-{model}",
        title=f"{model}: all tasks",
        columns=tuple(columns),
        rows=tuple(rows),
        notes=tuple(notes_of(tables)),
    )


def span_text(ratios: Sequence[float]) -> str:
    """One ratio, or the smallest and largest of several; a dash where none is known."""
    known = sorted(ratio for ratio in ratios if not np.isnan(ratio))
    if not known:
        return MISSING
    low, high = (f"{end:.2f}" for end in (known[0], known[-1]))
    return low if low == high else f"{low}–{high}"


def split_table(group: Group, by: str) -> Table:
    """Every dataset split by the record field `by`, for files.

    Beside each part's mean stands the plain mean of the dataset's parts, which is how LongBench-E
    averages a dataset over its length buckets.
    """
    good = group.records[group.records["status"] == "ok"]
    keys = ["variant", "dataset"]
    means = good.groupby([*keys, by])["score"].agg(["mean", "count"]).reset_index()
    means["whole"] = means.groupby(keys)["mean"].transform("mean")
    ranks = [variant.label for variant in group.variants]
    lines = sorted(
        means.to_dict("records"),
        key=lambda line: (
            ranks.index(line["variant"]),
            group.datasets.index(line["dataset"]),
            natural_order(line[by]),
        ),
    )
    unit = group.meta.score_unit
    return Table(
        name=f"{group.task}-{group.model}-by-{by}-and-dataset",
        title="",
        columns=(
            *(Column(name) for name in ("model", "task", *keys, by)),
            Column("scored"),
            Column("score", kind="deviation", unit=unit),
            Column("mean_of_parts", kind="deviation", unit=unit),
        ),
        rows=tuple(
            Row(
                {"model": group.model, "task": group.task}
                | {str(key): value for key, value in line.items()}
                | {"score": line["mean"], "mean_of_parts": line["whole"], "scored": line["count"]}
            )
            for line in lines
        ),
    )


def _score_columns(table: ScoreTable, names: Sequence[str], wide: bool) -> list[Column]:
    """One column of scores for each name; of many, only the average shows its interval."""
    return [
        Column(
            name,
            name if table.by == "dataset" else f"{table.by} {name}",
            "score",
            table.unit,
            bounds=not wide or name == AVERAGE,
            saved=False,
            total=name == AVERAGE,
            ascending=table.lower_is_better,
        )
        for name in names
    ]


def _difference_column(table: ScoreTable) -> list[Column]:
    if table.baseline is None:
        return []
    heading, ascending = f"Δ {table.baseline}", table.lower_is_better
    return [Column("difference", heading, "difference", table.unit, ascending=ascending)]


def _cost_columns(table: ScoreTable) -> list[Column]:
    """The costs that any row has."""
    return [
        Column(m.key, m.heading, m.kind, ascending=True, optional=m.key != "ratio")
        for m in COSTS
        if not all(np.isnan(row.costs[m.key]) for row in table.rows)
    ]


def _table_row(table: ScoreTable, row: VariantScores, names: Sequence[str]) -> Row:
    """The row of a variant under columns of these names."""
    cells = {name: row.cells.get(name, NO_CELL) for name in names}
    # but for datasets, whose examples differ, every column is about the same examples
    once = table.by == "measure" or AVERAGE in row.cells or len(row.cells) == 1
    counted = [row.total] if once else list(row.cells.values())
    scored, expected = sum(c.scored for c in counted), sum(c.expected for c in counted)
    failures: Counter[str] = Counter()
    for cell in counted:
        failures.update(cell.failures)
    return Row(
        {
            "variant": row.variant.label,
            **{name: cell.score for name, cell in cells.items()},
            "difference": row.total.difference,
            **row.costs,
            "scored": f"{scored}/{expected}",
            "failures": dict(failures),
        },
        marks={name: cell.marks for name, cell in cells.items()},
        bold=frozenset(name for name, cell in cells.items() if cell.best),
        method=row.variant.method,
    )


def _long(table: ScoreTable) -> Table:
    """One row per variant and column."""
    unit = table.unit
    return Table(
        name="",
        title="",
        columns=(
            *map(Column, ("model", "task", "method", "variant", table.by, "unit")),
            Column("score", kind="score", unit=unit),
            Column("baseline"),
            Column("difference", kind="difference", unit=unit),
            *map(Column, ("best", "not_shown_to_differ", "shown_worse", "scored", "expected")),
            Column("failures", kind="failures"),
            *(Column(m.key, kind=m.kind) for m in COSTS),
            Column("uncompressed"),
        ),
        rows=tuple(
            Row(
                {
                    "model": table.model,
                    "task": table.task,
                    "method": row.variant.method,
                    "variant": row.variant.label,
                    table.by: column,
                    "unit": "%" if unit == "fraction" else unit,
                    "score": cell.score,
                    "baseline": None if cell.difference is None else table.baseline,
                    "difference": cell.difference,
                    "best": cell.best,
                    "not_shown_to_differ": cell.tied,
                    "shown_worse": cell.worse,
                    "scored": cell.scored,
                    "expected": cell.expected,
                    "failures": cell.failures,
                    **row.costs,
                    "uncompressed": row.uncompressed,
                }
            )
            for row in table.rows
            for column, cell in row.cells.items()
        ),
    )
