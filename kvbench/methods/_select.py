"""What several methods share: positions of sink and window, averages over a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

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


def top_positions(scores: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest scores of each head, ascending: [batch, heads, count]."""
    return scores.topk(count, dim=-1, sorted=False).indices.sort(-1).values


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
