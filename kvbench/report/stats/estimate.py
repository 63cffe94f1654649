"""Means over a table of units and variants, and the bootstrap of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvbench.report.stats.distributions import normal_quantile, t_quantile

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

RESAMPLES = 4000
LEVEL = 0.95
_CHUNK = 250
_REMEMBERED_UNITS = 600
"""Up to this many units the resamples of a stratum are kept: 10 MB of them, of 20 strata at most."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval; all NaN where there is nothing to average."""

    value: float
    low: float
    high: float

    def named(self, name: str) -> dict[str, float]:
        """The three numbers as the fields of a file, which begin with `name`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


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


def estimates(strata: Sequence[Stratum]) -> list[Estimate]:
    """One estimate per variant: the mean over strata of each stratum's mean.

    Percentile bootstrap. Units are resampled with replacement within each stratum, the same draw
    for every variant, from a generator seeded by the stratum's name. A variant that has no score in one
    of the strata has no mean over them.
    """
    return _intervals(_means(strata), np.mean([_draws(s) for s in strata], axis=0))


def _means(strata: Sequence[Stratum]) -> Array:
    """Per column, the mean over strata of each stratum's mean."""
    return np.asarray(np.mean([ratio(s.sums.sum(0), s.counts.sum(0)) for s in strata], axis=0))


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
    factor = float(t_quantile(tail, units - 1) / normal_quantile(tail)) * math.sqrt(
        units / (units - 1)
    )
    value = estimate.value
    low, high = (value + factor * (bound - value) for bound in (estimate.low, estimate.high))
    return Estimate(value, low, high)


def _draws(stratum: Stratum) -> Array:
    """[RESAMPLES, variants] means over resampled units."""
    units = len(stratum.sums)
    known = units <= _REMEMBERED_UNITS
    times = _remembered_times(stratum.name, units) if known else _times(stratum.name, units)
    return np.concatenate([ratio(chunk @ stratum.sums, chunk @ stratum.counts) for chunk in times])


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


def ratio(sums: ArrayLike, counts: ArrayLike) -> Array:
    """Means where there are scores, NaN elsewhere."""
    sums, counts = np.asarray(sums, dtype=float), np.asarray(counts, dtype=float)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
