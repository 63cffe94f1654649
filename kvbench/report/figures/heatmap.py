"""Heatmaps: a score by two record fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvbench.report.experiment import Group
from kvbench.report.figures.canvas import (
    GREY,
    SMALL,
    TEXT,
    Drawn,
    axis_name,
    axis_unit,
    new_figure,
    pages,
    percent,
    slug,
    stem,
    words,
)
from kvbench.report.labels import Variant
from kvbench.report.tables.strata import as_text

_HEAT = "viridis"
_MISSING = "#EEEEEE"


def heatmaps(group: Group, spec: Mapping[str, Any]) -> list[Drawn]:
    """All methods side by side (one figure per rate where there are many), and each alone."""
    grids = {label: grid for label, grid in grids_of(group, spec).items() if grid.size}
    low, high = _scale(group, grids)
    unit = axis_unit(group)
    variants = [variant for variant in group.variants if variant.label in grids]
    caption = (
        f"Mean {spec.get('value', 'score')} by {words(spec['x'])} and {words(spec['y'])} on one"
        " colour scale; grey cells have no scored example."
    )
    figures = []
    for suffix, page in pages(group, variants):
        columns = min(4, len(page))
        rows = math.ceil(len(page) / columns)
        figure = new_figure(0.9 + 2.3 * columns, 0.6 + 2.05 * rows)
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for ax, variant in zip(axes.flat, page, strict=False):
            _heat(ax, grids[variant.label], low, high, group)
            ax.set_title(variant.label, fontsize=TEXT)
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


def heatmaps_alone(
    group: Group, variants: Sequence[Variant], spec: Mapping[str, Any]
) -> list[Drawn]:
    """A heatmap of each variant, on the scale that all variants share; laid out once for all."""
    grids = grids_of(group, spec)
    low, high = _scale(group, grids)
    figure = new_figure(4.4, 3.2)
    ax = figure.subplots()
    found = []
    for number, variant in enumerate(variants):
        ax.clear()
        image = _heat(ax, grids[variant.label], low, high, group)
        ax.set_title(f"{group.task}, {group.model}: {variant.label}", fontsize=TEXT)
        ax.set_xlabel(axis_name(spec["x"]), fontsize=TEXT)
        ax.set_ylabel(axis_name(spec["y"]), fontsize=TEXT)
        if number == 0:
            bar = figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03)
            _style_bar(bar.ax, f"{spec.get('value', 'score')}{axis_unit(group)}")
        name = f"{stem(group)}-heatmap-{slug(variant.label)}"
        drawn = Drawn(name, f"{group.task}: {variant.label}", "", figure)
        if len(variants) > 1:
            assert drawn.png
            assert drawn.pdf  # both are kept: the next variant takes the same axes
        found.append(drawn)
    return found


def _style_bar(ax: Axes, label: str) -> None:
    ax.tick_params(labelsize=SMALL, length=2.5, color=GREY)
    ax.set_ylabel(label, fontsize=TEXT)


def grids_of(group: Group, spec: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """`grid_of` every variant by its label."""
    return {variant.label: grid_of(group, variant, spec) for variant in group.variants}


def grid_of(group: Group, variant: Variant, spec: Mapping[str, Any]) -> pd.DataFrame:
    """y x x means of one variant over the cells that any variant has; NaN where nothing was scored."""
    x, y, value = spec["x"], spec["y"], spec.get("value", "score")
    records = group.records.dropna(subset=[x, y])
    mine = records[(records["variant"] == variant.label) & (records["status"] == "ok")]
    if mine.empty:
        return pd.DataFrame()
    grid = mine.assign(value=pd.to_numeric(mine[value])).pivot_table(
        index=y, columns=x, values="value", aggfunc="mean"
    )
    return grid.reindex(index=sorted(records[y].unique()), columns=sorted(records[x].unique()))


def _scale(group: Group, grids: Mapping[str, pd.DataFrame]) -> tuple[float, float]:
    """The colour scale that every variant shares."""
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
