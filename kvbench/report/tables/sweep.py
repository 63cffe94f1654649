"""A sweep over rates as one table: a row per method, a column per rate."""

from __future__ import annotations

from kvbench.report.table import Column, Row, Table, unit_text
from kvbench.report.tables.score_notes import notes_of
from kvbench.report.tables.score_tables import METHOD, span_text
from kvbench.report.tables.scores import AVERAGE, ScoreTable, VariantScores


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
