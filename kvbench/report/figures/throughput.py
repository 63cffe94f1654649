"""Time and memory: of each setting, and against the prompt's length."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from kvbench.report.experiment import Group
from kvbench.report.figures import canvas, names
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.style import style_of
from kvbench.report.figures.vector import add_spot
from kvbench.report.stats.estimate import Estimate
from kvbench.report.table import Column, failures_text, number, value_text
from kvbench.report.tables.strata import as_text
from kvbench.report.tables.timings import median_of, timings_of


def throughput(group: Group) -> Drawn:
    """Seconds, new tokens per second and peak memory per setting and variant; what failed is named."""
    timings = timings_of(group)
    settings = list(dict.fromkeys(timing.setting for timing in timings))
    memory = any(math.isfinite(timing.number("peak_bytes")) for timing in timings)
    figure = canvas.new_figure(10.5 if memory else 9.0, 1.1 + max(1.6, 0.26 * len(timings)))
    panels: list[Axes] = list(figure.subplots(1, 3 if memory else 2, sharey=True))
    labels = []
    decoding: dict[str, float] = {}
    for i, timing in enumerate(reversed(timings)):
        color = style_of(timing.variant.method).color
        prefill, decode = (timing.median(key) for key in ("prefill_compress_s", "decode_s"))
        panels[0].barh(i, prefill, 0.68, color=color, alpha=0.4, edgecolor=color)
        panels[0].barh(i, decode, 0.68, left=prefill, color=color, edgecolor=color)
        rate = timing.estimate("decode_tokens_per_s")
        who = f"{timing.variant.label} ({timing.setting})"
        if math.isfinite(prefill + decode):
            said = f"{who}: prefill and compress {number(prefill)} s, decode {number(decode)} s"
            add_spot(panels[0], (prefill + decode) / 2, i, said, (prefill + decode, 0.68))
        if math.isfinite(rate.value):
            said = f"{who}: {' '.join(Column('', '', 'median').text(rate))} new tokens per second"
            add_spot(panels[1], rate.value / 2, i, said, (rate.value, 0.68))
            decoding[who] = rate.value
        _bar(panels[1], i, rate.value, color)
        if math.isfinite(rate.low):
            panels[1].plot([rate.low, rate.high], [i, i], color="#222222", linewidth=0.9)
        if memory:
            _bar(panels[2], i, timing.number("peak_bytes") / 2**30, color)
        if timing.failures:
            failed = f" {failures_text(timing.failures)}"
            at = prefill + decode if timing.runs else 0.0
            panels[0].annotate(
                failed, (at, i), va="center", fontsize=canvas.SMALL, color=canvas.GREY
            )
        labels.append(timing.variant.label + (f" ({timing.setting})" if len(settings) > 1 else ""))
    panels[0].set_yticks(range(len(labels)), labels)
    panels[0].set_ylim(-0.6, len(labels) - 0.4)
    labels_below = ("seconds: prefill + compress (pale), decode (full)", _DECODING, _PEAK)
    for ax, label in zip(panels, labels_below, strict=False):
        ax.set_xlabel(label, fontsize=canvas.TEXT)
        ax.set_xlim(left=0)
        canvas.style_axes(ax, grid="x")
    per_setting = len(timings) // max(1, len(settings))
    for k in range(1, len(settings)):
        for ax in panels:
            ax.axhline(k * per_setting - 0.5, color=canvas.GREY, linewidth=0.5)
    counts = sorted({timing.runs for timing in timings if timing.runs})
    runs = " to ".join(str(count) for count in dict.fromkeys(counts[:1] + counts[-1:])) or "0"
    known = any(math.isfinite(timing.estimate("decode_tokens_per_s").low) for timing in timings)
    lines = ", lines: 95 % intervals between order statistics" if known else ""
    setting = f"; prompt + new tokens: {settings[0]}" if len(settings) == 1 else ""
    return Drawn(
        f"{names.stem(group)}-throughput",
        f"{group.task}: time{' and memory' if memory else ''}",
        f"Medians over {runs} runs{lines}{setting}.",
        figure,
        names.extremes(decoding, "tokens per second", lower=False),
    )


_DECODING, _PEAK = "new tokens per second while decoding", "peak memory (GiB)"
_SCALING = (
    ("latency_s", "seconds in all", 1.0),
    ("decode_tokens_per_s", _DECODING, 1.0),
    ("peak_bytes", _PEAK, 2.0**-30),
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
    figure, axes = canvas.new_panels(len(panels), len(panels), (3.1, 3.3), (0.8, 0.0))
    variants = [
        variant for variant in group.variants if (records["variant"] == variant.label).any()
    ]
    for ax, (field, label, scale) in zip(axes, panels, strict=True):
        for variant in variants:
            mine = records[records["variant"].eq(variant.label) & records["status"].eq("ok")]
            values = mine[field].astype(float) * scale
            lines = {}
            for length, part in values.groupby(mine["prompt_tokens"]):
                found = median_of(part)
                if math.isnan(found.low):
                    found = Estimate(found.value, float(part.min()), float(part.max()))
                if math.isfinite(found.value):
                    lines[length] = found
            canvas.draw_estimates(
                ax,
                list(lines),
                list(lines.values()),
                style_of(variant.method),
                line=1.3,
                label=variant.label,
                says=[
                    f"{variant.label}, {as_text(length)} tokens: {number(found.value)} {label}"
                    for length, found in lines.items()
                ],
            )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        span = records.loc[records["status"] == "ok", "prompt_tokens"]
        few = span.max() < 32 * span.min()
        canvas.plain_ticks(ax.xaxis, LogLocator(base=2 if few else 4))
        canvas.plain_ticks(ax.yaxis, LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        ax.set_xlabel("prompt length (tokens)", fontsize=canvas.TEXT)
        ax.set_ylabel(label, fontsize=canvas.TEXT)
        canvas.style_axes(ax)
    canvas.name_lines(figure, axes)
    return Drawn(
        f"{names.stem(group)}-scaling",
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
            fontsize=canvas.SMALL,
        )
    ax.margins(x=0.16)
