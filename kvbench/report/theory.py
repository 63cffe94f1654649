"""Rates of growth and decay from records: curves, log-log slopes, and what was found in words.

Drawn for the figure kind ``scaling`` of a task's meta, a mapping with

    x, y            record fields; both axes are logarithmic
    level           the field that was set (y is averaged over the records of one level)
    facet           one panel and one fit for each of its values
    unit            the independent repetition, which intervals resample
    fit_least, fit_most   levels the slope is fitted over (None: all)
    guides          slopes drawn in grey
    expected        {beginning of a label: slope predicted}
    compare         label whose curve the others are divided by, at the last level fitted
    finding         error_scaling | discrepancy | clusters: the words
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvbench.report.data import Arm, Group
from kvbench.report.drawing import Drawn, add_legend, label_axes, new_figure, stem, style_axes
from kvbench.report.stats import LEVEL, RESAMPLES, Array, Estimate, widened
from kvbench.report.style import Style, order_of, style_of
from kvbench.report.views import View, number

_GREY = "#888888"
_SPARE = ("#332288", "#44AA99", "#CC79A7", "#999933", "#661100", "#117733", "#DDCC77", "#AA4499")
_SPARE_MARKERS = ("h", "p", ">", "d", "8", "H", "v", "^")
NEAR = 0.1
"""A slope this close to the predicted one agrees with it."""
WIDE = 0.5
"""An interval wider than this cannot tell -1 from -1/2: the slope is not determined."""


@dataclass(frozen=True, eq=False)
class Curve:
    """y against x of one arm in one panel; arrays are over levels, ascending.

    Attributes:
        x: mean x of each level. mean, low, high: mean of y with its interval.
        draws: [resamples, levels] means of y over resampled repetitions; the arms of a panel are
            resampled alike, so that ratios of their draws are paired.
        units: repetitions.
    """

    facet: str
    arm: Arm
    levels: Array
    x: Array
    mean: Array
    low: Array
    high: Array
    draws: Array
    units: int

    def slope(self, least: float | None = None, most: float | None = None) -> Estimate:
        """Least-squares slope of log y against log x over levels in [least, most]."""
        used = np.isfinite(self.mean) & (self.mean > 0)
        used &= (self.levels >= (least or 0)) & (self.levels <= (most or math.inf))
        if used.sum() < 2:
            return Estimate(math.nan, math.nan, math.nan)
        log_x = np.log(self.x[used])
        log_x = log_x - log_x.mean()
        weights = log_x / np.square(log_x).sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            slopes = np.log(self.draws[:, used]) @ weights
        return _interval(float(np.log(self.mean[used]) @ weights), slopes, self.units)

    def over(self, other: Curve, level: float) -> Estimate:
        """This curve's y over another's at one level, paired."""
        mine, theirs = (np.flatnonzero(c.levels == level) for c in (self, other))
        if not len(mine) or not len(theirs):
            return Estimate(math.nan, math.nan, math.nan)
        i, j = int(mine[0]), int(theirs[0])
        with np.errstate(divide="ignore", invalid="ignore"):
            log = np.log(self.draws[:, i]) - np.log(other.draws[:, j])
            ratio = _interval(math.log(self.mean[i] / other.mean[j]), log, self.units)
        return Estimate(*(math.exp(x) for x in (ratio.value, ratio.low, ratio.high)))


@dataclass(frozen=True, eq=False)
class Fit:
    """A curve's slopes: over all levels fitted, and over their lower and upper half.

    Attributes:
        least, split, most: the levels fitted; `split` belongs to both halves.
        ratio: y over that of `compare` at `most`; NaN where there is nothing to compare with.
    """

    curve: Curve
    least: float
    split: float
    most: float
    slope: Estimate
    lower: Estimate
    upper: Estimate
    expected: float
    ratio: Estimate

    @property
    def determined(self) -> bool:
        """Whether the interval is narrower than `WIDE`."""
        return self.slope.high - self.slope.low <= WIDE

    @property
    def agrees(self) -> bool:
        """Within `NEAR` of the predicted slope."""
        return abs(self.slope.value - self.expected) <= NEAR


def scaling_of(group: Group) -> Mapping[str, Any] | None:
    """The group's ``scaling`` figure, if its task asks for one and there is something to draw."""
    spec = group.meta.figure("scaling")
    if spec is None or spec["y"] not in group.records:
        return None
    good = group.records["status"].eq("ok") & group.records[spec["y"]].notna()
    return spec if good.any() else None


