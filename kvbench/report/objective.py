"""What a sweep is to make better: what jobs came to, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from kvbench.records.read import load_run
from kvbench.report.experiment import group_runs
from kvbench.report.tables.scores import ScoreTable, score_table

T = TypeVar("T")


def objective_of(folders: Sequence[str | Path]) -> dict[str, float]:
    """``score`` and ``ratio`` of the runs in these folders, and those of each method.

    ``score`` is the mean over the methods that compress (over all, where none does), of several tasks
    over these; of a task whose metric is an error, less is better. NaN where nothing was scored.

    Raises:
        StoreError: a folder holds no run, or a broken one.
    """
    runs = [run for run in map(load_run, map(Path, folders)) if not run.records.empty]
    groups = group_runs(runs)
    found: dict[str, float] = {}
    scores, ratios = [], []
    for group in groups:
        table = score_table(group)
        prefix = f"{table.task}/" if len(groups) > 1 else ""
        found |= {prefix + name: value for name, value in scalars_of(table).items()}
        rows = [row for row in table.rows if row.variant.label in group.compressed]
        rows = rows or list(table.rows)
        scores.append(_mean([row.total.score.value for row in rows]))
        ratios.append(_mean([row.ratio for row in rows]))
    return {**found, "score": _mean(scores), "ratio": _mean(ratios)}


def scalars_of(table: ScoreTable) -> dict[str, float]:
    """Score, difference and ratio of every variant, for columns and charts of a list of runs."""
    found: dict[str, float] = {}
    for row in table.rows:
        total, name = row.total, row.variant.label
        found |= {f"{name}/score": total.score.value, f"{name}/ratio": row.ratio}
        if total.difference is not None:
            found[f"{name}/difference"] = total.difference.value
    return without_nan(found)


def without_nan(values: Mapping[str, T]) -> dict[str, T]:
    """The entries that are known."""
    return {k: v for k, v in values.items() if not isinstance(v, float) or not math.isnan(v)}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
