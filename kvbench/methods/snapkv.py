"""SnapKV: entries are scored by the attention of the prompt's last queries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors.options import Odd
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import best_and_recent, group_mean
from kvbench.methods.base import TokenScoringMethod


def window_scores(layer: LayerKV, window: int, kernel_size: int, pooling: str) -> Tensor:
    """SnapKV's score of every position before the window: [batch, heads, n - window] float32.

    The score is the causal softmax attention of the last `window` queries, summed over them and pooled
    along the positions with stride 1 and "same" padding; an average counts the padding as zeros.

    Args:
        kernel_size: over how many positions scores are pooled; odd.
        pooling: avgpool | maxpool.
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
    """Keep the `count` entries with the highest scores before the window, and the window, by position.

    Args:
        scores: [batch, heads, n - window].
        per_query_head: whether every query head chooses for itself from its own copy of the keys. If
            False, the scores of a group are averaged and its heads share one choice.
    """
    if per_query_head:
        group = scores.shape[1] // layer.keys.shape[1]
        keys = layer.keys.repeat_interleave(group, 1)
        values = layer.values.repeat_interleave(group, 1)
        layer = replace(layer, keys=keys, values=values)
    scores = group_mean(scores, layer.keys.shape[1])
    return gather_entries(layer, best_and_recent(layer, scores, count, window))


@dataclass(frozen=True, kw_only=True)
class SnapKV(TokenScoringMethod):
    """Keeps the window and those earlier entries to which the window's queries attend most.

    There is no separate sink; the window and scores use up the capacity. With `granularity=query_head`
    the result is [batch, heads, c, head_dim] with the same c, so its bytes are heads / kv_heads times
    those of `kv_head`.

    Args:
        kernel_size: over how many positions scores are pooled; odd.
        pooling: avgpool | maxpool.
        granularity: ``kv_head`` averages the scores of a group, whose heads share one choice;
            ``query_head`` first repeats keys to query heads, as the MInference package does.
    """

    paper: ClassVar[str] = "arXiv 2404.14469, section 4"
    can_compress_again: ClassVar[bool] = True

    kernel_size: Odd = 5
    pooling: Literal["avgpool", "maxpool"] = "avgpool"
    granularity: Literal["kv_head", "query_head"] = "kv_head"

    def token_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        scores = window_scores(layer, budget.window, self.kernel_size, self.pooling)
        return F.pad(group_mean(scores, layer.keys.shape[1]), (0, budget.window))

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        capacity = self.layer_capacity(budget, layer.n, layer.layer_index, layer.num_layers)
        scores = window_scores(layer, budget.window, self.kernel_size, self.pooling)
        per_query_head = self.granularity == "query_head"
        return keep_best(layer, scores, capacity - budget.window, budget.window, per_query_head)
