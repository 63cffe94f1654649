"""Figures of what a cache costs: scores against memory, time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvbench.report.experiment import BASELINE, Group
from kvbench.report.figures.canvas import (
    GREY,
    SMALL,
    TEXT,
    Drawn,
    add_legend,
    axis_unit,
    marker_size,
    new_figure,
    percent,
    stem,
    style_axes,
)
from kvbench.report.figures.style import style_of
from kvbench.report.stats.estimate import Estimate
from kvbench.report.tables.scores import AVERAGE, ScoreTable, failures_text, score_table
from kvbench.report.tables.timings import Timing, median_of
from kvbench.report.views import value_text

Point = tuple[float, Estimate]
"""A measured ratio and the score there."""


def score_against_ratio(group: Group, table: ScoreTable) -> Drawn:
    """Score against the measured ratio of bytes, one line per method; the baseline as a band."""
    lines: dict[str, list[Point]] = {}
    for row in table.rows:
        if not math.isnan(row.total.score.value):
            lines.setdefault(row.arm.method, []).append((row.ratio, row.total.score))
    baselines = {a.method for a in group.arms if a.method == BASELINE}
    averaged = f" over {len(table.columns) - 1} datasets" if AVERAGE in table.columns else ""
    return _against_ratio(
        group,
        lines,
        {method for method in baselines if method in lines},
        title=f"{group.task}: score against memory",
        caption=f"Mean score{averaged} with 95 % intervals against the ratio that was"
        " measured, not the one that was asked for; dashed with its band: the baseline.",
    )


def error_against_memory(group: Group) -> Drawn | None:
    """The same for tasks whose records bear a rate each; None where there are no two rates."""
    records = group.records[group.records["status"].eq("ok") & group.records["score"].notna()]
    if "rate" not in records or records["rate"].nunique() < 2:
        return None
    ratios = records.groupby(["arm", "rate"])["ratio"].mean()
    table = score_table(group, "rate")
    lines: dict[str, list[Point]] = {}
    for row in table.rows:
        if row.arm.label not in group.compressed:
            continue  # what keeps the whole cache has rounding for an error
        for rate, cell in row.cells.items():
            if not math.isnan(cell.score.value):
                point = float(ratios[row.arm.label, float(rate)]), cell.score
                lines.setdefault(row.arm.label, []).append(point)
    if not lines:
        return None
    return _against_ratio(
        group,
        lines,
        set(),
        title=f"{group.task}: {group.meta.score_unit.replace('_', ' ')} against memory",
        caption="Means with 95 % intervals over prompts against the ratio that was"
        " measured, not the one that was asked for.",
        logarithmic=group.meta.lower_is_better,
    )


def _against_ratio(
    group: Group,
    lines: Mapping[str, Sequence[Point]],
    baselines: set[str],
    *,
    title: str,
    caption: str,
    logarithmic: bool = False,
) -> Drawn:
    figure = new_figure(6.2, 3.7)
    ax = figure.subplots()
    scale = percent(group.meta.score_unit)
    for label, points in lines.items():
        style = style_of(label.split(",")[0])
        ordered = sorted(points, key=lambda point: point[0])
        scores = [score for _, score in ordered]
        if label in baselines:
            first = scores[0]
            ax.axhline(scale * first.value, color=style.color, linestyle="--", linewidth=1)
            if not math.isnan(first.low):
                low, high = scale * first.low, scale * first.high
                ax.axhspan(low, high, color=style.color, alpha=0.07, lw=0)
        ax.errorbar(
            [ratio for ratio, _ in ordered],
            [scale * s.value for s in scores],
            [
                [max(0.0, scale * (s.value - s.low)) for s in scores],
                [max(0.0, scale * (s.high - s.value)) for s in scores],
            ],
            color=style.color,
            marker=style.marker,
            markersize=marker_size(style.marker),
            linewidth=1.5,
            elinewidth=0.8,
            capsize=2,
            label=label,
        )
    ax.set_xscale("log", base=2)
    ratios = [ratio for points in lines.values() for ratio, _ in points]
    few = max(ratios) < 4 * min(ratios)
    _plain_ticks(ax.xaxis, LogLocator(base=2, subs=(1.0, 1.5) if few else (1.0,)))
    if group.meta.score_unit == "fraction" and not any(
        score.value > 0 for points in lines.values() for _, score in points
    ):
        ax.set_ylim(0, 103)
    if logarithmic:
        ax.set_yscale("log")
        _plain_ticks(ax.yaxis, LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    ax.set_xlabel("measured ratio (bytes held / bytes of the exact cache)", fontsize=TEXT)
    unit = group.meta.score_unit
    named = f"score{axis_unit(group)}" if unit == "fraction" else unit.replace("_", " ")
    ax.set_ylabel(named, fontsize=TEXT)
    style_axes(ax)
    add_legend(figure, ax, len(lines))
    return Drawn(f"{stem(group)}-ratio", title, caption, figure)


def _plain_ticks(axis: Axis, locator: LogLocator) -> None:
    """Ticks of a logarithmic axis as plain numbers."""
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def throughput(group: Group, timings: Sequence[Timing]) -> Drawn:
    """Seconds, new tokens per second and peak memory per setting and arm; what failed is named."""
    settings = list(dict.fromkeys(timing.setting for timing in timings))
    memory = any(math.isfinite(timing.peak_bytes) for timing in timings)
    figure = new_figure(10.5 if memory else 9.0, 1.1 + max(1.6, 0.26 * len(timings)))
    panels: list[Axes] = list(figure.subplots(1, 3 if memory else 2, sharey=True))
    labels = []
    for i, timing in enumerate(reversed(timings)):
        color = style_of(timing.arm.method).color
        prefill, decode = timing.prefill_s.value, timing.decode_s.value
        panels[0].barh(i, prefill, 0.68, color=color, alpha=0.4, edgecolor=color)
        panels[0].barh(i, decode, 0.68, left=prefill, color=color, edgecolor=color)
        rate = timing.decode_tokens_per_s
        _bar(panels[1], i, rate.value, color)
        if math.isfinite(rate.low):
            panels[1].plot([rate.low, rate.high], [i, i], color="#222222", linewidth=0.9)
        if memory:
            _bar(panels[2], i, timing.peak_bytes / 2**30, color)
        if timing.failures:
            failed = f" {failures_text(timing.failures)}"
            at = prefill + decode if timing.runs else 0.0
            panels[0].annotate(failed, (at, i), va="center", fontsize=SMALL, color=GREY)
        labels.append(timing.arm.label + (f" ({timing.setting})" if len(settings) > 1 else ""))
    panels[0].set_yticks(range(len(labels)), labels)
    panels[0].set_ylim(-0.6, len(labels) - 0.4)
    panels[0].set_xlabel("seconds: prefill + compress (pale), decode (full)", fontsize=TEXT)
    panels[1].set_xlabel("new tokens per second while decoding", fontsize=TEXT)
    if memory:
        panels[2].set_xlabel("peak memory (GiB)", fontsize=TEXT)
    for ax in panels:
        ax.set_xlim(left=0)
        style_axes(ax, grid="x")
    per_setting = len(timings) // max(1, len(settings))
    for k in range(1, len(settings)):
        for ax in panels:
            ax.axhline(k * per_setting - 0.5, color=GREY, linewidth=0.5)
    counts = sorted({timing.runs for timing in timings if timing.runs})
    runs = " to ".join(str(count) for count in dict.fromkeys(counts[:1] + counts[-1:])) or "0"
    return Drawn(
        f"{stem(group)}-throughput",
        f"{group.task}: time and memory" if memory else f"{group.task}: time",
        f"Medians over {runs} runs"
        + (
            ", lines: 95 % intervals between order statistics"
            if any(math.isfinite(timing.decode_tokens_per_s.low) for timing in timings)
            else ""
        )
        + (f"; prompt + new tokens: {settings[0]}." if len(settings) == 1 else "."),
        figure,
    )


_SCALING = (
    ("latency_s", "seconds in all", 1.0),
    ("decode_tokens_per_s", "new tokens per second while decoding", 1.0),
    ("peak_bytes", "peak memory (GiB)", 2.0**-30),
)


def throughput_scaling(group: Group) -> Drawn | None:
    """Time and memory against the prompt's length, one line per method: medians with their intervals,
    or the range where there are too few runs for one. A line ends where a method failed. None below
    three lengths, or where more than the length varies.
    """
    records = group.records
    lengths = records["prompt_tokens"].nunique()
    panels = [p for p in _SCALING if p[0] in records and records[p[0]].notna().any()]
    if lengths < 3 or records["dataset"].nunique() != lengths or not panels:
        return None
    figure = new_figure(0.8 + 3.1 * len(panels), 3.3)
    axes: list[Axes] = list(figure.subplots(1, len(panels), squeeze=False)[0])
    arms = [arm for arm in group.arms if (records["arm"] == arm.label).any()]
    for ax, (field, label, scale) in zip(axes, panels, strict=True):
        for arm in arms:
            mine = records[records["arm"].eq(arm.label) & records["status"].eq("ok")]
            values = mine[field].astype(float) * scale
            lines = {}
            for length, part in values.groupby(mine["prompt_tokens"]):
                found = median_of(part)
                if math.isnan(found.low):
                    found = Estimate(found.value, float(part.min()), float(part.max()))
                if math.isfinite(found.value):
                    lines[length] = found
            style = style_of(arm.method)
            ax.errorbar(
                list(lines),
                [e.value for e in lines.values()],
                [
                    [e.value - e.low for e in lines.values()],
                    [e.high - e.value for e in lines.values()],
                ],
                color=style.color,
                marker=style.marker,
                markersize=marker_size(style.marker),
                linewidth=1.3,
                elinewidth=0.8,
                capsize=1.5,
                label=arm.label,
            )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        span = records.loc[records["status"] == "ok", "prompt_tokens"]
        few = span.max() < 32 * span.min()
        _plain_ticks(ax.xaxis, LogLocator(base=2 if few else 4))
        _plain_ticks(ax.yaxis, LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        ax.set_xlabel("prompt length (tokens)", fontsize=TEXT)
        ax.set_ylabel(label, fontsize=TEXT)
        style_axes(ax)
    add_legend(figure, axes[0], len(arms))
    return Drawn(
        f"{stem(group)}-scaling",
        f"{group.task}: time and memory against the prompt's length",
        "Medians, with 95 % intervals between order statistics, below six runs the range; a line ends"
        " where a method failed. Both axes are logarithmic.",
        figure,
    )


def _bar(ax: Axes, at: int, value: float, color: str) -> None:
    """A horizontal bar with its value beside it."""
    ax.barh(at, value, 0.68, color=color)
    if math.isfinite(value):
        ax.annotate(
            value_text(value, ""),
            (value, at),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
        )
    ax.margins(x=0.16)
