"""Every number with an interval or a test behind it: means, paired differences, marks, medians, margins.

Functions take strata (`Stratum`: independent units of one dataset) and return one `Estimate` per column:
the mean over strata of each stratum's mean. `scripts/benchmarks/bench_statistics.py` measures how often
an interval holds the truth, and how often a mark is wrong.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, gammaincinv, ndtr, ndtri, stdtrit  # scipy.stats is slow to import

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

LEVEL = 0.95
ALPHA = 1 - LEVEL
RESAMPLES = 4000
ENUMERATED = 14
"""Up to this many differences every assignment of signs is tried."""
FLIPS = 20_000
"""Random sign assignments of the test of more differences."""
_TAIL = (1 + LEVEL) / 2
_Z = float(ndtri(_TAIL))
_FEW = 3.0
"""Where fewer units than this carry the variance, it says nothing yet."""
_PRIOR = 2.0
"""Units' worth of the pooled variance that each of several strata borrows."""
_CHUNK = 500
_MOST_WORK = 300_000
"""Units times columns beyond which random signs give way to the normal approximation."""


class Estimate(NamedTuple):
    """A mean and its interval; all NaN where there is nothing to average."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def times(self, factor: float) -> Estimate:
        """Value and bounds, multiplied."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def named(self, name: str) -> dict[str, float]:
        """The three numbers as fields of a file, which begin with `name`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


NOTHING = Estimate(math.nan)


@dataclass(frozen=True)
class Stratum:
    """Scores of one dataset: rows are units (independent prompts), columns are variants.

    Attributes:
        name: seeds the resampling, so that an interval does not depend on what else is reported.
        sums, counts: [units, variants] sum of a unit's scores and how many there are (0 = missing).
    """

    name: str
    sums: Array
    counts: Array


@dataclass(frozen=True)
class Scores:
    """Scores of one dataset, as every comparison takes them.

    Attributes:
        values: [pairs, variants], NaN where missing; a pair is one (seed, example). A variant that
            was not run with a seed has its mean over its own seeds there, where the prompt is the same.
        given: [pairs, variants] whether the variant was to score the pair itself.
        units: [pairs] number of the independent unit that each pair belongs to.
        statuses: per variant, failed examples by status.
    """

    name: str
    values: Array
    given: Flags
    units: NDArray[np.intp]
    statuses: tuple[Mapping[str, int], ...]

    def stratum(self, *columns: Array) -> Stratum:
        """Columns [pairs, k] summed within each unit."""
        order, starts = self._by_unit
        values = np.concatenate(columns, axis=1)[order]
        known = ~np.isnan(values)
        sums, counts = np.where(known, values, 0.0), known.astype(float)
        if len(starts) < len(order):
            sums, counts = (np.add.reduceat(part, starts, axis=0) for part in (sums, counts))
        return Stratum(self.name, sums, counts)

    @cached_property
    def _by_unit(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The pairs in the order of their units, and where each unit begins."""
        order = np.argsort(self.units, kind="stable")
        return order, np.unique(self.units[order], return_index=True)[1]


def ratio(sums: ArrayLike, counts: ArrayLike) -> Array:
    """Means where there are scores, NaN elsewhere."""
    sums, counts = np.asarray(sums, dtype=float), np.asarray(counts, dtype=float)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def estimates(strata: Sequence[Stratum]) -> list[Estimate]:
    """One estimate per variant: the mean over strata of each one's mean, with a percentile bootstrap. A
    variant that has no score in one of the strata has no mean over them."""
    value = np.mean([ratio(s.sums.sum(0), s.counts.sum(0)) for s in strata], axis=0)
    draws = np.mean([resampled(s) for s in strata], axis=0)
    found = ~np.isnan(draws).all(0)
    low, high = np.full((2, len(value)), np.nan)
    if found.any():
        low[found], high[found] = np.nanquantile(draws[:, found], [1 - _TAIL, _TAIL], axis=0)
    return [Estimate(*map(float, row)) for row in zip(value, low, high, strict=True)]


