"""Scores and errors against memory, with the exact cache as a line across."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from kvbench.report.experiment import BASELINE, Group
from kvbench.report.figures.canvas import (
    SMALL,
    TEXT,
    Drawn,
    axis_unit,
    draw_estimates,
    extremes,
    label_axes,
    label_ends,
    name_lines,
    new_figure,
    percent,
    plain_ticks,
    slug,
    stem,
    style_axes,
    words,
)
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
    figure = new_figure(6.6, 0.9 + 0.27 * len(lines) if alike else 3.7)
    ax = figure.subplots()
    if alike:
        _draw_rows(ax, lines, table.unit, _order(lines, table), ratios=True)
    else:
        _draw_lines(ax, group, lines, BASELINE)
        label_ends(ax)
    averaged = f" over {len(table.columns) - 1} datasets" if AVERAGE in table.columns else ""
    return _memory_figure(
        group,
        figure,
        lines,
        title=f"{group.task}: score {'at equal' if alike else 'against'} memory",
        caption=f"Mean score{averaged} with 95 % intervals "
        + ("and" if alike else "against")
        + " the ratio that was measured, not the one that was asked for; dashed with its band: the"
        " baseline." + ("" if alike else PARETO),
        alike=alike,
    )


def score_on_tasks(tasks: Sequence[tuple[Group, ScoreTable]]) -> Drawn:
    """The same on several tasks of one model: a panel each."""
    lines = [_lines_of(table) for _, table in tasks]
    alike = all(map(_is_alike, lines))
    named = dict.fromkeys(name for found in lines for name in found)
    columns = min(3 + 2 * alike, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    height = 0.45 + 0.2 * len(named) if alike else 2.5
    figure = new_figure(1.2 + (2.1 if alike else 3.2) * columns, 0.7 + height * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    finding = []
    for ax, (group, table), found in zip(axes, tasks, lines, strict=False):
        if alike:
            _draw_rows(ax, found, table.unit, list(named), ratios=False)
            ax.set_xlim(-3, 103)
        else:
            _draw_lines(ax, group, found, BASELINE)
            ax.set_ylim(0, 103)
        ax.set_title(group.task, fontsize=TEXT)
        means = {name: points[0][1].value for name, points in found.items()}
        finding.append(f"{group.task}: {extremes(means, table.unit, lower=table.lower_is_better)}")
    for ax in axes[len(tasks) :]:
        ax.remove()
    shown = axes[: len(tasks)]
    if alike:
        label_axes(figure, shown, "score (%)", "")
    else:
        label_axes(figure, shown, _RATIO, "score (%)")
        name_lines(figure, shown)
    model = tasks[0][0].model
    return Drawn(
        f"overview-{slug(model)}-memory",
        f"{model}: score {'at equal' if alike else 'against'} memory",
        "Mean score with 95 % intervals; dashed with its band: the baseline.",
        figure,
        " ".join(finding),
    )


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


def _order(lines: Mapping[str, Sequence[Point]], table: ScoreTable) -> list[str]:
    """Names, the best first."""
    sign = 1.0 if table.lower_is_better else -1.0
    return sorted(lines, key=lambda name: sign * lines[name][0][1].value)


def _draw_rows(
    ax: Axes,
    lines: Mapping[str, Sequence[Point]],
    unit: str,
    names: Sequence[str],
    *,
    ratios: bool,
) -> None:
    """A row per method from the top; `ratios`: with its ratio at the right."""
    scale = percent(unit)
    for i, name in enumerate(names):
        for ratio, score in lines.get(name, ()):
            style = style_of(name.split(",")[0])
            if name == BASELINE:
                ax.axvline(scale * score.value, color=style.color, linestyle="--", linewidth=1)
                if not math.isnan(score.low):
                    low, high = scale * score.low, scale * score.high
                    ax.axvspan(low, high, color=style.color, alpha=0.07, lw=0)
            said = f"{name} at ratio {number(ratio)}: {estimate_text(score, unit)}"
            draw_estimates(
                ax, [i], [score], style, scale=scale, horizontal=True, elinewidth=1.6, says=[said]
            )
            if ratios:
                ax.annotate(
                    f"ratio {ratio:.2f}",
                    (1.02, i),
                    xycoords=("axes fraction", "data"),
                    va="center",
                    fontsize=SMALL,
                    annotation_clip=False,
                )
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    style_axes(ax, grid="x")


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
    figure = new_figure(6.6, 3.7)
    ax = figure.subplots()
    _draw_lines(ax, group, lines)
    if group.meta.lower_is_better:
        ax.set_yscale("log")
        plain_ticks(ax.yaxis, LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    label_ends(ax)
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


PARETO = " Ringed: the Pareto set, no other point has fewer bytes and a better mean."


def _draw_lines(
    ax: Axes, group: Group, lines: Mapping[str, Sequence[Point]], baseline: str | None = None
) -> None:
    scale, unit = percent(group.meta.score_unit), group.meta.score_unit
    for label, points in lines.items():
        style = style_of(label.split(",")[0])
        ordered = sorted(points, key=lambda point: point[0])
        scores = [score for _, score in ordered]
        if label == baseline:
            first = scores[0]
            ax.axhline(
                scale * first.value, color=style.color, linestyle="--", linewidth=1, label=label
            )
            if not math.isnan(first.low):
                low, high = scale * first.low, scale * first.high
                ax.axhspan(low, high, color=style.color, alpha=0.07, lw=0)
            continue
        draw_estimates(
            ax,
            [ratio for ratio, _ in ordered],
            scores,
            style,
            scale=scale,
            line=1.5,
            label=label,
            says=[
                f"{label} at ratio {number(ratio)}: {estimate_text(score, unit)}"
                for ratio, score in ordered
            ],
        )
    _mark_pareto(ax, lines, baseline, scale, group.meta.lower_is_better)
    ax.set_xscale("log", base=2)
    ratios = [
        ratio for label, points in lines.items() for ratio, _ in points if label != baseline
    ] or [1.0]
    low, high = min(ratios), max(ratios)
    few = high < 4 * low
    if high < 2 * low:
        ax.set_xlim(low / 1.6, high * 1.6)
    plain_ticks(ax.xaxis, LogLocator(base=2, subs=(1.0, 1.5) if few else (1.0,)))
    if unit == "fraction" and not any(
        score.value > 0 for points in lines.values() for _, score in points
    ):
        ax.set_ylim(0, 103)
    style_axes(ax)


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
    named = f"score{axis_unit(group)}" if unit == "fraction" else words(unit)
    label_axes(figure, figure.axes, *((named, "") if alike else (_RATIO, named)))
    means = {
        label: float(np.mean([score.value for _, score in points]))
        for label, points in lines.items()
    }
    finding = extremes(means, unit, lower=group.meta.lower_is_better)
    return Drawn(f"{stem(group)}-ratio", title, caption, figure, finding)
