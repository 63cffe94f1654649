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
    """Holds all entries; a decoding query attends only to the `capacity` entries of its largest logits.

    No memory is saved: the method shows what could be left out if every query were known in advance.
    Each query head chooses for itself. Generated tokens can be chosen like those of the prompt.

    Args:
        heavy_hitters: whether half of the capacity goes to heavy hitters, the keys that received most
            attention from the prompt's queries; each KV head chooses them once, after the prompt. The
            other half then goes to the query's largest logits.
    """

    paper: ClassVar[str] = "arXiv 2306.14048 (H2O), Table 8"
    saves_memory: ClassVar[bool] = False

    heavy_hitters: bool = False

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        compressed = keep_all(layer)
        if not self.heavy_hitters:
            return compressed
        mass = group_mean(layer.attention_mass(), layer.keys.shape[1])
        return replace(compressed, scores=highest(mass, budget.capacity(layer.n) // 2).float())

    def restrict(self, held: Held, logits: Tensor) -> Tensor:
        entries = logits.shape[-1]
        if held.scores is None:
            return ~highest(logits, min(held.capacity, entries))
        heavy = (held.scores > 0).unsqueeze(1)
        free = min(held.capacity - held.capacity // 2, entries)
        return ~(heavy | highest(logits.masked_fill(heavy, float("-inf")), free))