def resampled(stratum: Stratum) -> Array:
    """[RESAMPLES, variants] means over units drawn with replacement, the same draw for every variant,
    seeded by the stratum's name."""
    units = len(stratum.sums)
    generator = np.random.default_rng([zlib.crc32(stratum.name.encode()), units])
    even = np.full(units, 1 / units) if units else np.empty(0)
    times = generator.multinomial(units, even, size=RESAMPLES).astype(np.float32)
    return ratio(times @ stratum.sums, times @ stratum.counts)


def widened(estimate: Estimate, units: int) -> Estimate:
    """The interval for few units: a percentile bootstrap over n units is too narrow by the factor
    sqrt((n - 1) / n) of its standard error and by Student's t against the normal."""
    if units < 2:
        return estimate
    factor = float(stdtrit(units - 1, _TAIL) / _Z) * math.sqrt(units / (units - 1))
    value = estimate.value
    low, high = (value + factor * (bound - value) for bound in (estimate.low, estimate.high))
    return Estimate(value, low, high)


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
    bound = gammaincinv(np.where(small, count, 1.0), 1 - LEVEL) / units
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
    return np.asarray(stdtrit(np.maximum(freedom, 1.0), _TAIL))


def _t_bounds(found: _Moments) -> tuple[Array, Array]:
    half = _t_quantile(found.freedom) * np.sqrt(found.variance)
    return found.mean - half, found.mean + half


def _estimates(mean: Array, low: Array, high: Array, freedom: Array) -> list[Estimate]:
    bounds = (np.where(freedom > 0, bound, np.nan) for bound in (low, high))
    return [Estimate(*map(float, row)) for row in zip(mean, *bounds, strict=True)]


def p_values(strata: Sequence[Stratum]) -> list[float]:
    """Two-sided p-values of paired differences: how likely is a mean so far from zero by chance.

    A randomisation test. Were the two variants alike, each unit's difference would be as likely as its
    negative; the mean over strata of each stratum's mean is compared with what it is under other signs.
    Differences of one size (right or wrong answers) make this McNemar's exact test. Else all signs are
    tried where at most 14 differences are not zero, and 20,000 random assignments where there are more,
    the same for every column: p = (1 + as extreme) / (1 + FLIPS), or Hoeffding's bound 2 exp(-z^2 / 2)
    where that is smaller (random signs alone cannot go below 1 / FLIPS). Very large tables take the
    normal approximation of that distribution.

    Args:
        strata: columns are differences of pairs of variants.

    Returns:
        By column; NaN below two units, or where a stratum has none.
    """
    terms, known, units = _terms(strata)
    seen, sizes = np.abs(terms.sum(0)), np.abs(terms)
    least = seen - 1e-9 * sizes.sum(0)  # what rounding makes of an equal mean is as extreme
    different, largest = (sizes > 0).sum(0), sizes.max(0, initial=0.0)
    p = np.full(len(seen), np.nan)
    equal = (np.abs(sizes - largest) <= 1e-9 * largest) | (sizes == 0)
    alike = equal.all(0)
    positive = (terms > 0).sum(0)
    tail = _heads_at_most(np.minimum(positive, different - positive), different)
    p[alike] = np.minimum(1.0, 2.0 * tail)[alike]
    for i in np.flatnonzero(~alike & (different <= ENUMERATED)):
        nonzero = terms[sizes[:, i] > 0, i]
        p[i] = (np.abs(_signs(len(nonzero)) @ nonzero) >= least[i]).mean()
    many = np.flatnonzero(~alike & (different > ENUMERATED))
    if len(many):
        p[many] = _p_of_many(terms[:, many], least[many], strata)
    p[~known | (units < 2)] = np.nan
    return [float(x) for x in p]


def _terms(strata: Sequence[Stratum]) -> tuple[Array, Flags, Array]:
    """What each unit adds to the mean over strata, [units of all strata, columns]; by column, whether
    every stratum has scores, and how many units there are."""
    totals = [stratum.counts.sum(0) for stratum in strata]
    parts = [s.sums / np.maximum(total, 1) for s, total in zip(strata, totals, strict=True)]
    units = np.sum([(stratum.counts > 0).sum(0) for stratum in strata], axis=0)
    return np.concatenate(parts) / len(strata), np.all(np.array(totals) > 0, axis=0), units