def curves_of(group: Group, spec: Mapping[str, Any]) -> list[Curve]:
    """One curve per panel and arm, in the order of the records and of the arms."""
    good = group.records[group.records["status"].eq("ok")].dropna(subset=[spec["x"], spec["y"]])
    good = good.assign(
        repeat=good["seed"].astype(str) + "/" + good[spec["unit"]].astype(str),
        y=pd.to_numeric(good[spec["y"]]),
        x=pd.to_numeric(good[spec["x"]]),
        level=pd.to_numeric(good[spec["level"]]),
    )
    curves = []
    for facet in good[spec["facet"]].unique():
        part = good[good[spec["facet"]] == facet]
        repeats = sorted(part["repeat"].unique())
        for arm in group.arms:
            mine = part[part["arm"] == arm.label]
            if mine.empty:
                continue
            table = mine.pivot_table(index="repeat", columns="level", values="y", aggfunc="mean")
            values = table.reindex(repeats).to_numpy(float)
            draws = _resampled(str(facet), values)
            mean = np.nanmean(values, axis=0)
            with np.errstate(divide="ignore", invalid="ignore"):
                spread = [
                    _interval(math.log(m) if m > 0 else math.nan, np.log(column), len(table))
                    for m, column in zip(mean, draws.T, strict=True)
                ]
            curves.append(
                Curve(
                    facet=str(facet),
                    arm=arm,
                    levels=table.columns.to_numpy(float),
                    x=mine.groupby("level")["x"].mean().to_numpy(float),
                    mean=mean,
                    low=np.exp([e.low for e in spread]),
                    high=np.exp([e.high for e in spread]),
                    draws=draws,
                    units=len(table),
                )
            )
    return curves


