"""95 % intervals of the means and paired differences that tables show, in closed form.

Everything here takes strata of independent units (`stats.Stratum`) and returns one estimate per column:
the mean over strata of each stratum's mean. `scripts/benchmarks/bench_statistics.py` measures how
often each kind of interval holds the truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.report.stats.distributions import chi2_quantile, normal_quantile, t_quantile
from kvbench.report.stats.estimate import LEVEL, Array, Estimate, Flags, Stratum, ratio

_Z = normal_quantile((1 + LEVEL) / 2)
_FEW = 3.0
"""Where fewer units than this carry the variance, it says nothing yet."""
_PRIOR = 2.0
"""Units' worth of the pooled variance that each of several strata borrows."""


@dataclass(frozen=True)
class _Moments:
    """By column, the mean over strata, its estimated variance, and how well that is known.

    Attributes:
        freedom: Satterthwaite's degrees of freedom of `variance`; 0 where no stratum has two units.
        effective: D^2 / (1 / n_1 + ... + 1 / n_D), the number of units of a single stratum with the
            same variance of the mean.
            few: fewer than three units carry the variance: (sum of r^2)^2 / (sum of r^4) of the
            residuals r, which is how many differ where a few differ by the same.
        zero_one: every unit's mean is 0 or 1. signs: it is -1, 0 or 1.
        gains, losses: mean over strata of the positive and of the negative parts of units' means.
    """

    mean: Array
    variance: Array
    freedom: Array
    effective: Array
    few: Flags
    zero_one: Flags
    signs: Flags
    gains: Array
    losses: Array


def mean_intervals(strata: Sequence[Stratum], *, fraction: bool) -> list[Estimate]:
    """The mean score of each column with its interval; none (NaN) below two units.

    Scores of a fraction lie in [0, 1] and get Wilson's interval on the effective number of units
    p (1 - p) / variance of the mean, as is usual for surveys (Korn and Graubard 1998), with Student's t
    of Satterthwaite's degrees of freedom. For 0/1 scores of one stratum this is Wilson's interval
    itself. Where fewer than three units carry the variance, it is taken as that of 0/1 scores, the
    largest there can be. Counts of three or fewer successes or failures take the Poisson bound (Brown,
    Cai and DasGupta 2001), without which Wilson's covers only 90 % at n = 10, p = .99.

    Other scores get Student's t interval with Satterthwaite's degrees of freedom.
    """
    found = _moments(strata, fraction=fraction)
    if not fraction:
        return _estimates(found.mean, *_t_bounds(found), found.freedom)
    p = found.mean
    bernoulli = found.few | (found.zero_one & (len(strata) == 1))
    quantile = np.where(bernoulli, _Z, _t_quantile(found.freedom))
    with np.errstate(divide="ignore", invalid="ignore"):
        units = np.where(bernoulli, found.effective, p * (1 - p) / found.variance)
        bounds = wilson(p, units, quantile)
    return _estimates(p, *bounds, found.freedom)


def difference_intervals(strata: Sequence[Stratum], *, fraction: bool) -> list[Estimate]:
    """The mean paired difference of each column with its interval; none (NaN) below two units.

    Bonett and Price's (2012) interval where a stratum's units differ by -1, 0 or 1, and, on the
    effective number of units, where fewer than three units of a fraction carry the variance. Else
    Student's t interval with Satterthwaite's degrees of freedom.
    """
    found = _moments(strata, fraction=False)
    low, high = _t_bounds(found)
    if fraction:
        n = found.effective + 2
        up, down = ((part * found.effective + 1) / n for part in (found.gains, found.losses))
        half = _Z * np.sqrt((up + down - np.square(up - down)) / n)
        counted = found.few | (found.signs & (len(strata) == 1))
        low = np.where(counted, up - down - half, low)
        high = np.where(counted, up - down + half, high)
        low, high = np.maximum(low, -1.0), np.minimum(high, 1.0)
    return _estimates(found.mean, low, high, found.freedom)


def unpaired_difference(first: Estimate, second: Estimate) -> Estimate:
    """Second minus first mean, of units that have nothing to do with each other.

    From the two intervals (Zou and Donner 2008; of two proportions it is Newcombe's).
    """
    value = second.value - first.value
    below = math.hypot(second.value - second.low, first.high - first.value)
    above = math.hypot(second.high - second.value, first.value - first.low)
    return Estimate(value, value - below, value + above)


