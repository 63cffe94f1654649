"""Rates of growth and decay from records: curves on logarithmic axes and their slopes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvbench.records import figures
from kvbench.report.experiment import Group, Variant
from kvbench.report.stats import LEVEL, NOTHING, Array, Estimate, Flags, Stratum, resampled, widened

NEAR = 0.1
"""A slope is as predicted where its whole interval is this close to the prediction."""


@dataclass(frozen=True, eq=False)
class Curve:
    """y against x of one variant in one panel; arrays are over levels, ascending.

    Attributes:
        x: mean x of each level. mean, low, high: mean of y with its interval.
        draws: [resamples, levels] means of y over resampled repetitions; the variants of a panel are
            resampled alike, so that ratios of their draws are paired.
        units: repetitions.
    """

    facet: str
    variant: Variant
    levels: Array
    x: Array
    mean: Array
    low: Array
    high: Array
    draws: Array
    units: int

    def _used(self, least: float, most: float) -> Flags:
        return (
            np.isfinite(self.mean)
            & (self.mean > 0)
            & (self.levels >= least)
            & (self.levels <= most)
        )

    def slope(self, least: float = 0.0, most: float = math.inf) -> Estimate:
        """Least-squares slope of log y against log x over levels in [least, most]."""
        used = self._used(least, most)
        if used.sum() < 2:
            return NOTHING
        log_x = np.log(self.x[used])
        log_x = log_x - log_x.mean()
        weights = log_x / np.square(log_x).sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = np.log(self.draws[:, used]) @ weights
        return _interval(float(np.log(self.mean[used]) @ weights), drawn, self.units)

    def r_squared(self, least: float, most: float) -> float:
        """Share of the variance of log y that the line explains; NaN for fewer than three levels."""
        used = self._used(least, most)
        if used.sum() < 3 or not np.ptp(self.mean[used]):
            return math.nan
        return float(np.corrcoef(np.log(self.x[used]), np.log(self.mean[used]))[0, 1] ** 2)

    def over(self, other: Curve, level: float) -> Estimate:
        """This curve's y over another's at one level, paired."""
        if level not in self.levels or level not in other.levels:
            return NOTHING
        i, j = (int(np.flatnonzero(c.levels == level)[0]) for c in (self, other))
        with np.errstate(divide="ignore", invalid="ignore"):
            log = np.log(self.draws[:, i]) - np.log(other.draws[:, j])
            ratio = _interval(math.log(self.mean[i] / other.mean[j]), log, self.units)
        return Estimate(*map(math.exp, ratio))


def curves_of(group: Group, spec: figures.Curve) -> list[Curve]:
    """One curve per panel and variant, in the order of the records and of the variants."""
    good = group.good.dropna(subset=[spec.x, spec.y])
    good = good.assign(
        repeat=good[spec.unit].astype(str),
        y=pd.to_numeric(good[spec.y]),
        x=pd.to_numeric(good[spec.x]),
        level=pd.to_numeric(good[spec.level]),
    )
    curves = []
    for facet in good[spec.facet].unique():
        part = good[good[spec.facet] == facet]
        repeats = sorted(part["repeat"].unique())
        for variant in group.variants:
            mine = part[part["variant"] == variant.label]
            if mine.empty:
                continue
            table = mine.pivot_table(index="repeat", columns="level", values="y", aggfunc="mean")
            values = table.reindex(repeats).to_numpy(float)
            known = Stratum(str(facet), np.nan_to_num(values), (~np.isnan(values)).astype(float))
            draws, mean = resampled(known), np.nanmean(values, axis=0)
            with np.errstate(divide="ignore", invalid="ignore"):
                spread = [
                    _interval(math.log(m) if m > 0 else math.nan, np.log(column), len(table))
                    for m, column in zip(mean, draws.T, strict=True)
                ]
            x = mine.groupby("level")["x"].mean().to_numpy(float)
            low, high = (np.exp([getattr(e, end) for e in spread]) for end in ("low", "high"))
            levels = table.columns.to_numpy(float)
            curves.append(Curve(str(facet), variant, levels, x, mean, low, high, draws, len(table)))
    return curves


def slopes(group: Group, spec: figures.Curve) -> pd.DataFrame:
    """A row per panel and variant: slopes over all levels fitted and over their lower and upper half, a
    verdict on the one predicted, the value at the last level and its ratio to the variant compared."""
    curves = curves_of(group, spec)
    base = {c.facet: c for c in curves if c.variant.method == spec.compare}
    rows = []
    for curve in curves:
        least, most = spec.fit_least or 0.0, spec.fit_most or math.inf
        levels = curve.levels[(curve.levels >= least) & (curve.levels <= most)]
        if not len(levels):
            continue
        least, split, most = (float(levels[i]) for i in (0, len(levels) // 2, -1))
        at = int(np.flatnonzero(curve.levels == most)[0])
        other, slope = base.get(curve.facet), curve.slope(least, most)
        named = [name for name in spec.expected if curve.variant.method.startswith(name)]
        expected = float(spec.expected[max(named, key=len)]) if named else math.nan
        mine = group.good[group.good["variant"].eq(curve.variant.label)]
        mine = mine[mine[spec.facet].eq(curve.facet) & mine[spec.level].eq(most)]
        rows.append(
            {
                "method": curve.variant.method,
                "variant": curve.variant.label,
                spec.facet: curve.facet,
                "fitted_from": least,
                "fitted_to": most,
                "expected": expected,
                "verdict": verdict_on(slope, expected),
                **slope.named("slope"),
                **curve.slope(least, split).named("slope_lower"),
                **curve.slope(split, most).named("slope_upper"),
                "r_squared": curve.r_squared(least, most),
                **Estimate(*(float(x[at]) for x in (curve.mean, curve.low, curve.high))).named(
                    "last"
                ),
                **(curve.over(other, most) if other is not None else NOTHING).named("last_ratio"),
                "held_last": curve.x[at],
                "bytes_ratio_last": float(pd.to_numeric(mine["ratio"]).mean()),
                "repetitions": curve.units,
            }
        )
    return pd.DataFrame(rows)


def verdict_on(slope: Estimate, expected: float) -> str | None:
    """Two one-sided tests against expected - NEAR and expected + NEAR, each at half of what the interval
    leaves out: equivalent is an interval within both bounds, different one beyond either. One repetition
    has no interval, and decides nothing. None without a prediction."""
    if math.isnan(expected):
        return None
    least, most = expected - NEAR, expected + NEAR
    if slope.low >= least and slope.high <= most:
        return "as predicted"
    return (
        "steeper" if slope.high < least else "shallower" if slope.low > most else "not determined"
    )


def _interval(value: float, draws: Array, units: int) -> Estimate:
    """Percentile bootstrap, widened for few units; one unit has no interval."""
    draws = draws[np.isfinite(draws)]
    if units < 2 or not len(draws):
        return Estimate(value)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return widened(Estimate(value, float(low), float(high)), units)
