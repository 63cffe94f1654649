"""Statistics of scores: means and paired differences with intervals, tests, medians.

One convention in every table, page and file:

- The unit is the independent prompt. Where there are several datasets, each has the same weight.
- An interval is a 95 % interval by itself, of a mean from `LEAST` prompts on, of a difference from
  `FEWEST`, as its test. One dataset of right and wrong answers has Wilson's, with the correction for
  continuity; medians have the sign test's. All others are Student's t intervals on each dataset's units
  and two more (`_moments`), of measures that are nowhere negative on the logarithmic scale. Units that
  are all equal have none, unless they are fractions.
- Two variants are compared on the scale that has the intervals: measures that are nowhere negative by
  their ratio, of geometric means, which is the paired t test of log ratios (`times`); all others by the
  difference of means.
- A difference is tested from ten prompts on: by the exact McNemar test for right and wrong answers of
  one dataset, or of several of one size, else by the t test that belongs to the interval. The discrete
  form of Holm's method adjusts the p-values of the pairs at one rate (`holm`); marks follow them
  (`standing`).

`scripts/benchmarks/bench_statistics.py` measures how often intervals contain the truth, and how often
marks are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, ndtri, stdtr, stdtrit  # scipy.stats is slow

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Pair = tuple[int, int]

LEVEL = 0.95
ALPHA = 1 - LEVEL
FEWEST = 10
"""With fewer independent units (prompts) than this, a report does not judge differences."""
LEAST = 3
"""With fewer units than this, a mean has no interval."""
MOST_LACKING = 0.1
"""The largest share of a dataset's examples that a variant may lack and still be ranked."""
MOST_ZEROS = 0.1
"""The largest share of units without a logarithm that a ratio leaves out."""


class Estimate(NamedTuple):
    """A mean with the bounds of its 95 % interval. What is not known is NaN.

    Attributes:
        p: of two variants' difference, the p-value of the hypothesis that they do not differ.
        discordant: of right and wrong answers, the number of prompts on which the two differ, which
            says what p-values are possible.
        times: whether this is the ratio of the two, in place of the difference.
        zeros: the units that a ratio leaves out, since one of the two is 0.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    discordant: float = math.nan
    times: bool = False
    zeros: int = 0

    @property
    def lead(self) -> float:
        """By how much the first is larger than the second: negative, zero or positive."""
        return math.log(self.value) if self.times else self.value

    def reversed(self) -> Estimate:
        """The second against the first."""
        ends = self.value, self.high, self.low
        value, low, high = (1 / x for x in ends) if self.times else (-x for x in ends)
        return self._replace(value=value, low=low, high=high)

    def named(self, name: str) -> dict[str, float]:
        """The value and its bounds by the names of fields of a file: ``x``, ``x_low``, ``x_high``."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


NOTHING = Estimate(math.nan)


def _estimates(*rows: Array) -> list[Estimate]:
    """An estimate for each column of these rows, which are the first fields of `Estimate`."""
    return [Estimate(*column) for column in np.transpose(rows).tolist()]


@dataclass(frozen=True)
class Scores:
    """The scores of all variants on one part of the examples, such as a dataset, which `value` names.

    Attributes:
        values: [pairs, variants] scores, NaN where missing; a pair is one (seed, example). For a seed
            that a variant was not run with, this is its mean over its own seeds, if all seeds have the
            same prompt.
        given: [pairs, variants] whether the variant was to be run on the pair.
        units: [pairs] the number of the independent unit that each pair belongs to.
        statuses: for each variant, how many examples failed, by status.
    """

    value: str
    values: Array
    given: Flags
    units: NDArray[np.intp]
    statuses: tuple[Mapping[str, int], ...]

    def by_unit(self, values: Array) -> Array:
        """[units, columns] of any columns [pairs, columns], such as scores or differences of scores: the
        mean of each unit; NaN where it has none.

        Where units have different numbers of pairs, these values are linearized, so that their mean is
        the mean over pairs, and their variance is that of a ratio.
        """
        sums, counts = self._sums(values)
        mean, num_units = divided(sums.sum(0), counts.sum(0)), (counts > 0).sum(0)
        linear = mean + (sums - mean * counts) * divided(num_units, counts.sum(0))
        even = counts.max(0, initial=0.0) * num_units == counts.sum(0)
        return np.where(counts > 0, np.where(even, divided(sums, counts), linear), np.nan)

    def scored_by(self, variants: Sequence[int]) -> Flags:
        """[pairs] whether all of these variants have a score."""
        return np.asarray(~np.isnan(self.values[:, variants]).any(axis=1))

    def unit_means(self, values: Array) -> Array:
        """[units, columns]: the mean of each unit, however many pairs it has."""
        return divided(*self._sums(values))

    def _sums(self, values: Array) -> tuple[Array, Array]:
        order = np.argsort(self.units, kind="stable")
        starts = np.unique(self.units[order], return_index=True)[1]
        known = ~np.isnan(values[order])
        sums = np.add.reduceat(np.where(known, values[order], 0.0), starts, axis=0)
        return sums, np.add.reduceat(known.astype(float), starts, axis=0)