@lru_cache(maxsize=ENUMERATED)
def _signs(count: int) -> Array:
    """[2^(count - 1), count] every assignment of signs; the first is plus, as the test is two-sided."""
    bits = np.arange(2 ** (count - 1))[:, None] >> np.arange(count - 1)
    return np.concatenate([np.ones((len(bits), 1)), 1.0 - 2.0 * (bits & 1)], axis=1)


def _p_of_many(terms: Array, least: Array, strata: Sequence[Stratum]) -> Array:
    z = np.abs(terms.sum(0)) / np.sqrt(np.square(terms).sum(0))
    if terms.size > _MOST_WORK:
        return 2.0 * ndtr(-z)
    generator = _generator(strata)
    extreme = np.zeros(len(z))
    for _ in range(0, FLIPS, _CHUNK):
        extreme += (np.abs(_random_signs(generator, len(terms)) @ terms) >= least).sum(0)
    return np.minimum((1 + extreme) / (1 + FLIPS), 2.0 * np.exp(-np.square(z) / 2))


def adjusted_p_values(strata: Sequence[Stratum], p: Sequence[float]) -> list[float]:
    """p-values of a family of paired differences, adjusted so that among equal variants the smallest of
    them is below 5 % in one family of twenty.

    Westfall and Young's step-down maximum (1993): all differences change their signs together, unit by
    unit, and each |mean| / sqrt(sum of squares) is compared with the largest that signs alone give to
    it or to any difference less clear than it. Methods that answer alike make this less severe than
    adjusting for their number alone, as Holm's method does.

    Args:
        p: of `p_values`, of the same columns; none is adjusted downwards.
    """
    terms, known, units = _terms(strata)
    tested = known & (units >= 2)
    squares = np.square(terms).sum(0)
    columns = np.flatnonzero(tested & (squares > 0))
    found = np.where(tested, 1.0, np.nan)
    if len(columns):
        scaled = terms[:, columns] / np.sqrt(squares[columns])
        order = np.argsort(-np.abs(scaled.sum(0)), kind="stable")
        scaled = scaled[:, order][np.abs(scaled).any(1)]
        least = np.abs(scaled.sum(0)) * (1 - 1e-9)
        extreme, flips = np.zeros(len(order)), 0
        for signs in _assignments(len(scaled), len(order), strata):
            sizes = np.abs(signs @ scaled)
            extreme += (np.maximum.accumulate(sizes[:, ::-1], axis=1)[:, ::-1] >= least).sum(0)
            flips += len(signs)
        exact = len(scaled) <= ENUMERATED
        stepped = extreme / flips if exact else (1 + extreme) / (1 + flips)
        found[columns[order]] = np.maximum.accumulate(stepped)
    return [float(x) for x in np.fmax(found, np.array(p))]


def _assignments(units: int, columns: int, strata: Sequence[Stratum]) -> Iterator[Array]:
    """All assignments of signs to few units; of more, 10,000 random ones, 500 in very large tables."""
    if units <= ENUMERATED:
        yield _signs(units)
        return
    generator = _generator(strata)
    for _ in range(max(1, min(20, int(1e9 / (units * columns * _CHUNK))))):
        yield _random_signs(generator, units)


def _random_signs(generator: np.random.Generator, units: int) -> Array:
    """A chunk of random assignments, of shape [`_CHUNK`, units]."""
    signs = generator.integers(2, size=(_CHUNK, units), dtype=np.int8).astype(float)
    signs *= 2.0  # in place: there may be many
    signs -= 1.0
    return signs


def _generator(strata: Sequence[Stratum]) -> np.random.Generator:
    seed = [part for s in strata for part in (zlib.crc32(s.name.encode()), len(s.sums))]
    return np.random.default_rng([*seed, 1])


