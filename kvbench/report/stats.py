"""Statistics of scores: means with intervals, paired differences with p-values, medians, margins.

In: strata; each has the scores of the independent units of one dataset (`Stratum`, `Scores`). Out: one
`Estimate` for each column of scores. Its value is the mean of the means of all strata, so that every
dataset has the same weight.

The interval and the p-value of a difference come from the same t statistic, and all differences of one
table are adjusted for multiple comparisons together (`compared`). An interval therefore excludes 0
exactly where the p-value is below 5 %; marks (`kvbench.report.marks`) follow these p-values.

`scripts/benchmarks/bench_statistics.py` measures how often intervals contain the truth, and how often
marks are wrong.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, gammaincinv, ndtr, ndtri, stdtr, stdtrit  # scipy.stats is slow

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Pair = tuple[int, int]

LEVEL = 0.95
ALPHA = 1 - LEVEL
FEWEST = 10
"""With fewer independent units (prompts) than this, a report does not judge differences."""
RARE = 50
"""Samples of up to this many units often do not contain a loss that three units in a hundred have.
`differences` allows for such losses."""
FARTHEST = 1.5
"""For scores without bounds, how far from the mean the two added units lie (`_moments`), as a multiple
of the distance of the sample's farthest unit."""
DRAWS = 10_000
"""The number of draws that make up the distribution of the largest |z| of a family of tests."""
_Z = float(ndtri((1 + LEVEL) / 2))
"""The quantile of the normal distribution that belongs to an interval of `LEVEL`: 1.96."""


