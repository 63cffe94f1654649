"""Effects of a method's variants as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvbench.report.figures import canvas, names
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.names import words
from kvbench.report.figures.style import SERIES, Style
from kvbench.report.table import Column
from kvbench.report.tables.ablation import Ablation, Effect
from kvbench.report.tables.strata import as_text


def ablation_figure(ablation: Ablation) -> Drawn:
    """Change of y in per cent: a row per variant, a panel per `by`, a marker per `series`."""
    group, spec, effects = ablation.group, ablation.spec, ablation.first
    panels = sorted({by for e in effects for by, _ in e.cells}, reverse=spec["by"] == "rate")
    series = sorted({s for e in effects for _, s in e.cells})
    places = _places(effects)
    height = max(places) + 1
    count = len(panels)
    figure, axes = canvas.new_panels(count, count, (2.6, 0.205 * height), (1.7, 1.1), sharey=True)
    limit = _limit(effects)
    lowest = max(0.0, *(-e.low for effect in effects for e in effect.cells.values()))
    for ax, panel in zip(axes, panels, strict=True):
        ax.axvline(0, color="#666666", linewidth=0.9)
        for k, one in enumerate(series):
            color, marker = SERIES[k % len(SERIES)]
            shift = (k - (len(series) - 1) / 2) * 0.6 / len(series)
            for place, effect in zip(places, effects, strict=True):
                estimate = effect.cells.get((panel, one))
                if estimate is None or math.isnan(estimate.value):
                    continue
                y = place + shift
                label = f"{words(spec['series'])} {as_text(one)}" if spec.get("series") else None
                if 100 * estimate.value > limit:
                    ax.plot(limit, y, marker=">", color=color, markersize=4, clip_on=False)
                    text = f"{100 * estimate.value:+.0f} %"
                    ax.annotate(
                        text,
                        (limit, y),
                        xytext=(-5, 0),
                        textcoords="offset points",
                        ha="right",
                        va="center",
                        fontsize=6,
                        color=color,
                    )
                    continue
                canvas.draw_estimates(
                    ax,
                    [y],
                    [estimate],
                    Style(color, marker),
                    scale=100,
                    horizontal=True,
                    size=0.7,
                    elinewidth=1.0,
                    capsize=0,
                    label=label,
                    says=[
                        f"{effect.label}, {words(spec['by'])} {names.tick_text(panel, spec['by'])}"
                        + (f", {label}" if label else "")
                        + f": {' '.join(Column('', '', 'change').text(estimate))} %"
                    ],
                )
        ax.set_title(f"{words(spec['by'])} {names.tick_text(panel, spec['by'])}", fontsize=9)
        ax.set_xlim(-min(limit, 105 * lowest) - 1, limit * 1.04)
        canvas.style_axes(ax, grid="x")
    for place, before in zip(places[1:], places, strict=False):
        if place - before > 1:
            for ax in axes:
                ax.axhline((place + before) / 2, color="#DDDDDD", linewidth=0.6)
    axes[0].set_yticks(places, [effect.label for effect in effects])
    axes[0].set_ylim(height - 0.3, -0.8)
    what = words(spec["y"])
    canvas.label_axes(figure, list(axes), f"change of {what} against {spec['reference']} (%)", "")
    handles = canvas.handles_of(axes)
    if handles:
        figure.legend(
            handles=[handles[label] for label in sorted(handles)],
            labels=sorted(handles),
            loc="outside upper center",
            ncols=len(handles),
            frameon=False,
            fontsize=8,
        )
    return Drawn(
        f"{names.stem(group)}-ablation",
        f"{group.task}: one option changed at a time",
        f"Change of {what} against {spec['reference']} on the same tensors (left is better), geometric"
        f" mean with 95 % bootstrap intervals over {ablation.units}; a triangle at the edge"
        " stands for a larger change.",
        figure,
        names.extremes(
            {
                effect.label: float(np.mean([e.value for e in effect.cells.values()]))
                for effect in effects
            },
            "fraction",
            lower=True,
            signed=True,
        ),
    )


def _places(effects: Sequence[Effect]) -> list[float]:
    """Rows from the top, a gap of half a row between parts."""
    places: list[float] = []
    for i, effect in enumerate(effects):
        new = i > 0 and effect.part != effects[i - 1].part
        places.append(0.0 if not places else places[-1] + (1.6 if new else 1.0))
    return places


def _limit(effects: Sequence[Effect]) -> float:
    """The axis reaches what nine cells in ten reach, in per cent."""
    values = [100 * abs(e.value) for effect in effects for e in effect.cells.values()]
    values = [value for value in values if math.isfinite(value)]
    return max(5.0, float(np.quantile(values, 0.9)) * 1.25) if values else 5.0
