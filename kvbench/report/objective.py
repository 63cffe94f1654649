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
    groups = group_runs([run for run in map(load_run, map(Path, folders)) if len(run.records)])
    found, means = dict[str, float](), pd.DataFrame(columns=["score", "ratio"], dtype=float)
    for group in groups:
        frame = pd.concat([scores(group), costs(group)], ignore_index=True)
        prefix = f"{group.task}/" if len(groups) > 1 else ""
        found |= {prefix + name: value for name, value in scalars_of(frame).items()}
        total = pd.DataFrame({name: totals(frame, str(name))["mean"] for name in means})
        chosen = total[total.index.isin(list(group.compressed))]
        means.loc[len(means)] = (chosen if len(chosen) else total).mean(skipna=False)
    return {**found, **{str(name): float(x) for name, x in means.mean(skipna=False).items()}}


def scalars_of(frame: pd.DataFrame) -> dict[str, float]:
    """Score, difference and ratio of every variant of a tidy frame, for columns and charts of runs."""
    return {
        f"{label}/{name}": float(value)
        for name in ("score", "difference", "ratio")
        for label, value in totals(frame, name)["mean"].items()
        if not math.isnan(value)
    }