def divided(sums: ArrayLike, counts: ArrayLike) -> Array:
    """`sums` divided by `counts`; NaN where a count is 0."""
    sums, counts = np.asarray(sums, dtype=float), np.asarray(counts, dtype=float)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


class _Moments(NamedTuple):
    """The mean of each column over datasets, its standard error, Satterthwaite's degrees of freedom (0
    where no dataset has two units), and the number of units."""

    mean: Array
    error: Array
    freedom: Array
    units: Array

    def half(self) -> Array:
        """Half the width of Student's t interval; NaN without degrees of freedom or variance."""
        known = (self.freedom > 0) & (self.error > 0) & (self.units >= LEAST)
        quantile = stdtrit(np.maximum(self.freedom, 1.0), 1 - ALPHA / 2)
        return np.where(known, quantile * self.error, np.nan)


def _moments(parts: Sequence[Array], ends: tuple[float, float] | None) -> _Moments:
    """The moments of datasets [units, columns], each with two more units than it has.

    As in the intervals of Agresti and Caffo (2000) and Bonett and Price (2012), where x right answers of
    n count as (x + 1) / (n + 2): what is too rare for a small sample is not taken to be impossible.

    Args:
        ends: the values of these two; None, for measures without bounds: as far from the mean as the
            farthest unit, on either side.
    """
    means, variances, freedoms, sizes = [], [], [], []
    for values in parts:
        known = ~np.isnan(values)
        n = known.sum(0).astype(float)
        mean = divided(np.where(known, values, 0.0).sum(0), n)
        away = np.where(known, values - mean, 0.0)
        if ends is None:
            high = np.abs(away).max(0, initial=0.0)
            high = np.where(high <= 1e-9 * np.abs(mean), 0.0, high)  # all equal but for rounding
            low = -high
        else:
            low, high = (end - mean for end in ends)
        squares = np.square(away).sum(0) + np.square(low) + np.square(high)
        variance = squares / (n + 2) - np.square((low + high) / (n + 2))
        means.append(mean)
        variances.append(np.where(high > low, divided(variance, n), 0.0))
        freedoms.append(np.maximum(n - 1, 1))
        sizes.append(n)
    each, units = np.array(variances), np.array(sizes)
    total = each.sum(0)
    freedom = divided(np.square(total), (np.square(each) / np.array(freedoms)).sum(0))
    freedom = np.where((units > 1).any(0), np.nan_to_num(freedom), 0.0)
    return _Moments(np.mean(means, axis=0), np.sqrt(total) / len(parts), freedom, units.sum(0))


def means(strata: Sequence[Scores], *, fraction: bool, signed: bool = False) -> list[Estimate]:
    """The mean score of each variant; see `mean_intervals`. Scores of which one is negative are
    `signed`, too."""
    parts = [dataset.by_unit(dataset.values) for dataset in strata]
    return mean_intervals(parts, fraction=fraction, signed=signed or is_signed(strata))


