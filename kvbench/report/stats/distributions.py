"""Quantiles and tails as reports need them, from `scipy.special`: importing `scipy.stats` takes longer
than all the statistics of a page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, gammaincinv, ndtr, ndtri, stdtr, stdtrit

Floats = NDArray[np.float64]


def normal_quantile(probability: float) -> float:
    """Of the standard normal distribution."""
    return float(ndtri(probability))


def normal_tail(z: ArrayLike) -> Floats:
    """The probability above z."""
    return np.asarray(ndtr(-np.asarray(z)))


def t_quantile(probability: ArrayLike, freedom: ArrayLike) -> Floats:
    """Of Student's t."""
    return np.asarray(stdtrit(freedom, probability))


def chi2_quantile(probability: float, freedom: ArrayLike) -> Floats:
    """Of the chi-squared distribution."""
    return np.asarray(2 * gammaincinv(np.asarray(freedom) / 2, probability))


def heads_at_most(count: ArrayLike, coins: ArrayLike) -> Floats:
    """The probability that at most `count` of `coins` fair coins come up heads."""
    coins = np.asarray(coins, dtype=int)
    known = bdtr(np.asarray(count, dtype=float), np.maximum(coins, 1), 0.5)
    return np.where(coins > 0, known, 1.0)


def t_test(values: Sequence[float] | Floats) -> float:
    """Two-sided p-value of Student's t-test of two or more values against a mean of 0."""
    known = np.asarray(values, dtype=float)
    t = known.mean() / (known.std(ddof=1) / np.sqrt(len(known)))
    return float(2 * stdtr(len(known) - 1, -abs(t)))
