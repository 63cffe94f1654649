"""Records as one frame, for whoever goes on from here: `kvbench.load`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.records.read import MANIFEST, Run, StoreError, load_run, load_runs
from kvbench.report.labels import variants_of

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    "experiment": "name of the experiment",
    "model": "the model's name",
    "task": "the task's name",
    "dataset": "part of the task that the example is of",
    "example_id": "the example, the same for every method",
    "method": "the method's label",
    "variant": "the label that tables use: the method and what sets it apart from others of its name",
    "rate": "share of the middle that the budget keeps; NaN for a budget of another kind",
    "seed": "of the examples and the method's draws",
    "config_hash": "changes with whatever changes a score",
    "status": "ok, over_budget, oom, error or timeout",
    "score": "as the task defines it; NaN where the status is not ok",
    "ratio": "bytes held over bytes of the exact cache, measured",
    "cache_bytes": "bytes held after compression",
    "exact_bytes": "bytes of the exact cache of the same prompt",
    "capacity": "entries per layer and KV head that the budget allows",
    "entries_mean": "entries held per layer and KV head, mean",
    "entries_max": "the same, maximum",
    "compressed": "false: the prompt was no longer than the capacity",
    "saves_memory": "false: a reference such as exact or topk",
    "prompt_tokens": "tokens of the prompt",
    "new_tokens": "tokens of the answer",
    "prefill_s": "seconds of the prefill, which every method of the job shares",
    "compress_s": "seconds of compression",
    "decode_s": "seconds of decoding, this method's share",
    "prediction": "the answer, as text",
    "answers": "the expected answers, a list of texts",
    "prompt_tail": "end of the prompt",
    "error": "one line: what failed",
    "run": "the run's folder",
}
"""Columns that every frame has, in this order; those of the task follow."""


def load(folder: str | Path) -> pd.DataFrame:
    """Every record below a folder: of one run, of an experiment, or of several experiments.

    One row per (example, method, seed), with the columns of `COLUMNS` and then the task's own. Values
    are numbers, texts, truth values and lists of texts (whatever else a record holds is JSON), so that
    ``load(folder).to_parquet("records.parquet")`` works.

    Raises:
        StoreError: no runs there, or one that is broken.
    """
    import pandas as pd

    place = Path(folder).expanduser()
    if (place / MANIFEST).is_file():
        runs = [load_run(place)]
    else:
        inner = sorted({path.parents[3] for path in place.glob(f"*/*/*/*/{MANIFEST}")})
        runs = [run for one in inner for run in load_runs(one)] or load_runs(place)
    if not runs:
        raise StoreError(f"no runs in {place}: expected an experiment's folder, or one run's")
    labels = [variant.label for variant in variants_of(runs)]
    frames = [_columns(run, label) for run, label in zip(runs, labels, strict=True)]
    whole = pd.concat([frame for frame in frames if len(frame)] or frames, ignore_index=True)
    return whole[[*COLUMNS, *sorted(map(str, set(whole) - set(COLUMNS)))]]


def _columns(run: Run, label: str) -> pd.DataFrame:
    import pandas as pd

    budget = (run.manifest.get("config") or {}).get("budget") or {}
    other = budget.get("size") is not None or budget.get("total_rate") is not None
    held = pd.DataFrame([e if isinstance(e, dict) else {} for e in run.records["entries"]])
    held = held.reindex(columns=["mean", "max"]).set_index(run.records.index)
    frame = run.records.drop(columns="entries").assign(
        variant=label,
        rate=float("nan") if other else budget.get("rate", float("nan")),
        entries_mean=pd.to_numeric(held["mean"], errors="coerce"),
        entries_max=pd.to_numeric(held["max"], errors="coerce"),
        run=str(run.folder),
    )
    for name, column in frame.items():
        if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
            continue
        frame[name] = [_plain(value, texts=name == "answers") for value in column]
    return frame


def _plain(value: Any, *, texts: bool) -> Any:
    if isinstance(value, list) and texts:
        return [one if isinstance(one, str) else json.dumps(one) for one in value]
    return json.dumps(value) if isinstance(value, dict | list) else value