def mean_intervals(
    parts: Sequence[Array], *, fraction: bool, signed: bool = False
) -> list[Estimate]:
    """The mean of each column over datasets [units, columns], with its interval, which is NaN below
    `LEAST` units; of scores in [0, 1] (`fraction`), of others, or of others that may be negative
    (`signed`)."""
    moments = _moments(parts, (0.0, 1.0) if fraction else None)
    mean, half = moments.mean, moments.half()
    if fraction:
        low, high = np.maximum(mean - half, 0.0), np.minimum(mean + half, 1.0)
        if len(parts) == 1:
            right_or_wrong = (np.isnan(parts[0]) | np.isin(parts[0], (0.0, 1.0))).all(0)
            use = right_or_wrong & ~np.isnan(half)
            bounds = wilson(mean, moments.units)
            low, high = (np.where(use, *two) for two in zip(bounds, (low, high), strict=True))
    elif signed:
        low, high = mean - half, mean + half
    else:
        factor = np.exp(divided(half, mean))
        low, high = mean / factor, mean * factor
    return _estimates(mean, low, high)


def wilson(p: Array, n: Array) -> tuple[Array, Array]:
    """The bounds of Wilson's interval of proportions `p` of `n`, with the correction for continuity."""
    with np.errstate(divide="ignore", invalid="ignore"):
        z = float(ndtri(1 - ALPHA / 2))
        square = z**2

        def reach(sign: float) -> Array:
            inner = square + sign * 2 - 1 / n + 4 * p * (n * (1 - p) - sign)
            return np.asarray(1 + z * np.sqrt(np.maximum(inner, 0.0)))

        middle, scale = 2 * n * p + square, 2 * (n + square)
        low = np.where(p == 0, 0.0, (middle - reach(-1.0)) / scale)
        high = np.where(p == 1, 1.0, (middle + reach(1.0)) / scale)
    return np.maximum(low, 0.0), np.minimum(high, 1.0)


