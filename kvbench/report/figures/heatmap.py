"""Figures of scores: heatmaps, bars, breakdowns, paired differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvbench.report.experiment import BASELINE, Arm, Group
from kvbench.report.figures.canvas import (
    GREY,
    SMALL,
    TEXT,
    Drawn,
    add_legend,
    axis_name,
    axis_unit,
    label_axes,
    marker_size,
    new_figure,
    percent,
    slug,
    stem,
    style_axes,
    tick_text,
    words,
)
from kvbench.report.figures.intervals import error_against_memory, score_against_ratio
from kvbench.report.figures.style import style_of
from kvbench.report.stats.estimate import Estimate
from kvbench.report.tables.scores import AVERAGE, ScoreTable, as_text
from kvbench.report.views import value_text

_HEAT = "viridis"
_MISSING = "#EEEEEE"
_MAX_PANELS = 16
_NOTHING = Estimate(math.nan, math.nan, math.nan)


def figures_of(group: Group, tables: Sequence[ScoreTable]) -> list[Drawn]:
    """Every figure that the group's task asks for, and those that its records allow.

    Args:
        tables: the group's score table by dataset, then those by other fields.
    """
    figures: list[Drawn] = []
    if not ((group.records["status"] == "ok") & group.records["score"].notna()).any():
        return figures
    heat, bar_spec = group.meta.figure("heatmap"), group.meta.figure("bars")
    if heat:
        figures += heatmaps(group, heat)
    if bar_spec:
        figures += bars(group, bar_spec)
    if group.meta.figure("throughput"):
        return figures
    for table in tables[1:]:
        if len(table.columns) > 1 and not (bar_spec and table.by == bar_spec.get("x")):
            figures.append(breakdown(group, table))
    table = tables[0]
    if any(row.total.difference for row in table.rows):
        figures.append(differences(table))
    if AVERAGE in table.columns:
        figures.append(by_dataset(group, table))
    memory = error_against_memory(group)
    if memory is not None:
        figures.append(memory)
    elif len({arm.rate for arm in group.arms if arm.rate is not None}) > 1:
        figures.append(score_against_ratio(group, table))
    return figures


def by_dataset(group: Group, table: ScoreTable) -> Drawn:
    """Paired difference to the baseline on every dataset: a panel per rate, a point per method."""
    if table.baseline is None:
        return breakdown(group, table)
    panels = _pages(group, [arm for arm in group.arms if group.baseline[arm.label]], per_rate=True)
    columns = sorted(table.columns, key=lambda name: name == AVERAGE)
    figure = new_figure(max(6.2, 1.0 + 0.62 * len(columns)), 0.6 + 3.0 * len(panels))
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    at = np.arange(len(columns))
    scale = percent(table.unit)
    for ax, (suffix, arms) in zip(axes, panels, strict=True):
        ax.axhline(0, color=GREY, linewidth=0.9)
        if AVERAGE in columns:
            ax.axvline(len(columns) - 1.5, color=GREY, linewidth=0.6, linestyle=":")
        shown = [row for row in table.rows if row.arm in arms]
        for i, row in enumerate(shown):
            found = [row.cells[c].difference or _NOTHING for c in columns]
            values = scale * np.array([d.value for d in found])
            spread = scale * np.array([[d.value - d.low for d in found],
                                       [d.high - d.value for d in found]])  # fmt: skip
            style = style_of(row.arm.method)
            ax.errorbar(
                at + (i - (len(shown) - 1) / 2) * 0.7 / len(shown),
                values,
                np.clip(spread, 0, None),
                color=style.color,
                marker=style.marker,
                markersize=marker_size(style.marker) * 0.85,
                linestyle="none",
                elinewidth=0.9,
                capsize=1.2,
                label=row.arm.label if len(panels) == 1 else row.arm.method,
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


def heatmaps(group: Group, spec: Mapping[str, Any]) -> list[Drawn]:
    """All methods side by side (one figure per rate where there are many), and each alone."""
    grids = {label: grid for label, grid in grids_of(group, spec).items() if grid.size}
    low, high = _scale(group, grids)
    unit = axis_unit(group)
    arms = [arm for arm in group.arms if arm.label in grids]
    caption = (
        f"Mean {spec.get('value', 'score')} by {words(spec['x'])} and {words(spec['y'])} on one"
        " colour scale; grey cells have no scored example."
    )
    figures = []
    pages = _pages(group, arms)
    for suffix, page in pages:
        columns = min(4, len(page))
        rows = math.ceil(len(page) / columns)
        figure = new_figure(0.9 + 2.3 * columns, 0.6 + 2.05 * rows)
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for ax, arm in zip(axes.flat, page, strict=False):
            _heat(ax, grids[arm.label], low, high, group)
            ax.set_title(arm.label, fontsize=TEXT)
        for ax in list(axes.flat)[len(page) :]:
            ax.remove()
        figure.supxlabel(axis_name(spec["x"]), fontsize=TEXT)
        figure.supylabel(axis_name(spec["y"]), fontsize=TEXT)
        image = figure.axes[0].images[0]
        bar = figure.colorbar(image, ax=list(figure.axes), fraction=0.03, pad=0.02)
        _style_bar(bar.ax, f"{spec.get('value', 'score')}{unit}")
        figures.append(
            Drawn(
                f"{stem(group)}-heatmap{suffix}",
                f"{group.task}: {spec.get('value', 'score')} by {words(spec['x'])} and"
                f" {words(spec['y'])}",
                caption,
                figure,
            )
        )
    return figures


def heatmap_alone(
    group: Group, arm: Arm, spec: Mapping[str, Any], grids: Mapping[str, pd.DataFrame] | None = None
) -> Drawn:
    """One arm's heatmap, on the scale that all arms share.

    Args:
        grids: `grids_of` the group, for whoever draws many.
    """
    grids = grids_of(group, spec) if grids is None else grids
    low, high = _scale(group, grids)
    figure = new_figure(4.4, 3.2)
    ax = figure.subplots()
    image = _heat(ax, grids[arm.label], low, high, group)
    ax.set_title(f"{group.task}, {group.model}: {arm.label}", fontsize=TEXT)
    ax.set_xlabel(axis_name(spec["x"]), fontsize=TEXT)
    ax.set_ylabel(axis_name(spec["y"]), fontsize=TEXT)
    bar = figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03)
    _style_bar(bar.ax, f"{spec.get('value', 'score')}{axis_unit(group)}")
    return Drawn(
        f"{stem(group)}-heatmap-{slug(arm.label)}", f"{group.task}: {arm.label}", "", figure
    )


def bars(group: Group, spec: Mapping[str, Any]) -> list[Drawn]:
    """Bars per method and x, one panel per facet: mean and standard deviation over repetitions: the
    values of the record field ``repeat`` names, within each the mean; else seeds.

    A record field ``draw`` (several draws of a method in one run) counts as part of the seed.
    Methods that keep the whole cache are left out: their error is rounding.
    """
    value = spec.get("value", "score")
    x, facet = spec["x"], spec.get("facet")
    good = group.records[group.records["status"].eq("ok") & group.records["saves_memory"].ne(False)]
    if good.empty:
        return []
    over = str(spec.get("repeat", "seed"))
    if over != "seed" and over in good:
        repeat = good[over].astype(str)
    else:
        over = "seed"
        repeat = good["seed"].astype(str) + (
            "/" + good["draw"].astype(str) if "draw" in good else ""
        )
    good = good.assign(
        value=pd.to_numeric(good[value if value in good else "score"]), repeat=repeat
    )
    facets = sorted(good[facet].unique()) if facet else [None]
    ticks = sorted(good[x].unique(), reverse=x == "rate")
    columns = min(3, len(facets))
    rows = math.ceil(len(facets) / columns)
    figure = new_figure(1.0 + 2.9 * columns, 0.9 + 2.4 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    arms = [arm for arm in group.arms if (good["arm"] == arm.label).any()]
    width = 0.8 / len(arms)
    for ax, name in zip(axes.flat, facets, strict=False):
        part = good if name is None else good[good[facet] == name]
        for i, arm in enumerate(arms):
            repeats = part[part["arm"] == arm.label].groupby([x, "repeat"])["value"].mean()
            means, spread = repeats.groupby(x).mean(), repeats.groupby(x).std()
            at = np.arange(len(ticks)) + (i - (len(arms) - 1) / 2) * width
            ax.bar(
                at,
                means.reindex(ticks),
                width * 0.92,
                yerr=spread.reindex(ticks).fillna(0.0),
                color=style_of(arm.method).color,
                label=arm.label,
                error_kw={"elinewidth": 0.9, "capsize": 1.6, "ecolor": "#333333"},
            )
        ax.set_xticks(np.arange(len(ticks)), [tick_text(tick, x) for tick in ticks])
        style_axes(ax)
        if name is not None:
            ax.set_title(f"{words(facet or '')} {as_text(name)}", fontsize=TEXT)
    for ax in list(axes.flat)[len(facets) :]:
        ax.remove()
    ylabel = str(spec.get("ylabel", words(value)))
    label_axes(figure, list(axes.flat)[: len(facets)], axis_name(x), ylabel)
    add_legend(figure, axes.flat[0], len(arms))
    count = good["repeat"].nunique()
    caption = ("Mean over prompts; " if over == "seed" else "") + (
        f"error bars are the standard deviation over {count} {words(over)}s."
        if count > 1
        else f"one {words(over)}, so no error bars."
    )
    title = f"{group.task}: {ylabel} by {words(x)}"
    return [Drawn(f"{stem(group)}-bars", title, caption, figure)]


def breakdown(group: Group, table: ScoreTable) -> Drawn:
    """Score against a record field, one line per method, a panel per rate."""
    panels = _pages(group, list(group.arms), per_rate=True)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(1.0 + (5.2 if columns == 1 else 3.2 * columns), 0.9 + 2.7 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    at = np.arange(len(table.columns))
    scale = percent(table.unit)
    for ax, (suffix, arms) in zip(axes.flat, panels, strict=False):
        shown = [row for row in table.rows if row.arm in arms]
        for i, row in enumerate(shown):
            scores = [row.cells[c].score for c in table.columns]
            shift = (i - (len(shown) - 1) / 2) * 0.5 / len(shown)
            values = scale * np.array([s.value for s in scores])
            spread = scale * np.array([[s.value - s.low for s in scores],
                                       [s.high - s.value for s in scores]])  # fmt: skip
            style = style_of(row.arm.method)
            ax.errorbar(
                at + shift,
                values,
                np.clip(spread, 0, None),
                color=style.color,
                marker=style.marker,
                markersize=marker_size(style.marker),
                linewidth=1.3,
                elinewidth=0.8,
                capsize=1.5,
                label=row.arm.label if len(panels) == 1 else row.arm.method,
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
    """Paired difference to the baseline with its interval, one line per arm."""
    rows = [row for row in table.rows if row.total.difference is not None]
    scale = percent(table.unit)
    figure = new_figure(6.2, 0.9 + 0.27 * len(rows))
    ax = figure.subplots()
    ax.axvline(0, color=GREY, linewidth=0.9)
    for i, row in enumerate(reversed(rows)):
        difference = row.total.difference
        if difference is None or math.isnan(difference.value):
            continue
        style = style_of(row.arm.method)
        ax.errorbar(
            scale * difference.value,
            i,
            xerr=[
                [max(0.0, scale * (difference.value - difference.low))],
                [max(0.0, scale * (difference.high - difference.value))],
            ],
            color=style.color,
            marker=style.marker,
            markersize=marker_size(style.marker),
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
    ax.set_yticks(range(len(rows)), [row.arm.label for row in reversed(rows)])
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


def _style_bar(ax: Axes, label: str) -> None:
    ax.tick_params(labelsize=SMALL, length=2.5, color=GREY)
    ax.set_ylabel(label, fontsize=TEXT)


def grids_of(group: Group, spec: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """`grid_of` every arm by its label."""
    return {arm.label: grid_of(group, arm, spec) for arm in group.arms}


def grid_of(group: Group, arm: Arm, spec: Mapping[str, Any]) -> pd.DataFrame:
    """y x x means of one arm over the cells that any arm has; NaN where nothing was scored."""
    x, y, value = spec["x"], spec["y"], spec.get("value", "score")
    records = group.records.dropna(subset=[x, y])
    mine = records[(records["arm"] == arm.label) & (records["status"] == "ok")]
    if mine.empty:
        return pd.DataFrame()
    grid = mine.assign(value=pd.to_numeric(mine[value])).pivot_table(
        index=y, columns=x, values="value", aggfunc="mean"
    )
    return grid.reindex(index=sorted(records[y].unique()), columns=sorted(records[x].unique()))


def _scale(group: Group, grids: Mapping[str, pd.DataFrame]) -> tuple[float, float]:
    """The colour scale that every arm shares."""
    if group.meta.score_unit == "fraction":
        return 0.0, 1.0
    values = np.concatenate([grid.to_numpy(float).ravel() for grid in grids.values()])
    return float(np.nanmin(values)), float(np.nanmax(values))


def _heat(ax: Axes, grid: pd.DataFrame, low: float, high: float, group: Group) -> Any:
    scale = percent(group.meta.score_unit)
    values = grid.to_numpy(float) * scale
    ax.set_facecolor(_MISSING)
    image = ax.imshow(
        np.ma.masked_invalid(values),
        aspect="auto",
        cmap=_HEAT,
        vmin=low * scale,
        vmax=high * scale,
        interpolation="nearest",
    )
    ax.set_xticks(np.arange(-0.5, values.shape[1]), minor=True)
    ax.set_yticks(np.arange(-0.5, values.shape[0]), minor=True)
    ax.grid(which="minor", color="white", linewidth=1)
    ax.tick_params(which="minor", length=0)
    _thin_ticks(ax, "x", [as_text(c) for c in grid.columns])
    _thin_ticks(ax, "y", [as_text(c) for c in grid.index])
    ax.tick_params(labelsize=SMALL, length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if values.size <= 64:
        middle = (low + high) / 2 * scale
        for (row, column), value in np.ndenumerate(values):
            if not math.isnan(value):
                ax.text(
                    column,
                    row,
                    f"{value:.0f}" if scale == 100 else f"{value:.2g}",
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white" if value < middle else "black",
                )
    return image


def _thin_ticks(ax: Axes, axis: Literal["x", "y"], labels: Sequence[str]) -> None:
    """At most about eight labels."""
    step = math.ceil(len(labels) / 8)
    at = range(0, len(labels), step)
    set_ticks = ax.set_xticks if axis == "x" else ax.set_yticks
    set_ticks(list(at), [labels[i] for i in at])
    if axis == "x" and max(map(len, labels), default=0) > 4:
        ax.tick_params(axis="x", rotation=45)


def _pages(
    group: Group, arms: Sequence[Arm], per_rate: bool = False
) -> list[tuple[str, list[Arm]]]:
    """Arms split by rate, each with the baselines, where one picture cannot hold them all."""
    rates = sorted({a.rate for a in arms if a.rate is not None and a.options}, reverse=True)
    if len(rates) < 2 or (not per_rate and len(arms) <= _MAX_PANELS):
        return [("", list(arms))]
    return [
        (
            f"-rate-{rate:g}",
            [a for a in arms if a.rate == rate or a.method == BASELINE],
        )
        for rate in rates
    ]
