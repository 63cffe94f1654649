"""The tables of probes: times of a throughput probe, distances of a fidelity probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from kvbench.report.experiment import Group
from kvbench.report.frame import failures_of, failures_text, scores
from kvbench.report.labels import as_text
from kvbench.report.ratios import at_rate, headings, rate_texts
from kvbench.report.stats import median_of
from kvbench.report.table import (
    METHOD,
    Column,
    Table,
    number,
    score_format,
    size,
    whole,
    with_values,
)

_MEDIANS = {
    "prefill_compress_s_over_exact": "prefill_ratio",
    "tokens_per_s": "tokens_per_s",
    "tokens_per_s_over_exact": "speedup",
    "decode_tokens_per_s": "decode_tokens_per_s",
    "decode_tokens_per_s_over_exact": "decode_speedup",
}
"""Columns of a throughput probe's table that are medians over runs, each with its record field."""
_MEANS = ("peak_bytes", "cache_bytes", "ratio")
"""Columns that are means over runs."""
_DISTANCES = ("kl", "max_kl", "agreement", "difference", "perplexity_ratio", "ratio")
"""Record fields of a fidelity probe; agreement is a fraction."""


def timing_table(group: Group) -> Table:
    """What a throughput probe measured, a row per setting and variant: minimum and median seconds,
    medians of tokens per second, means of bytes. A setting is a number of prompt and new tokens, and a
    batch and rate where the probe was asked for several."""
    records = group.records
    asked = [c for c in ("asked_new_tokens", "asked_batch", "asked_rate") if c in records]
    rows = []
    for key, at in records.groupby(["prompt_tokens", *asked], sort=True, dropna=False):
        for variant in group.variants:
            part = at[at["variant"] == variant.label]
            if part.empty:
                continue
            good = part[part["status"] == "ok"]
            fields = [*_MEDIANS.values(), *_MEANS, "batch", "new_tokens", "decode_s", "score"]
            measured = good.reindex(columns=fields).apply(pd.to_numeric)
            rate = measured["new_tokens"] / measured["decode_s"]
            measured["tokens_per_s"] = measured["tokens_per_s"].fillna(measured["score"])
            measured["decode_tokens_per_s"] = measured["decode_tokens_per_s"].fillna(rate)
            measured["prefill_compress_s"] = good["prefill_s"] + good["compress_s"].fillna(0.0)
            named = dict(zip(["prompt_tokens", *asked], key, strict=True))
            row: dict[str, Any] = {"method": variant.method, "variant": variant.label}
            row |= {
                "prompt_and_new_tokens": _setting(named, good),
                "batch": measured["batch"].mean(),
            }
            for name in ("prefill_compress_s", "decode_s"):
                row |= {f"{name}_min": measured[name].min(), name: measured[name].median()}
            for name, field in _MEDIANS.items():
                row |= median_of(measured[field]).named(name)
            row |= dict(measured[list(_MEANS)].mean())
            rows.append(row | {"runs": len(good), "failures": failures_text(failures_of(part))})
    frame = pd.DataFrame(rows)
    columns = (
        METHOD,
        Column("prompt_and_new_tokens", "prompt + new"),
        Column("batch", text=number),
        Column("prefill_compress_s", "prefill s", number),
        Column("prefill_compress_s_over_exact", "prefill x", number),
        Column("decode_s", "decode s", number),
        Column("tokens_per_s", "tokens/s", number),
        Column("tokens_per_s_over_exact", "tokens/s x", number),
        Column("decode_tokens_per_s", "decode tokens/s", number),
        Column("decode_tokens_per_s_over_exact", "decode x", number),
        Column("peak_bytes", "peak", size),
        Column("cache_bytes", "cache", size),
        Column("ratio", text=number),
        Column("runs", text=whole),
        Column("failures", "failed"),
    )
    return Table(
        f"{group.task}-{group.model}-timing",
        f"{group.task} on {group.model}: medians over runs",
        frame,
        with_values(frame, columns),
        (
            "Every method has a prefill of its own, whose seconds include compression. tokens/s: the"
            " batch's new tokens divided by the seconds of prefill and decoding; decode tokens/s: by"
            " those of decoding alone. x: divided by the exact cache's value in the same run. [low,"
            " high]: 95 % confidence intervals of medians (order statistics), from six runs on. peak:"
            " memory allocated on the GPU; on a CPU that of the whole process.",
        ),
        frame,
    )


def _setting(asked: Mapping[str, Any], records: pd.DataFrame) -> str:
    new = asked.get("asked_new_tokens", records["new_tokens"].max())
    text = f"{as_text(asked['prompt_tokens'])} + {as_text(new) if new == new else '?'}"
    batch, rate = asked.get("asked_batch", "1"), asked.get("asked_rate")
    text += f", batch {batch}" if batch != "1" else ""
    return text if rate is None or rate != rate else f"{text}, rate {rate}"


def fidelity_table(group: Group) -> Table:
    """Every distance from the exact model, averaged over prompts, by rate; with the same intervals as in
    every other table."""
    records, by = group.records, "rate" if "rate" in group.records else "dataset"
    parts: list[Any] = []
    for name in _DISTANCES:
        meta = replace(group.meta, score_unit="fraction" if name == "agreement" else "")
        rows = scores(replace(group, meta=meta, records=records.assign(score=records[name])), by)
        rows = rows[rows["measure"].eq("score")].set_index(["value", "method", "variant"])
        ends = rows[["mean", "low", "high"]].set_axis([name, f"{name}_low", f"{name}_high"], axis=1)
        parts.append(ends)
    whole_prompts = records.assign(value=records[by].map(as_text), all=1)
    kept = whole_prompts.groupby(["value", "method", "variant"])[["compressed", "all"]].sum()
    parts.append(
        (kept["compressed"].map(int).map(str) + "/" + kept["all"].map(str)).rename("compressed")
    )
    frame = pd.concat(parts, axis=1).drop(columns=["ratio_low", "ratio_high"]).reset_index()
    frame = frame.sort_values(
        "value", key=lambda of: pd.to_numeric(of, errors="coerce"), ascending=False, kind="stable"
    )
    value = frame.pop("value")
    frame["group"] = "rate " + value if by == "rate" else ""
    shares = {str(k): 100 * frame[k] for k in frame if str(k).startswith("agreement")}
    about = {"model": group.model, "task": group.task, "compress_after": group.protocol}
    data = frame.assign(**about, **shares)
    if by == "rate":
        frame["group"] = headings(pd.to_numeric(value).map(at_rate), rate_texts(group))
    return Table(
        f"{group.task}-{group.model}-fidelity",
        f"{group.task} on {group.model}{group.protocol_in_title}: distance from the exact model, per"
        " token",
        frame,
        (
            METHOD,
            Column("kl", "KL, nats", number),
            Column("max_kl", "max KL, nats", number, bounds=False),
            Column("agreement", "same top token, %", score_format("fraction")),
            Column("difference", "Δ NLL, nats", score_format("", signed=True)),
            Column("perplexity_ratio", "perplexity ratio", number),
            Column("ratio", text=number),
            Column("compressed"),
        ),
        (
            "Every method reads the same continuation, token by token. KL: the Kullback-Leibler"
            " divergence KL(exact || method) of the next-token distributions. NLL: negative"
            " log-likelihood of the continuation; Δ: the method's minus the exact cache's.",
        ),
        data,
    )
