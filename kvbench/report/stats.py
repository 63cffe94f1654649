"""Means with bootstrap intervals over a table of units and arms."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, t

Array = NDArray[np.float64]

RESAMPLES = 4000
LEVEL = 0.95
_CHUNK = 250


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
    value = np.mean([_ratio(s.sums.sum(0), s.counts.sum(0)) for s in strata], axis=0)
    draws = np.mean([_draws(s) for s in strata], axis=0)
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


def _draws(stratum: Stratum) -> Array:
    """[RESAMPLES, arms] means over resampled units."""
    units = len(stratum.sums)
    generator = np.random.default_rng([zlib.crc32(stratum.name.encode()), units])
    even = np.full(units, 1 / units) if units else np.empty(0)
    parts = []
    for _ in range(0, RESAMPLES, _CHUNK):
        times = generator.multinomial(units, even, size=_CHUNK).astype(float)
        parts.append(_ratio(times @ stratum.sums, times @ stratum.counts))
    return np.concatenate(parts)


def _ratio(sums: Array, counts: Array) -> Array:
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
