"""Tables of times: of a throughput probe, and of decoding per token by length."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvbench.report.experiment import Group
from kvbench.report.stats.estimate import Estimate
from kvbench.report.tables.scores import failures_text
from kvbench.report.tables.speeds import Speed
from kvbench.report.tables.timings import Timing
from kvbench.report.views import MISSING, View, number, size


def timing_view(task: str, model: str, timings: Sequence[Timing]) -> View:
    """Minimum and median seconds, memory and rate of generation, with intervals."""
    return View(
        name=f"{task}-{model}-timing",
        title=f"{task} on {model}: minimum / median over runs",
        columns=(
            "method",
            "prompt + new",
            "batch",
            "prefill s",
            "prefill x",
            "decode s",
            "tokens/s",
            "tokens/s x",
            "decode tokens/s",
            "decode x",
            "peak",
            "cache",
            "ratio",
            "runs",
            "failed",
        ),
        rows=tuple(
            (
                t.arm.label,
                t.setting,
                MISSING if math.isnan(t.batch) else f"{t.batch:g}",
                f"{number(t.prefill_least)} / {number(t.prefill_s.value)}",
                median_text(t.prefill_ratio),
                f"{number(t.decode_least)} / {number(t.decode_s.value)}",
                median_text(t.tokens_per_s),
                median_text(t.speedup),
                median_text(t.decode_tokens_per_s),
                median_text(t.decode_speedup),
                size(t.peak_bytes),
                size(t.cache_bytes),
                number(t.ratio),
                str(t.runs),
                failures_text(t.failures) or "0",
            )
            for t in timings
        ),
        notes=(
            "No prefill is shared; its seconds include compression. tokens/s are medians: new tokens"
            " of the whole batch over the time of prefill and decoding, and over decoding alone."
            " x: times the exact cache's in the same run, median. [low, high]: 95 % intervals of"
            " medians between two order statistics (of ten runs the second and the ninth); below six"
            " runs there are none. runs: those that succeeded; failed: those that did not. peak:"
            " allocated on the GPU; on a CPU the whole process, weights and libraries included.",
        ),
    )


def speed_view(group: Group, speeds: Sequence[Speed]) -> View:
    """The same as a table."""
    rows = []
    for speed in speeds:
        rows.append(
            (
                speed.arm.label,
                f"{speed.least:,}–{speed.most - 1:,}",
                MISSING if math.isnan(speed.tokens) else f"{speed.tokens:g}",
                median_text(speed.decode_ms),
                median_text(speed.over_baseline),
                str(speed.timed),
                failures_text(speed.failures) or "0",
            )
        )
    return View(
        name=f"{group.task}-{group.model}-decoding",
        title=f"{group.task} on {group.model}: decoding per token, by length of the prompt",
        columns=(
            *("method", "prompt tokens", "new tokens", "ms/token"),
            *(f"x {group.baseline_name or 'baseline'}", "timed", "failed"),
        ),
        rows=tuple(rows),
        notes=(
            "Medians over examples, with 95 % intervals between order statistics (below six examples:"
            " none). x: over the baseline's on the same example, median. In a job of several methods"
            " all decode together and share each step's time by rows: to compare times, use"
            " task=throughput, which measures each alone.",
        ),
    )


def median_text(estimate: Estimate) -> str:
    """A median with its interval, where there is one."""
    if math.isnan(estimate.low):
        return number(estimate.value)
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"
