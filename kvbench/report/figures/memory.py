"""Scores and errors against memory, with the exact cache as a line across."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from kvbench.report.experiment import BASELINE, Group
from kvbench.report.figures import canvas, names
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.names import words
from kvbench.report.figures.style import style_of
from kvbench.report.stats.estimate import Estimate
from kvbench.report.table import estimate_text, number
from kvbench.report.tables.scores import AVERAGE, ScoreTable, score_table

Point = tuple[float, Estimate]
"""A measured ratio and the score there."""


def score_against_ratio(group: Group, table: ScoreTable) -> Drawn:
    """Score against the measured ratio of bytes, a line per method, the baseline as a line across; where
    all hold about as much, one row per method."""
    lines = _lines_of(table)
    alike = _is_alike(lines)
    height = 0.9 + 0.27 * len(lines) if alike else 3.7
    figure, (ax,) = canvas.new_panels(1, 1, (6.6, height), (0.0, 0.0))
    if alike:
        sign = 1.0 if table.lower_is_better else -1.0
        best_first = sorted(lines, key=lambda name: sign * lines[name][0][1].value)
        _draw_rows(ax, lines, table.unit, best_first, ratios=True)
    else:
        _draw_lines(ax, group, lines, BASELINE)
        canvas.label_ends(ax)
    averaged = f" over {len(table.columns) - 1} datasets" if AVERAGE in table.columns else ""
    return _memory_figure(
        group,
        figure,
        lines,
        title=f"{group.task}: score {'at equal' if alike else 'against'} memory",
        caption=f"Mean score{averaged} with 95 % intervals {'and' if alike else 'against'}"
        " the ratio that was measured, not the one that was asked for; dashed with its band: the"
        f" baseline.{'' if alike else PARETO}",
        alike=alike,
    )


def score_on_tasks(tasks: Sequence[tuple[Group, ScoreTable]]) -> Drawn:
    """The same on several tasks of one model: a panel each."""
    lines = [_lines_of(table) for _, table in tasks]
    alike = all(map(_is_alike, lines))
    named = list(dict.fromkeys(name for found in lines for name in found))
    size = (2.1, 0.45 + 0.2 * len(named)) if alike else (3.2, 2.5)
    columns = 5 if alike else 3
    figure, axes = canvas.new_panels(len(tasks), columns, size, (1.2, 0.7), sharey=True)
    finding = []
    for ax, (group, table), found in zip(axes, tasks, lines, strict=True):
        if alike:
            _draw_rows(ax, found, table.unit, named, ratios=False)
            ax.set_xlim(-3, 103)
        else:
            _draw_lines(ax, group, found, BASELINE)
            ax.set_ylim(0, 103)
        ax.set_title(group.task, fontsize=canvas.TEXT)
        means = {name: points[0][1].value for name, points in found.items()}
        best = names.extremes(means, table.unit, lower=table.lower_is_better)
        finding.append(f"{group.task}: {best}")
    canvas.label_axes(figure, axes, *(("score (%)", "") if alike else (_RATIO, "score (%)")))
    if not alike:
        canvas.name_lines(figure, axes)
    model = tasks[0][0].model
    return Drawn(
        f"overview-{names.slug(model)}-memory",
        f"{model}: score {'at equal' if alike else 'against'} memory",
        "Mean score with 95 % intervals; dashed with its band: the baseline.",
        figure,
        " ".join(finding),
    )


PARETO = " Ringed: the Pareto set, no other point has fewer bytes and a better mean."
_RATIO = "measured ratio (bytes held / bytes of the exact cache)"
_ALIKE = 1.5
"""Ratios within this factor are no axis."""


def _lines_of(table: ScoreTable) -> dict[str, list[Point]]:
    """By method (of several variants at one rate by variant) its points."""
    rates = [(row.variant.method, row.variant.rate) for row in table.rows]
    single = len(rates) == len(set(rates))
    lines: dict[str, list[Point]] = {}
    for row in table.rows:
        if not math.isnan(row.total.score.value):
            name = row.variant.method if single else row.variant.label
            lines.setdefault(name, []).append((row.ratio, row.total.score))
    return lines


def _is_alike(lines: Mapping[str, Sequence[Point]]) -> bool:
    """Whether every method has one point, and what compresses holds about as much."""
    ratios = [ratio for points in lines.values() for ratio, _ in points if not ratio > 0.99]
    single = all(len(points) == 1 for points in lines.values())
    return single and bool(ratios) and max(ratios) < _ALIKE * min(ratios)


def _draw_rows(
    ax: Axes, lines: Mapping[str, Sequence[Point]], unit: str, order: Sequence[str], *, ratios: bool
) -> None:
    """A row per method from the top; `ratios`: with its ratio at the right."""
    scale = names.percent(unit)
    for i, name in enumerate(order):
        for ratio, score in lines.get(name, ()):
            style = style_of(name.split(",")[0])
            if name == BASELINE:
                _draw_baseline(ax.axvline, ax.axvspan, score, scale, style.color)
            canvas.draw_estimates(
                ax,
                [i],
                [score],
                style,
                scale=scale,
                horizontal=True,
                elinewidth=1.6,
                says=[_said(name, ratio, score, unit)],
            )
            if ratios:
                canvas.write_beside(ax, f"ratio {ratio:.2f}", (1.02, i))
    canvas.list_rows(ax, order)


def _draw_baseline(
    line: Callable[..., Any],
    span: Callable[..., Any],
    score: Estimate,
    scale: float,
    color: str,
    label: str | None = None,
) -> None:
    """A dashed line across the axes, and its interval as a band."""
    line(scale * score.value, color=color, linestyle="--", linewidth=1, label=label)
    if not math.isnan(score.low):
        span(scale * score.low, scale * score.high, color=color, alpha=0.07, lw=0)


def _said(name: str, ratio: float, score: Estimate, unit: str) -> str:
    return f"{name} at ratio {number(ratio)}: {estimate_text(score, unit)}"


def points_of(group: Group) -> dict[str, list[Point]]:
    """By method its points, whether its rates are in the records or are variants."""
    return _lines_by_rate(group) or _lines_of(score_table(group))


def _lines_by_rate(group: Group) -> dict[str, list[Point]]:
    """By method its points, of records that bear a rate each; none where there are no two rates."""
    records = group.records[group.records["status"].eq("ok") & group.records["score"].notna()]
    if "rate" not in records or records["rate"].nunique() < 2:
        return {}
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
    return lines


def error_against_memory(group: Group) -> Drawn | None:
    """The same for tasks whose records bear a rate each; None where there are no two rates."""
    lines = _lines_by_rate(group)
    if not lines:
        return None
    figure, (ax,) = canvas.new_panels(1, 1, (6.6, 3.7), (0.0, 0.0))
    _draw_lines(ax, group, lines)
    if group.meta.lower_is_better:
        ax.set_yscale("log")
        canvas.plain_ticks(ax.yaxis, LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    canvas.label_ends(ax)
    return _memory_figure(
        group,
        figure,
        lines,
        title=f"{group.task}: {group.meta.score_unit.replace('_', ' ')} against memory",
        caption="Means with 95 % intervals over prompts against the ratio that was"
        " measured, not the one that was asked for." + PARETO,
    )


def pareto(points: Sequence[tuple[float, float]], *, lower: bool) -> list[bool]:
    """Which of (bytes, score) no other equals or beats in both and beats in one.

    Args:
        lower: whether lower scores are better.
    """
    costs = [(cost, score if lower else -score) for cost, score in points]
    return [
        not any(a <= cost and b <= loss and (a, b) != (cost, loss) for a, b in costs)
        for cost, loss in costs
    ]


def _mark_pareto(
    ax: Axes, lines: Mapping[str, Sequence[Point]], baseline: str | None, scale: float, lower: bool
) -> None:
    """Rings around the points of the Pareto set, where there are lines to choose among."""
    points = [
        (ratio, scale * score.value)
        for label, line in lines.items()
        for ratio, score in line
        if label != baseline
    ]
    if len(lines) < 3 or len({ratio for ratio, _ in points}) < 2:
        return
    best = [p for p, on in zip(points, pareto(points, lower=lower), strict=True) if on]
    ratios, scores = zip(*best, strict=True)
    ax.scatter(ratios, scores, s=80, facecolors="none", edgecolors="0.25", lw=0.8, zorder=5)


def _draw_lines(
    ax: Axes, group: Group, lines: Mapping[str, Sequence[Point]], baseline: str | None = None
) -> None:
    scale, unit = names.percent(group.meta.score_unit), group.meta.score_unit
    for label, points in lines.items():
        style = style_of(label.split(",")[0])
        ordered = sorted(points, key=lambda point: point[0])
        if label == baseline:
            _draw_baseline(ax.axhline, ax.axhspan, ordered[0][1], scale, style.color, label)
            continue
        canvas.draw_estimates(
            ax,
            [ratio for ratio, _ in ordered],
            [score for _, score in ordered],
            style,
            scale=scale,
            line=1.5,
            label=label,
            says=[_said(label, ratio, score, unit) for ratio, score in ordered],
        )
    _mark_pareto(ax, lines, baseline, scale, group.meta.lower_is_better)
    ax.set_xscale("log", base=2)
    others = [points for label, points in lines.items() if label != baseline]
    ratios = [ratio for points in others for ratio, _ in points] or [1.0]
    low, high = min(ratios), max(ratios)
    if high < 2 * low:
        ax.set_xlim(low / 1.6, high * 1.6)
    subs = (1.0, 1.5) if high < 4 * low else (1.0,)
    canvas.plain_ticks(ax.xaxis, LogLocator(base=2, subs=subs))
    scores = [score.value for points in lines.values() for _, score in points]
    if unit == "fraction" and not any(score > 0 for score in scores):
        ax.set_ylim(0, 103)
    canvas.style_axes(ax)


def _memory_figure(
    group: Group,
    figure: Figure,
    lines: Mapping[str, Sequence[Point]],
    *,
    title: str,
    caption: str,
    alike: bool = False,
) -> Drawn:
    unit = group.meta.score_unit
    named = f"score{names.axis_unit(group)}" if unit == "fraction" else words(unit)
    canvas.label_axes(figure, figure.axes, *((named, "") if alike else (_RATIO, named)))
    means = {
        label: float(np.mean([score.value for _, score in points]))
        for label, points in lines.items()
    }
    finding = names.extremes(means, unit, lower=group.meta.lower_is_better)
    return Drawn(f"{names.stem(group)}-ratio", title, caption, figure, finding)
