"""Seconds, memory and tokens per second: of a throughput probe by setting, of decoding by length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvbench.report.experiment import Group
from kvbench.report.labels import Variant
from kvbench.report.stats.distributions import heads_at_most
from kvbench.report.stats.estimate import LEVEL, Estimate
from kvbench.report.table import NOTHING, Column, Table
from kvbench.report.tables.strata import as_text, failures_of


@dataclass(frozen=True)
class Timing:
    """One variant of a throughput table, at one setting.

    Attributes:
        setting: prompt + new tokens, and batch and rate where they were chosen.
        values: by key of `COLUMNS`.
        runs: runs that succeeded, which the medians are over; failures: the others by status.
    """

    variant: Variant
    setting: str
    values: Mapping[str, object]
    runs: int
    failures: Mapping[str, int]

    def estimate(self, key: str) -> Estimate:
        """A median with its interval."""
        found = self.values[key]
        assert isinstance(found, Estimate)
        return found

    def median(self, key: str) -> float:
        """Of a pair of minimum and median the second."""
        found = self.values[key]
        assert isinstance(found, tuple)
        return float(found[1])

    def number(self, key: str) -> float:
        """A mean; of a median without its interval."""
        found = self.values[key]
        return found.value if isinstance(found, Estimate) else float(found)  # type: ignore[arg-type]


COLUMNS = (
    Column("batch", "batch", "plain"),
    Column("prefill_compress_s", "prefill s", "spread"),
    Column("prefill_compress_s_over_exact", "prefill x", "median"),
    Column("decode_s", "decode s", "spread"),
    Column("tokens_per_s", "tokens/s", "median"),
    Column("tokens_per_s_over_exact", "tokens/s x", "median"),
    Column("decode_tokens_per_s", "decode tokens/s", "median"),
    Column("decode_tokens_per_s_over_exact", "decode x", "median"),
    Column("peak_bytes", "peak", "bytes"),
    Column("cache_bytes", "cache", "bytes"),
    Column("ratio", "ratio", "number"),
)
"""What is measured at a setting: seconds with compression, minimum and median over runs; rates of the
whole batch, over everything and over decoding alone; the same over the exact cache's in the same run;
means of bytes."""


def median_of(values: pd.Series) -> Estimate:
    """The median of what is known, between two order statistics.

    Of n values the k-th and the (n + 1 - k)-th lie on either side of the true median with a
    probability of at least `LEVEL`, whatever the distribution, where k is the largest number for
    which fewer than k of n fair coins come up heads with a probability of at most (1 - LEVEL) / 2:
    the second and the ninth of ten. Below six values there is no such interval.
    """
    known = np.sort(values.astype(float).dropna())
    if not len(known):
        return NOTHING
    heads = heads_at_most(np.arange(len(known) + 1), len(known))
    middle, k = float(np.median(known)), int((heads < (1 - LEVEL) / 2).sum())
    if k == 0:
        return Estimate(middle, np.nan, np.nan)
    return Estimate(middle, float(known[k - 1]), float(known[-k]))


def timings_of(group: Group) -> list[Timing]:
    """What a throughput probe measured, setting by setting, per variant."""
    timings = []
    columns = ["prompt_tokens", *(c for c in _ASKED if c in group.records)]
    for asked, at in group.records.groupby(columns, sort=True, dropna=False):
        for variant in group.variants:
            part = at[at["variant"] == variant.label]
            if len(part):
                timings.append(_timing(variant, dict(zip(columns, asked, strict=True)), part))
    return timings


def timing_table(group: Group) -> Table:
    """Minimum and median seconds, memory and rate of generation, with intervals."""
    return Table.of(
        f"{group.task}-{group.model}-timing",
        f"{group.task} on {group.model}: minimum / median over runs",
        (
            Column("method"),
            Column("variant", "method", "label"),
            Column("prompt_and_new_tokens", "prompt + new", "label"),
            *COLUMNS,
            Column("runs", "runs", "label"),
            Column("failures", "failed", "failures"),
        ),
        [
            {**t.values, "method": t.variant.method, "variant": t.variant.label}
            | {"prompt_and_new_tokens": t.setting, "runs": t.runs, "failures": t.failures}
            for t in timings_of(group)
        ],
        (
            "No prefill is shared; its seconds include compression. tokens/s are medians: new tokens"
            " of the whole batch over the time of prefill and decoding, and over decoding alone."
            " x: times the exact cache's in the same run, median. [low, high]: 95 % intervals of"
            " medians between two order statistics (of ten runs the second and the ninth); below six"
            " runs there are none. runs: those that succeeded; failed: those that did not. peak:"
            " allocated on the GPU; on a CPU the whole process, weights and libraries included.",
        ),
        row=lambda line: {"method": line["method"]},
    )


_ASKED = ("asked_new_tokens", "asked_batch", "asked_rate")
"""What a throughput record was asked for, beside its prompt tokens."""


def _setting(asked: Mapping[str, object], records: pd.DataFrame) -> str:
    new = asked.get("asked_new_tokens", records["new_tokens"].max())
    text = f"{as_text(asked['prompt_tokens'])} + {as_text(new) if new == new else '?'}"
    batch, rate = asked.get("asked_batch", "1"), asked.get("asked_rate")
    if batch != "1":
        text += f", batch {batch}"
    return text if rate is None or rate != rate else f"{text}, rate {rate}"


def _timing(variant: Variant, asked: Mapping[str, object], records: pd.DataFrame) -> Timing:
    good = records[records["status"] == "ok"]

    def column(name: str) -> pd.Series:
        return good[name].astype(float) if name in good else pd.Series(dtype=float)

    def spread(seconds: pd.Series) -> tuple[float, float]:
        return float(seconds.min()), median_of(seconds).value

    rate, alone = column("tokens_per_s"), column("decode_tokens_per_s")
    decoded = good["new_tokens"] / good["decode_s"]
    return Timing(
        variant=variant,
        setting=_setting(asked, good),
        values={
            "batch": float(column("batch").mean()),
            "prefill_compress_s": spread(good["prefill_s"].add(good["compress_s"].fillna(0.0))),
            "prefill_compress_s_over_exact": median_of(column("prefill_ratio")),
            "decode_s": spread(good["decode_s"]),
            "tokens_per_s": median_of(rate if len(rate) else good["score"]),
            "tokens_per_s_over_exact": median_of(column("speedup")),
            "decode_tokens_per_s": median_of(alone if len(alone) else decoded),
            "decode_tokens_per_s_over_exact": median_of(column("decode_speedup")),
            "peak_bytes": float(column("peak_bytes").mean()),
            "cache_bytes": float(good["cache_bytes"].mean()),
            "ratio": float(good["ratio"].mean()),
        },
        runs=len(good),
        failures=failures_of(records),
    )


def decoding_table(group: Group) -> Table | None:
    """Seconds of decoding per token, by length of the prompt: what answers of different lengths hide.

    Every variant at every length, lengths from one power of two to the next; None without times.
    """
    if not group.records["decode_ms"].gt(0).any():
        return None
    needed = ["variant", "seed", "example_id", "status", "score", "new_tokens", "decode_ms"]
    records = group.records[[*needed, "prompt_tokens"]].dropna(subset=["prompt_tokens"])
    tokens = pd.to_numeric(records["prompt_tokens"])
    powers = tokens.clip(lower=1).map(lambda n: int(n).bit_length() - 1)
    lines = []
    for power in sorted(powers.unique().tolist()):
        parts = dict(iter(records[powers.eq(power)].groupby("variant")))
        good_parts = {label: part[part["status"].eq("ok")] for label, part in parts.items()}
        ms = {
            label: part.set_index(["seed", "example_id"])["decode_ms"]
            for label, part in good_parts.items()
        }
        none = pd.Series(dtype=float, index=pd.MultiIndex.from_arrays([[], []]))
        for variant in (variant for variant in group.variants if variant.label in parts):
            good, ours = good_parts[variant.label], ms[variant.label]
            theirs = ms.get(str(group.baseline[variant.label]), none)
            lines.append(
                {
                    "model": group.model,
                    "task": group.task,
                    "method": variant.method,
                    "variant": variant.label,
                    "prompt_tokens": f"{2**power:,}–{2 ** (power + 1) - 1:,}",
                    "prompt_tokens_from": 2**power,
                    "prompt_tokens_below": 2 ** (power + 1),
                    "new_tokens_median": float(pd.to_numeric(good["new_tokens"]).median()),
                    "decode_ms_per_token": median_of(ours),
                    "baseline": group.baseline[variant.label],
                    "over_baseline": median_of((ours / theirs.reindex(ours.index)).dropna()),
                    "timed": int(ours.notna().sum()),
                    "failures": failures_of(parts[variant.label]),
                }
            )
    return Table.of(
        f"{group.task}-{group.model}-decoding",
        f"{group.task} on {group.model}: decoding per token, by length of the prompt",
        (
            Column("model"),
            Column("task"),
            Column("variant", "method", "label"),
            Column("prompt_tokens", "prompt tokens", "label", saved=False),
            Column("prompt_tokens_from"),
            Column("prompt_tokens_below"),
            Column("new_tokens_median", "new tokens", "plain"),
            Column("decode_ms_per_token", "ms/token", "median"),
            Column("baseline"),
            Column("over_baseline", f"x {group.baseline_name or 'baseline'}", "median"),
            Column("timed", "timed", "label"),
            Column("failures", "failed", "failures"),
        ),
        lines,
        (
            "Medians over examples, with 95 % intervals between order statistics (below six examples:"
            " none). x: over the baseline's on the same example, median. In a job of several methods"
            " all decode together and share each step's time by rows: to compare times, use"
            " task=throughput, which measures each alone.",
        ),
        row=lambda line: {"method": line["method"]},
    )
