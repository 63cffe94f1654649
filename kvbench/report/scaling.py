"""Rates of growth and decay from records: curves on logarithmic axes, their slopes, and the table and
the sentence that say them.

Every number here is a weighted sum of logarithms of means over repetitions. Its interval is a t interval
over the repetitions' first-order contributions (the delta method), so that slopes and ratios whose means
share repetitions are paired.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from kvbench.records.figures import Curve
from kvbench.report.experiment import Group
from kvbench.report.stats import ALPHA, NOTHING, Array, Estimate
from kvbench.report.table import METHOD, Column, Table, score_format, value_text, wide
from kvbench.report.variants import Variant

NEAR = 0.1
"""The largest distance between the prediction and any point of a slope's interval at which the slope
counts as predicted."""


@dataclass(frozen=True, eq=False)
class VariantCurve:
    """y against x of one variant in one panel.

    Attributes:
        facet: the panel's value of the field that panels are split by.
        frame: a row per level, ascending: ``x`` (mean), ``mean``, ``low`` and ``high`` of y.
        parts: [repetitions of the panel, levels] what each contributes to the logarithm of the mean.
        units: the number of the curve's repetitions.
    """

    facet: str
    variant: Variant
    frame: pd.DataFrame
    parts: Array
    units: int

    def slope(self, least: float, most: float) -> tuple[Estimate, float]:
        """Least-squares slope of log y against log x over levels in [least, most], and the share of the
        variance of log y that it explains (NaN for fewer than three levels)."""
        used = ((self.frame["mean"] > 0) & self.frame["level"].between(least, most)).to_numpy()
        if used.sum() < 2:
            return NOTHING, math.nan
        x, y = (np.log(self.frame.loc[used, key].to_numpy(float)) for key in ("x", "mean"))
        weights = (x - x.mean()) / np.square(x - x.mean()).sum()
        share = np.corrcoef(x, y)[0, 1] ** 2 if used.sum() > 2 and np.ptp(y) else math.nan
        return _interval(y @ weights, self.parts[:, used] @ weights, self.units), float(share)

    def over(self, other: VariantCurve, level: float) -> Estimate:
        """This curve's y over another's at one level, paired."""
        places = [np.flatnonzero(curve.frame["level"] == level) for curve in (self, other)]
        if not all(map(len, places)):
            return NOTHING
        i, j = (int(place[0]) for place in places)
        if not (self.frame["mean"][i] > 0 and other.frame["mean"][j] > 0):
            return NOTHING  # the exact cache has no error
        ratio = math.log(self.frame["mean"][i] / other.frame["mean"][j])
        parts = self.parts[:, i] - other.parts[:, j]
        logarithm = _interval(ratio, parts, self.units)
        value, low, high = map(math.exp, logarithm[:3])
        return Estimate(value, low, high)


def _interval(value: float, parts: Array, units: int) -> Estimate:
    """A value with its interval, given what each repetition contributes to it (`parts`); one repetition
    has no interval."""
    if units < 2:
        return Estimate(float(value))
    error = math.sqrt(units / (units - 1) * float(np.square(parts).sum()))
    half = float(stdtrit(units - 1, 1 - ALPHA / 2)) * error
    return Estimate(float(value), float(value) - half, float(value) + half)


def curves_of(group: Group, spec: Curve) -> list[VariantCurve]:
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
            mean = table.mean().where(lambda y: y > 0)
            parts = ((table - mean) / mean / table.count()).reindex(repeats).fillna(0.0).to_numpy()
            ends = [_interval(m, d, len(table)) for m, d in zip(np.log(mean), parts.T, strict=True)]
            frame = mine.groupby("level", as_index=False)["x"].mean()
            frame = frame.assign(facet=str(facet), label=variant.label, method=variant.method)
            frame = frame.assign(mean=table.mean().to_numpy())
            for end in ("low", "high"):
                frame[end] = np.exp([getattr(interval, end) for interval in ends])
            curves.append(VariantCurve(str(facet), variant, frame, parts, len(table)))
    return curves


def slopes(group: Group, spec: Curve) -> pd.DataFrame:
    """A row per panel and variant: the slope over all levels fitted and over their lower and upper half,
    a verdict on the predicted slope, the value at the last fitted level, and its ratio to the value of
    the method that `spec.compare` names."""
    curves = curves_of(group, spec)
    base = {c.facet: c for c in curves if c.variant.method == spec.compare}
    rows = []
    for curve in curves:
        level = curve.frame["level"]
        levels = level[level <= (spec.fit_most or math.inf)].tolist()
        if not levels:
            continue
        least, split, most = levels[0], levels[len(levels) // 2], levels[-1]
        last = curve.frame[level == most].iloc[0]
        slope, share = curve.slope(least, most)
        method, label = curve.variant.method, curve.variant.label
        predicted = [name for name in spec.expected if method.startswith(name)]
        expected = math.nan
        if predicted:  # by the longest name that the method's begins with
            expected = float(spec.expected[max(predicted, key=len)])
        mine = group.good[group.good["variant"].eq(label)]
        mine = mine[mine[spec.facet].eq(curve.facet) & mine[spec.level].eq(most)]
        over = curve.over(base[curve.facet], most) if curve.facet in base else NOTHING
        row: dict[str, Any] = {
            "method": method,
            "variant": label,
            spec.facet: curve.facet,
            "fitted_from": least,
            "fitted_to": most,
            "expected": expected,
            "verdict": verdict_on(slope, expected),
            **slope.named("slope"),
            **curve.slope(least, split)[0].named("slope_lower"),
            **curve.slope(split, most)[0].named("slope_upper"),
            "r_squared": share,
            **Estimate(last["mean"], last["low"], last["high"]).named("last"),
            **over.named("last_ratio"),
            "held_last": last["x"],
            "bytes_ratio_last": float(pd.to_numeric(mine["ratio"]).mean()),
            "repetitions": curve.units,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def verdict_on(slope: Estimate, expected: float) -> str | None:
    """How a slope compares with the predicted one; None without a prediction.

    These are two one-sided tests, against expected - NEAR and expected + NEAR: "as predicted" where the
    whole interval is within these bounds, "steeper" or "shallower" where it is beyond one of them, else
    "not determined". One repetition has no interval, so nothing is determined.
    """
    if math.isnan(expected):
        return None
    least, most = expected - NEAR, expected + NEAR
    if slope.low >= least and slope.high <= most:
        return "as predicted"
    if slope.high < least:
        return "steeper"
    return "shallower" if slope.low > most else "not determined"


def slope_table(group: Group, curve: Curve) -> Table:
    """Log-log slopes of error against entries: variants by data sets; in files one row for each."""
    data = slopes(group, curve)
    named = {"slope": "mean", "slope_low": "low", "slope_high": "high"}
    frame = wide(
        data.rename(columns=named).assign(mark=""), ["method", "variant", "expected"], curve.facet
    )
    columns = [Column(name, text=score_format("")) for name in data[curve.facet].unique()]
    predicted = (
        [Column("expected", "predicted", score_format(""))]
        if data["expected"].notna().any()
        else []
    )
    least, most = data["fitted_from"].min(), data["fitted_to"].max()
    return Table(
        f"{group.task}-{group.model}-slopes",
        f"{group.task} on {group.model}: log-log slopes",
        frame,
        (METHOD, *predicted, *columns),
        (
            f"Least-squares slopes of log {curve.y} against log {curve.x}, from"
            f" {least:.0f} to {most:.0f}, with 95 % t intervals over {curve.unit}s"
            f" ({data['repetitions'].min():.0f} or more); a slope of one repetition has no interval.",
        ),
        data.assign(model=group.model, task=group.task),
    )


def slope_verdict(group: Group, curve: Curve) -> str:
    """How many slopes of each method are as predicted, steeper or shallower; empty without a
    prediction."""
    parts = []
    data = slopes(group, curve)
    for label, rows in data.dropna(subset=["verdict"]).groupby("variant", sort=False):
        predicted = value_text(float(rows["expected"].iloc[0]), "")
        counts = rows["verdict"].value_counts().items()
        counted = ", ".join(f"{word} on {count} of {len(rows)}" for word, count in counts)
        parts.append(f"{label} (predicted {predicted}): {counted}")
    return f"Slopes: {'; '.join(parts)}." if parts else ""
