"""Paired tests between variants, their adjustment for number, and how many units would show a
difference."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from kvbench.report.stats.distributions import heads_at_most, normal_quantile, normal_tail
from kvbench.report.stats.estimate import LEVEL, Array, Flags, Stratum, ratio

ALPHA = 1 - LEVEL
ENUMERATED = 14
"""Up to this many differences every assignment of signs is tried."""
FLIPS = 20_000
"""Random sign assignments of the test of more differences."""
POWER = 0.8
_CHUNK = 500
_MOST_WORK = 300_000
"""Units times columns beyond which random signs give way to the normal approximation."""


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
    tail = heads_at_most(np.minimum(positive, different - positive), different)
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
        return 2.0 * normal_tail(z)
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


def variances(strata: Sequence[Stratum]) -> Array:
    """[strata, columns] variance over units of each unit's mean; NaN below two units."""
    found = []
    for stratum in strata:
        means = ratio(stratum.sums, stratum.counts)
        count = (stratum.counts > 0).sum(0)
        centre = ratio(np.nansum(means, axis=0), count)
        found.append(ratio(np.nansum(np.square(means - centre), axis=0), np.maximum(count - 1, 0)))
    return np.array(found)


def units_needed(
    variance: Sequence[float] | Array,
    effect: float,
    *,
    alpha: float = ALPHA,
    power: float = POWER,
    differing: float = 1.0,
) -> float:
    """Units per stratum at which the paired test shows a stated difference: a plan.

    With n independent units in each of D strata, the mean over strata of their mean differences has
    the variance V / n, where V = (s_1^2 + ... + s_D^2) / D^2 and s_d^2 is the variance of one unit's
    difference. The test compares with what changing signs gives, whose variance is (V + effect^2 / D) /
    n, and so rejects at `alpha` with probability `power` when (Connor 1987)

        n = (z_{1 - alpha / 2} sqrt(V + effect^2 / D) + z_power sqrt(V))^2 / effect^2

    (normal approximation; z_q is the standard normal's quantile). However clear the difference, no
    signs test rejects before ceil(log2(2 / alpha)) units differ (6 at 5 %).

    Args:
        variance: s_d^2 of each stratum, in the unit of `effect` squared.
        effect: the difference of the means to plan for.
        alpha: two-sided level of the test; divide by the number of tests where they are adjusted.
        differing: share of units whose difference is not zero.

    Returns:
        A whole number; infinite for no effect, NaN where a variance is unknown or all are 0.
    """
    strata = len(variance)
    spread = float(np.sum(variance)) / strata**2
    if math.isnan(spread) or math.isnan(effect) or spread == 0 or differing == 0:
        return math.nan
    if effect == 0:
        return math.inf
    z, z_power = _quantile(1 - alpha / 2), _quantile(power)
    root = z * math.sqrt(spread + effect**2 / strata) + z_power * math.sqrt(spread)
    fewest = math.ceil(math.log2(2 / alpha)) / (differing * strata)
    return float(max(2, math.ceil(fewest), math.ceil(root**2 / effect**2)))


@lru_cache
def _quantile(probability: float) -> float:
    return normal_quantile(probability)
