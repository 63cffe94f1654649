"""What a sweep is to make better: what jobs came to, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from kvbench.records.read import load_run
from kvbench.report.experiment import group_runs
from kvbench.report.frame import costs, scores, totals


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
    each: dict[str, list[float]] = {"score": [], "ratio": []}
    for group in groups:
        frame = pd.concat([scores(group), costs(group)], ignore_index=True)
        prefix = f"{group.task}/" if len(groups) > 1 else ""
        found |= {prefix + name: value for name, value in scalars_of(frame).items()}
        for name, values in each.items():
            mine = totals(frame, name)["mean"]
            chosen = [label for label in mine.index if label in group.compressed] or list(
                mine.index
            )
            values.append(_mean([float(mine[label]) for label in chosen]))
    return {**found, **{name: _mean(values) for name, values in each.items()}}


def scalars_of(frame: pd.DataFrame) -> dict[str, float]:
    """Score, difference and ratio of every variant of a tidy frame, for columns and charts of runs."""
    return {
        f"{label}/{name}": float(value)
        for name in ("score", "difference", "ratio")
        for label, value in totals(frame, name)["mean"].items()
        if not math.isnan(value)
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
