"""Seconds of decoding per token, by length of the prompt: what answers of different lengths hide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from kvbench.report.experiment import Arm, Group
from kvbench.report.stats.estimate import Estimate
from kvbench.report.tables.scores import failures_of, failures_text
from kvbench.report.tables.timings import median_of, with_interval


@dataclass(frozen=True)
class Speed:
    """One arm at one length.

    Attributes:
        least, most: prompt tokens, [least, most).
        tokens: median length of the answers.
        decode_ms: milliseconds per step of decoding, median over examples.
        over_baseline: the same over the baseline's on the same example, median; NaN where there is
            no baseline.
        timed: examples with such a time; failures: the failed ones by status.
    """

    arm: Arm
    least: int
    most: int
    tokens: float
    decode_ms: Estimate
    over_baseline: Estimate
    timed: int
    failures: Mapping[str, int]


def speeds_of(group: Group) -> list[Speed]:
    """Every arm at every length, lengths from one power of two to the next; empty without times."""
    if not group.records["decode_ms"].gt(0).any():
        return []
    records = group.records.dropna(subset=["prompt_tokens"])
    tokens = pd.to_numeric(records["prompt_tokens"])
    powers = tokens.clip(lower=1).map(lambda n: int(n).bit_length() - 1)
    found = []
    for power in sorted(powers.unique().tolist()):
        part = records[powers.eq(power)]
        ms = part[part["status"].eq("ok")].set_index(["arm", "seed", "example_id"])["decode_ms"]
        for arm in group.arms:
            mine = part[part["arm"].eq(arm.label)]
            if mine.empty:
                continue
            good = mine[mine["status"].eq("ok")]
            ours = _of(ms, arm.label)
            theirs = _of(ms, group.baseline[arm.label])
            found.append(
                Speed(
                    arm,
                    2**power,
                    2 ** (power + 1),
                    float(pd.to_numeric(good["new_tokens"]).median()),
                    median_of(ours),
                    median_of((ours / theirs.reindex(ours.index)).dropna()),
                    int(ours.notna().sum()),
                    failures_of(mine),
                )
            )
    return found


def _of(ms: pd.Series, label: str | None) -> pd.Series:
    """By seed and example; empty where the label has none."""
    return ms[ms.index.get_level_values("arm") == label].droplevel("arm")


def speed_frame(group: Group, speeds: Sequence[Speed]) -> pd.DataFrame:
    """The numbers, one row per arm and length."""
    return pd.DataFrame(
        {
            "model": group.model,
            "task": group.task,
            "arm": speed.arm.label,
            "prompt_tokens_from": speed.least,
            "prompt_tokens_below": speed.most,
            "new_tokens_median": speed.tokens,
            **with_interval("decode_ms_per_token", speed.decode_ms),
            "baseline": group.baseline[speed.arm.label],
            **with_interval("over_baseline", speed.over_baseline),
            "timed": speed.timed,
            "failures": failures_text(speed.failures),
        }
        for speed in speeds
    )