def fits_of(curves: Sequence[Curve], spec: Mapping[str, Any]) -> list[Fit]:
    """The slopes of every curve."""
    base = {c.facet: c for c in curves if c.arm.method == spec.get("compare")}
    fits = []
    for curve in curves:
        least, most = spec.get("fit_least") or 0.0, spec.get("fit_most") or math.inf
        levels = curve.levels[(curve.levels >= least) & (curve.levels <= most)]
        if not len(levels):
            continue
        split = float(levels[len(levels) // 2])
        least, most = float(levels[0]), float(levels[-1])
        other = base.get(curve.facet)
        fits.append(
            Fit(
                curve,
                least,
                split,
                most,
                curve.slope(least, most),
                curve.slope(least, split),
                curve.slope(split, most),
                _expected(curve.arm.method, spec),
                curve.over(other, most)
                if other is not None
                else Estimate(math.nan, math.nan, math.nan),
            )
        )
    return fits


def scaling_figures(group: Group, spec: Mapping[str, Any]) -> list[Drawn]:
    """The curves, a panel per data set; and, where slopes are predicted, the fitted ones."""
    curves = curves_of(group, spec)
    figures = [_curves_figure(group, spec, curves)]
    if spec.get("expected"):
        figures.append(_slopes_figure(group, spec, fits_of(curves, spec)))
    return figures


def slope_frame(group: Group, spec: Mapping[str, Any]) -> pd.DataFrame:
    """Slopes in long form: one row per data set and arm."""
    lines = []
    for fit in fits_of(curves_of(group, spec), spec):
        line: dict[str, Any] = {
            "model": group.model,
            "task": group.task,
            spec["facet"]: fit.curve.facet,
            "arm": fit.curve.arm.label,
            "fitted_from": fit.least,
            "fitted_to": fit.most,
            "expected": fit.expected,
        }
        halves = {"slope": fit.slope, "slope_lower": fit.lower, "slope_upper": fit.upper}
        for name, estimate in halves.items():
            line |= {
                name: estimate.value,
                f"{name}_low": estimate.low,
                f"{name}_high": estimate.high,
            }
        at = int(np.flatnonzero(fit.curve.levels == fit.most)[0])
        line |= {
            "last": fit.curve.mean[at],
            "last_low": fit.curve.low[at],
            "last_high": fit.curve.high[at],
            "last_ratio": fit.ratio.value,
            "last_ratio_low": fit.ratio.low,
            "last_ratio_high": fit.ratio.high,
            "held_last": fit.curve.x[at],
            "bytes_ratio_last": _bytes_ratio(group, spec, fit),
            "repetitions": fit.curve.units,
        }
        lines.append(line)
    return pd.DataFrame(lines)


def _bytes_ratio(group: Group, spec: Mapping[str, Any], fit: Fit) -> float:
    """Mean bytes held over those of the exact cache at the last level fitted; NaN where not known."""
    records = group.records
    mine = records["arm"].eq(fit.curve.arm.label) & records[spec["facet"]].eq(fit.curve.facet)
    mine &= records[spec["level"]].eq(fit.most) & records["status"].eq("ok")
    return float(pd.to_numeric(records["ratio"][mine]).mean())


def slope_view(group: Group, spec: Mapping[str, Any]) -> View:
    """Slopes as a table: arms by data sets."""
    fits = fits_of(curves_of(group, spec), spec)
    facets = list(dict.fromkeys(fit.curve.facet for fit in fits))
    cells = {(f.curve.arm.label, f.curve.facet): f for f in fits}
    predicted = any(math.isfinite(f.expected) for f in fits)
    rows = []
    for arm in dict.fromkeys(fit.curve.arm for fit in fits):
        mine = [cells.get((arm.label, facet)) for facet in facets]
        expected = next(f.expected for f in mine if f is not None)
        row = [arm.label]
        if predicted:
            row.append(_signed(expected) if math.isfinite(expected) else "–")
        rows.append((*row, *("–" if f is None else _slope_text(f.slope) for f in mine)))
    reach = _reach(fits)
    return View(
        name=f"{group.task}-{group.model}-slopes",
        title=f"{group.task} on {group.model}: log-log slopes",
        columns=("method", *(("predicted",) if predicted else ()), *facets),
        rows=tuple(rows),
        notes=(
            f"Least-squares slopes of log {_words(spec['y'])} against log {_words(spec['x'])}"
            f"{reach}, with 95 % bootstrap intervals over {_count(fits)} repetitions, widened by"
            " Student's t for their number.",
        ),
    )


def scaling_findings(group: Group, spec: Mapping[str, Any]) -> list[str]:
    """What was found, one sentence or two per arm, from the numbers alone."""
    fits = fits_of(curves_of(group, spec), spec)
    arms = list(dict.fromkeys(fit.curve.arm.label for fit in fits))
    by_arm = {label: [f for f in fits if f.curve.arm.label == label] for label in arms}
    kind = spec.get("finding")
    if kind == "discrepancy":
        return _discrepancy_words(by_arm, spec)
    if kind == "clusters":
        return _cluster_words(by_arm)
    return _error_words(by_arm, spec, fits) + _exponent_words(group, spec)


def _error_words(
    by_arm: Mapping[str, Sequence[Fit]], spec: Mapping[str, Any], fits: Sequence[Fit]
) -> list[str]:
    first, last = fits[0].least, fits[0].most
    found = [
        f"Slopes of the error of equation (2) against entries held, fitted from {first:.0f} to "
        f"{last:.0f} entries asked for, 95 % intervals over {_count(fits)} repetitions; as predicted "
        f"means within {NEAR:g} of the prediction, not determined an interval wider than {WIDE:g}. "
        f"{_reached(by_arm)}"
    ]
    for label, mine in by_arm.items():
        expected = mine[0].expected
        if not math.isfinite(expected):
            continue
        parts, settled = [], [f for f in mine if f.determined]
        for words, chosen in (
            ("as predicted on", [f for f in settled if f.agrees]),
            ("steeper on", [f for f in settled if f.slope.value < expected - NEAR]),
            ("shallower on", [f for f in settled if f.slope.value > expected + NEAR]),
            ("not determined on", [f for f in mine if not f.determined]),
        ):
            if chosen:
                named = "; ".join(f"{f.curve.facet} ({_slope_text(f.slope)})" for f in chosen)
                parts.append(f"{words} {named}")
        text = f"{label}, predicted {_signed(expected)}: {'. '.join(map(_capital, parts))}."
        bent = [f for f in mine if _bends(f)]
        if bent:
            named = "; ".join(
                f"{f.curve.facet} ({_signed(f.lower.value)} up to {f.split:.0f} entries, "
                f"{_signed(f.upper.value)} beyond)"
                for f in bent
            )
            text += f" The slope changes along the way: {named}."
        found.append(text)
    compare = spec.get("compare")
    gains = [f for f in fits if f.curve.arm.method != compare and math.isfinite(f.ratio.value)]
    if gains:
        sentences = []
        for label, mine in by_arm.items():
            ratios = [f for f in mine if f in gains]
            if not ratios:
                continue
            below = [f for f in ratios if f.ratio.high < 1]
            above = [f for f in ratios if f.ratio.low > 1]
            low, high = (pick(ratios, key=lambda f: f.ratio.value) for pick in (min, max))
            spread = f"from {_ratio_text(low.ratio)} times on {low.curve.facet}"
            if high is not low:
                spread += f" to {_ratio_text(high.ratio)} on {high.curve.facet}"
            sentences.append(
                f"{label} {spread} (interval below 1 on {len(below)}, above 1 on {len(above)} of "
                f"{len(ratios)})"
            )
        found.append(
            f"Error relative to {compare}'s with {last:.0f} entries asked for: "
            f"{'; '.join(sentences)}."
        )
    heavy: dict[str, float] = {}
    for f in fits:
        share = float((f.curve.x / f.curve.levels).max())
        heavy[f.curve.arm.label] = max(heavy.get(f.curve.arm.label, 0.0), share)
    heavy = {label: share for label, share in heavy.items() if share > 1.02}
    if heavy:
        named = "; ".join(f"{label} up to {share:.2f} times" for label, share in heavy.items())
        found.append(
            f"Entries held beyond those asked for: {named}. Slopes and curves are against what is "
            "held."
        )
    return found


def _exponent_words(group: Group, spec: Mapping[str, Any]) -> list[str]:
    """How large the factor in BalanceKV's bound is, where the records say."""
    if "key_exponent" not in group.records:
        return []
    known = group.records.dropna(subset=["key_exponent"])
    by_facet = known.groupby(spec["facet"], sort=False)["key_exponent"].median()
    named = "; ".join(f"{facet} ({number(float(value))})" for facet, value in by_facet.items())
    return [
        "The largest exponent of the walk's kernel, ||k||^2 / sqrt(d) of the keys less their mean"
        f" (median over repetitions): {named}. The bound of BalanceKV grows with its exponential."
    ]


def _reached(by_arm: Mapping[str, Sequence[Fit]]) -> str:
    """How many data sets each arm is as steep on as predicted, arms of one prediction together."""
    predictions = sorted({f.expected for mine in by_arm.values() for f in mine})
    sentences = []
    for expected in (p for p in predictions if math.isfinite(p)):
        named = []
        for label, mine in by_arm.items():
            if mine[0].expected == expected:
                steep = sum(f.determined and f.slope.value <= expected + NEAR for f in mine)
                named.append(f"{label} on {steep} of {len(mine)}")
        sentences.append(
            f"The predicted {_signed(expected)} or steeper is reached by {', '.join(named)} data sets."
        )
    return " ".join(sentences)


def _discrepancy_words(by_arm: Mapping[str, Sequence[Fit]], spec: Mapping[str, Any]) -> list[str]:
    some = next(iter(by_arm.values()))[0]
    found = [
        f"Growth of the largest coordinate of the signed sum as n^slope, fitted from n = "
        f"{some.least:.0f} to {some.most:.0f}, 95 % intervals over {_count([some])} walks. "
        "Random signs must give 1/2, a logarithm something close to 0."
    ]
    for label, mine in by_arm.items():
        parts = []
        for f in mine:
            at = f.curve.mean[np.flatnonzero(f.curve.levels == f.most)[0]]
            text = f"{f.curve.facet} (slope {_slope_text(f.slope)}, {number(float(at))} at the end"
            if math.isfinite(f.ratio.value) and f.curve.arm.method != spec.get("compare"):
                text += f", {_ratio_text(f.ratio)} times {spec['compare']}"
            parts.append(f"{text})")
        found.append(f"{label}: {'; '.join(parts)}.")
    base = {f.curve.facet: f.curve for f in by_arm.get(str(spec.get("compare")), [])}
    starts = []
    for label, mine in by_arm.items():
        if label == spec.get("compare"):
            continue
        named = []
        for f in mine:
            other = base.get(f.curve.facet)
            if other is None:
                continue
            below = [n for n in f.curve.levels if f.curve.over(other, float(n)).high < 1]
            where = f"from n = {min(below):.0f}" if below else "nowhere"
            named.append(f"{f.curve.facet} {where}")
        if named:
            starts.append(f"{label} ({', '.join(named)})")
    if starts:
        found.append(
            f"Smaller than {spec['compare']}, the whole interval of the paired ratio below 1: "
            f"{'; '.join(starts)}."
        )
    return found


def _cluster_words(by_arm: Mapping[str, Sequence[Fit]]) -> list[str]:
    some = next(iter(by_arm.values()))[0]
    found = [
        f"Growth of the number of clusters m as n^slope, fitted from n = {some.least:.0f} to "
        f"{some.most:.0f}; memory is sublinear in n only where the slope is below 1."
    ]
    for label, mine in by_arm.items():
        parts = []
        for f in mine:
            share = f.curve.mean[-1] / f.curve.levels[-1]
            parts.append(
                f"{f.curve.facet} (slope {_slope_text(f.slope)}, m = {number(float(f.curve.mean[-1]))},"
                f" {100 * share:.3g} % of n)"
            )
        found.append(f"{label}: {'; '.join(parts)}.")
    return found


def _curves_figure(group: Group, spec: Mapping[str, Any], curves: Sequence[Curve]) -> Drawn:
    facets = list(dict.fromkeys(curve.facet for curve in curves))
    columns = 2 if len(facets) == 4 else min(3, len(facets))
    rows = math.ceil(len(facets) / columns)
    figure = new_figure(1.0 + (4.6 if columns == 1 else 2.55 * columns), 1.0 + 2.15 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    looks = _looks(group.arms)
    for ax, facet in zip(axes.flat, facets, strict=False):
        for curve in (c for c in curves if c.facet == facet):
            look = looks[curve.arm.label]
            ax.fill_between(curve.x, curve.low, curve.high, color=look.color, alpha=0.15, lw=0)
            ax.plot(
                curve.x,
                curve.mean,
                color=look.color,
                marker=look.marker,
                markersize=4,
                linewidth=1.2,
                label=curve.arm.label,
            )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_title(facet, fontsize=9)
        style_axes(ax)
    low, high = axes.flat[0].get_ylim()
    for ax, facet in zip(axes.flat, facets, strict=False):
        _guides(ax, [c for c in curves if c.facet == facet], spec)
    axes.flat[0].set_ylim(low, high)
    for ax in list(axes.flat)[len(facets) :]:
        ax.remove()
    shown = list(axes.flat)[: len(facets)]
    xlabel, ylabel = (str(spec.get(f"{a}label", _words(spec[a]))) for a in "xy")
    label_axes(figure, shown, xlabel, ylabel)
    most = max(range(len(facets)), key=lambda i: len(shown[i].lines))
    add_legend(figure, shown[most], len(looks))
    slopes = " and ".join(_signed(slope) for slope in spec.get("guides", ()))
    return Drawn(
        f"{stem(group)}-scaling",
        f"{group.task}: {_words(spec['y'])} against {_words(spec['x'])}",
        f"Mean with its 95 % bootstrap interval over {_count(curves)} repetitions, both axes"
        f" logarithmic; dashed in grey: slope {slopes}.",
        figure,
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
    looks = _looks(group.arms)
    arms = [a for a in group.arms if any(f.curve.arm == a for f in fits)]
    figure = new_figure(6.4, 1.2 + len(facets) * max(0.34, 0.085 * len(arms) + 0.12))
    ax = figure.subplots()
    for slope in spec.get("guides", ()):
        ax.axvline(slope, color=_GREY, linestyle=(0, (4, 3)), linewidth=0.9)
    for k, arm in enumerate(arms):
        look = looks[arm.label]
        mine = [f for f in fits if f.curve.arm == arm and math.isfinite(f.slope.value)]
        shift = (k - (len(arms) - 1) / 2) * 0.78 / len(arms)
        value = np.array([f.slope.value for f in mine])
        spread = np.array(
            [
                [f.slope.value - f.slope.low for f in mine],
                [f.slope.high - f.slope.value for f in mine],
            ]
        )
        ax.errorbar(
            value,
            [facets.index(f.curve.facet) + shift for f in mine],
            xerr=np.clip(spread, 0, None),
            linestyle="none",
            color=look.color,
            marker=look.marker,
            markersize=4.5,
            elinewidth=1.1,
            label=arm.label,
        )
    ax.set_yticks(range(len(facets)), facets)
    ax.set_ylim(len(facets) - 0.5, -0.5)
    for edge in np.arange(0.5, len(facets) - 1):
        ax.axhline(edge, color="#DDDDDD", linewidth=0.6)
    across = str(spec.get("xlabel", _words(spec["x"])))
    ax.set_xlabel(f"slope of log {_words(spec['y'])} against log {across}", fontsize=9)
    style_axes(ax, grid="x")
    add_legend(figure, ax, min(4, len(arms)))
    return Drawn(
        f"{stem(group)}-slopes",
        f"{group.task}: fitted slopes",
        f"Least-squares slopes on logarithmic axes{_reach(fits)}, with 95 % bootstrap intervals over"
        f" {_count(fits)} repetitions; dashed: the slopes of the papers' bounds.",
        figure,
    )


def _looks(arms: Sequence[Arm]) -> dict[str, Style]:
    """The papers' methods as everywhere; variants of them in the spare colours, in order."""
    looks: dict[str, Style] = {}
    unknown = order_of("")[0]
    spare = zip(_SPARE * 9, _SPARE_MARKERS * 9, strict=True)
    for arm in arms:
        known = order_of(arm.method)[0] != unknown
        taken = any(style_of(arm.method) == look for look in looks.values())
        looks[arm.label] = style_of(arm.method) if known and not taken else Style(*next(spare))
    return looks


def _resampled(name: str, values: Array) -> Array:
    """[RESAMPLES, levels] means over resampled rows of `values` [units, levels], NaN left out."""
    units = len(values)
    generator = np.random.default_rng([zlib.crc32(name.encode()), units])
    times = generator.multinomial(units, np.full(units, 1 / units), size=RESAMPLES).astype(float)
    sums, counts = times @ np.nan_to_num(values), times @ ~np.isnan(values)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _interval(value: float, draws: Array, units: int) -> Estimate:
    """Percentile bootstrap, widened for few units."""
    draws = draws[np.isfinite(draws)]
    if not len(draws):
        return Estimate(value, math.nan, math.nan)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return widened(Estimate(value, float(low), float(high)), units)


def _expected(label: str, spec: Mapping[str, Any]) -> float:
    """The slope predicted for a label: of the longest beginning that is named."""
    found = [name for name in spec.get("expected") or {} if label.startswith(name)]
    return float(spec["expected"][max(found, key=len)]) if found else math.nan


def _bends(fit: Fit) -> bool:
    """The two halves differ by more than `NEAR` and their intervals do not overlap."""
    apart = fit.lower.high < fit.upper.low or fit.upper.high < fit.lower.low
    return apart and abs(fit.lower.value - fit.upper.value) > NEAR


def _reach(fits: Sequence[Fit]) -> str:
    if not fits:
        return ""
    least, most = min(f.least for f in fits), max(f.most for f in fits)
    return f" from {least:.0f} to {most:.0f}"


def _count(parts: Sequence[Fit] | Sequence[Curve]) -> str:
    units = {part.curve.units if isinstance(part, Fit) else part.units for part in parts}
    return str(units.pop()) if len(units) == 1 else f"{min(units)} to {max(units)}"


def _slope_text(slope: Estimate) -> str:
    if math.isnan(slope.value):
        return "–"
    return f"{_signed(slope.value)} [{_signed(slope.low)}, {_signed(slope.high)}]"


def _ratio_text(ratio: Estimate) -> str:
    low, value, high = (
        f"{x:.2f}" if x >= 0.1 or math.isnan(x) else f"{x:.2g}"
        for x in (ratio.low, ratio.value, ratio.high)
    )
    return f"{value} [{low}, {high}]"


def _signed(value: float) -> str:
    text = f"{value:.2f}"
    return (text.lstrip("-") if float(text) == 0 else text).replace("-", "−")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _words(name: str) -> str:
    return name.replace("_", " ")