def wilson(p: Array, units: Array, quantile: Array | float = _Z) -> tuple[Array, Array]:
    """Wilson's bounds of proportions, with the Poisson bound for three or fewer of a kind.

    Args:
        p: proportions. units: of how many (need not be whole).
    """
    square = quantile**2 / units
    centre = (p + square / 2) / (1 + square)
    half = np.sqrt(square * p * (1 - p) + square**2 / 4) / (1 + square)
    low, high = (_poisson_bound(share, units) for share in (p, 1 - p))
    return np.minimum(centre - half, low), np.maximum(centre + half, 1 - high)


def _poisson_bound(p: Array, units: Array) -> Array:
    """The lower bound of a proportion whose count is at most three; 1 (none) for larger counts."""
    count = np.round(p * units, 9)
    small = (count > 0) & (count <= 3)
    bound = chi2_quantile(1 - LEVEL, 2 * np.where(small, count, 1.0)) / (2 * units)
    return np.asarray(np.where(small, bound, np.where(count == 0, 0.0, 1.0)))


def _moments(strata: Sequence[Stratum], *, fraction: bool) -> _Moments:
    parts = [_stratum_moments(stratum) for stratum in strata]
    mean, squares, fourth, units, zero_one, signs, gains, losses = (
        np.array([part[i] for part in parts]) for i in range(8)
    )
    several, freedom = len(strata) > 1, np.maximum(units - 1, 0)
    average = mean.mean(0)
    prior = ratio(squares.sum(0), freedom.sum(0))
    if fraction:
        prior = np.where(zero_one.all(0), average * (1 - average), prior)
    weight = _PRIOR if several else 0.0
    borrowed = weight * np.nan_to_num(prior) if several else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        each = (squares + borrowed) / (freedom + weight) / units
        total = each.sum(0)
        known = total**2 / (np.square(each) / (freedom + weight)).sum(0)
        effective = len(strata) ** 2 / (1 / units).sum(0)
    return _Moments(
        mean=average,
        variance=total / len(strata) ** 2,
        freedom=np.where(freedom.sum(0) > 0, np.where(total > 0, known, freedom.sum(0)), 0.0),
        effective=effective,
        few=~(np.square(squares.sum(0)) >= _FEW * fourth.sum(0)) | ~(total > 0),
        zero_one=np.all(zero_one, axis=0),
        signs=np.all(signs, axis=0),
        gains=gains.mean(0),
        losses=losses.mean(0),
    )


def _stratum_moments(stratum: Stratum) -> tuple[Array, ...]:
    """Of one stratum, by column: mean, sums of second and fourth powers of what units add to it, units,
    whether all are 0 or 1, whether all are -1, 0 or 1, and mean positive and negative parts."""
    known = stratum.counts > 0
    units = known.sum(0).astype(float)
    each = ratio(stratum.sums, stratum.counts)
    scores = stratum.counts.sum(0)
    mean = ratio(stratum.sums.sum(0), scores)
    residual = np.where(known, stratum.sums - mean * stratum.counts, 0.0) * ratio(units, scores)
    squares = np.square(residual)
    filled = np.where(known, each, 0.0)
    return (
        mean,
        squares.sum(0),
        np.square(squares).sum(0),
        units,
        (~known | (filled == 0) | (filled == 1)).all(0),
        (~known | (filled == 0) | (np.abs(filled) == 1)).all(0),
        ratio(np.maximum(filled, 0).sum(0), units),
        ratio(np.maximum(-filled, 0).sum(0), units),
    )


def _t_quantile(freedom: Array) -> Array:
    return t_quantile((1 + LEVEL) / 2, np.maximum(freedom, 1.0))


def _t_bounds(found: _Moments) -> tuple[Array, Array]:
    half = _t_quantile(found.freedom) * np.sqrt(found.variance)
    return found.mean - half, found.mean + half


def _estimates(mean: Array, low: Array, high: Array, freedom: Array) -> list[Estimate]:
    bounds = (np.where(freedom > 0, bound, np.nan) for bound in (low, high))
    return [Estimate(*map(float, row)) for row in zip(mean, *bounds, strict=True)]
