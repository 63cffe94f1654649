"""The exact halving of BalanceKV: which entries the signs of a walk leave, and with what weight."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton


def halve(
    positive: Tensor, order: Tensor, weights: Tensor, *, implementation: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Halve the first m entries of every head exactly: floor(m / 2) of them survive.

    The signs of a head are scanned in order, over all its blocks, to the place where one class has
    floor(m / 2) members; that class is dropped up to there, the other one kept with its weight
    doubled, and what follows is kept as it is. Where both classes reach that number the later place
    counts. Of an odd m the last survivor goes too. Both as in the released code. Survivors stay in
    order; the doubled ones, all from before the cut, so come first.

    Args:
        positive: [batch, kv_heads, m] bool, the signs of the first m entries.
        order: [batch, kv_heads, c] int64, c >= m, which entry each is.
        weights: [batch, kv_heads, c] float32.
        implementation: auto (Triton on CUDA, torch elsewhere) | triton | torch.

    Returns:
        order and weights of the survivors, [batch, kv_heads, c - m + floor(m / 2)].
    """
    batch, heads, m = positive.shape
    half, held = m // 2, order.shape[2]
    if half == 0:
        return order[:, :, m:], weights[:, :, m:]
    if use_triton("halve", implementation, weights, rows_on_chip=False):
        from kvbench.kernels import _triton_walk

        survivors, scaled = _triton_walk.cut(
            positive.flatten(0, 1), order.reshape(-1, held), weights.reshape(-1, held)
        )
        return survivors.view(batch, heads, -1), scaled.view(batch, heads, -1)
    place = torch.arange(m, device=positive.device)
    seen = positive.cumsum(-1, dtype=torch.int32)
    ends = []
    for count in (seen, place + 1 - seen):
        first = (count < half).sum(-1, keepdim=True)
        ends.append(first.masked_fill(first == m, -1))  # -1: never
    end = torch.maximum(*ends)
    keep = (positive != positive.gather(-1, end)) | (place > end)
    survivors = keep.nonzero()[:, -1].view(batch, heads, m - half)[:, :, :half]
    factor = 1.0 + (survivors <= end)
    return (
        torch.cat([order.gather(-1, survivors), order[:, :, m:]], dim=-1),
        torch.cat([weights.gather(-1, survivors) * factor, weights[:, :, m:]], dim=-1),
    )
