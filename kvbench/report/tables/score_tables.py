"""Scores as tables: of one task, as papers print them, of all tasks, by rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvbench.report.experiment import Group
from kvbench.report.table import MISSING, NOTHING, Column, Row, Table, long_table, unit_text
from kvbench.report.tables.score_notes import INTERVAL_NOTE, notes_of
from kvbench.report.tables.scores import AVERAGE, COSTS, NO_CELL, ScoreTable, VariantScores
from kvbench.report.tables.strata import natural_order

METHOD = Column("variant", "method", "label", of=lambda row: row.variant.label)
"""Who a row is about."""

_WIDE = 4
"""With more columns than this, intervals are shown for the average only."""


def as_table(table: ScoreTable, *, narrow: bool = False) -> Table:
    """Scores, paired differences, cost and failures; in files one row per variant and column.

    Args:
        narrow: of many datasets show the average only, as a terminal has no room for more.
    """
    whole, wide = table.by == "dataset", len(table.columns) > _WIDE
    shown = (AVERAGE,) if narrow and wide and AVERAGE in table.columns else table.columns
    columns = [METHOD, *_score_columns(table, shown, wide)]
    lower = table.lower_is_better
    if whole and table.baseline is not None:
        heading = f"Δ {table.baseline}"
        columns.append(Column("difference", heading, "difference", table.unit, ascending=lower))
    if whole:
        columns += [
            Column(m.key, m.heading, m.kind, ascending=True, optional=m.key != "ratio")
            for m in COSTS
            if m.heading and not all(np.isnan(row.costs[m.key]) for row in table.rows)
        ]
    columns += [
        Column("scored", "scored", "label", optional=True),
        Column("failures", "failed", "failures", optional=True),
    ]
    title = f"{table.task} on {table.model}: score{unit_text(table.unit)}"
    if shown != table.columns:
        title += f"; average of {len(table.columns) - 1} datasets"
    return Table(
        f"{table.task}-{table.model}" + ("" if whole else f"-by-{table.by}"),
        title if whole else f"{title} by {table.by}",
        tuple(columns),
        tuple(_table_row(table, row, shown) for row in table.rows),
        tuple(notes_of([table])),
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
    return Table(
        f"{first.task}-paper",
        f"{first.task}: score{unit_text(first.unit)}",
        (
            METHOD,
            *_score_columns(first, names, len(names) > _WIDE),
            Column("ratio", "ratio", "number"),
            *([Column("failures", "failed", "failures")] * failed),
        ),
        tuple(
            replace(_table_row(table, row, names), group=table.model)
            for table in tables
            for row in table.rows
        ),
        tuple(notes_of(tables)),
        filed=False,
    )


def difference_table(table: ScoreTable) -> Table:
    """The paired difference to the baseline, per column."""
    named = "" if table.by == "dataset" else f" by {table.by}"

    def change(name: str) -> Column:
        return Column(
            name,
            name,
            "difference",
            table.unit,
            total=name == AVERAGE,
            of=lambda row: row.cells[name].difference,
        )

    return Table.of(
        f"{table.task}-{table.model}{named.replace(' ', '-')}-difference",
        f"{table.task} on {table.model}: paired difference to"
        f" {table.baseline}{unit_text(table.unit)}{named}",
        (METHOD, *map(change, table.columns)),
        [row for row in table.rows if row.total.difference is not None],
        (INTERVAL_NOTE, "Differences are over the examples that both scored."),
        row=lambda row: {"method": row.variant.method},
        filed=False,
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
    rows = []
    for variant in variants:
        # of the same label: tasks may have been run at different rates
        named = labels[variant.label] > 1 and variant.rate is not None
        found = {table.task: row for table in tables if (row := table.row(variant)) is not None}
        rows.append(
            Row(
                {
                    "variant": f"{variant.label}, rate {variant.rate:g}"
                    if named
                    else variant.label,
                    **{table.task: NOTHING for table in tables},
                    **{task: row.total.score for task, row in found.items()},
                    "ratio": span_text([row.ratio for row in found.values()]),
                },
                marks={task: row.total.marks for task, row in found.items()},
                bold=frozenset(task for task, row in found.items() if row.total.best),
                method=variant.method,
            )
        )
    scores = [
        Column(
            table.task,
            f"{table.task}{unit_text(table.unit)}",
            "score",
            table.unit,
            remark="lower is better" if table.lower_is_better else "",
            ascending=table.lower_is_better,
        )
        for table in tables
    ]
    ratio = Column("ratio", "ratio", "label", total=True, ascending=True, optional=True)
    return Table(
        f"overview-{model}",
        f"{model}: all tasks",
        (METHOD, *scores, ratio),
        tuple(rows),
        tuple(notes_of(tables)),
        filed=False,
    )


def span_text(ratios: Sequence[float]) -> str:
    """One ratio, or the smallest and largest of several; a dash where none is known."""
    known = sorted(ratio for ratio in ratios if not np.isnan(ratio))
    if not known:
        return MISSING
    low, high = (f"{end:.2f}" for end in (known[0], known[-1]))
    return low if low == high else f"{low}–{high}"


def sweep_table(table: ScoreTable) -> Table | None:
    """Methods x rates, each with its score; None where fewer than two rates were run.

    The heading of a rate says the ratio that was measured there; a method without a rate stands in every
    column.
    """
    rates = sorted({r.variant.rate for r in table.rows if r.variant.rate is not None}, reverse=True)
    if table.by != "dataset" or len(rates) < 2:
        return None
    lines: dict[str, dict[float | None, VariantScores]] = {}
    for row in table.rows:
        name = ", ".join((row.variant.method, *row.variant.options_without_rate))
        lines.setdefault(name, {})[row.variant.rate] = row
    rows = []
    for name, by_rate in lines.items():
        at = {_key(rate): by_rate.get(rate, by_rate.get(None)) for rate in rates}
        found = {key: row for key, row in at.items() if row is not None}
        rows.append(
            Row(
                {"variant": name, **{key: row.total.score for key, row in found.items()}},
                marks={key: row.total.marks for key, row in found.items()},
                bold=frozenset(key for key, row in found.items() if row.total.best),
                method=next(iter(found.values())).variant.method,
            )
        )
    averaged = f"; average of {len(table.columns) - 1} datasets" if AVERAGE in table.columns else ""
    columns = [
        Column(
            _key(rate),
            _key(rate),
            "score",
            table.unit,
            remark=f"ratio {span_text([r.ratio for r in table.rows if r.variant.rate == rate])}",
            ascending=table.lower_is_better,
        )
        for rate in rates
    ]
    return Table(
        f"{table.task}-{table.model}-rates",
        f"{table.task} on {table.model}: score{unit_text(table.unit)}, by rate{averaged}",
        (METHOD, *columns),
        tuple(rows),
        tuple(notes_of([table])),
        filed=False,
    )


def _key(rate: float) -> str:
    return f"rate {rate:g}"


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
    named = {"model": group.model, "task": group.task}
    found = [
        named
        | {key: line[key] for key in (*keys, by)}
        | {"scored": line["count"], "score": line["mean"], "mean_of_parts": line["whole"]}
        for line in lines
    ]
    table = long_table(found, group.meta.score_unit, score="deviation", mean_of_parts="deviation")
    return replace(table, name=f"{group.task}-{group.model}-by-{by}-and-dataset")


def _score_columns(table: ScoreTable, names: Sequence[str], wide: bool) -> list[Column]:
    """One column of scores for each name; of many, only the average shows its interval."""
    return [
        Column(
            name,
            name if table.by == "dataset" else f"{table.by} {name}",
            "score",
            table.unit,
            bounds=not wide or name == AVERAGE,
            total=name == AVERAGE,
            ascending=table.lower_is_better,
        )
        for name in names
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
    lines = [
        {
            "model": table.model,
            "task": table.task,
            "method": row.variant.method,
            "variant": row.variant.label,
            table.by: column,
            "unit": "%" if table.unit == "fraction" else table.unit,
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
        for row in table.rows
        for column, cell in row.cells.items()
    ]
    return long_table(
        lines, table.unit, score="score", difference="difference", failures="failures"
    )
