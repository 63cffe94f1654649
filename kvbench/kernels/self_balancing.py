"""The Self-Balancing Walk (BalanceKV, arXiv 2502.07861, Algorithm 3) on the kernel of its Algorithm 2.

This is the walk of the paper, which can fail; `balanced_walk` is that of the authors' code.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

ROWS = 128  # vectors whose inner products with the earlier ones are computed at once


def walk_bound(n: int, delta: float, constant: float = 30.0) -> float:
    """The bound c = constant * log(n / delta), which an inner product of a walk of n steps exceeds
    with a probability of at most delta."""
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
    """Halve one batch as in Algorithm 2: the walk over the kernel exp(<k_i, k_j> / sqrt(d)) <v_i,
    v_j>.

    Args:
        keys: [n, d], of l2 norm at most `key_radius`.
        values: [n, e], of l2 norm at most `value_radius`; None for the number 1 (as for the
            denominator of attention).
        uniforms: [n] in [0, 1).
        bound: c; see `walk_bound`.
        exact_half: whether the smaller class is completed to floor(n / 2) members by the last ones of
            the larger class.

    Returns:
        [n] bool, the members of the smaller sign class (of + on a tie); None where the walk failed,
        because an inner product exceeded c R^2, R = exp(key_radius^2 / (2 sqrt(d))) value_radius.
    """
    # Everything is divided by R^2, the most that an inner product can be, so that nothing overflows.
    k = keys.double()
    v = None if values is None else values.double() / value_radius
    draws = uniforms.double().numpy()
    signs = np.zeros(len(k))
    for first in range(0, len(k), ROWS):
        rows = slice(first, min(len(k), first + ROWS))
        earlier = slice(0, rows.stop)  # a step depends on the vectors before it alone
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
    """Choose the signs of r consecutive vectors, the last of the first m, and write them to `signs` [n],
    which has those of the vectors before. gram [r, m] are their inner products with all m.

    Returns:
        whether no inner product exceeded the bound; if one did, the walk stops there.
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
