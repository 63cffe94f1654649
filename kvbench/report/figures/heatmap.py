"""Heatmaps: a score by two record fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar

from kvbench.report.experiment import Group
from kvbench.report.figures import canvas, names
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.names import words
from kvbench.report.figures.vector import add_spot
from kvbench.report.labels import Variant
from kvbench.report.table import value_text
from kvbench.report.tables.strata import as_text

_HEAT = "viridis"
_MISSING = "#EEEEEE"
_ON_DARK, _ON_BRIGHT = "#FDFDFD", "#111111"
"""Text on a cell, which keeps its colour on a dark page."""


def heatmaps(group: Group, spec: Mapping[str, Any]) -> list[Drawn]:
    """All methods side by side (one figure per rate where there are many), and each alone."""
    grids = {label: grid for label, grid in grids_of(group, spec).items() if grid.size}
    low, high = _scale(group, grids)
    unit = names.axis_unit(group)
    variants = [variant for variant in group.variants if variant.label in grids]
    caption = (
        f"Mean {spec.get('value', 'score')} by {words(spec['x'])} and {words(spec['y'])} on one"
        " colour scale; grey cells have no scored example."
    )
    figures = []
    for suffix, page in names.pages(group, variants):
        share = {"sharex": True, "sharey": True}
        figure, axes = canvas.new_panels(len(page), 4, (2.3, 2.05), (0.9, 0.6), **share)
        for ax, variant in zip(axes, page, strict=True):
            image = _heat(ax, grids[variant.label], low, high, group, variant.label)
            ax.set_title(variant.label, fontsize=canvas.TEXT)
        figure.supxlabel(names.axis_name(spec["x"]), fontsize=canvas.TEXT)
        figure.supylabel(names.axis_name(spec["y"]), fontsize=canvas.TEXT)
        bar = figure.colorbar(image, ax=list(figure.axes), fraction=0.03, pad=0.02)
        _style_bar(bar, f"{spec.get('value', 'score')}{unit}")
        figures.append(
            Drawn(
                f"{names.stem(group)}-heatmap{suffix}",
                f"{group.task}: {spec.get('value', 'score')} by {words(spec['x'])} and"
                f" {words(spec['y'])}",
                caption,
                figure,
                names.extremes(
                    {v.label: float(np.nanmean(grids[v.label])) for v in page},
                    group.meta.score_unit,
                    lower=group.meta.lower_is_better,
                ),
            )
        )
    return figures


def heatmaps_alone(
    group: Group, variants: Sequence[Variant], spec: Mapping[str, Any]
) -> list[Drawn]:
    """A heatmap of each variant, on the scale that all variants share; laid out once for all."""
    grids = grids_of(group, spec)
    low, high = _scale(group, grids)
    figure = canvas.new_figure(4.4, 3.2)
    ax = figure.subplots()
    found = []
    for number, variant in enumerate(variants):
        ax.clear()
        image = _heat(ax, grids[variant.label], low, high, group)
        ax.set_title(f"{group.task}, {group.model}: {variant.label}", fontsize=canvas.TEXT)
        ax.set_xlabel(names.axis_name(spec["x"]), fontsize=canvas.TEXT)
        ax.set_ylabel(names.axis_name(spec["y"]), fontsize=canvas.TEXT)
        if number == 0:
            bar = figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03)
            _style_bar(bar, f"{spec.get('value', 'score')}{names.axis_unit(group)}")
        name = f"{names.stem(group)}-heatmap-{names.slug(variant.label)}"
        drawn = Drawn(name, f"{group.task}: {variant.label}", "", figure)
        if len(variants) > 1:
            assert drawn.png
            assert drawn.pdf  # both are kept: the next variant takes the same axes
        found.append(drawn)
    return found


def _style_bar(bar: Colorbar, label: str) -> None:
    if bar.solids is not None:
        bar.solids.set_rasterized(True)  # hundreds of shades, one picture
    bar.ax.tick_params(labelsize=canvas.SMALL, length=2.5, color=canvas.GREY)
    bar.ax.set_ylabel(label, fontsize=canvas.TEXT)


def grids_of(group: Group, spec: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """`grid_of` every variant by its label."""
    return {variant.label: grid_of(group, variant, spec) for variant in group.variants}


def grid_of(group: Group, variant: Variant, spec: Mapping[str, Any]) -> pd.DataFrame:
    """y x x means of one variant over the cells that any variant has; NaN where nothing was scored."""
    x, y, value = spec["x"], spec["y"], spec.get("value", "score")
    records = group.records[list(dict.fromkeys(["variant", "status", x, y, value]))]
    records = records.dropna(subset=[x, y])
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


def _heat(
    ax: Axes, grid: pd.DataFrame, low: float, high: float, group: Group, says: str = ""
) -> Any:
    """Cells of one colour each; `says`: with a spot on each, whose text begins so."""
    scale = names.percent(group.meta.score_unit)
    values = grid.to_numpy(float) * scale
    ax.set_facecolor(_MISSING)
    rows, columns = values.shape
    image = ax.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        np.ma.masked_invalid(values),
        cmap=_HEAT,
        vmin=low * scale,
        vmax=high * scale,
        edgecolors="white",
        linewidth=1,
    )
    ax.set_ylim(rows - 0.5, -0.5)
    xs, ys = ([as_text(one) for one in names] for names in (grid.columns, grid.index))
    _thin_ticks(ax, "x", xs)
    _thin_ticks(ax, "y", ys)
    ax.tick_params(labelsize=canvas.SMALL, length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    middle = (low + high) / 2 * scale
    for (row, column), value in np.ndenumerate(values):
        if math.isnan(value):
            continue
        if says:
            where = f"{words(str(grid.columns.name))} {xs[column]}, "
            where += f"{words(str(grid.index.name))} {ys[row]}"
            text = value_text(value / scale, group.meta.score_unit)
            add_spot(ax, column, row, f"{says}, {where}: {text}", (1.0, 1.0))
        if values.size <= 64:
            ax.text(
                column,
                row,
                f"{value:.0f}" if scale == 100 else f"{value:.2g}",
                ha="center",
                va="center",
                fontsize=6.5,
                color=_ON_DARK if value < middle else _ON_BRIGHT,
                in_layout=False,  # within the axes: measuring it takes long and changes nothing
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
