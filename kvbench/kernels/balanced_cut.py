"""The exact halving of BalanceKV (arXiv 2502.07861)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton


def halve(
    positive: Tensor, order: Tensor, weights: Tensor, *, implementation: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Halve the first m entries of every head exactly: floor(m / 2) of them survive.

    The signs of a head are scanned in order to the place where one class, + or -, has floor(m / 2)
    members; if both reach that number, to the later place. Up to that place the members of the class
    whose sign stands there are dropped and those of the other class survive with doubled weight;
    behind it all entries survive as they are. If m is odd, the last survivor is dropped, too. The
    authors' released code does the same. Survivors stay in order, so that the doubled ones come first.

    Args:
        positive: [batch, kv_heads, m] bool, the signs of the first m entries, True for +.
        order: [batch, kv_heads, c] int64, c >= m, the index of each entry.
        weights: [batch, kv_heads, c] float32.
        implementation: auto (Triton on CUDA, torch elsewhere) | triton | torch.

    Returns:
        the order and the weights of the survivors and of the entries from m on, each
        [batch, kv_heads, c - m + floor(m / 2)].
    """
    batch, heads, m = positive.shape
    half = m // 2
    entries = order.shape[2]
    if half == 0:
        return order[:, :, m:], weights[:, :, m:]
    if use_triton("halve", implementation, weights, rows_on_chip=False):
        from kvbench.kernels import _triton_walk

        survivors, scaled = _triton_walk.cut(
            positive.flatten(0, 1), order.reshape(-1, entries), weights.reshape(-1, entries)
        )
        return survivors.view(batch, heads, -1), scaled.view(batch, heads, -1)
    place = torch.arange(m, device=positive.device)
    plus_seen = positive.cumsum(-1, dtype=torch.int32)
    minus_seen = place + 1 - plus_seen
    ends = []
    for seen in (plus_seen, minus_seen):
        first = (seen < half).sum(-1, keepdim=True)
        ends.append(first.masked_fill(first == m, -1))  # -1: the class has fewer than half
    end = torch.maximum(ends[0], ends[1])
    survives = (positive != positive.gather(-1, end)) | (place > end)
    survivors = survives.nonzero()[:, -1].view(batch, heads, m - half)[:, :, :half]
    factor = 1.0 + (survivors <= end)
    return (
        torch.cat([order.gather(-1, survivors), order[:, :, m:]], dim=-1),
        torch.cat([weights.gather(-1, survivors) * factor, weights[:, :, m:]], dim=-1),
    )
