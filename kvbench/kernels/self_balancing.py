"""The Self-Balancing Walk (BalanceKV, Algorithm 3) on the kernel of Algorithm 2."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


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
    gram = torch.exp((k @ k.T - key_radius**2) / keys.shape[1] ** 0.5)
    if values is not None:
        v = values.double() / value_radius
        gram *= v @ v.T
    rows, draws = gram.numpy(), uniforms.double().numpy()
    signs = np.zeros(len(rows))
    for step, row in enumerate(rows):
        inner = float(row[:step] @ signs[:step])
        if abs(inner) > bound:
            return None
        signs[step] = 1.0 if draws[step] < 0.5 - inner / (2 * bound) else -1.0
    positive = torch.from_numpy(signs > 0)
    smaller = positive if 2 * int(positive.sum()) <= len(rows) else ~positive
    if exact_half:
        missing = len(rows) // 2 - int(smaller.sum())
        larger = (~smaller).nonzero().squeeze(-1)
        smaller[larger[len(larger) - missing :]] = True
    return smaller
