"""Rates of growth and decay in words, written from the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
        by_verdict = {verdict: [f for f in mine if f.verdict == verdict] for verdict in VERDICTS}
        parts = []
        for verdict, chosen in by_verdict.items():
            named = "; ".join(f"{f.curve.facet} ({slope_text(f.slope)})" for f in chosen)
            parts += [_capital(f"{verdict} on {named}")] if chosen else []
        text = f"{label}, predicted {signed_text(expected)}: {'. '.join(parts)}."
        bent = "; ".join(
            f"{f.curve.facet} ({signed_text(f.lower.value)} up to {f.split:.0f} entries, "
            f"{signed_text(f.upper.value)} beyond)"
            for f in mine
            if _bends(f)
        )
        found.append(text + (f" The slope changes along the way: {bent}." if bent else ""))
    compare = spec.get("compare")
    sentences = []
    for label, mine in by_variant.items():
        ratios = [
            f for f in mine if f.curve.variant.method != compare and math.isfinite(f.ratio.value)
        ]
        if ratios:
            below = sum(f.ratio.high < 1 for f in ratios)
            above = sum(f.ratio.low > 1 for f in ratios)
            low, high = (pick(ratios, key=lambda f: f.ratio.value) for pick in (min, max))
            spread = f"from {ratio_text(low.ratio)} times on {low.curve.facet}"
            if high is not low:
                spread += f" to {ratio_text(high.ratio)} on {high.curve.facet}"
            sentences.append(
                f"{label} {spread} (interval below 1 on {below}, above 1 on {above} of {len(ratios)})"
            )
    if sentences:
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
    some, compare = next(iter(by_variant.values()))[0], str(spec.get("compare"))

    def growth(f: Fit) -> str:
        at = float(f.curve.mean[np.flatnonzero(f.curve.levels == f.most)[0]])
        text = f"{f.curve.facet} (slope {slope_text(f.slope)}, {number(at)} at the end"
        if math.isfinite(f.ratio.value) and f.curve.variant.method != compare:
            text += f", {ratio_text(f.ratio)} times {compare}"
        return f"{text})"

    base = {f.curve.facet: f.curve for f in by_variant.get(compare, [])}

    def smaller(f: Fit) -> str:
        start = _smaller_from(f, base[f.curve.facet])
        return f"{f.curve.facet} {'nowhere' if start is None else f'from n = {start:.0f}'}"

    beside = {
        label: [smaller(f) for f in mine if f.curve.facet in base]
        for label, mine in by_variant.items()
        if label != compare
    }
    starts = [f"{label} ({', '.join(named)})" for label, named in beside.items() if named]
    found = [
        f"Growth of the largest coordinate of the signed sum as n^slope, fitted from n = "
        f"{some.least:.0f} to {some.most:.0f}, 95 % intervals over {count_text([some], spec)}. "
        "Random signs must give 1/2, a logarithm something close to 0.",
        *_of_each(by_variant, growth),
    ]
    if starts:
        found.append(
            f"Smaller than {compare}, the whole interval of the paired ratio below 1: "
            f"{'; '.join(starts)}."
        )
    return found


def _cluster_words(by_variant: Mapping[str, Sequence[Fit]]) -> list[str]:
    some = next(iter(by_variant.values()))[0]

    def clusters(f: Fit) -> str:
        last, share = float(f.curve.mean[-1]), f.curve.mean[-1] / f.curve.levels[-1]
        return (
            f"{f.curve.facet} (slope {slope_text(f.slope)}, m = {number(last)},"
            f" {100 * share:.3g} % of n)"
        )

    return [
        f"Growth of the number of clusters m as n^slope, fitted from n = {some.least:.0f} to "
        f"{some.most:.0f}; memory is sublinear in n only where the slope is below 1.",
        *_of_each(by_variant, clusters),
    ]


def _power_words(by_variant: Mapping[str, Sequence[Fit]], spec: Mapping[str, Any]) -> list[str]:
    """The exponent and how well a power law fits, of every curve."""
    some = next(iter(by_variant.values()))[0]
    x, y = (str(spec.get(f"{a}label", words(spec[a]))) for a in "xy")

    def power(f: Fit) -> str:
        first, last = (number(float(f.curve.mean[at])) for at in (0, -1))
        return (
            f"{f.curve.facet} (slope {slope_text(f.slope)}, R² {f.r_squared:.3f}, "
            f"{first} at the first x and {last} at the last)"
        )

    means = {
        label: float(np.mean([f.slope.value for f in mine])) for label, mine in by_variant.items()
    }
    named = ", ".join(
        f"{name} {signed_text(means[name])}" for name in sorted(means, key=means.__getitem__)
    )
    return [
        f"Power law y = C x^slope of {y} (y) against {x} (x), by least squares on logarithmic axes, x "
        f"from {some.least:.0f} to {some.most:.0f}, 95 % intervals over {count_text([some], spec)}; R² "
        "is of the line through the means.",
        *_of_each(by_variant, power),
        f"Mean slope of {y} against {x}, the steepest fall first: {named}.",
    ]


def _of_each(by_variant: Mapping[str, Sequence[Fit]], text: Callable[[Fit], str]) -> list[str]:
    """A sentence for each variant: what `text` says of its fits."""
    return [f"{label}: {'; '.join(map(text, mine))}." for label, mine in by_variant.items()]


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
