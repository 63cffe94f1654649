"""Rates of growth and decay as figures: curves, and their slopes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvbench.report.experiment import Group
from kvbench.report.figures import canvas, names
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.names import words
from kvbench.report.figures.style import SPARE, Style, order_of, style_of
from kvbench.report.figures.vector import add_spot
from kvbench.report.labels import Variant
from kvbench.report.table import number, signed_text
from kvbench.report.tables.scaling import Curve, Fit, Scaling, interval_text, reach_text, slope_text
from kvbench.report.tables.strata import as_text

_GREY = "#888888"
_SPARE_MARKERS = ("h", "p", ">", "d", "8", "H", "v", "^")


def scaling_figures(scaling: Scaling) -> list[Drawn]:
    """The curves, a panel per data set; and, where slopes are predicted, the fitted ones."""
    group, spec = scaling.group, scaling.spec
    figures = [_curves_figure(group, spec, scaling.curves)]
    if spec.get("expected"):
        figures.append(_slopes_figure(group, spec, scaling.fits))
    return figures


def _curves_figure(group: Group, spec: Mapping[str, Any], curves: Sequence[Curve]) -> Drawn:
    facets = list(dict.fromkeys(curve.facet for curve in curves))
    columns = 2 if len(facets) == 4 else min(3, len(facets))
    size = (4.6 if columns == 1 else 2.55, 2.15)
    figure, axes = canvas.new_panels(
        len(facets), columns, size, (1.0, 1.0), sharex=True, sharey=True
    )
    looks = _looks(group.variants)
    for ax, facet in zip(axes, facets, strict=True):
        for curve in (c for c in curves if c.facet == facet):
            look = looks[curve.variant.label]
            ax.fill_between(curve.x, curve.low, curve.high, color=look.color, alpha=0.15, lw=0)
            ax.plot(
                curve.x,
                curve.mean,
                color=look.color,
                marker=look.marker,
                markersize=4,
                linewidth=1.2,
                label=curve.variant.label,
            )
            for x, y in zip(curve.x, curve.mean, strict=True):
                said = f"{curve.variant.label}, {facet}, {words(spec['x'])} {as_text(float(x))}"
                add_spot(ax, float(x), float(y), f"{said}: {number(float(y))}")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(facet, fontsize=9)
        canvas.style_axes(ax)
    low, high = axes[0].get_ylim()
    for ax, facet in zip(axes, facets, strict=True):
        _guides(ax, [c for c in curves if c.facet == facet], spec)
    axes[0].set_ylim(low, high)
    xlabel, ylabel = (str(spec.get(f"{a}label", words(spec[a]))) for a in "xy")
    canvas.label_axes(figure, axes, xlabel, ylabel)
    canvas.name_lines(figure, axes)
    slopes = " and ".join(signed_text(slope) for slope in spec.get("guides") or ())
    return Drawn(
        f"{names.stem(group)}-scaling",
        f"{group.task}: {words(spec['y'])} against {words(spec['x'])}",
        f"Means {interval_text(curves, spec)}; both axes logarithmic"
        + (f"; dashed in grey: slope {slopes}." if slopes else "."),
        figure,
        names.extremes(
            {f"{c.variant.label}, {c.facet}": float(c.mean[-1]) for c in curves}, "", lower=True
        ).replace("mean", f"{words(spec['y'])} at the last {words(spec['x'])}"),
    )


def _guides(ax: Any, curves: Sequence[Curve], spec: Mapping[str, Any]) -> None:
    """Grey lines through the first point of the panel's first curve."""
    if not curves:
        return
    x = np.array([curves[0].x[0], max(c.x[-1] for c in curves)])
    for slope in spec.get("guides", ()):
        y = curves[0].mean[0] * (x / x[0]) ** slope
        ax.plot(x, y, color=_GREY, linestyle=(0, (4, 3)), linewidth=0.9, zorder=1)


def _slopes_figure(group: Group, spec: Mapping[str, Any], fits: Sequence[Fit]) -> Drawn:
    facets = list(dict.fromkeys(fit.curve.facet for fit in fits))
    looks = _looks(group.variants)
    variants = [a for a in group.variants if any(f.curve.variant == a for f in fits)]
    size = (6.4, len(facets) * max(0.34, 0.085 * len(variants) + 0.12))
    figure, (ax,) = canvas.new_panels(1, 1, size, (0.0, 1.2))
    for slope in spec.get("guides", ()):
        ax.axvline(slope, color=_GREY, linestyle=(0, (4, 3)), linewidth=0.9)
    for k, variant in enumerate(variants):
        look = looks[variant.label]
        mine = [f for f in fits if f.curve.variant == variant and math.isfinite(f.slope.value)]
        shift = (k - (len(variants) - 1) / 2) * 0.78 / len(variants)
        canvas.draw_estimates(
            ax,
            [facets.index(f.curve.facet) + shift for f in mine],
            [f.slope for f in mine],
            look,
            horizontal=True,
            elinewidth=1.1,
            capsize=0,
            label=variant.label,
            says=[f"{variant.label}, {f.curve.facet}: slope {slope_text(f.slope)}" for f in mine],
        )
    canvas.list_rows(ax, facets, foot=0.5)
    for edge in np.arange(0.5, len(facets) - 1):
        ax.axhline(edge, color="#DDDDDD", linewidth=0.6)
    across = str(spec.get("xlabel", words(spec["x"])))
    ax.set_xlabel(f"slope of log {words(spec['y'])} against log {across}", fontsize=9)
    canvas.name_lines(figure, [ax])
    return Drawn(
        f"{names.stem(group)}-slopes",
        f"{group.task}: fitted slopes",
        f"Least-squares slopes on logarithmic axes{reach_text(fits)}, {interval_text(fits, spec)};"
        " dashed: the slopes of the papers' bounds.",
        figure,
        "Steepest "
        + ", ".join(
            f"{f.curve.variant.label}, {f.curve.facet} {slope_text(f.slope)}"
            for f in sorted(fits, key=lambda f: f.slope.value)[:1]
        ),
    )


def _looks(variants: Sequence[Variant]) -> dict[str, Style]:
    """The papers' methods as everywhere; variants of them in the spare colours, in order."""
    looks: dict[str, Style] = {}
    unknown = order_of("")[0]
    spare = zip(SPARE * 9, _SPARE_MARKERS * 9, strict=True)
    for variant in variants:
        own = style_of(variant.method)
        free = order_of(variant.method)[0] != unknown and own not in looks.values()
        looks[variant.label] = own if free else Style(*next(spare))
    return looks
