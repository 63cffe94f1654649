"""Exact cache, sparse attention: each decoding query sees only its heaviest keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods._select import group_mean, highest
from kvbench.methods.base import Held, Method


@dataclass(frozen=True, kw_only=True)
class TopK(Method):
    """Holds everything; each decoding query attends to its `capacity` largest logits only.

    The bytes are those of the exact cache: this tells what an oracle that knew each query could keep.
    Query heads of a group choose on their own. Generated tokens are candidates like all others.

    Args:
        heavy_hitters: half of the capacity goes to the keys with the most accumulated attention over
            the prompt (chosen once, per KV head), the other half to the query's own largest.
    """

    paper: ClassVar[str] = "arXiv 2306.14048 (H2O), Table 8"
    saves_memory: ClassVar[bool] = False

    heavy_hitters: bool = False

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """All entries; `scores` 1 for heavy hitters when they are asked for."""
        compressed = keep_all(layer)
        if not self.heavy_hitters:
            return compressed
        mass = group_mean(layer.attention_mass(), layer.keys.shape[1])
        return replace(compressed, scores=highest(mass, budget.capacity(layer.n) // 2).float())

    def restrict(self, held: Held, logits: Tensor) -> Tensor:
        """True for entries that are neither heavy hitters nor among the query's largest logits."""
        entries = logits.shape[-1]
        if held.scores is None:
            return ~highest(logits, min(held.capacity, entries))
        heavy = (held.scores > 0).unsqueeze(1)
        free = min(held.capacity - held.capacity // 2, entries)
        return ~(heavy | highest(logits.masked_fill(heavy, float("-inf")), free))
