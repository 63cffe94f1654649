"""SnapKV: what the last queries of the prompt look at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors.options import Odd
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import best_and_recent, group_mean
from kvbench.methods.base import Method


def window_scores(layer: LayerKV, window: int, kernel_size: int, pooling: str) -> Tensor:
    """SnapKV's score of every position before the window: [batch, heads, n - window] float32.

    Softmax attention of the last `window` queries shown (causal inside the window), summed over
    them, then pooled along the positions with stride 1 and same padding; padding counts in an
    average.

    Raises:
        KVError: `window` is 0, or the layer does not hold that many queries.
    """
    if window < 1:
        raise KVError(f"budget.window is {window}; allowed here: an integer >= 1 (it observes)")
    mass = layer.attention_of_last(window)[:, :, : layer.n - window]
    if pooling == "maxpool":
        return F.max_pool1d(mass, kernel_size, stride=1, padding=kernel_size // 2)
    return F.avg_pool1d(mass, kernel_size, stride=1, padding=kernel_size // 2)


def keep_best(
    layer: LayerKV, scores: Tensor, count: int, window: int, per_query_head: bool
) -> CompressedKV:
    """The `count` best-scored positions before the window, then the window, ascending.

    Args:
        scores: [batch, heads, n - window].
        per_query_head: every query head chooses for itself, from its own copy of the keys;
            otherwise the scores of a group are averaged and the group shares one choice.
    """
    if per_query_head:
        group = scores.shape[1] // layer.keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (layer.keys, layer.values))
        layer = replace(layer, keys=keys, values=values)
    scores = group_mean(scores, layer.keys.shape[1])
    return gather_entries(layer, best_and_recent(layer, scores, count, window))


@dataclass(frozen=True, kw_only=True)
class SnapKV(Method):
    """Keeps the window and the capacity - window earlier positions its queries attend to most.

    There is no separate sink: the whole capacity is spent by score. With `granularity=query_head`
    the result is [batch, heads, c, head_dim]: the budget is in entries per head that holds a cache,
    so c is the same, and the bytes, measured as stored, are (heads / kv_heads) times those of
    `kv_head`.

    Args:
        kernel_size: positions the score is pooled over; odd.
        pooling: avgpool | maxpool.
        granularity: kv_head (the query heads of a group are averaged and share one choice) |
            query_head (keys repeated to query heads first, as the MInference package does).
    """

    paper: ClassVar[str] = "arXiv 2404.14469, section 4"
    recompresses: ClassVar[bool] = True

    kernel_size: Odd = 5
    pooling: Literal["avgpool", "maxpool"] = "avgpool"
    granularity: Literal["kv_head", "query_head"] = "kv_head"

    def token_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        """See `Method.token_scores`: the window's attention, mean over the group."""
        scores = window_scores(layer, budget.window, self.kernel_size, self.pooling)
        return F.pad(group_mean(scores, layer.keys.shape[1]), (0, budget.window))

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """The chosen positions, ascending, then the window.

        Raises:
            KVError: the budget has no window, or the layer lacks its queries.
        """
        capacity = self.layer_capacity(budget, layer.n, layer.layer_index, layer.num_layers)
        scores = window_scores(layer, budget.window, self.kernel_size, self.pooling)
        per_query_head = self.granularity == "query_head"
        return keep_best(layer, scores, capacity - budget.window, budget.window, per_query_head)
