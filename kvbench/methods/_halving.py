"""Halving a set of weighted entries by the signs of a walk (BalanceKV): plans and survivors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = -1
"""Position of an entry that exists only because another head holds more."""


def plan_halvings(middle: int, rate: float, kept: int) -> list[tuple[int, int]]:
    """(entries before, entries halved) of each halving that brings `middle` entries to the budget.

    At rate 2^-T: T halvings of everything that is left. Between 2^-(T+1) and 2^-T: T such halvings,
    then one of as many entries as leaves `kept` in all.
    """
    mantissa, exponent = math.frexp(rate)
    whole = 1 - exponent if mantissa == 0.5 else -exponent
    plan, left = [], middle
    for _ in range(whole):
        plan.append((left, left))
        left //= 2
    if mantissa != 0.5 and left > kept:
        plan.append((left, 2 * (left - kept)))
    return plan


@dataclass(frozen=True)
class Survivors:
    """Entries still in the race, in the order the next halving cuts into blocks.

    Attributes:
        order: [batch, kv_heads, c] int64, which entry each is.
        weights: [batch, kv_heads, c], powers of two.
        counts: [batch, kv_heads], entries that are real, from the start; None when all are
            (only `smaller_classes` keeps different numbers in different heads).
    """

    order: Tensor
    weights: Tensor
    counts: Tensor | None = None

    def to_halve(self, left: int, size: int) -> Tensor | None:
        """Entries of each head the next halving covers, [batch, kv_heads]; None: `size` of all.

        A plan says `size` of `left`; a head that already holds fewer has less to halve to reach
        the same number.
        """
        if self.counts is None or size == left:
            return self.counts
        return (2 * (self.counts - (left - size // 2))).clamp(min=0).minimum(self.counts)

    def marked(self) -> tuple[Tensor, Tensor]:
        """Order and weights, with -1 and 0 beyond each head's count."""
        if self.counts is None:
            return self.order, self.weights
        place = torch.arange(self.order.shape[2], device=self.order.device)
        beyond = place >= self.counts.unsqueeze(-1)
        return self.order.masked_fill(beyond, PADDING), self.weights.masked_fill(beyond, 0.0)


def smaller_classes(
    state: Survivors, positive: Tensor, b: int, size: int, halved: Tensor | None
) -> Survivors:
    """Keep the smaller sign class of every block with its weight doubled (Algorithm 2).

    On a tie the +1 class. At most half survives, and not the same number in every head.

    Args:
        positive: [batch, kv_heads, blocks * b] bool.
        b: entries per block.
        size, halved: entries the walk covered, from the start (`Survivors.to_halve`).
    """
    batch, heads, padded = positive.shape
    total = state.order.shape[2]
    place = torch.arange(max(padded, total), device=positive.device)
    limit = torch.full((batch, heads), size, device=positive.device) if halved is None else halved
    covered = place < limit.unsqueeze(-1)
    real = covered[:, :, :padded].reshape(batch, heads, -1, b)
    blocks = positive.view(batch, heads, -1, b)
    plus, minus = (blocks & real).sum(-1, keepdim=True), (~blocks & real).sum(-1, keepdim=True)
    doubled = ((blocks == (plus <= minus)) & real).view(batch, heads, padded)
    doubled = blocked(doubled[:, :, :total], total)
    counts = state.counts if state.counts is not None else limit.new_full((batch, heads), total)
    untouched = ~covered[:, :, :total] & (place[:total] < counts.unsqueeze(-1))
    keep = doubled | untouched
    front = keep.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)
    counts = keep.sum(-1)
    front = front[:, :, : int(counts.max())]
    weights = state.weights * (1.0 + doubled)
    return Survivors(state.order.gather(-1, front), weights.gather(-1, front), counts)


def blocked(x: Tensor, places: int) -> Tensor:
    """x [batch, kv_heads, c] continued to `places` with zeros (False; index of a valid row)."""
    if x.shape[2] == places:
        return x.contiguous()
    padded = x.new_zeros(*x.shape[:2], places)
    padded[:, :, : x.shape[2]] = x
    return padded


def block_counts(
    shape: tuple[int, int, int, int], size: int, halved: Tensor | None, device: torch.device
) -> Tensor | None:
    """Real entries of each block, [batch, kv_heads, blocks]; None when every block is full.

    Args:
        shape: batch, kv_heads, blocks, entries per block.
        size, halved: entries the walk covers (`Survivors.to_halve`).
    """
    batch, heads, blocks, b = shape
    if halved is None and size == blocks * b:
        return None
    if halved is None:
        halved = torch.full((batch, heads), size, device=device)
    starts = torch.arange(blocks, device=device) * b
    return (halved.unsqueeze(-1) - starts).clamp(0, b)
