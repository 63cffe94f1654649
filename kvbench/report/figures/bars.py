"""Bars: means and standard deviations over repetitions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvbench.report.experiment import Group
from kvbench.report.figures.canvas import (
    TEXT,
    Drawn,
    axis_name,
    extremes,
    label_axes,
    name_lines,
    new_figure,
    stem,
    style_axes,
    tick_text,
    words,
)
from kvbench.report.figures.style import style_of
from kvbench.report.figures.vector import add_spot
from kvbench.report.table import number
from kvbench.report.tables.strata import as_text


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
    variants = [variant for variant in group.variants if (good["variant"] == variant.label).any()]
    width = 0.8 / len(variants)
    for ax, name in zip(axes.flat, facets, strict=False):
        part = good if name is None else good[good[facet] == name]
        for i, variant in enumerate(variants):
            repeats = part[part["variant"] == variant.label].groupby([x, "repeat"])["value"].mean()
            means, spread = repeats.groupby(x).mean(), repeats.groupby(x).std()
            at = np.arange(len(ticks)) + (i - (len(variants) - 1) / 2) * width
            ax.bar(
                at,
                means.reindex(ticks),
                width * 0.92,
                yerr=spread.reindex(ticks).fillna(0.0),
                color=style_of(variant.method).color,
                label=variant.label,
                error_kw={"elinewidth": 0.9, "capsize": 1.6, "ecolor": "#333333"},
            )
            for place, tick in zip(at, ticks, strict=True):
                mean = float(means.get(tick, math.nan))
                if math.isfinite(mean):
                    where = "" if name is None else f", {words(facet or '')} {as_text(name)}"
                    said = (
                        f"{variant.label}{where}, {words(x)} {tick_text(tick, x)}: {number(mean)}"
                    )
                    around = float(spread.get(tick, math.nan))
                    said += f" ± {number(around)}" if math.isfinite(around) else ""
                    add_spot(ax, place, mean / 2, said, (width, mean))
        ax.set_xticks(np.arange(len(ticks)), [tick_text(tick, x) for tick in ticks])
        style_axes(ax)
        if name is not None:
            ax.set_title(f"{words(facet or '')} {as_text(name)}", fontsize=TEXT)
    for ax in list(axes.flat)[len(facets) :]:
        ax.remove()
    ylabel = str(spec.get("ylabel", words(value)))
    label_axes(figure, list(axes.flat)[: len(facets)], axis_name(x), ylabel)
    name_lines(figure, list(axes.flat)[: len(facets)])
    count = good["repeat"].nunique()
    caption = ("Mean over prompts; " if over == "seed" else "") + (
        f"error bars are the standard deviation over {count} {words(over)}s."
        if count > 1
        else f"one {words(over)}, so no error bars."
    )
    title = f"{group.task}: {ylabel} by {words(x)}"
    overall = {
        v.label: float(good.loc[good["variant"] == v.label, "value"].mean()) for v in variants
    }
    finding = extremes(overall, group.meta.score_unit, lower=group.meta.lower_is_better)
    return [Drawn(f"{stem(group)}-bars", title, caption, figure, finding)]
