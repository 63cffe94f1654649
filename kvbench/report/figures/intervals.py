"""Means and paired differences with their intervals: by dataset, by a record field, against memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import LogLocator

from kvbench.report.experiment import BASELINE, Group
from kvbench.report.figures.canvas import (
    GREY,
    SMALL,
    TEXT,
    Drawn,
    add_legend,
    axis_name,
    axis_unit,
    draw_estimates,
    label_axes,
    new_figure,
    pages,
    percent,
    plain_ticks,
    slug,
    stem,
    style_axes,
    words,
)
from kvbench.report.figures.style import style_of
from kvbench.report.stats.estimate import Estimate
from kvbench.report.table import NOTHING, value_text
from kvbench.report.tables.scores import AVERAGE, ScoreTable, score_table

Point = tuple[float, Estimate]
"""A measured ratio and the score there."""


def score_against_ratio(group: Group, table: ScoreTable) -> Drawn:
    """Score against the measured ratio of bytes, one line per method; the baseline as a band."""
    lines: dict[str, list[Point]] = {}
    for row in table.rows:
        if not math.isnan(row.total.score.value):
            lines.setdefault(row.variant.method, []).append((row.ratio, row.total.score))
    baselines = {a.method for a in group.variants if a.method == BASELINE}
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
    ratios = records.groupby(["variant", "rate"])["ratio"].mean()
    table = score_table(group, "rate")
    lines: dict[str, list[Point]] = {}
    for row in table.rows:
        if row.variant.label not in group.compressed:
            continue  # what keeps the whole cache has rounding for an error
        for rate, cell in row.cells.items():
            if not math.isnan(cell.score.value):
                point = float(ratios[row.variant.label, float(rate)]), cell.score
                lines.setdefault(row.variant.label, []).append(point)
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
        draw_estimates(
            ax, [ratio for ratio, _ in ordered], scores, style, scale=scale, line=1.5, label=label
        )
    ax.set_xscale("log", base=2)
    ratios = [ratio for points in lines.values() for ratio, _ in points]
    few = max(ratios) < 4 * min(ratios)
    plain_ticks(ax.xaxis, LogLocator(base=2, subs=(1.0, 1.5) if few else (1.0,)))
    if group.meta.score_unit == "fraction" and not any(
        score.value > 0 for points in lines.values() for _, score in points
    ):
        ax.set_ylim(0, 103)
    if logarithmic:
        ax.set_yscale("log")
        plain_ticks(ax.yaxis, LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    ax.set_xlabel("measured ratio (bytes held / bytes of the exact cache)", fontsize=TEXT)
    unit = group.meta.score_unit
    named = f"score{axis_unit(group)}" if unit == "fraction" else unit.replace("_", " ")
    ax.set_ylabel(named, fontsize=TEXT)
    style_axes(ax)
    add_legend(figure, ax, len(lines))
    return Drawn(f"{stem(group)}-ratio", title, caption, figure)


def by_dataset(group: Group, table: ScoreTable) -> Drawn:
    """Paired difference to the baseline on every dataset: a panel per rate, a point per method."""
    if table.baseline is None:
        return breakdown(group, table)
    panels = pages(
        group,
        [variant for variant in group.variants if group.baseline[variant.label]],
        per_rate=True,
    )
    columns = sorted(table.columns, key=lambda name: name == AVERAGE)
    figure = new_figure(max(6.2, 1.0 + 0.62 * len(columns)), 0.6 + 3.0 * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    at = np.arange(len(columns))
    scale = percent(table.unit)
    for ax, (suffix, variants) in zip(axes, panels, strict=True):
        ax.axhline(0, color=GREY, linewidth=0.9)
        if AVERAGE in columns:
            ax.axvline(len(columns) - 1.5, color=GREY, linewidth=0.6, linestyle=":")
        shown = [row for row in table.rows if row.variant in variants]
        for i, row in enumerate(shown):
            draw_estimates(
                ax,
                at + (i - (len(shown) - 1) / 2) * 0.7 / len(shown),
                [row.cells[c].difference or NOTHING for c in columns],
                style_of(row.variant.method),
                scale=scale,
                size=0.85,
                label=row.variant.label if len(panels) == 1 else row.variant.method,
            )
        ax.set_xticks(at, columns, rotation=35, ha="right", rotation_mode="anchor")
        ax.set_xlim(-0.6, len(columns) - 0.4)
        if len(panels) > 1:
            ax.set_title(suffix.lstrip("-").replace("-", " "), fontsize=TEXT)
        style_axes(ax)
    unit = "percentage points" if table.unit == "fraction" else words(table.unit)
    label_axes(figure, list(axes), "", f"difference to {table.baseline} ({unit})")
    add_legend(figure, axes[0], len(panels[0][1]))
    return Drawn(
        f"{stem(group)}-by-dataset",
        f"{group.task}: paired difference to {table.baseline} by dataset",
        "Over examples that both scored, with 95 % intervals; the average counts every"
        " dataset alike. Points are set apart sideways so that their intervals can be told apart.",
        figure,
    )


def breakdown(group: Group, table: ScoreTable) -> Drawn:
    """Score against a record field, one line per method, a panel per rate."""
    panels = pages(group, list(group.variants), per_rate=True)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(1.0 + (5.2 if columns == 1 else 3.2 * columns), 0.9 + 2.7 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    at = np.arange(len(table.columns))
    scale = percent(table.unit)
    for ax, (suffix, variants) in zip(axes.flat, panels, strict=False):
        shown = [row for row in table.rows if row.variant in variants]
        for i, row in enumerate(shown):
            draw_estimates(
                ax,
                at + (i - (len(shown) - 1) / 2) * 0.5 / len(shown),
                [row.cells[c].score for c in table.columns],
                style_of(row.variant.method),
                scale=scale,
                line=1.3,
                label=row.variant.label if len(panels) == 1 else row.variant.method,
                clip_on=False,
            )
        ax.set_xticks(at, list(table.columns))
        if len(panels) > 1:
            ax.set_title(suffix.lstrip("-").replace("-", " "), fontsize=TEXT)
        style_axes(ax)
    if table.unit == "fraction":
        axes.flat[0].set_ylim(*_limits(table))
    for ax in list(axes.flat)[len(panels) :]:
        ax.remove()
    label_axes(
        figure, list(axes.flat)[: len(panels)], axis_name(table.by), f"score{axis_unit(group)}"
    )
    add_legend(figure, axes.flat[0], len(panels[0][1]))
    return Drawn(
        f"{stem(group)}-by-{slug(table.by)}",
        f"{group.task}: score by {words(table.by)}",
        "Mean and 95 % interval over examples. Values are evenly spaced, and points set"
        " apart sideways so that their intervals can be told apart.",
        figure,
    )


def _limits(table: ScoreTable) -> tuple[float, float]:
    """All of 0 to 100 per cent; where everything lies in a small part of it (and not all is 0), that
    part."""
    scores = [cell.score for row in table.rows for cell in row.cells.values()]
    low = 100 * np.nanmin([min(score.value, score.low) for score in scores])
    high = 100 * np.nanmax([max(score.value, score.high) for score in scores])
    if high - low > 40 or not any(score.value > 0 for score in scores):
        return 0.0, 103.0
    room = max(1.0, 0.08 * (high - low))
    return max(0.0, low - room), min(103.0, high + room)


def differences(table: ScoreTable) -> Drawn:
    """Paired difference to the baseline with its interval, one line per variant."""
    rows = [row for row in table.rows if row.total.difference is not None]
    scale = percent(table.unit)
    figure = new_figure(6.2, 0.9 + 0.27 * len(rows))
    ax = figure.subplots()
    ax.axvline(0, color=GREY, linewidth=0.9)
    for i, row in enumerate(reversed(rows)):
        difference = row.total.difference
        if difference is None or math.isnan(difference.value):
            continue
        draw_estimates(
            ax,
            [i],
            [difference],
            style_of(row.variant.method),
            scale=scale,
            horizontal=True,
            elinewidth=1.6,
            capsize=2.5,
        )
        ax.annotate(
            value_text(difference.value, table.unit, signed=True),
            (1.01, i),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=SMALL,
            annotation_clip=False,
        )
    ax.set_yticks(range(len(rows)), [row.variant.label for row in reversed(rows)])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    unit = " (percentage points)" if table.unit == "fraction" else f" ({words(table.unit)})"
    better = "left" if table.lower_is_better else "right"
    ax.set_xlabel(f"difference to {table.baseline}{unit}; {better} is better", fontsize=TEXT)
    style_axes(ax, grid="x")
    return Drawn(
        f"{slug(table.task)}-{slug(table.model)}-difference",
        f"{table.task}: paired difference to {table.baseline}",
        "Over examples that both scored, with 95 % intervals.",
        figure,
    )
