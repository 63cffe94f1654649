"""Fidelity to the exact model as tables: all distances, and where each method first differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from kvbench.report.experiment import Group
from kvbench.report.stats.estimate import estimates
from kvbench.report.table import NOTHING, Column, Row, Table
from kvbench.report.tables.strata import as_text, strata_of

MEASURES = (
    Column("kl", "KL, nats", "score"),
    Column("max_kl", "max KL, nats", "score", bounds=False),
    Column("agreement", "same top token, %", "score", unit="fraction"),
    Column("difference", "Δ NLL, nats", "difference"),
    Column("perplexity_ratio", "perplexity ratio", "score"),
)
"""What is averaged over prompts: record fields."""

SHOWN = 40
"""Rows of the table of first differences."""


def is_fidelity(group: Group) -> bool:
    """Whether the group's task measures fidelity, and any record has some."""
    return group.meta.figure("fidelity") is not None and "kl" in group.records


def _by_rate(group: Group) -> Iterator[tuple[str, Group]]:
    """The group's records at each rate that the task was run with, or all of them."""
    if "rate" not in group.records:
        yield "", group
        return
    for rate in sorted(group.records["rate"].dropna().unique(), reverse=True):
        part = group.records[group.records["rate"] == rate]
        yield f"rate {as_text(rate)}", replace(group, records=part)


def fidelity_table(group: Group) -> Table:
    """Mean over prompts of every distance, with bootstrap intervals; the same prompts are drawn for all
    methods."""
    rows = []
    for heading, part in _by_rate(group):
        found = {}
        for column in MEASURES:
            scored = replace(part, records=part.records.assign(score=part.records[column.key]))
            (scores,) = strata_of(scored)
            found[column.key] = estimates([scores.stratum(scores.values)])
        for i, variant in enumerate(group.variants):
            mine = part.records[part.records["variant"] == variant.label]
            good = mine[mine["status"] == "ok"]
            values: dict[str, Any] = {
                "model": group.model,
                "task": group.task,
                "variant": variant.label,
                "rate": heading,
                **{c.key: found[c.key][i] if len(good) else NOTHING for c in MEASURES},
                "ratio": float(good["ratio"].mean()),
                "compressed": f"{int(good['compressed'].eq(True).sum())}/{len(mine)}",
            }
            rows.append(Row(values, group=heading, method=variant.method))
    floor = pd.to_numeric(group.records.get("kl_floor", pd.Series(dtype=float)), errors="coerce")
    notes = [
        "Every method reads the same continuation, token by token. KL is of the exact model's next-token"
        " distribution from the method's; the means of each prompt count the same. [low, high]: 95 %"
        " bootstrap over prompts, the same draws for every method.",
        "max KL: the mean of the prompts' largest. perplexity ratio: exp of a prompt's mean Δ NLL."
        " compressed: prompts longer than the capacity.",
    ]
    if floor.notna().any():
        notes.append(
            f"Rounding alone comes to a KL of {floor.max():.1e} at most (the exact cache fed twice, in"
            " batches of different size)."
        )
    return Table(
        name=f"{group.task}-{group.model}-fidelity",
        title=f"{group.task} on {group.model}: distance from the exact model, per token",
        columns=(
            Column("model"),
            Column("task"),
            Column("variant", "method", "label"),
            Column("rate"),
            *MEASURES,
            Column("ratio", "ratio", "number"),
            Column("compressed", "compressed", "label"),
        ),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def divergence_table(group: Group) -> Table | None:
    """Where each method's most likely token first is not the exact model's, in its context; None where
    they all agree everywhere."""
    records = group.records
    if "diverges" not in records:
        return None
    some = records[records["diverges"].map(lambda value: isinstance(value, dict))]
    some = some.sort_values(["prompt", "seed"], kind="stable").head(SHOWN)
    rows = [
        Row(
            {
                "prompt": str(one["prompt"]) + (f", rate {one['rate']:g}" if "rate" in one else ""),
                "variant": one["variant"],
                "at": f"{one['diverges_at']:.0f} of {one['new_tokens']:.0f}",
                "before": f"…{one['diverges'].get('before', '')}",
                "exact": repr(one["diverges"].get("exact", "")),
                "other": repr(one["diverges"].get("method", "")),
                "kl": float(one["diverges"].get("kl", float("nan"))),
            },
            method=str(one["method"]),
        )
        for _, one in some.iterrows()
    ]
    if not rows:
        return None
    return Table(
        name=f"{group.task}-{group.model}-first-differences",
        title=f"{group.task} on {group.model}: where a method begins to differ",
        columns=(
            Column("prompt", "prompt"),
            Column("variant", "method", "label"),
            Column("at", "token", "label"),
            Column("before", "text before it"),
            Column("exact", "exact"),
            Column("other", "method's own"),
            Column("kl", "KL there", "number"),
        ),
        rows=tuple(rows),
        notes=(
            "The first token of the continuation at which the method's most likely token is not the"
            f" exact model's; the first {SHOWN} rows.",
        ),
    )
