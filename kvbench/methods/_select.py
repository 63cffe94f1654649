"""What several methods share: positions of sink and window, averages over a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvbench.kv import Budget, LayerKV


def positions_between(layer: LayerKV, start: int, stop: int) -> Tensor:
    """Prompt positions start .. stop - 1 of every head: [batch, kv_heads, stop - start] int64."""
    batch, heads = layer.keys.shape[:2]
    return torch.arange(start, stop, device=layer.keys.device).expand(batch, heads, stop - start)


def with_sink_and_window(layer: LayerKV, budget: Budget, middle: Tensor) -> Tensor:
    """Positions of the sink, then `middle` ([batch, kv_heads, c] prompt positions), the window."""
    sink = positions_between(layer, 0, budget.sink)
    window = positions_between(layer, layer.n - budget.window, layer.n)
    return torch.cat([sink, middle, window], dim=-1)


def group_mean(scores: Tensor, kv_heads: int) -> Tensor:
    """Mean over the query heads of each group: [batch, heads, ...] -> [batch, kv_heads, ...]."""
    return scores.unflatten(1, (kv_heads, -1)).mean(2)


def highest(scores: Tensor, count: int) -> Tensor:
    """Which `count` of the last dimension's scores are the highest, [..., n] bool; of equal scores the
    lower positions, on every device (`topk` orders them as it likes)."""
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    least = _lowest_of_highest(scores, count)
    above = scores > least
    tied = scores == least
    places_left = count - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= places_left))


def _lowest_of_highest(scores: Tensor, count: int) -> Tensor:
    """The count-th highest score, [..., 1]. On a CPU numpy, which only parts the higher scores from the
    lower, takes half the time of torch's `topk`, which tells their positions as well."""
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        place = scores.shape[-1] - count
        parted = np.partition(scores.detach().numpy(), place, axis=-1)
        return torch.from_numpy(parted[..., place : place + 1])
    return scores.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def top_positions(scores: Tensor, count: int) -> Tensor:
    """Positions of the `count` highest scores of each head, ascending, [batch, heads, count]; of equal
    scores the lower positions."""
    chosen = highest(scores, count)
    # The i-th chosen position is written to place i; what is not chosen, to one more place.
    place = torch.where(chosen, chosen.cumsum(-1) - 1, count)
    every = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    positions = every.new_zeros(*scores.shape[:-1], count + 1)
    return positions.scatter_(-1, place, every)[..., :count]


def best_and_recent(layer: LayerKV, scores: Tensor, count: int, recent: int) -> Tensor:
    """The `count` positions before the last `recent` ones with the largest scores, and these, ascending:
    [batch, kv_heads, count + recent]; scores [batch, kv_heads, n - recent]."""
    last = positions_between(layer, layer.n - recent, layer.n)
    return torch.cat([top_positions(scores, count), last], dim=-1)


def side_by_side(heads: Sequence[tuple[Tensor, Tensor]], fill: float) -> tuple[Tensor, Tensor]:
    """Positions and weights [c] of each head as [heads, most], padded with -1 and `fill`."""
    positions, weights = map(list, zip(*heads, strict=True))
    return pad_sequence(positions, True, -1), pad_sequence(weights, True, fill)


def by_largest_remainder(wanted: Sequence[Fraction], total: int) -> list[int]:
    """Non-negative numbers rounded so that they sum to `total` exactly.

    Each is rounded down; those with the largest remainders, the first on a tie, get what is missing.
    A non-increasing sequence stays so.
    """
    rounded = [math.floor(value) for value in wanted]
    order = sorted(range(len(rounded)), key=lambda i: rounded[i] - wanted[i])
    for i in order[: total - sum(rounded)]:
        rounded[i] += 1
    return rounded
