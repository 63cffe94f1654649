from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.kv import Budget, CompressedKV, LayerKV, gather_entries
from kvbench.methods._select import group_mean, positions_between, top_positions
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Pattern(Method):
    """Keeps the most recent tokens with half the capacity, and a pattern of older tokens with the other
    half (rounded down). There is no separate sink.

    Args:
        heavy_hitters: whether half of the older tokens (rounded down) are heavy hitters instead: for
            each KV head the keys outside the pattern that received most attention from the prompt, as
            in h2o.
    """

    paper: ClassVar[str] = "arXiv 2306.14048, Table 2 (patterns of arXiv 1904.10509)"

    heavy_hitters: bool = False

    @abstractmethod
    def pattern(self, older: int, count: int) -> Tensor:
        """Choose `count` of the positions 0 .. older - 1: [count] int64, ascending."""

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        batch, heads, n = layer.keys.shape[:3]
        capacity = budget.capacity(n)
        older_kept = capacity // 2
        older = n - (capacity - older_kept)
        heavy = older_kept // 2 if self.heavy_hitters else 0
        pattern = self.pattern(older, older_kept - heavy).to(layer.keys.device)
        chosen = pattern.expand(batch, heads, -1)
        if heavy:
            mass = group_mean(layer.attention_mass(), heads)[:, :, :older]
            outside = mass.scatter(-1, chosen, -1.0)
            chosen = torch.cat([chosen, top_positions(outside, heavy)], dim=-1).sort(-1).values
        positions = torch.cat([chosen, positions_between(layer, older, n)], dim=-1)
        return gather_entries(layer, positions)
