"""Bars: means and standard deviations over repetitions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvbench.report.experiment import Group
from kvbench.report.figures import canvas, names
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.names import words
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
    figure, axes = canvas.new_panels(len(facets), 3, (2.9, 2.4), (1.0, 0.9), sharey=True)
    variants = [variant for variant in group.variants if (good["variant"] == variant.label).any()]
    width = 0.8 / len(variants)
    for ax, name in zip(axes, facets, strict=True):
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
            where = "" if name is None else f", {words(facet or '')} {as_text(name)}"
            for place, tick in zip(at, ticks, strict=True):
                mean, around = (float(of.get(tick, math.nan)) for of in (means, spread))
                if math.isfinite(mean):
                    said = f"{variant.label}{where}, {words(x)} {names.tick_text(tick, x)}"
                    said += f": {number(mean)}"
                    said += f" ± {number(around)}" if math.isfinite(around) else ""
                    add_spot(ax, place, mean / 2, said, (width, mean))
        ax.set_xticks(np.arange(len(ticks)), [names.tick_text(tick, x) for tick in ticks])
        canvas.style_axes(ax)
        if name is not None:
            ax.set_title(f"{words(facet or '')} {as_text(name)}", fontsize=canvas.TEXT)
    ylabel = str(spec.get("ylabel", words(value)))
    canvas.label_axes(figure, axes, names.axis_name(x), ylabel)
    canvas.name_lines(figure, axes)
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
    finding = names.extremes(overall, group.meta.score_unit, lower=group.meta.lower_is_better)
    return [Drawn(f"{names.stem(group)}-bars", title, caption, figure, finding)]
