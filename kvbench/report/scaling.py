"""Rates of growth and decay from records: curves on logarithmic axes and their slopes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvbench.records import figures
from kvbench.report.experiment import Group, Variant
from kvbench.report.stats import LEVEL, NOTHING, Array, Estimate, Stratum, resampled, widened

NEAR = 0.1
"""A slope is as predicted where its whole interval is this close to the prediction."""


@dataclass(frozen=True, eq=False)
class Curve:
    """y against x of one variant in one panel.

    Attributes:
        frame: a row per level, ascending: ``x`` (mean), ``mean``, ``low`` and ``high`` of y.
        draws: [resamples, levels] means of y over resampled repetitions; the variants of a panel are
            resampled alike, so that ratios of their draws are paired.
        units: repetitions.
    """

    facet: str
    variant: Variant
    frame: pd.DataFrame
    draws: Array
    units: int

    def slope(self, least: float, most: float) -> tuple[Estimate, float]:
        """Least-squares slope of log y against log x over levels in [least, most], and the share of the
        variance of log y that it explains (NaN for fewer than three levels)."""
        used = ((self.frame["mean"] > 0) & self.frame["level"].between(least, most)).to_numpy()
        if used.sum() < 2:
            return NOTHING, math.nan
        x, y = (np.log(self.frame.loc[used, key].to_numpy(float)) for key in ("x", "mean"))
        weights = (x - x.mean()) / np.square(x - x.mean()).sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = np.log(self.draws[:, used]) @ weights
        share = np.corrcoef(x, y)[0, 1] ** 2 if used.sum() > 2 and np.ptp(y) else math.nan
        return _interval(float(y @ weights), drawn, self.units), float(share)

    def over(self, other: Curve, level: float) -> Estimate:
        """This curve's y over another's at one level, paired."""
        places = [np.flatnonzero(one.frame["level"] == level) for one in (self, other)]
        if not all(map(len, places)):
            return NOTHING
        i, j = (int(place[0]) for place in places)
        with np.errstate(divide="ignore", invalid="ignore"):
            log = np.log(self.draws[:, i]) - np.log(other.draws[:, j])
        ratio = math.log(self.frame["mean"][i] / other.frame["mean"][j])
        return Estimate(*map(math.exp, _interval(ratio, log, self.units)))


def curves_of(group: Group, spec: figures.Curve) -> list[Curve]:
    """One curve per panel and variant, in the order of the records and of the variants."""
    good = group.good.dropna(subset=[spec.x, spec.y])
    numbers = {"y": spec.y, "x": spec.x, "level": spec.level}
    good = good.assign(
        repeat=good[spec.unit].astype(str),
        **{name: pd.to_numeric(good[field]) for name, field in numbers.items()},
    )
    curves = []
    for facet, part in good.groupby(spec.facet, sort=False):
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
                logs = np.log(np.where(mean > 0, mean, np.nan)), np.log(draws)
            spread = [
                _interval(float(m), d, len(table)) for m, d in zip(logs[0], logs[1].T, strict=True)
            ]
            frame = (
                mine.groupby("level", as_index=False)["x"]
                .mean()
                .assign(
                    facet=str(facet),
                    label=variant.label,
                    method=variant.method,
                    mean=mean,
                    low=np.exp([e.low for e in spread]),
                    high=np.exp([e.high for e in spread]),
                )
            )
            curves.append(Curve(str(facet), variant, frame, draws, len(table)))
    return curves


def slopes(group: Group, spec: figures.Curve) -> pd.DataFrame:
    """A row per panel and variant: slopes over all levels fitted and over their lower and upper half, a
    verdict on the one predicted, the value at the last level and its ratio to the variant compared."""
    curves = curves_of(group, spec)
    base = {c.facet: c for c in curves if c.variant.method == spec.compare}
    rows = []
    for curve in curves:
        level = curve.frame["level"]
        levels = level[level.between(spec.fit_least or 0.0, spec.fit_most or math.inf)].tolist()
        if not levels:
            continue
        least, split, most = levels[0], levels[len(levels) // 2], levels[-1]
        last = curve.frame[level == most].iloc[0]
        slope, share = curve.slope(least, most)
        method, label = curve.variant.method, curve.variant.label
        named = [name for name in spec.expected if method.startswith(name)]
        expected = float(spec.expected[max(named, key=len)]) if named else math.nan
        mine = group.good[group.good["variant"].eq(label)]
        mine = mine[mine[spec.facet].eq(curve.facet) & mine[spec.level].eq(most)]
        over = curve.over(base[curve.facet], most) if curve.facet in base else NOTHING
        row = {"method": method, "variant": label, spec.facet: curve.facet}
        row |= {"fitted_from": least, "fitted_to": most, "expected": expected}
        row |= {"verdict": verdict_on(slope, expected), **slope.named("slope")}
        row |= curve.slope(least, split)[0].named("slope_lower")
        row |= curve.slope(split, most)[0].named("slope_upper") | {"r_squared": share}
        row |= Estimate(last["mean"], last["low"], last["high"]).named("last")
        row |= over.named("last_ratio") | {"held_last": last["x"]}
        row |= {"bytes_ratio_last": float(pd.to_numeric(mine["ratio"]).mean())}
        rows.append(row | {"repetitions": curve.units})
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
