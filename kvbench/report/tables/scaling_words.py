"""Rates of growth and decay in words, written from the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvbench.report.experiment import Group
from kvbench.report.figures.names import words
from kvbench.report.table import number, ratio_text, signed_text
from kvbench.report.tables.scaling import (
    AS_PREDICTED,
    NEAR,
    SHALLOWER,
    STEEPER,
    UNDECIDED,
    VERDICTS,
    Curve,
    Fit,
    Scaling,
    count_text,
    slope_text,
)


def scaling_findings(scaling: Scaling) -> list[str]:
    """What was found, one sentence or two per variant, from the numbers alone."""
    group, spec, fits = scaling.group, scaling.spec, scaling.fits
    variants = list(dict.fromkeys(fit.curve.variant.label for fit in fits))
    by_variant = {label: [f for f in fits if f.curve.variant.label == label] for label in variants}
    kind = spec.get("finding")
    if kind == "discrepancy":
        return _discrepancy_words(by_variant, spec)
    if kind == "clusters":
        return _cluster_words(by_variant)
    if kind == "power_law":
        return _power_words(by_variant, spec)
    return _error_words(by_variant, spec, fits) + _exponent_words(group, spec)


def _error_words(
    by_variant: Mapping[str, Sequence[Fit]], spec: Mapping[str, Any], fits: Sequence[Fit]
) -> list[str]:
    first, last = fits[0].least, fits[0].most
    if all(f.curve.units == 1 for f in fits):
        return [
            f"Slopes of the error of equation (2) against entries held, of {count_text(fits, spec)}: "
            "one repetition has no interval and determines nothing. Its numbers are in the table."
        ]
    found = [
        f"Slopes of the error of equation (2) against entries held, fitted from {first:.0f} to "
        f"{last:.0f} entries asked for, 95 % intervals over {count_text(fits, spec)}. "
        f"{_capital(AS_PREDICTED)}: the whole interval lies within {NEAR:g} of the prediction (two "
        f"one-sided tests); {STEEPER} or {SHALLOWER}: it lies wholly beyond; {UNDECIDED}: neither. "
        f"{_reached(by_variant)}"
    ]
    for label, mine in by_variant.items():
        expected = mine[0].expected
        if not math.isfinite(expected):
            continue
        parts = []
        for verdict in VERDICTS:
            chosen = [f for f in mine if f.verdict == verdict]
            if chosen:
                named = "; ".join(f"{f.curve.facet} ({slope_text(f.slope)})" for f in chosen)
                parts.append(f"{verdict} on {named}")
        text = f"{label}, predicted {signed_text(expected)}: {'. '.join(map(_capital, parts))}."
        bent = [f for f in mine if _bends(f)]
        if bent:
            named = "; ".join(
                f"{f.curve.facet} ({signed_text(f.lower.value)} up to {f.split:.0f} entries, "
                f"{signed_text(f.upper.value)} beyond)"
                for f in bent
            )
            text += f" The slope changes along the way: {named}."
        found.append(text)
    compare = spec.get("compare")
    gains = [f for f in fits if f.curve.variant.method != compare and math.isfinite(f.ratio.value)]
    if gains:
        sentences = []
        for label, mine in by_variant.items():
            ratios = [f for f in mine if f in gains]
            if not ratios:
                continue
            below = [f for f in ratios if f.ratio.high < 1]
            above = [f for f in ratios if f.ratio.low > 1]
            low, high = (pick(ratios, key=lambda f: f.ratio.value) for pick in (min, max))
            spread = f"from {ratio_text(low.ratio)} times on {low.curve.facet}"
            if high is not low:
                spread += f" to {ratio_text(high.ratio)} on {high.curve.facet}"
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
        heavy[f.curve.variant.label] = max(heavy.get(f.curve.variant.label, 0.0), share)
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


def _reached(by_variant: Mapping[str, Sequence[Fit]]) -> str:
    """How many data sets each variant is as steep on as predicted, variants of one prediction
    together."""
    predictions = sorted({f.expected for mine in by_variant.values() for f in mine})
    sentences = []
    for expected in (p for p in predictions if math.isfinite(p)):
        named = []
        for label, mine in by_variant.items():
            if mine[0].expected == expected:
                named.append(f"{label} on {sum(f.reaches for f in mine)} of {len(mine)}")
        sentences.append(
            f"As steep as the predicted {signed_text(expected)} or steeper, the whole interval below "
            f"{signed_text(expected + NEAR)}: {', '.join(named)} data sets."
        )
    return " ".join(sentences)


def _discrepancy_words(
    by_variant: Mapping[str, Sequence[Fit]], spec: Mapping[str, Any]
) -> list[str]:
    some = next(iter(by_variant.values()))[0]
    found = [
        f"Growth of the largest coordinate of the signed sum as n^slope, fitted from n = "
        f"{some.least:.0f} to {some.most:.0f}, 95 % intervals over {count_text([some], spec)}. "
        "Random signs must give 1/2, a logarithm something close to 0."
    ]
    for label, mine in by_variant.items():
        parts = []
        for f in mine:
            at = f.curve.mean[np.flatnonzero(f.curve.levels == f.most)[0]]
            text = f"{f.curve.facet} (slope {slope_text(f.slope)}, {number(float(at))} at the end"
            if math.isfinite(f.ratio.value) and f.curve.variant.method != spec.get("compare"):
                text += f", {ratio_text(f.ratio)} times {spec['compare']}"
            parts.append(f"{text})")
        found.append(f"{label}: {'; '.join(parts)}.")
    base = {f.curve.facet: f.curve for f in by_variant.get(str(spec.get("compare")), [])}
    starts = []
    for label, mine in by_variant.items():
        if label == spec.get("compare"):
            continue
        named = []
        for f in mine:
            other = base.get(f.curve.facet)
            if other is None:
                continue
            start = _smaller_from(f, other)
            where = "nowhere" if start is None else f"from n = {start:.0f}"
            named.append(f"{f.curve.facet} {where}")
        if named:
            starts.append(f"{label} ({', '.join(named)})")
    if starts:
        found.append(
            f"Smaller than {spec['compare']}, the whole interval of the paired ratio below 1: "
            f"{'; '.join(starts)}."
        )
    return found


def _cluster_words(by_variant: Mapping[str, Sequence[Fit]]) -> list[str]:
    some = next(iter(by_variant.values()))[0]
    found = [
        f"Growth of the number of clusters m as n^slope, fitted from n = {some.least:.0f} to "
        f"{some.most:.0f}; memory is sublinear in n only where the slope is below 1."
    ]
    for label, mine in by_variant.items():
        parts = []
        for f in mine:
            share = f.curve.mean[-1] / f.curve.levels[-1]
            parts.append(
                f"{f.curve.facet} (slope {slope_text(f.slope)}, m = {number(float(f.curve.mean[-1]))},"
                f" {100 * share:.3g} % of n)"
            )
        found.append(f"{label}: {'; '.join(parts)}.")
    return found


def _power_words(by_variant: Mapping[str, Sequence[Fit]], spec: Mapping[str, Any]) -> list[str]:
    """The exponent and how well a power law fits, of every curve."""
    some = next(iter(by_variant.values()))[0]
    x, y = (str(spec.get(f"{a}label", words(spec[a]))) for a in "xy")
    found = [
        f"Power law y = C x^slope of {y} (y) against {x} (x), by least squares on logarithmic axes, x "
        f"from {some.least:.0f} to {some.most:.0f}, 95 % intervals over {count_text([some], spec)}; R² "
        "is of the line through the means."
    ]
    for label, mine in by_variant.items():
        parts = [
            f"{f.curve.facet} (slope {slope_text(f.slope)}, R² {f.r_squared:.3f}, "
            f"{number(float(f.curve.mean[0]))} at the first x and {number(float(f.curve.mean[-1]))} at "
            "the last)"
            for f in mine
        ]
        found.append(f"{label}: {'; '.join(parts)}.")
    means = {
        label: float(np.mean([f.slope.value for f in mine])) for label, mine in by_variant.items()
    }
    named = ", ".join(
        f"{name} {signed_text(means[name])}" for name in sorted(means, key=means.__getitem__)
    )
    found.append(f"Mean slope of {y} against {x}, the steepest fall first: {named}.")
    return found


def _smaller_from(fit: Fit, other: Curve) -> float | None:
    """The level from which on the whole interval of the curve's ratio to another lies below 1."""
    start = None
    for level in fit.curve.levels[::-1]:
        if not fit.curve.over(other, float(level)).high < 1:
            break
        start = float(level)
    return start


def _bends(fit: Fit) -> bool:
    """The two halves differ by more than `NEAR` and their intervals do not overlap."""
    apart = fit.lower.high < fit.upper.low or fit.upper.high < fit.lower.low
    return apart and abs(fit.lower.value - fit.upper.value) > NEAR


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
