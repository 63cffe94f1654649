"""Ada-KV: a layer divides its budget among its heads by the scores of their entries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors.options import Fraction
from kvbench.kv import Budget, CompressedKV, LayerKV
from kvbench.methods._select import keep_marked
from kvbench.methods._wrapped import ScoreWrapper


def best_of_all_heads(scores: Tensor, kept: int, safe: int) -> Tensor:
    """Mark the entries that a layer keeps, kept * kv_heads of each prompt: the `safe` best of each head,
    and the best of all other entries of the layer. Of equal scores those at lower places are kept.

    Args:
        scores: [batch, kv_heads, n].

    Returns:
        [batch, kv_heads, n] bool.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    is_safe = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :safe], True)
    of_layer = scores.masked_fill(is_safe, math.inf).flatten(1)
    best = of_layer.argsort(dim=-1, descending=True, stable=True)[:, : kept * scores.shape[1]]
    return torch.zeros_like(of_layer, dtype=torch.bool).scatter_(-1, best, True).view_as(scores)


@dataclass(frozen=True, kw_only=True)
class AdaKV(ScoreWrapper):
    """Keeps kv_heads * capacity entries of every layer, and more of them in heads with higher scores.

    The capacity is that of the inner method at the layer. Sink, window and the best int(safeguard *
    capacity) entries of each head are safe; the other entries of all heads compete. Where the capacity
    is less than sink and window, the last tokens of the sink leave. Heads hold different numbers of
    entries, and only these are stored and counted (`CompressedKV.lengths`).

    The rule is that of kvpress's AdaKVPress; whether its safeguard is the paper's was not checked. Of
    equal scores those at lower places are kept; in kvpress chance decides.

    Args:
        of: the inner method, whose token scores are comparable across heads (snapkv, pyramidkv, h2o,
            expected_attention, attention_matching).
        options: the options of the inner method.
        safeguard: the share of the capacity that every head keeps for its own best entries.
    """

    paper: ClassVar[str] = "arXiv 2407.11550; kvpress AdaKVPress"

    safeguard: Fraction = 0.2

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        n = layer.n
        capacity = self.layer_capacity(budget, n, layer.layer_index, layer.num_layers)
        scores = self.scorer.checked_scores(layer, budget).clone()
        scores[:, :, : budget.sink] = torch.finfo(scores.dtype).max
        scores[:, :, n - budget.window :] = math.inf
        stay = best_of_all_heads(scores, capacity, int(self.safeguard * capacity))
        return self.scorer.fit(layer, keep_marked(layer, stay), budget)
