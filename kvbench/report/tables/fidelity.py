"""Fidelity to the exact model as tables: all distances, and where each method first differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from kvbench.report.experiment import Group
from kvbench.report.stats.estimate import estimates
from kvbench.report.table import NOTHING, Column, Table
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
    lines: list[dict[str, Any]] = []
    for heading, part in _by_rate(group):
        found = {}
        for column in MEASURES:
            scored = replace(part, records=part.records.assign(score=part.records[column.key]))
            (scores,) = strata_of(scored)
            found[column.key] = estimates([scores.stratum(scores.values)])
        for i, variant in enumerate(group.variants):
            mine = part.records[part.records["variant"] == variant.label]
            good = mine[mine["status"] == "ok"]
            named = {"model": group.model, "task": group.task, "rate": heading}
            lines.append(
                named
                | {c.key: found[c.key][i] if len(good) else NOTHING for c in MEASURES}
                | {
                    "variant": variant.label,
                    "method": variant.method,
                    "ratio": float(good["ratio"].mean()),
                    "compressed": f"{int(good['compressed'].eq(True).sum())}/{len(mine)}",
                }
            )
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
    return Table.of(
        f"{group.task}-{group.model}-fidelity",
        f"{group.task} on {group.model}: distance from the exact model, per token",
        (
            Column("model"),
            Column("task"),
            Column("variant", "method", "label"),
            Column("rate"),
            *MEASURES,
            Column("ratio", "ratio", "number"),
            Column("compressed", "compressed", "label"),
        ),
        lines,
        notes,
        row=lambda line: {"group": line["rate"], "method": line["method"]},
    )


def divergence_table(group: Group) -> Table | None:
    """Where each method's most likely token first is not the exact model's, in its context; None where
    they all agree everywhere."""
    records = group.records
    if "diverges" not in records:
        return None
    some = records[records["diverges"].map(lambda value: isinstance(value, dict))]
    some = some.sort_values(["prompt", "seed"], kind="stable").head(SHOWN)
    if some.empty:
        return None

    def said(one: pd.Series, key: str) -> str:
        return repr(one["diverges"].get(key, ""))

    def prompt(one: pd.Series) -> str:
        return str(one["prompt"]) + (f", rate {one['rate']:g}" if "rate" in one else "")

    def place(one: pd.Series) -> str:
        return f"{one['diverges_at']:.0f} of {one['new_tokens']:.0f}"

    return Table.of(
        f"{group.task}-{group.model}-first-differences",
        f"{group.task} on {group.model}: where a method begins to differ",
        (
            Column("prompt", "prompt", of=prompt),
            Column("variant", "method", "label", of=lambda one: one["variant"]),
            Column("at", "token", "label", of=place),
            Column(
                "before", "text before it", of=lambda one: f"…{one['diverges'].get('before', '')}"
            ),
            Column("exact", "exact", of=lambda one: said(one, "exact")),
            Column("other", "method's own", of=lambda one: said(one, "method")),
            Column(
                "kl",
                "KL there",
                "number",
                of=lambda one: float(one["diverges"].get("kl", math.nan)),
            ),
        ),
        [one for _, one in some.iterrows()],
        (
            "The first token of the continuation at which the method's most likely token is not the"
            f" exact model's; the first {SHOWN} rows.",
        ),
        row=lambda one: {"method": str(one["method"])},
    )