def holm(p: Sequence[float]) -> list[float]:
    """p-values adjusted for their number by Holm's step-down method; NaN are not counted."""
    order = sorted((i for i, x in enumerate(p) if not math.isnan(x)), key=lambda i: p[i])
    adjusted = [math.nan] * len(p)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p[i]))
        adjusted[i] = largest
    return adjusted


@dataclass(frozen=True)
class PairTests:
    """Every pair of some variants, tested over the examples that both scored.

    Attributes:
        pairs: numbers of the two variants. strata: a column for each pair, the first minus the second.
        means: of these. p, adjusted: of the paired test, and adjusted for all these pairs.
    """

    pairs: tuple[tuple[int, int], ...]
    strata: tuple[Stratum, ...]
    means: Array
    p: Sequence[float]
    adjusted: Sequence[float]


@dataclass(frozen=True)
class Standing:
    """Variants by number: the best, those shown to be worse, and those that are neither."""

    best: frozenset[int] = frozenset()
    worse: frozenset[int] = frozenset()
    tied: frozenset[int] = frozenset()


def paired_tests(strata: Sequence[Scores], variants: Sequence[int]) -> PairTests:
    """Every pair of `variants`, in their order."""
    pairs = tuple(itertools.combinations(variants, 2))
    first, second = np.array(pairs).T
    parts = [one.stratum(one.values[:, first] - one.values[:, second]) for one in strata]
    means = [ratio(part.sums.sum(0), part.counts.sum(0)) for part in parts]
    p = p_values(parts)
    return PairTests(pairs, tuple(parts), np.mean(means, axis=0), p, adjusted_p_values(parts, p))


def standing(strata: Sequence[Scores], peers: Sequence[int], *, lower: bool) -> Standing:
    """How the variants `peers`, which compete with each other, stand on one dataset or on several.

    The best has the best mean. Means over different examples cannot be ranked: variants that lack
    a score are passed over where another has them all, and where each lacks some, the examples that all
    scored decide. Where every mean is 0 there is no best.

    Another variant is shown to be worse where its paired test against a best one, over the examples that
    both scored and adjusted for every pair of `peers`, rejects at 5 % and the difference is to its
    disadvantage. So among equal variants about one table in twenty shows any, whichever is best.

    Args:
        lower: whether lower scores are better.
    """
    sign = -1.0 if lower else 1.0
    lacking = [sum(int(np.isnan(one.values[:, i]).sum()) for one in strata) for i in peers]
    whole = [i for i, missing in zip(peers, lacking, strict=True) if not missing]
    scored = [i for i in peers if all((~np.isnan(one.values[:, i])).any() for one in strata)]
    ranked = whole or scored
    if len(scored) < 2 or not ranked:
        return Standing()
    means = sign * common_means(strata, ranked)
    if np.isnan(means).all() or not np.nan_to_num(means).any():
        return Standing()
    top = float(np.nanmax(means))
    best = {i for i, x in zip(ranked, means, strict=True) if math.isclose(x, top, rel_tol=1e-9)}
    tests = paired_tests(strata, scored)
    met, worse = set(), set()
    for (first, second), difference, p in zip(
        tests.pairs, map(float, tests.means), tests.adjusted, strict=True
    ):
        for winner, other, gain in (first, second, difference), (second, first, -difference):
            if winner in best and other not in best and not math.isnan(difference):
                met.add(other)
                if p < ALPHA and sign * gain > 0:
                    worse.add(other)
    return Standing(frozenset(best), frozenset(worse), frozenset(met - worse))


def common_means(strata: Sequence[Scores], columns: Sequence[int]) -> Array:
    """Mean over strata of the mean score, over the examples that all these variants scored."""
    means = []
    for one in strata:
        values = one.values[:, columns]
        kept = values[~np.isnan(values).any(axis=1)]
        means.append(kept.mean(0) if len(kept) else np.full(len(columns), np.nan))
    return np.asarray(np.mean(means, axis=0))


def _heads_at_most(count: ArrayLike, coins: ArrayLike) -> Array:
    """The probability that at most `count` of `coins` fair coins come up heads."""
    coins = np.asarray(coins, dtype=int)
    known = bdtr(np.asarray(count, dtype=float), np.maximum(coins, 1), 0.5)
    return np.where(coins > 0, known, 1.0)


