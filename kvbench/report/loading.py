"""All records below a folder as one frame, for Python code of a user's: `kvbench.load`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.records.read import COMMON_FIELDS, MANIFEST, StoreError, load_run, load_runs
from kvbench.report.experiment import entries_columns
from kvbench.report.variants import share_of, variants_of

COLUMNS = (
    *(name for name in COMMON_FIELDS if name != "entries"),
    "entries_mean",
    "entries_max",
    "variant",
    "rate",
    "run",
)
"""The first columns of every frame of `load`; the fields of the task follow, sorted by name."""


def load(folder: str | Path) -> pd.DataFrame:
    """Read every record below a folder, of one run, of an experiment, or of several experiments: a row
    for each, with `COLUMNS` and the fields of the task.

    ``variant`` is the label in tables; ``rate`` the record's where a task has several, else that of the
    run's budget (NaN for a number of entries); ``ratio`` bytes over those of the exact cache; entries
    are per layer and KV head, times in seconds. Values are numbers, texts, truth values or lists of
    texts; others are JSON, so that ``load(folder).to_parquet("x.parquet")`` works.

    Raises:
        StoreError: the folder has no runs, or a broken one.
    """
    place = Path(folder).expanduser()
    if (place / MANIFEST).is_file():
        runs = [load_run(place)]
    else:
        experiments = sorted({path.parents[3] for path in place.glob(f"*/*/*/*/{MANIFEST}")})
        runs = [run for folder_of_runs in experiments for run in load_runs(folder_of_runs)]
        runs = runs or load_runs(place)
    if not runs:
        raise StoreError(f"no runs in {place}: expected an experiment's folder, or one run's")
    frames = []
    for run, variant in zip(runs, variants_of(runs), strict=True):
        _, rate = share_of(run.manifest)
        frame = run.records.drop(columns="entries").assign(
            variant=variant.label,
            rate=run.records.get("rate", math.nan if rate is None else rate),
            run=str(run.folder),
            **entries_columns(run.records),
        )
        for name, column in frame.items():
            if not pd.api.types.is_numeric_dtype(column):
                frame[name] = [_simple(value, is_answers=name == "answers") for value in column]
        frames.append(frame)
    records = pd.concat([frame for frame in frames if len(frame)] or frames, ignore_index=True)
    return records[[*COLUMNS, *sorted(map(str, set(records) - set(COLUMNS)))]]


def _simple(value: Any, *, is_answers: bool) -> Any:
    if isinstance(value, list) and is_answers:
        return [answer if isinstance(answer, str) else json.dumps(answer) for answer in value]
    return json.dumps(value) if isinstance(value, dict | list) else value