def differences(parts: Sequence[Array], *, reach: float | None, by: float = 0.0) -> list[Estimate]:
    """The mean of each column of paired differences over datasets [units, columns], with its interval
    and its p-value, which are NaN below `FEWEST` units.

    Args:
        reach: the largest difference that is possible, where scores are in [0, 1]: the largest score
            seen, since an answer that fails loses all of its score. None for scores without bounds.
        by: the difference that is tested.
    """
    moments = _moments(parts, None if reach is None else (-reach, reach))
    mean, half = moments.mean, moments.half()
    low, high = mean - half, mean + half
    if reach is not None:
        low, high = np.maximum(low, -1.0), np.minimum(high, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = 2 * stdtr(np.maximum(moments.freedom, 1.0), -np.abs(mean - by) / moments.error)
    discordant = np.full_like(mean, np.nan)
    if reach is not None and parts and not by:
        every = np.concatenate(parts)
        sizes = np.array([(~np.isnan(part)).sum(0) for part in parts])
        right_or_wrong = (np.isnan(every) | np.isin(every, (-1.0, 0.0, 1.0))).all(0)
        right_or_wrong &= (sizes == sizes[0]).all(0)  # the average is then that of all units
        won, lost = ((every * sign > 0).sum(0) for sign in (1, -1))
        mcnemar = np.minimum(1.0, 2 * bdtr(np.minimum(won, lost).astype(float), won + lost, 0.5))
        p = np.where(right_or_wrong, mcnemar, p)
        discordant = np.where(right_or_wrong, won + lost, np.nan)
    few = moments.units < FEWEST
    low, high = np.where(few, np.nan, low), np.where(few, np.nan, high)
    p = np.where(few, np.nan, np.minimum(1.0, p))
    return _estimates(mean, low, high, p, discordant)


def ratios_of_pairs(
    strata: Sequence[Scores], pairs: Sequence[Pair], raw: Sequence[Estimate]
) -> list[Estimate]:
    """The ratio of each pair's geometric means, first over second variant, with its interval and
    p-value: Student's t on the paired differences of logarithms of each unit's means.

    A unit of which either mean is 0 has no logarithm and is left out. A pair of which that is more than
    `MOST_ZEROS` of the units, or that leaves too few to be tested, keeps its `raw` difference; one of
    which either variant is 0 everywhere, as the error of the exact cache is, is no pair.
    """
    first, second = np.array(pairs).T
    logs: list[Array] = []
    zeros, every = np.zeros(len(pairs)), np.zeros(len(pairs))
    nothing = np.ones(len(pairs), dtype=bool)
    for dataset in strata:
        scored = ~np.isnan(dataset.values[:, first] + dataset.values[:, second])
        sides = [
            dataset.unit_means(np.where(scored, dataset.values[:, own], np.nan))
            for own in (first, second)
        ]
        with np.errstate(divide="ignore", invalid="ignore"):
            changes = np.log(sides[0]) - np.log(sides[1])
        known = ~np.isnan(sides[0])
        zeros += (known & ~np.isfinite(changes)).sum(0)
        every += known.sum(0)
        nothing &= ~((sides[0] > 0).any(0) & (sides[1] > 0).any(0))
        logs.append(np.where(np.isfinite(changes), changes, np.nan))
    found = differences(logs, reach=None)
    ratios = []
    for i, (change, own) in enumerate(zip(found, raw, strict=True)):
        if nothing[i]:
            ratios.append(NOTHING)
        elif zeros[i] > MOST_ZEROS * every[i] or every[i] - zeros[i] < FEWEST <= every[i]:
            ratios.append(own)
        else:
            value, low, high = map(math.exp, change[:3])
            ends = change._replace(value=value, low=low, high=high)
            ratios.append(ends._replace(times=True, zeros=int(zeros[i])))
    return ratios


def attainable(discordant: int) -> Array:
    """The p-values that McNemar's exact test can have where two variants differ on so many prompts,
    ascending."""
    least = np.arange(discordant // 2 + 1, dtype=float)
    return np.unique(np.minimum(1.0, 2 * bdtr(least, discordant, 0.5)))


def holm(p: ArrayLike, discordant: ArrayLike | None = None) -> Array:
    """P-values of one family, adjusted by Holm's method (1979) in its discrete form (Westfall and
    Wolfinger, 1997); NaN stays NaN and does not count.

    The adjusted p of a pair is the sum, over the pairs that are not yet rejected, of the probability
    that their test has a p as small. That is p itself for a t test. McNemar's exact test of few
    discordant prompts has few p-values (`attainable`), the smallest of which is the only one below:
    22 methods on 12 prompts are 231 pairs, most of which cannot reach 5 % / 231.

    Args:
        discordant: for each p, of how many discordant prompts it is; NaN of any other test.
    """
    adjusted = np.array(p, dtype=float)
    counts = np.full(len(adjusted), np.nan) if discordant is None else np.asarray(discordant)
    known = np.flatnonzero(~np.isnan(adjusted))
    order = known[np.argsort(adjusted[known], kind="stable")]
    x, n = adjusted[order], counts[order]
    chances = np.repeat(x[:, None], len(x), axis=1)  # [of reaching this p, of this pair]
    for count in np.unique(n[~np.isnan(n)]):
        steps = np.r_[0.0, attainable(int(count))]
        below = steps[np.searchsorted(steps, x * (1 + 1e-9), side="right") - 1]
        chances[:, n == count] = below[:, None]
    sums = np.triu(chances).sum(1)
    adjusted[order] = np.minimum(np.maximum.accumulate(sums), 1.0)
    return adjusted


def compared(
    strata: Sequence[Scores], pairs: Sequence[Pair], *, fraction: bool
) -> dict[Pair, Estimate]:
    """The difference of each pair, first minus second variant, or the ratio (`paired`). The p-values are
    adjusted for all pairs together."""
    if not pairs or not strata:
        return {}
    changes = paired(strata, pairs, fraction=fraction)
    adjusted = holm([change.p for change in changes], [change.discordant for change in changes])
    return {
        pair: change._replace(p=float(p))
        for pair, change, p in zip(pairs, changes, adjusted, strict=True)
    }


def paired(
    strata: Sequence[Scores],
    pairs: Sequence[Pair],
    *,
    fraction: bool,
    share: float = 1.0,
    by: float = 0.0,
) -> list[Estimate]:
    """The difference of each pair, first minus second variant, over the examples that both scored, with
    p-values that are not adjusted; from this `share` of the second variant's score, tested against the
    difference `by`. Without one, of scores that are no fractions and nowhere negative, the ratio
    (`ratios_of_pairs`)."""
    if not pairs:
        return []
    first, second = np.array(pairs).T
    parts = [
        dataset.by_unit(dataset.values[:, first] - share * dataset.values[:, second])
        for dataset in strata
    ]
    largest = max(np.nanmax(dataset.values, initial=0.0) for dataset in strata)
    reach = float(largest or 1.0) if fraction else None
    found = differences(parts, reach=reach, by=by)
    if fraction or by or is_signed(strata):
        return found
    return ratios_of_pairs(strata, pairs, found)


def is_signed(strata: Sequence[Scores]) -> bool:
    """Whether a score is negative, so that scores have no logarithm."""
    return any((dataset.values < 0).any() for dataset in strata)


def num_units(strata: Sequence[Scores], variants: Sequence[int]) -> int:
    """The number of units of which all of these variants have a score."""
    return sum(len(set(dataset.units[dataset.scored_by(variants)])) for dataset in strata)


def standing(
    strata: Sequence[Scores], peers: Sequence[int], tests: Mapping[Pair, Estimate], *, lower: bool
) -> dict[int, str]:
    """Rank the variants of `peers` over these datasets, and mark each one; empty where there is nothing
    to rank.

    "best" has the best mean over the examples that all ranked variants scored; there is none where every
    mean is 0. A variant that lacks more than `MOST_LACKING` of a dataset's examples is ranked only if
    all do: a method that fails on hard examples has a good mean over the rest. The others are marked by
    their test against the best: "worse" or "better" where its p-value is below 5 %, else "tied", and
    "few" where there are too few units for a test; of several that are best, by the first of "few",
    "worse", "better" and "tied". A variant may be "better" than the best if it is not ranked, or scored
    examples that others lack. `tests` is what `compared` returned for every pair of `peers`."""
    sign = -1.0 if lower else 1.0
    scored = [i for i in peers if all(dataset.scored_by([i]).any() for dataset in strata)]
    nearly_all = [
        i
        for i in scored
        if all(np.isnan(dataset.values[:, i]).mean() <= MOST_LACKING for dataset in strata)
    ]
    ranked = nearly_all or scored
    common = [dataset.values[dataset.scored_by(ranked)][:, ranked] for dataset in strata]
    if len(scored) < 2 or not all(map(len, common)):
        return {}
    means = sign * np.mean([values.mean(0) for values in common], axis=0)
    if not means.any():
        return {}
    if num_units(strata, ranked) < FEWEST:
        return dict.fromkeys(scored, "few")
    top = float(means.max())
    best = {i for i, x in zip(ranked, means, strict=True) if math.isclose(x, top, rel_tol=1e-9)}
    marks = dict.fromkeys(best, "best")
    for other in (i for i in scored if i not in best):
        against = {_against(strata, winner, other, tests, sign) for winner in best}
        marks[other] = next((w for w in ("few", "worse", "better", "tied") if w in against), "")
    return marks


def _against(
    strata: Sequence[Scores], winner: int, other: int, tests: Mapping[Pair, Estimate], sign: float
) -> str:
    """The mark of `other` by its test against `winner`; empty where there was none."""
    swapped = (winner, other) not in tests
    change = tests.get((other, winner) if swapped else (winner, other), NOTHING)
    if math.isnan(change.value):
        return ""
    if num_units(strata, [winner, other]) < FEWEST:
        return "few"
    lead = -sign * change.lead if swapped else sign * change.lead
    return "tied" if not change.p < ALPHA else "worse" if lead > 0 else "better"


def median_of(values: pd.Series) -> Estimate:
    """The median of the values that are not NaN, with the interval of the sign test.

    The interval goes from the k-th smallest to the k-th largest value: of ten values, from the second to
    the ninth. k is the largest number for which fewer than k heads of n fair coins have a probability of
    at most ALPHA / 2. Whatever the distribution, the interval contains the true median with a
    probability of at least 95 %. Below six values there is no such interval.
    """
    known = np.sort(values.astype(float).dropna())
    if not len(known):
        return NOTHING
    heads = bdtr(np.arange(len(known), dtype=float), len(known), 0.5)
    middle, k = float(np.median(known)), int((heads < ALPHA / 2).sum())
    return Estimate(middle, float(known[k - 1]), float(known[-k])) if k else Estimate(middle)
