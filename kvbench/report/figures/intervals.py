"""Means and paired differences with their intervals: by dataset, by a record field."""

from __future__ import annotations

import math

import numpy as np

from kvbench.report.experiment import Group
from kvbench.report.figures import canvas, names
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.names import words
from kvbench.report.figures.style import style_of
from kvbench.report.table import estimate_text, value_text
from kvbench.report.tables.scores import AVERAGE, ScoreTable, VariantScores


def by_dataset(group: Group, table: ScoreTable) -> Drawn:
    """Paired difference to the baseline: a panel per method, a row per dataset; of several rates the
    lowest in full colour."""
    if table.baseline is None:
        return breakdown(group, table)
    panels: dict[str, list[VariantScores]] = {}
    single = len({row.variant.rate for row in table.rows}) < 3
    for row in table.rows:
        if row.total.difference is not None:
            named = row.variant.label if single else row.variant.method
            panels.setdefault(named, []).append(row)
    columns = sorted(table.columns, key=lambda name: name == AVERAGE)
    size = (1.75, 0.35 + 0.19 * len(columns))
    share = {"sharex": True, "sharey": True}
    figure, axes = canvas.new_panels(len(panels), 5, size, (1.4, 0.7), **share)
    for ax, (title, rows) in zip(axes, panels.items(), strict=True):
        ax.axvline(0, color=canvas.GREY, linewidth=0.9)
        if AVERAGE in columns:
            ax.axhline(len(columns) - 1.5, color=canvas.GREY, linewidth=0.6, linestyle=":")
        for i, row in enumerate(rows):
            known = [(k, d) for k, name in enumerate(columns) if (d := row.cells[name].difference)]
            canvas.draw_estimates(
                ax,
                [k for k, _ in known],
                [difference for _, difference in known],
                style_of(row.variant.method),
                scale=names.percent(table.unit),
                horizontal=True,
                size=0.85,
                alpha=0.3 + 0.7 * (i + 1) / len(rows),
                says=[
                    f"{row.variant.label}, {columns[k]}:"
                    f" {estimate_text(difference, table.unit, signed=True)}"
                    for k, difference in known
                ],
            )
        ax.set_title(title, fontsize=canvas.TEXT)
        canvas.list_rows(ax, columns)
    unit = "percentage points" if table.unit == "fraction" else words(table.unit)
    canvas.label_axes(figure, axes, f"difference to {table.baseline} ({unit})", "")
    return Drawn(
        f"{names.stem(group)}-by-dataset",
        f"{group.task}: paired difference to {table.baseline} by dataset",
        "Over examples that both scored, with 95 % intervals; the average counts every"
        " dataset alike." + ("" if single else " Paler: higher rates."),
        figure,
        _difference_extremes(table),
    )


def breakdown(group: Group, table: ScoreTable) -> Drawn:
    """Score against a record field, one line per method, a panel per rate."""
    panels = names.pages(group, list(group.variants), per_rate=True)
    several = len(panels) > 1
    size = (3.2 if several else 5.6, 2.7)
    figure, axes = canvas.new_panels(len(panels), 3, size, (1.0, 0.9), sharey=True)
    at = range(len(table.columns))
    for ax, (suffix, variants) in zip(axes, panels, strict=True):
        for row in (row for row in table.rows if row.variant in variants):
            cells = [row.cells[c].score for c in table.columns]
            canvas.draw_estimates(
                ax,
                at,
                cells,
                style_of(row.variant.method),
                scale=names.percent(table.unit),
                line=1.3,
                label=row.variant.method if several else row.variant.label,
                clip_on=False,
                says=[
                    f"{row.variant.label}, {words(table.by)} {name}:"
                    f" {estimate_text(cell, table.unit)}"
                    for name, cell in zip(table.columns, cells, strict=True)
                ],
            )
        ax.set_xticks(at, list(table.columns))
        if several:
            ax.set_title(suffix.lstrip("-").replace("-", " "), fontsize=canvas.TEXT)
        canvas.style_axes(ax)
    if table.unit == "fraction":
        axes[0].set_ylim(*_limits(table))
    canvas.label_axes(figure, axes, names.axis_name(table.by), f"score{names.axis_unit(group)}")
    if several:
        canvas.name_lines(figure, axes)
    else:
        canvas.label_ends(axes[0])
    means = {
        row.variant.label: float(np.mean([cell.score.value for cell in row.cells.values()]))
        for row in table.rows
    }
    return Drawn(
        f"{names.stem(group)}-by-{names.slug(table.by)}",
        f"{group.task}: score by {words(table.by)}",
        "Mean and 95 % interval over examples. Values are evenly spaced.",
        figure,
        names.extremes(means, table.unit, lower=table.lower_is_better),
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
    """Paired difference to the baseline with its interval, one line per variant, best first."""
    rows = [row for row in table.rows if row.total.difference is not None]
    rows.sort(key=lambda row: _rank(table, row))
    figure, (ax,) = canvas.new_panels(1, 1, (6.2, 0.27 * len(rows)), (0.0, 0.9))
    ax.axvline(0, color=canvas.GREY, linewidth=0.9)
    for i, row in enumerate(reversed(rows)):
        difference = row.total.difference
        if difference is None or math.isnan(difference.value):
            continue
        said = estimate_text(difference, table.unit, signed=True)
        canvas.draw_estimates(
            ax,
            [i],
            [difference],
            style_of(row.variant.method),
            scale=names.percent(table.unit),
            horizontal=True,
            elinewidth=1.6,
            capsize=2.5,
            says=[f"{row.variant.label}: {said} to {table.baseline}"],
        )
        canvas.write_beside(ax, value_text(difference.value, table.unit, signed=True), (1.01, i))
    ax.set_yticks(range(len(rows)), [row.variant.label for row in reversed(rows)])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    unit = "percentage points" if table.unit == "fraction" else words(table.unit)
    better = "left" if table.lower_is_better else "right"
    ax.set_xlabel(
        f"difference to {table.baseline} ({unit}); {better} is better", fontsize=canvas.TEXT
    )
    canvas.style_axes(ax, grid="x")
    return Drawn(
        f"{names.slug(table.task)}-{names.slug(table.model)}-difference",
        f"{table.task}: paired difference to {table.baseline}",
        "Over examples that both scored, with 95 % intervals.",
        figure,
        _difference_extremes(table),
    )


def _rank(table: ScoreTable, row: VariantScores) -> float:
    """Ascending: the best difference first, what has none last."""
    difference = row.total.difference
    if difference is None or math.isnan(difference.value):
        return math.inf
    return difference.value if table.lower_is_better else -difference.value


def _difference_extremes(table: ScoreTable) -> str:
    found = {
        row.variant.label: row.total.difference.value for row in table.rows if row.total.difference
    }
    return names.extremes(found, table.unit, lower=table.lower_is_better, signed=True)
