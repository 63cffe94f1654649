"""Functions that several methods share: choosing positions, group means, padding, rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries


def positions_between(layer: LayerKV, start: int, stop: int) -> Tensor:
    """The prompt positions start .. stop - 1 for every head, [batch, kv_heads, stop - start] int64."""
    batch, heads = layer.keys.shape[:2]
    return torch.arange(start, stop, device=layer.keys.device).expand(batch, heads, stop - start)


def with_sink_and_window(layer: LayerKV, budget: Budget, middle: Tensor) -> Tensor:
    """The positions of the sink, then `middle` (prompt positions [batch, kv_heads, c]), then the
    positions of the window."""
    sink = positions_between(layer, 0, budget.sink)
    window = positions_between(layer, layer.n - budget.window, layer.n)
    return torch.cat([sink, middle, window], dim=-1)


def group_mean(scores: Tensor, kv_heads: int) -> Tensor:
    """Average scores [batch, heads, ...] over the query heads of each group: [batch, kv_heads, ...]."""
    return scores.unflatten(1, (kv_heads, -1)).mean(2)


def highest(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` highest of scores [..., n] along the last dimension: [..., n] bool.

    Of equal scores those at lower positions are marked. (`torch.topk` chooses among equal scores
    differently on different devices.)
    """
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    least = _lowest_of_highest(scores, count)
    above = scores > least
    tied = scores == least
    places_left = count - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= places_left))


def _lowest_of_highest(scores: Tensor, count: int) -> Tensor:
    """The count-th highest score, [..., 1].

    On a CPU numpy's `partition` takes half the time of torch's `topk`, which also returns positions.
    """
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        rank = scores.shape[-1] - count
        partitioned = np.partition(scores.detach().numpy(), rank, axis=-1)
        return torch.from_numpy(partitioned[..., rank : rank + 1])
    return scores.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)


def top_positions(scores: Tensor, count: int) -> Tensor:
    """The positions of the `count` highest scores of each head, ascending, [batch, heads, count]. Of
    equal scores those at lower positions are taken."""
    if scores.device.type == "cpu" and scores.isnan().any():  # a GPU would be waited for
        raise KVError("token scores are NaN; allowed: numbers")
    chosen = highest(scores, count)
    # The i-th chosen position is written to column i. All others are written to one more column, which
    # is cut off.
    column = torch.where(chosen, chosen.cumsum(-1) - 1, count)
    all_positions = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    positions = all_positions.new_zeros(*scores.shape[:-1], count + 1)
    return positions.scatter_(-1, column, all_positions)[..., :count]


def best_and_recent(layer: LayerKV, scores: Tensor, count: int, recent: int) -> Tensor:
    """The positions of the `count` best-scored tokens before the last `recent` tokens, and of these
    recent tokens: [batch, kv_heads, count + recent], ascending. `scores` is [batch, kv_heads, n -
    recent]."""
    last = positions_between(layer, layer.n - recent, layer.n)
    return torch.cat([top_positions(scores, count), last], dim=-1)


def side_by_side(heads: Sequence[tuple[Tensor, Tensor]], fill: float) -> tuple[Tensor, Tensor]:
    """Stack the positions [c] and weights [c] of heads with different c as two tensors [heads, largest
    c], padded with -1 and `fill`."""
    positions = [head_positions for head_positions, _ in heads]
    weights = [head_weights for _, head_weights in heads]
    return (
        pad_sequence(positions, batch_first=True, padding_value=-1),
        pad_sequence(weights, batch_first=True, padding_value=fill),
    )


def keep_marked(layer: LayerKV, marked: Tensor) -> CompressedKV:
    """Keep the entries that `marked` [batch, kv_heads, n] bool marks. Heads may keep different numbers
    (`CompressedKV.lengths`)."""
    lengths = marked.sum(-1)
    order = (~marked).to(torch.uint8).argsort(dim=-1, stable=True)[..., : int(lengths.max())]
    is_entry = torch.arange(order.shape[-1], device=order.device) < lengths[..., None]
    compressed = gather_entries(layer, order)
    log_weights = torch.zeros(order.shape, device=order.device).masked_fill_(~is_entry, -math.inf)
    positions = order.masked_fill(~is_entry, -1)
    return replace(compressed, positions=positions, log_weights=log_weights, lengths=lengths)


def by_largest_remainder(wanted: Sequence[Fraction], total: int) -> list[int]:
    """Round non-negative numbers to integers that sum to `total`.

    Every number is rounded down; then those with the largest remainders, the first on a tie, are raised
    by one until the sum is reached. A non-increasing sequence stays non-increasing.
    """
    rounded = [math.floor(value) for value in wanted]
    order = sorted(range(len(rounded)), key=lambda i: rounded[i] - wanted[i])
    for i in order[: total - sum(rounded)]:
        rounded[i] += 1
    return rounded
