"""Seconds, memory and tokens per second of a throughput probe, by arm and setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvbench.report.data import Arm, Group
from kvbench.report.tables import as_text, failures_of, failures_text


@dataclass(frozen=True)
class Timing:
    """One arm of a throughput table, at one setting.

    Attributes:
        setting: prompt + new tokens, and batch and rate where they were chosen.
        batch: prompts decoded together.
        speedup, decode_speedup: tokens per second, and those of decoding alone, over the exact
            cache's of the same run, medians; prefill_ratio: seconds over the exact cache's.
        prefill_s: prefill and compression, (minimum, median) over runs; decode_s likewise.
        tokens_per_s: new tokens per second of everything, median over runs;
            decode_tokens_per_s of decoding alone.
        peak_bytes, cache_bytes, ratio: means over runs.
    """

    arm: Arm
    setting: str
    prefill_s: tuple[float, float]
    decode_s: tuple[float, float]
    tokens_per_s: float
    decode_tokens_per_s: float
    peak_bytes: float
    cache_bytes: float
    ratio: float
    runs: int
    failures: Mapping[str, int]
    batch: float = np.nan
    speedup: float = np.nan
    decode_speedup: float = np.nan
    prefill_ratio: float = np.nan


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
            "prefill_compress_s_min": timing.prefill_s[0],
            "prefill_compress_s_median": timing.prefill_s[1],
            "decode_s_min": timing.decode_s[0],
            "decode_s_median": timing.decode_s[1],
            "tokens_per_s_median": timing.tokens_per_s,
            "decode_tokens_per_s_median": timing.decode_tokens_per_s,
            "tokens_per_s_over_exact": timing.speedup,
            "decode_tokens_per_s_over_exact": timing.decode_speedup,
            "prefill_compress_s_over_exact": timing.prefill_ratio,
            "peak_bytes": timing.peak_bytes,
            "cache_bytes": timing.cache_bytes,
            "ratio": timing.ratio,
            "runs": timing.runs,
            "failures": failures_text(timing.failures),
        }
        for timing in timings
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
        prefill_s=(float(prefill.min()), float(prefill.median())),
        decode_s=(float(good["decode_s"].min()), float(good["decode_s"].median())),
        tokens_per_s=float((rate if len(rate) else good["score"]).median()),
        decode_tokens_per_s=float((alone if len(alone) else decoded).median()),
        peak_bytes=float(column("peak_bytes").mean()),
        cache_bytes=float(good["cache_bytes"].mean()),
        ratio=float(good["ratio"].mean()),
        runs=len(good),
        failures=failures_of(records),
        batch=float(column("batch").mean()),
        speedup=float(column("speedup").median()),
        decode_speedup=float(column("decode_speedup").median()),
        prefill_ratio=float(column("prefill_ratio").median()),
    )