def median_of(values: pd.Series) -> Estimate:
    """The median of what is known, between two order statistics.

    Of n values the k-th and the (n + 1 - k)-th lie on either side of the true median with a
    probability of at least `LEVEL`, whatever the distribution, where k is the largest number for
    which fewer than k of n fair coins come up heads with a probability of at most (1 - LEVEL) / 2:
    the second and the ninth of ten. Below six values there is no such interval.
    """
    known = np.sort(values.astype(float).dropna())
    if not len(known):
        return NOTHING
    heads = _heads_at_most(np.arange(len(known) + 1), len(known))
    middle, k = float(np.median(known)), int((heads < (1 - LEVEL) / 2).sum())
    if k == 0:
        return Estimate(middle, np.nan, np.nan)
    return Estimate(middle, float(known[k - 1]), float(known[-k]))


def margin_of(parts: Sequence[tuple[float, int]], f: float, *, total: bool, unit: float) -> float:
    """The margin of a mean over datasets, or of their sum.

    Args:
        parts: by dataset, the mean score as a fraction and how many examples it is of.
        total: whether the means are summed.
        unit: of the last printed digit, as a fraction.
    """
    variance = 0.0
    for mean, n in parts:
        if math.isnan(mean) or n == 0:
            return math.nan
        p = (mean * n + 1) / (n + 2)  # of a mean of 0 or 1, too, some answers may change
        variance += 2 * f * p * (1 - p) / n
    return _Z * math.sqrt(variance) / (1 if total else len(parts)) + unit / 2


_LONGEST_GRAM = 4
"""n-grams of 1 to so many words count alike, as in BLEU-4."""
_ABSENT = 0.1
"""Matches of an n-gram length without any, so that others count: method 1 of Chen and Cherry, 2014."""


def words_of(text: str) -> list[str]:
    """Words and punctuation marks, as they are written."""
    return re.findall(r"\w+|[^\w\s]", text)


def self_bleu(texts: Sequence[str]) -> list[float]:
    """Of each text the BLEU-4 with all others as its references, 0 to 1, whose mean is their Self-BLEU
    (arXiv 1802.01886): the lower, the more diverse. NaN of a single text.

    H2O (arXiv 2306.14048, appendix C.1) names the measure, but neither length of n-grams, smoothing
    nor words: here BLEU-4, 0.1 for matches of a length without any, and `words_of`. The others' largest
    count of an n-gram is that of all texts or, for the text that has it, the second: one pass.
    """
    if len(texts) < 2:
        return [math.nan for _ in texts]
    worded = [words_of(text) for text in texts]
    lengths = [len(words) for words in worded]
    precisions: list[list[tuple[int, int]]] = [[] for _ in texts]
    for n in range(1, _LONGEST_GRAM + 1):
        counted = [_grams(words, n) for words in worded]
        first, second = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
        for grams in counted:
            for gram, count in grams.items():
                if count > first[gram]:
                    first[gram], second[gram] = count, first[gram]
                elif count > second[gram]:
                    second[gram] = count
        for own, grams in zip(precisions, counted, strict=True):
            found = sum(
                min(count, second[gram] if count == first[gram] else first[gram])
                for gram, count in grams.items()
            )
            own.append((found, max(1, sum(grams.values()))))
    return [
        _bleu(own, length, _nearest(length, lengths))
        for own, length in zip(precisions, lengths, strict=True)
    ]


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _nearest(length: int, lengths: Sequence[int]) -> int:
    """The length that is nearest to one of them among the others, the shorter of two."""
    others = list(lengths)
    others.remove(length)
    return min(others, key=lambda other: (abs(other - length), other))


def _bleu(precisions: Sequence[tuple[int, int]], length: int, reference: int) -> float:
    if not precisions[0][0]:
        return 0.0
    logs = [math.log((found or _ABSENT) / total) for found, total in precisions]
    brevity = min(0.0, 1 - reference / length)
    return math.exp(brevity + sum(logs) / len(logs))
