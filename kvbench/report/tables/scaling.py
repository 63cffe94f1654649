"""Rates of growth and decay from records: curves and log-log slopes.

Drawn for the figure kind ``scaling`` of a task's meta, a mapping with

    x, y            record fields; both axes are logarithmic
    level           the field that was set (y is averaged over the records of one level)
    facet           one panel and one fit for each of its values
    unit            record field that names the independent repetition, which intervals resample: what
                    draws of one prompt share is no repetition
    fit_least, fit_most   levels the slope is fitted over (None: all)
    guides          slopes drawn in grey
    expected        {beginning of a label: slope predicted}
    compare         label whose curve the others are divided by, at the last level fitted
    finding         error_scaling | discrepancy | clusters | power_law: the words
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvbench.report.experiment import Group
from kvbench.report.figures.names import words
from kvbench.report.labels import Variant
from kvbench.report.stats.estimate import LEVEL, RESAMPLES, Array, Estimate, widened
from kvbench.report.table import NOTHING, Column, Table, long_table, signed_text

NEAR = 0.1
"""A slope is as predicted where its whole interval is this close to the prediction."""


AS_PREDICTED, STEEPER, SHALLOWER = "as predicted", "steeper", "shallower"
UNDECIDED = "not determined"
VERDICTS = (AS_PREDICTED, STEEPER, SHALLOWER, UNDECIDED)


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

    def slope(self, least: float | None = None, most: float | None = None) -> Estimate:
        """Least-squares slope of log y against log x over levels in [least, most]."""
        used = np.isfinite(self.mean) & (self.mean > 0)
        used &= (self.levels >= (least or 0)) & (self.levels <= (most or math.inf))
        if used.sum() < 2:
            return NOTHING
        log_x = np.log(self.x[used])
        log_x = log_x - log_x.mean()
        weights = log_x / np.square(log_x).sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            slopes = np.log(self.draws[:, used]) @ weights
        return _interval(float(np.log(self.mean[used]) @ weights), slopes, self.units)

    def r_squared(self, least: float, most: float) -> float:
        """Share of the variance of log y that the least-squares line explains, over levels in
        [least, most]; NaN for fewer than three."""
        used = np.isfinite(self.mean) & (self.mean > 0)
        used &= (self.levels >= least) & (self.levels <= most)
        if used.sum() < 3 or not np.ptp(self.mean[used]):
            return math.nan
        return float(np.corrcoef(np.log(self.x[used]), np.log(self.mean[used]))[0, 1] ** 2)

    def over(self, other: Curve, level: float) -> Estimate:
        """This curve's y over another's at one level, paired."""
        mine, theirs = (np.flatnonzero(c.levels == level) for c in (self, other))
        if not len(mine) or not len(theirs):
            return NOTHING
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
        verdict: on the slope against the one predicted, one of `VERDICTS`; None where none is.
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
    def verdict(self) -> str | None:
        """Two one-sided tests against expected - NEAR and expected + NEAR, each at half of what the
        interval leaves out: equivalent is an interval within both bounds, different one beyond
        either. One repetition has no interval, and decides nothing."""
        if math.isnan(self.expected):
            return None
        least, most = self.expected - NEAR, self.expected + NEAR
        if self.slope.low >= least and self.slope.high <= most:
            return AS_PREDICTED
        if self.slope.high < least:
            return STEEPER
        return SHALLOWER if self.slope.low > most else UNDECIDED

    @property
    def r_squared(self) -> float:
        """See `Curve.r_squared`, of the levels fitted; NaN for fewer than three."""
        return self.curve.r_squared(self.least, self.most)

    @property
    def reaches(self) -> bool:
        """Whether the slope is shown to be as steep as predicted, or steeper (one-sided)."""
        return self.slope.high <= self.expected + NEAR


def curves_of(group: Group, spec: Mapping[str, Any]) -> list[Curve]:
    """One curve per panel and variant, in the order of the records and of the variants."""
    good = group.records[group.records["status"].eq("ok")].dropna(subset=[spec["x"], spec["y"]])
    good = good.assign(
        repeat=good[spec["unit"]].astype(str),
        y=pd.to_numeric(good[spec["y"]]),
        x=pd.to_numeric(good[spec["x"]]),
        level=pd.to_numeric(good[spec["level"]]),
    )
    curves = []
    for facet in good[spec["facet"]].unique():
        part = good[good[spec["facet"]] == facet]
        repeats = sorted(part["repeat"].unique())
        for variant in group.variants:
            mine = part[part["variant"] == variant.label]
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
                    variant=variant,
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
    base = {c.facet: c for c in curves if c.variant.method == spec.get("compare")}
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
                _expected(curve.variant.method, spec),
                curve.over(other, most) if other is not None else NOTHING,
            )
        )
    return fits


@dataclass(frozen=True, eq=False)
class Scaling:
    """Curves and their slopes, as a task's figure ``scaling`` asks for them."""

    group: Group
    spec: Mapping[str, Any]
    curves: Sequence[Curve]
    fits: Sequence[Fit]


def scaling_of(group: Group) -> Scaling | None:
    """What the group's ``scaling`` figure asks for, if its task has one and records to draw."""
    spec = group.meta.figure("scaling")
    if spec is None or spec["y"] not in group.records:
        return None
    good = group.records["status"].eq("ok") & group.records[spec["y"]].notna()
    if not good.any():
        return None
    curves = curves_of(group, spec)
    return Scaling(group, spec, curves, fits_of(curves, spec))


