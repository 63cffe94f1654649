"""The Self-Balancing Walk (BalanceKV, Algorithm 3) on the kernel of Algorithm 2."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

ROWS = 128
"""Vectors whose inner products with earlier ones are computed at once."""


def walk_bound(n: int, delta: float, constant: float = 30.0) -> float:
    """c = constant * log(n / delta): how far a walk of n steps may stray but for probability delta."""
    return constant * math.log(max(n, 2) / delta)


def softmax_balance(
    keys: Tensor,
    values: Tensor | None,
    uniforms: Tensor,
    *,
    key_radius: float,
    value_radius: float,
    bound: float,
    exact_half: bool = False,
) -> Tensor | None:
    """One batch of Algorithm 2: the walk over exp(<k_i, k_j> / sqrt(d)) <v_i, v_j>.

    These are inner products of vectors of norm at most R = exp(r_key^2 / (2 sqrt(d))) r_value, so
    everything is divided by R^2 from the start and nothing overflows.

    Args:
        keys: [n, d], of l2 norm at most `key_radius`.
        values: [n, e], of l2 norm at most `value_radius`; None for the scalar 1 (the denominator).
        uniforms: [n] in [0, 1).
        bound: c; see `walk_bound`.
        exact_half: complete the smaller class to floor(n / 2) entries by the last of the larger.

    Returns:
        [n] bool, the smaller sign class (+1 on a tie); None when the walk failed, that is when an
        inner product exceeded c R^2.
    """
    k = keys.double()
    v = None if values is None else values.double() / value_radius
    draws = uniforms.double().numpy()
    signs = np.zeros(len(k))
    for first in range(0, len(k), ROWS):
        rows = slice(first, min(len(k), first + ROWS))
        earlier = slice(0, rows.stop)  # a step looks at the vectors before it alone
        gram = k[rows] @ k[earlier].T
        gram.sub_(key_radius**2).div_(keys.shape[1] ** 0.5).exp_()
        if v is not None:
            gram *= v[rows] @ v[earlier].T
        if not _walk(gram.numpy(), signs, draws, bound):
            return None
    positive = torch.from_numpy(signs > 0)
    smaller = positive if 2 * int(positive.sum()) <= len(signs) else ~positive
    if exact_half:
        missing = len(signs) // 2 - int(smaller.sum())
        larger = (~smaller).nonzero().squeeze(-1)
        smaller[larger[len(larger) - missing :]] = True
    return smaller


def _walk(gram: np.ndarray, signs: np.ndarray, draws: np.ndarray, bound: float) -> bool:
    """Choose the signs of some consecutive vectors; whether no inner product exceeded the bound.

    Args:
        gram: [r, m], inner products of the last r of m vectors with all of these.
        signs: [n], those of the m - r vectors before; the signs of the r vectors are entered.
        draws: [n]. bound: see `softmax_balance`.
    """
    count, stop = gram.shape
    first = stop - count
    sums = gram[:, :first] @ signs[:first]
    chosen = signs[first:stop]
    for step in range(count):
        inner = float(sums[step] + gram[step, first : first + step] @ chosen[:step])
        if abs(inner) > bound:
            return False
        chosen[step] = 1.0 if draws[first + step] < 0.5 - inner / (2 * bound) else -1.0
    return True