class Estimate(NamedTuple):
    """A mean with the bounds of its 95 % interval and, for a difference, the p-value of the hypothesis
    that it is 0. What is not known is NaN."""

    value: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan

    def named(self, name: str) -> dict[str, float]:
        """The value and its bounds by the names of fields of a file: ``x``, ``x_low``, ``x_high``."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


NOTHING = Estimate(math.nan)


@dataclass(frozen=True)
class Stratum:
    """The scores of one dataset: rows are units (independent prompts), columns are variants or pairs.

    Attributes:
        sums: [units, columns] the sum of the scores of each unit.
        counts: [units, columns] the number of scores of each unit; 0 where it has none.
    """

    sums: Array
    counts: Array

    @property
    def mean(self) -> Array:
        """[columns] the mean of each column; NaN where it has no score."""
        return ratio(self.sums.sum(0), self.counts.sum(0))


@dataclass(frozen=True)
class Scores:
    """The scores of all variants on one part of the examples, such as a dataset.

    Attributes:
        by: the record field whose values split the examples into parts.
        value: the value of that field in this part.
        values: [pairs, variants] scores, NaN where missing; a pair is one (seed, example). For a seed
            that a variant was not run with, this is its mean over its own seeds, if all seeds have the
            same prompt.
        given: [pairs, variants] whether the variant was to be run on the pair.
        units: [pairs] the number of the independent unit that each pair belongs to.
        statuses: for each variant, how many examples failed, by status.
    """

    by: str
    value: str
    values: Array
    given: Flags
    units: NDArray[np.intp]
    statuses: tuple[Mapping[str, int], ...]

    def stratum(self, values: Array) -> Stratum:
        """The stratum of any columns [pairs, columns], such as scores or differences of scores."""
        order = np.argsort(self.units, kind="stable")
        starts = np.unique(self.units[order], return_index=True)[1]
        values = values[order]
        known = ~np.isnan(values)
        sums, counts = np.where(known, values, 0.0), known.astype(float)
        if len(starts) < len(order):
            sums, counts = (np.add.reduceat(part, starts, axis=0) for part in (sums, counts))
        return Stratum(sums, counts)


def ratio(sums: ArrayLike, counts: ArrayLike) -> Array:
    """`sums` divided by `counts`; NaN where a count is 0."""
    sums, counts = np.asarray(sums, dtype=float), np.asarray(counts, dtype=float)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


class _Moments(NamedTuple):
    """For each column the mean over strata, its variance, and Satterthwaite's degrees of freedom.

    Attributes:
        freedom: 0 where no stratum has two units.
        smoothed: the mean including the two units that are added to each stratum.
    """

    mean: Array
    variance: Array
    freedom: Array
    smoothed: Array


Ends = tuple[ArrayLike, ArrayLike]
"""The scores of the two units that are added to a stratum, the lower one first."""


def _moments(strata: Sequence[Stratum], ends: Sequence[Ends] | None) -> _Moments:
    """Mean and variance of each column, with two units added to each stratum.

    Strata are not pooled: each has the variance of its own units and of the two added ones, as in the
    intervals of Agresti and Caffo (2000) and Bonett and Price (2012), where x right answers of n count
    as (x + 1) / (n + 2). A stratum whose few units happen to be equal therefore still has a variance,
    and large losses that are too rare for a small sample are not taken to be impossible.

    Args:
        ends: the two added units of each stratum. None, for scores without bounds, puts them on either
            side of the stratum's mean, `FARTHEST` times as far from it as the farthest unit; or, if all
            units are equal, `FARTHEST` times as far from it as 0 is. This allows for values of a skewed
            sample beyond the farthest one seen. Intervals of normal samples become 20 to 40 % wider.
    """
    parts = []
    for number, stratum in enumerate(strata):
        known, mean = stratum.counts > 0, stratum.mean
        n = known.sum(0).astype(float)
        residuals = (stratum.sums - mean * stratum.counts) * ratio(n, stratum.counts.sum(0))
        squares = np.square(np.where(known, residuals, 0.0)).sum(0)
        if ends is None:
            units = np.where(known, ratio(stratum.sums, stratum.counts), mean)
            distance = np.abs(units - mean).max(0, initial=0.0)
            all_equal = distance <= 1e-9 * np.abs(mean)
            distance = FARTHEST * np.where(all_equal, np.abs(mean), distance)
            low, high = mean - distance, mean + distance
        else:
            low, high = (np.asarray(end, dtype=float) for end in ends[number])
        smoothed = (n * mean + low + high) / (n + 2)
        about = np.square(low - smoothed) + np.square(high - smoothed)
        variance = (squares + n * np.square(mean - smoothed) + about) / (n + 2)
        parts.append((mean, ratio(variance, n), np.maximum(n - 1, 1), smoothed, n))
    mean, variance, freedom, smoothed, n = (np.array(part) for part in zip(*parts, strict=True))
    total = variance.sum(0)
    freedom_of_mean = ratio(
        np.square(total), (np.square(variance) * ratio(np.ones_like(freedom), freedom)).sum(0)
    )
    freedom_of_mean = np.where(total > 0, freedom_of_mean, freedom.sum(0))
    freedom_of_mean = np.where((n > 1).any(0), freedom_of_mean, 0.0)
    return _Moments(mean.mean(0), total / len(strata) ** 2, freedom_of_mean, smoothed.mean(0))


def mean_intervals(strata: Sequence[Stratum], *, fraction: bool) -> list[Estimate]:
    """The mean score of each column with its interval; NaN for the interval below two units.

    One stratum of scores in [0, 1] gets Wilson's interval. Its number of units is the effective one, as
    is usual for surveys (Korn and Graubard 1998): p (1 - p), divided by the variance of the mean. If all
    scores are 0 or 1 the quantile is the normal one, which makes this Wilson's interval proper;
    otherwise it is Student's. Where there are three or fewer successes or failures, the bound next to
    them is the Poisson bound (Brown, Cai and DasGupta 2001); without it, at n = 10 and p = .99, the
    interval would contain the truth in only 90 % of samples.

    Several strata, and scores without bounds, get Student's t interval with Satterthwaite's degrees of
    freedom.

    Args:
        fraction: whether scores are in [0, 1].
    """
    moments = _moments(strata, [(0.0, 1.0)] * len(strata) if fraction else None)
    mean = moments.mean
    if fraction and len(strata) == 1:
        sums, counts = strata[0].sums, strata[0].counts
        zero_one = ((sums == 0) | (sums == counts)).all(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            units = moments.smoothed * (1 - moments.smoothed) / moments.variance
            low, high = wilson(mean, units, np.where(zero_one, _Z, _quantile(moments, ALPHA)))
    else:
        half = _quantile(moments, ALPHA) * np.sqrt(moments.variance)
        least, most = (0.0, 1.0) if fraction else (-math.inf, math.inf)
        low, high = np.maximum(mean - half, least), np.minimum(mean + half, most)
    return _estimates(moments, low, high, np.full(len(mean), np.nan))


def wilson(p: Array, units: Array, quantile: Array | float) -> tuple[Array, Array]:
    """Wilson's interval of proportions, with the Poisson bound for three or fewer successes or failures.

    Args:
        p: the proportions.
        units: the number of units of each proportion, which need not be whole.
        quantile: the number of standard errors on either side, 1.96 for 95 % of a normal distribution.

    Returns:
        The lower and the upper bounds.
    """
    square = quantile**2 / units
    centre = (p + square / 2) / (1 + square)
    half = np.sqrt(square * p * (1 - p) + square**2 / 4) / (1 + square)
    low, high = (_poisson_bound(share, units) for share in (p, 1 - p))
    return np.minimum(centre - half, low), np.maximum(centre + half, 1 - high)


def _poisson_bound(p: Array, units: Array) -> Array:
    """The lower Poisson bound of each proportion whose count of successes is at most three; 1, which
    bounds nothing, for larger counts."""
    count = np.round(p * units, 9)
    small = (count > 0) & (count <= 3)
    bound = gammaincinv(np.where(small, count, 1.0), 1 - LEVEL) / units
    return np.asarray(np.where(small, bound, np.where(count == 0, 0.0, 1.0)))


def _quantile(moments: _Moments, alpha: float) -> Array:
    """The two-sided quantile of Student's t at `alpha` for each column's degrees of freedom."""
    return np.asarray(stdtrit(np.maximum(moments.freedom, 1.0), 1 - alpha / 2))


def _estimates(moments: _Moments, low: Array, high: Array, p: Array) -> list[Estimate]:
    """One estimate for each column; bounds and p-value are NaN without degrees of freedom."""
    known = moments.freedom > 0
    low, high, p = (np.where(known, numbers, np.nan) for numbers in (low, high, p))
    columns = zip(moments.mean, low, high, p, strict=True)
    return [Estimate(*map(float, column)) for column in columns]


def independent(tests: int = 1) -> Array:
    """[DRAWS] sorted: the distribution of the largest |z| of this many independent tests, if none of the
    tested differences exists."""
    shares = (np.arange(DRAWS) + 0.5) / DRAWS
    return np.asarray(ndtri((1 + shares ** (1 / tests)) / 2))


ALONE = independent()
"""The distribution of |z| of a single test, which adjusts nothing."""


def differences(
    strata: Sequence[Stratum],
    *,
    fraction: bool,
    family: Array = ALONE,
    reach: ArrayLike = 1.0,
) -> list[Estimate]:
    """The mean paired difference of each column with its interval and p-value, which are NaN below two
    units.

    Both come from Student's t with Satterthwaite's degrees of freedom and two units added to each
    stratum (`_moments`). Intervals are wider than necessary where scores are partial credit.

    Args:
        fraction: whether scores are in [0, 1].
        family: the distribution of the largest |z| of all tests of one table (`together`,
            `independent`), for which intervals and p-values are adjusted. In 95 of 100 tables all
            intervals then contain the truth, and no pair without a difference has a p-value below 5 %.
        reach: for each column the largest difference that is possible. `compared` takes the largest
            score seen, since an answer that fails loses all of its score. In strata of up to `RARE`
            units the added units lie that far above and below 0. In larger strata they lie nearer to 0,
            but at least as far as the root mean square of the differences seen.
    """
    ends = None
    if fraction:
        distances = [
            _typical_distance(stratum, np.asarray(reach, dtype=float)) for stratum in strata
        ]
        ends = [(-distance, distance) for distance in distances]
    moments = _moments(strata, ends)
    error = np.sqrt(moments.variance)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.where(moments.mean == 0, 0.0, np.abs(moments.mean) / error)
    p = 2 * stdtr(np.maximum(moments.freedom, 1.0), -size)
    larger = 1 - np.searchsorted(family, -ndtri(p / 2), side="left") / DRAWS
    half = _quantile(moments, float(2 * ndtr(-family[-round(ALPHA * DRAWS)]))) * error
    low, high = moments.mean - half, moments.mean + half
    if fraction:
        low, high = np.maximum(low, -1.0), np.minimum(high, 1.0)
    return _estimates(moments, low, high, np.where(np.isnan(size), np.nan, np.maximum(p, larger)))


def _typical_distance(stratum: Stratum, reach: Array) -> Array:
    """For each column the distance from 0 of the two units that `differences` adds to a stratum."""
    units = np.nan_to_num(ratio(stratum.sums, stratum.counts))
    seen = np.sqrt(np.nan_to_num(ratio(np.square(units).sum(0), (units != 0).sum(0))))
    count = np.maximum((stratum.counts > 0).sum(0), 1)
    return np.asarray(np.maximum(seen, np.minimum(1.0, RARE / count) * reach))


def together(strata: Sequence[Scores], pairs: Sequence[Pair]) -> Array:
    """[DRAWS] sorted: the distribution of the largest |z| of these pairs of variants, if no two variants
    differ.

    It consists of normal draws with the covariance of the variants over units (Hothorn, Bretz and
    Westfall 2008). Tests of pairs that share a variant, or of variants whose scores are similar, depend
    on each other, and so widen the intervals less than as many independent tests would.
    """
    parts = []
    for dataset in strata:
        part = dataset.stratum(dataset.values)
        parts.append(ratio(part.sums - part.mean * part.counts, part.counts.sum(0)))
    residuals = np.nan_to_num(np.concatenate(parts))
    covariance, largest = residuals.T @ residuals, np.zeros(DRAWS)
    seed = []
    for dataset in strata:
        name = f"{dataset.by} {dataset.value}".strip()
        seed += [zlib.crc32(name.encode()), len(dataset.values)]
    drawn = np.random.default_rng(seed).multivariate_normal(
        np.zeros(len(covariance)), covariance, DRAWS, method="eigh", check_valid="ignore"
    )
    for i, j in pairs:
        both = covariance[i, i] + covariance[j, j]
        variance = both - 2 * covariance[i, j]
        if variance > 1e-12 * both:
            change = np.abs(drawn[:, i] - drawn[:, j]) / math.sqrt(variance)
            np.maximum(largest, change, out=largest)
    return np.sort(largest) if len(pairs) > 1 and largest.any() else ALONE


def compared(
    strata: Sequence[Scores], pairs: Sequence[Pair], *, fraction: bool
) -> dict[Pair, Estimate]:
    """The difference of each pair, first minus second variant, over the examples that both scored.
    Intervals and p-values are adjusted for all pairs together."""
    if not pairs or not strata:
        return {}
    first, second = np.array(pairs).T
    parts = [
        dataset.stratum(dataset.values[:, first] - dataset.values[:, second]) for dataset in strata
    ]
    family = together(strata, pairs)
    reach = largest_scores(strata, pairs)
    changes = differences(parts, fraction=fraction, family=family, reach=reach)
    return dict(zip(pairs, changes, strict=True))


def largest_scores(strata: Sequence[Scores], pairs: Sequence[Pair]) -> Array:
    """For each pair the largest score of its two variants, which is the largest difference that is
    possible; 1 where every score is 0."""
    largest = np.max(
        [np.nan_to_num(dataset.values).max(0, initial=0.0) for dataset in strata], axis=0
    )
    first, second = np.array(pairs).T
    reach = np.maximum(largest[first], largest[second])
    return np.where(reach > 0, reach, 1.0)


def median_of(values: pd.Series) -> Estimate:
    """The median of the values that are not NaN, with the interval of the sign test.

    The interval goes from the k-th smallest to the k-th largest value: of ten values, from the second to
    the ninth. k is the largest number for which fewer than k heads of n fair coins have a probability of
    at most (1 - LEVEL) / 2. Whatever the distribution, the interval contains the true median with a
    probability of at least `LEVEL`. Below six values there is no such interval.
    """
    known = np.sort(values.astype(float).dropna())
    if not len(known):
        return NOTHING
    heads = bdtr(np.arange(len(known), dtype=float), len(known), 0.5)
    middle, k = float(np.median(known)), int((heads < (1 - LEVEL) / 2).sum())
    return Estimate(middle, float(known[k - 1]), float(known[-k])) if k else Estimate(middle)


def margin_of(parts: Sequence[tuple[float, int]], f: float, *, total: bool, unit: float) -> float:
    """How far apart the published results of two correct runs may be, in 95 of 100 cases.

    Args:
        parts: for each dataset the mean score, as a fraction, and its number of examples.
        f: the share of examples whose answers differ, in effect, between two runs.
        total: whether the result is the sum of the datasets' means, rather than their average.
        unit: the value of the last printed digit, as a fraction.

    Returns:
        The margin, as a fraction; NaN where a dataset has no examples or no mean.
    """
    variance = 0.0
    for mean, n in parts:
        if math.isnan(mean) or n == 0:
            return math.nan
        p = (mean * n + 1) / (n + 2)  # never 0 or 1, since some answers may always change
        variance += 2 * f * p * (1 - p) / n
    return _Z * math.sqrt(variance) / (1 if total else len(parts)) + unit / 2