def slope_table(scaling: Scaling) -> Table:
    """Slopes: variants by data sets; in files one row for each."""
    group, spec, fits = scaling.group, scaling.spec, scaling.fits
    facets = list(dict.fromkeys(fit.curve.facet for fit in fits))
    predicted = any(math.isfinite(f.expected) for f in fits)
    by_variant: dict[Variant, dict[str, Fit]] = {}
    for fit in fits:
        by_variant.setdefault(fit.curve.variant, {})[fit.curve.facet] = fit

    def slope_on(facet: str) -> Column:
        return Column(facet, facet, "slope", of=lambda one: _slope(one[1].get(facet)))

    first = Column("variant", "method", "label", of=lambda one: one[0].label)
    expected = Column(
        "predicted", "predicted", "slope", of=lambda one: next(iter(one[1].values())).expected
    )
    return Table.of(
        f"{group.task}-{group.model}-slopes",
        f"{group.task} on {group.model}: log-log slopes",
        (first, *[expected] * predicted, *map(slope_on, facets)),
        by_variant.items(),
        (
            f"Least-squares slopes of log {words(spec['y'])} against log {words(spec['x'])}"
            f"{reach_text(fits)}, {interval_text(fits, spec)}.",
        ),
        row=lambda one: {"method": one[0].method},
        long=_every_slope(scaling),
    )


def _slope(fit: Fit | None) -> Estimate:
    return NOTHING if fit is None else fit.slope


def _every_slope(scaling: Scaling) -> Table:
    """One row per data set and variant."""
    group, spec = scaling.group, scaling.spec
    lines = []
    for fit in scaling.fits:
        curve = fit.curve
        at = int(np.flatnonzero(curve.levels == fit.most)[0])
        lines.append(
            {
                "model": group.model,
                "task": group.task,
                spec["facet"]: curve.facet,
                "variant": curve.variant.label,
                "fitted_from": fit.least,
                "fitted_to": fit.most,
                "expected": fit.expected,
                "verdict": fit.verdict,
                "slope": fit.slope,
                "slope_lower": fit.lower,
                "slope_upper": fit.upper,
                "r_squared": fit.r_squared,
                "last": Estimate(*(float(x[at]) for x in (curve.mean, curve.low, curve.high))),
                "last_ratio": fit.ratio,
                "held_last": curve.x[at],
                "bytes_ratio_last": _bytes_ratio(group, spec, fit),
                "repetitions": curve.units,
            }
        )
    estimates = ("slope", "slope_lower", "slope_upper", "last", "last_ratio")
    return long_table(lines, **dict.fromkeys(estimates, "slope"))


def _bytes_ratio(group: Group, spec: Mapping[str, Any], fit: Fit) -> float:
    """Mean bytes held over those of the exact cache at the last level fitted; NaN where not known."""
    records = group.records
    mine = records["status"].eq("ok") & records["variant"].eq(fit.curve.variant.label)
    mine &= records[spec["facet"]].eq(fit.curve.facet) & records[spec["level"]].eq(fit.most)
    return float(pd.to_numeric(records["ratio"][mine]).mean())


def _resampled(name: str, values: Array) -> Array:
    """[RESAMPLES, levels] means over resampled rows of `values` [units, levels], NaN left out."""
    units = len(values)
    generator = np.random.default_rng([zlib.crc32(name.encode()), units])
    times = generator.multinomial(units, np.full(units, 1 / units), size=RESAMPLES).astype(float)
    sums, counts = times @ np.nan_to_num(values), times @ ~np.isnan(values)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _interval(value: float, draws: Array, units: int) -> Estimate:
    """Percentile bootstrap, widened for few units; one unit has no interval."""
    draws = draws[np.isfinite(draws)]
    if units < 2 or not len(draws):
        return Estimate(value, math.nan, math.nan)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return widened(Estimate(value, float(low), float(high)), units)


def _expected(label: str, spec: Mapping[str, Any]) -> float:
    """The slope predicted for a label: of the longest beginning that is named."""
    found = [name for name in spec.get("expected") or {} if label.startswith(name)]
    return float(spec["expected"][max(found, key=len)]) if found else math.nan


def count_text(parts: Sequence[Fit] | Sequence[Curve], spec: Mapping[str, Any]) -> str:
    """How many repetitions, as a number or a range, and of what: "4 repetitions", "1 prompt"."""
    units = {part.curve.units if isinstance(part, Fit) else part.units for part in parts}
    noun = _NOUNS.get(spec["unit"], spec["unit"])
    if units == {1}:
        return f"1 {noun}"
    count = str(units.pop()) if len(units) == 1 else f"{min(units)} to {max(units)}"
    return f"{count} {noun}s"


def interval_text(parts: Sequence[Fit] | Sequence[Curve], spec: Mapping[str, Any]) -> str:
    """What the intervals are, for a caption: "with 95 % ..."; of one repetition there is none."""
    count = count_text(parts, spec)
    if count.startswith("1 "):
        return f"of {count}, which has no interval and determines nothing"
    return f"with 95 % bootstrap intervals over {count}, widened by Student's t for their number"


_NOUNS = {"replicate": "repetition"}


def slope_text(slope: Estimate) -> str:
    """A slope with its interval."""
    if math.isnan(slope.value):
        return "–"
    if math.isnan(slope.low):
        return f"{signed_text(slope.value)} (no interval)"
    return f"{signed_text(slope.value)} [{signed_text(slope.low)}, {signed_text(slope.high)}]"


def reach_text(fits: Sequence[Fit]) -> str:
    """Over which levels the slopes were fitted, for a caption; empty without fits."""
    if not fits:
        return ""
    least, most = min(f.least for f in fits), max(f.most for f in fits)
    return f" from {least:.0f} to {most:.0f}"
