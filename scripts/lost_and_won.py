"""What solving for values costs and wins: for each method that `solved` stands around, the prompts on
which the answer gets worse and those on which it gets better. And what a cache holds beside bfloat16's.

    python scripts/lost_and_won.py results

Reads the records of FOLDERS below that folder and writes lost_and_won.csv and bytes.csv there, from
which readme_tables.py makes tables of results/README*.md: records stay where they were made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench import load
from kvbench.errors import UserError, complain

FOLDERS = ("leaderboard", "context", "fidelity", "ruler", "instructions")
INNER = {"solved": "kvzip", "solved_turboquant": "kvzip_turboquant"}
"""The inner method of each `solved` whose name does not end with it."""
LOWER = ("fidelity",)
"""Tasks whose score is a distance: more is worse."""
PLAIN = "snapkv"
"""A method that holds floats and no weights: its bytes say what the layers hold that are left whole."""


def inner_of(method: str) -> str | None:
    return INNER.get(method) or (method.removeprefix("solved_") if "solved_" in method else None)


def read(folder: Path) -> pd.DataFrame:
    """Every good record of the experiments."""
    parts = []
    for name in FOLDERS:
        if any(folder.glob(f"{name}/*/*/*/manifest.json")):
            rows = load(folder / name)
            parts.append(rows[rows["status"].eq("ok")].assign(experiment=name))
    if not parts:
        raise UserError(f"{folder} has no records of {', '.join(FOLDERS)}")
    return pd.concat(parts, ignore_index=True)


def lost_and_won(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """A row for each `solved`, model, task and rate: its mean and the inner method's over the prompts
    that both answered, and how many of these it answers worse (`lost`) and better (`won`)."""
    keys = ["experiment", "model", "task", "rate"]
    for key, part in rows.dropna(subset=["rate"]).groupby(keys, sort=False):
        score = part.pivot_table(index="example_id", columns="method", values="score")
        for method in map(str, score):
            inner = inner_of(method)
            if inner not in score:
                continue
            both = score[[inner, method]].dropna()
            gain = both[method] - both[inner]
            if key[keys.index("task")] in LOWER:
                gain = -gain
            yield {
                **dict(zip(keys, key, strict=True)),
                "method": method,
                "of": inner,
                "prompts": len(both),
                "alone": both[inner].mean(),
                "solved": both[method].mean(),
                "lost": int((gain < 0).sum()),
                "won": int((gain > 0).sum()),
            }


def beside_bfloat16(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """A row for each method, model, task and rate: the bytes that it holds over those of an exact cache
    of float32, as measured, and of bfloat16; and which share of the exact cache no method compresses.

    In bfloat16 floats keep their share. What stays as it is, log-weights (float32) and packed entries,
    weighs twice as much. Layers that attend to a window are whole in every method: what they hold
    follows from the bytes and entries of PLAIN.
    """
    keys = ["experiment", "model", "task"]
    for key, part in rows.groupby(keys, sort=False):
        rows_of = part.set_index("example_id")
        entries = rows_of["entries_mean"] / (rows_of["prompt_tokens"] - rows_of["held_back"])
        plain = rows_of["method"].eq(PLAIN) & rows_of["rate"].eq(rows_of["rate"].min())
        share = entries[plain]
        exact = rows_of["exact_bytes"][plain]
        whole = (rows_of["cache_bytes"][plain] - share * exact) / (1 - share)
        for at, own in rows_of.groupby(["method", "rate"], sort=False, dropna=False):
            method, rate = str(at[0]), at[1]
            own = own.loc[own.index.isin(whole.index)]
            kept = own["cache_bytes"] - whole  # aligned by prompt
            if "turboquant" not in method:
                used = own["entries_mean"] / (own["prompt_tokens"] - own["held_back"])
                kept = (kept - used * (exact - whole)).clip(lower=0)
            yield {
                **dict(zip(keys, key, strict=True)),
                "method": method,
                "rate": rate,
                "prompts": len(own),
                "float32": own["ratio"].mean(),
                "bfloat16": (own["ratio"] + kept / exact).mean(),
                "whole": (whole / exact).mean(),
            }


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UserError("one folder: python scripts/lost_and_won.py results")
    folder = Path(arguments[0])
    rows = read(folder)
    for name, found in (("lost_and_won", lost_and_won(rows)), ("bytes", beside_bfloat16(rows))):
        place = folder / f"{name}.csv"
        pd.DataFrame(found).to_csv(place, index=False, float_format="%.6g")
        print(place)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        complain(str(error), "lost_and_won")
        sys.exit(2)
