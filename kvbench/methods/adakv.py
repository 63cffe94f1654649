"""Ada-KV: the budget of a layer divided among its heads by score."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors.options import Fraction
from kvbench.kv import Budget, CompressedKV, LayerKV, gather_entries
from kvbench.methods._wrapped import Wrapper


def best_of_all_heads(scores: Tensor, kept: int, safe: int) -> Tensor:
    """Which entries of [batch, kv_heads, n] stay, kept * kv_heads in all: each head's `safe` best, and
    the best of the others of all heads; the lower place on a tie."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    first = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :safe], True)
    flat = scores.masked_fill(first, math.inf).flatten(1)
    best = flat.argsort(dim=-1, descending=True, stable=True)[:, : kept * scores.shape[1]]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, best, True).view_as(scores)


@dataclass(frozen=True, kw_only=True)
class AdaKV(Wrapper):
    """Keeps of every layer kv_heads * capacity entries, as many of each head as its scores deserve.

    The capacity is the one that the other method has at the layer (pyramidkv: its share of all layers').
    Sink, window and each head's best int(safeguard * capacity) entries are safe; the others of all heads
    compete; where the capacity is less than sink and window, the sink's last leave. Heads hold different
    numbers of entries, and what is held and counted is their sum (`CompressedKV.lengths`). As kvpress's
    AdaKVPress, whose safeguard is not the paper's own rule, which was not checked; ties go to the lower
    place, there to chance.

    Args:
        of: a method with token scores that heads can be compared by (snapkv, pyramidkv, h2o,
            expected_attention, attention_matching). options: its options.
        safeguard: share of the capacity that every head keeps.
    """

    paper: ClassVar[str] = "arXiv 2407.11550; kvpress AdaKVPress"
    needs: ClassVar[str] = "token_scores"
    by_head: ClassVar[bool] = False

    safeguard: Fraction = 0.2

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """The entries that stay, ascending, each head's at the front; padding follows."""
        n = layer.n
        capacity = self.layer_capacity(budget, n, layer.layer_index, layer.num_layers)
        scores = self.inner.token_scores(layer, budget).clone()
        scores[:, :, : budget.sink] = torch.finfo(scores.dtype).max
        scores[:, :, n - budget.window :] = math.inf
        stay = best_of_all_heads(scores, capacity, int(self.safeguard * capacity))
        return self.inner.settle(layer, keep(layer, stay), budget)


def keep(layer: LayerKV, stay: Tensor) -> CompressedKV:
    """The entries that `stay` [batch, kv_heads, n] marks, with `CompressedKV.lengths`."""
    lengths = stay.sum(-1)
    order = (~stay).to(torch.uint8).argsort(dim=-1, stable=True)[..., : int(lengths.max())]
    real = torch.arange(order.shape[-1], device=order.device) < lengths[..., None]
    kept = gather_entries(layer, order)
    log_weights = torch.zeros(order.shape, device=order.device).masked_fill_(~real, -math.inf)
    positions = order.masked_fill(~real, -1)
    return replace(kept, positions=positions, log_weights=log_weights, lengths=lengths)
