"""Means over a table of units and arms: bootstrap intervals, paired tests, how many units it takes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, t

Array = NDArray[np.float64]

RESAMPLES = 4000
LEVEL = 0.95
_CHUNK = 250
_REMEMBERED_UNITS = 600
"""Up to this many units the resamples of a stratum are kept: 10 MB of them, of 20 strata at most."""
FLIPS = 20_000
"""Random sign assignments of the paired test: no p-value below 1 / (FLIPS + 1)."""
POWER = 0.8


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval; all NaN where there is nothing to average."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Stratum:
    """Scores of one dataset: rows are units (independent prompts), columns are arms.

    Attributes:
        name: seeds the resampling, so that an interval does not depend on what else is reported.
        sums, counts: [units, arms] sum of a unit's scores and how many there are (0 = missing).
    """

    name: str
    sums: Array
    counts: Array


def estimates(strata: Sequence[Stratum]) -> list[Estimate]:
    """One estimate per arm: the mean over strata of each stratum's mean.

    Percentile bootstrap. Units are resampled with replacement within each stratum, the same draw
    for every arm, from a generator seeded by the stratum's name. An arm that has no score in one
    of the strata has no mean over them.
    """
    return _intervals(_means(strata), np.mean([_draws(s) for s in strata], axis=0))


def unpaired_difference(first: Sequence[Stratum], second: Sequence[Stratum]) -> Estimate:
    """Second minus first mean (of the only column) over units that have nothing to do with each
    other: each side is resampled by itself, by its strata's names."""
    draws = [np.mean([_draws(s) for s in side], axis=0) for side in (first, second)]
    return _intervals(_means(second) - _means(first), draws[1] - draws[0])[0]


def _means(strata: Sequence[Stratum]) -> Array:
    """Per column, the mean over strata of each stratum's mean."""
    return np.asarray(np.mean([_ratio(s.sums.sum(0), s.counts.sum(0)) for s in strata], axis=0))


def _intervals(value: Array, draws: Array) -> list[Estimate]:
    tail = (1 - LEVEL) / 2
    found = ~np.isnan(draws).all(0)
    low, high = np.full((2, len(value)), np.nan)
    if found.any():
        low[found], high[found] = np.nanquantile(draws[:, found], [tail, 1 - tail], axis=0)
    return [Estimate(*map(float, row)) for row in zip(value, low, high, strict=True)]


def widened(estimate: Estimate, units: int) -> Estimate:
    """The interval for few units: a percentile bootstrap over n units is too narrow by the factor
    sqrt((n - 1) / n) of its standard error and by Student's t against the normal."""
    if units < 2:
        return estimate
    tail = (1 + LEVEL) / 2
    factor = float(t.ppf(tail, units - 1) / norm.ppf(tail)) * math.sqrt(units / (units - 1))
    value = estimate.value
    low, high = (value + factor * (bound - value) for bound in (estimate.low, estimate.high))
    return Estimate(value, low, high)


def p_values(strata: Sequence[Stratum]) -> list[float]:
    """Two-sided p-values of paired differences: how likely is a mean so far from zero by chance.

    A randomisation test. Were the two arms alike, each unit's difference would be as likely as its
    negative: signs are drawn for every unit, the same for every column, and the mean over strata of
    each stratum's mean is compared with what was seen. p = (1 + as extreme) / (1 + FLIPS).

    Args:
        strata: columns are differences of pairs of arms.
    """
    seen = _means(strata)
    totals = [s.counts.sum(0) for s in strata]
    generators = [
        np.random.default_rng([zlib.crc32(s.name.encode()), len(s.sums), 1]) for s in strata
    ]
    extreme = np.zeros(len(seen))
    least = np.abs(seen) * (1 - 1e-9) - 1e-15  # what rounding makes of an equal mean is as extreme
    for _ in range(0, FLIPS, _CHUNK):
        means = np.zeros((_CHUNK, len(seen)))
        for stratum, total, generator in zip(strata, totals, generators, strict=True):
            signs = generator.integers(2, size=(_CHUNK, len(stratum.sums)), dtype=np.int8)
            flipped = (2.0 * signs - 1.0) @ stratum.sums
            means += np.divide(flipped, total, out=np.zeros_like(flipped), where=total > 0)
        extreme += (np.abs(means / len(strata)) >= least).sum(0)
    p = (1 + extreme) / (1 + FLIPS)
    return [math.nan if math.isnan(mean) else float(x) for mean, x in zip(seen, p, strict=True)]


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
        means = _ratio(stratum.sums, stratum.counts)
        known = ~np.isnan(means)
        count = known.sum(0)
        centre = _ratio(np.nansum(means, axis=0), count.astype(float))
        squares = np.where(known, np.square(means - centre), 0.0).sum(0)
        found.append(
            np.divide(squares, count - 1, out=np.full(len(count), np.nan), where=count > 1)
        )
    return np.array(found)


def units_needed(
    variance: Sequence[float] | Array, effect: float, *, level: float = LEVEL, power: float = POWER
) -> float:
    """Units per stratum at which a paired difference shows: its interval excludes zero.

    With n independent units in each of D strata, the mean over strata of their mean differences has
    the variance V / n, where V = (s_1^2 + ... + s_D^2) / D^2 and s_d^2 is the variance of one unit's
    difference. A two-sided interval of this level then excludes zero with probability `power` when

        n = (z_{(1 + level) / 2} + z_power)^2 V / effect^2

    (normal approximation; z_q is the standard normal's quantile). With `power` 1/2 this is where the
    expected interval just touches zero.

    Args:
        variance: s_d^2 of each stratum, in the unit of `effect` squared.
        effect: the true difference of the means.

    Returns:
        A whole number, at least 2; infinite for no effect, NaN where a variance is unknown.
    """
    spread = float(np.sum(variance)) / len(variance) ** 2
    if math.isnan(spread) or math.isnan(effect):
        return math.nan
    if effect == 0:
        return math.inf
    z = float(norm.ppf((1 + level) / 2) + norm.ppf(power))
    return max(2.0, math.ceil(z * z * spread / effect**2))


def _draws(stratum: Stratum) -> Array:
    """[RESAMPLES, arms] means over resampled units."""
    units = len(stratum.sums)
    known = units <= _REMEMBERED_UNITS
    times = _remembered_times(stratum.name, units) if known else _times(stratum.name, units)
    return np.concatenate([_ratio(chunk @ stratum.sums, chunk @ stratum.counts) for chunk in times])


def _times(name: str, units: int) -> Iterator[Array]:
    """How often each resample draws each unit, [_CHUNK, units] at a time; seeded by the name."""
    generator = np.random.default_rng([zlib.crc32(name.encode()), units])
    even = np.full(units, 1 / units) if units else np.empty(0)
    for _ in range(0, RESAMPLES, _CHUNK):
        yield generator.multinomial(units, even, size=_CHUNK).astype(np.float32)


@lru_cache(maxsize=20)
def _remembered_times(name: str, units: int) -> tuple[Array, ...]:
    """The same, kept: a table resamples each of its datasets for every column and average."""
    return tuple(_times(name, units))


def _ratio(sums: Array, counts: Array) -> Array:
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
