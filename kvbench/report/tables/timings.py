"""Seconds, memory and tokens per second of a throughput probe, by arm and setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import binom

from kvbench.report.experiment import Arm, Group
from kvbench.report.stats.estimate import LEVEL, Estimate
from kvbench.report.tables.scores import as_text, failures_of, failures_text

NO_ESTIMATE = Estimate(np.nan, np.nan, np.nan)


@dataclass(frozen=True)
class Timing:
    """One arm of a throughput table, at one setting.

    Attributes:
        setting: prompt + new tokens, and batch and rate where they were chosen.
        prefill_s: prefill and compression, median over runs; decode_s likewise; prefill_least,
            decode_least: the minima.
        tokens_per_s: new tokens per second of everything, median over runs;
            decode_tokens_per_s of decoding alone.
        peak_bytes, cache_bytes, ratio: means over runs.
        runs: runs that succeeded, which the medians are over; failures: the others by status.
        batch: prompts decoded together.
        speedup, decode_speedup: tokens per second, and those of decoding alone, over the exact
            cache's of the same run, medians; prefill_ratio: seconds over the exact cache's.
    """

    arm: Arm
    setting: str
    prefill_s: Estimate
    prefill_least: float
    decode_s: Estimate
    decode_least: float
    tokens_per_s: Estimate
    decode_tokens_per_s: Estimate
    peak_bytes: float
    cache_bytes: float
    ratio: float
    runs: int
    failures: Mapping[str, int]
    batch: float = np.nan
    speedup: Estimate = NO_ESTIMATE
    decode_speedup: Estimate = NO_ESTIMATE
    prefill_ratio: Estimate = NO_ESTIMATE


def median_of(values: pd.Series) -> Estimate:
    """The median of what is known, between two order statistics.

    Of n values the k-th and the (n + 1 - k)-th lie on either side of the true median with a
    probability of at least `LEVEL`, whatever the distribution, where k is the largest number for
    which fewer than k of n fair coins come up heads with a probability of at most (1 - LEVEL) / 2:
    the second and the ninth of ten. Below six values there is no such interval.
    """
    known = np.sort(values.astype(float).dropna())
    if not len(known):
        return NO_ESTIMATE
    middle, k = float(np.median(known)), int(binom.ppf((1 - LEVEL) / 2, len(known), 0.5))
    if k == 0:
        return Estimate(middle, np.nan, np.nan)
    return Estimate(middle, float(known[k - 1]), float(known[-k]))


def timing_table(group: Group) -> list[Timing]:
    """What a throughput probe measured, setting by setting, per arm."""
    timings = []
    columns = ["prompt_tokens", *(c for c in _ASKED if c in group.records)]
    for asked, at in group.records.groupby(columns, sort=True, dropna=False):
        for arm in group.arms:
            part = at[at["arm"] == arm.label]
            if len(part):
                timings.append(_timing(arm, dict(zip(columns, asked, strict=True)), part))
    return timings


def timing_frame(timings: Sequence[Timing]) -> pd.DataFrame:
    """Timings as numbers, one row per arm and setting."""
    return pd.DataFrame(
        {
            "method": timing.arm.method,
            "arm": timing.arm.label,
            "prompt_and_new_tokens": timing.setting,
            "batch": timing.batch,
            "prefill_compress_s_min": timing.prefill_least,
            "prefill_compress_s_median": timing.prefill_s.value,
            "decode_s_min": timing.decode_least,
            "decode_s_median": timing.decode_s.value,
            "tokens_per_s_median": timing.tokens_per_s.value,
            "decode_tokens_per_s_median": timing.decode_tokens_per_s.value,
            **with_interval("tokens_per_s_over_exact", timing.speedup),
            **with_interval("decode_tokens_per_s_over_exact", timing.decode_speedup),
            **with_interval("prefill_compress_s_over_exact", timing.prefill_ratio),
            "peak_bytes": timing.peak_bytes,
            "cache_bytes": timing.cache_bytes,
            "ratio": timing.ratio,
            "runs": timing.runs,
            "failures": failures_text(timing.failures),
        }
        for timing in timings
    )


def with_interval(name: str, estimate: Estimate) -> dict[str, float]:
    """Three columns of a frame."""
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


_ASKED = ("asked_new_tokens", "asked_batch", "asked_rate")
"""What a throughput record was asked for, beside its prompt tokens."""


def _setting(asked: Mapping[str, object], records: pd.DataFrame) -> str:
    new = asked.get("asked_new_tokens", records["new_tokens"].max())
    text = f"{as_text(asked['prompt_tokens'])} + {as_text(new) if new == new else '?'}"
    batch, rate = asked.get("asked_batch", "1"), asked.get("asked_rate")
    if batch != "1":
        text += f", batch {batch}"
    return text if rate is None or rate != rate else f"{text}, rate {rate}"


def _timing(arm: Arm, asked: Mapping[str, object], records: pd.DataFrame) -> Timing:
    good = records[records["status"] == "ok"]
    prefill = good["prefill_s"].add(good["compress_s"].fillna(0.0))

    def column(name: str) -> pd.Series:
        return good[name].astype(float) if name in good else pd.Series(dtype=float)

    rate, alone = column("tokens_per_s"), column("decode_tokens_per_s")
    decoded = good["new_tokens"] / good["decode_s"]
    return Timing(
        arm=arm,
        setting=_setting(asked, good),
        prefill_s=median_of(prefill),
        prefill_least=float(prefill.min()),
        decode_s=median_of(good["decode_s"]),
        decode_least=float(good["decode_s"].min()),
        tokens_per_s=median_of(rate if len(rate) else good["score"]),
        decode_tokens_per_s=median_of(alone if len(alone) else decoded),
        peak_bytes=float(column("peak_bytes").mean()),
        cache_bytes=float(good["cache_bytes"].mean()),
        ratio=float(good["ratio"].mean()),
        runs=len(good),
        failures=failures_of(records),
        batch=float(column("batch").mean()),
        speedup=median_of(column("speedup")),
        decode_speedup=median_of(column("decode_speedup")),
        prefill_ratio=median_of(column("prefill_ratio")),
    )
