"""Fixed sparse patterns: a local window, a pattern of older tokens, and heavy hitters on request."""

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
    """Half the capacity for the most recent tokens, half for a pattern of older ones.

    Of an odd capacity the odd entry is local. There is no separate sink.

    Args:
        heavy_hitters: half of the pattern's half (rounded down) goes to those keys outside the
            pattern that received most attention from the prompt, as in h2o, per KV head.
    """

    paper: ClassVar[str] = "arXiv 2306.14048, Table 2 (patterns of arXiv 1904.10509)"

    heavy_hitters: bool = False

    @abstractmethod
    def pattern(self, older: int, count: int) -> Tensor:
        """Which `count` of the positions 0 .. older - 1 are kept: int64, ascending."""

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Pattern and heavy hitters, ascending, then the recent tokens.

        Raises:
            KVError: with heavy_hitters, the layer does not hold all prompt queries.
        """
        batch, heads, n = layer.keys.shape[:3]
        far = budget.capacity(n) // 2
        older = n - (budget.capacity(n) - far)
        heavy = far // 2 if self.heavy_hitters else 0
        chosen = self.pattern(older, far - heavy).to(layer.keys.device).expand(batch, heads, -1)
        if heavy:
            mass = group_mean(layer.attention_mass(), heads)[:, :, :older].scatter(-1, chosen, -1.0)
            chosen = torch.cat([chosen, top_positions(mass, heavy)], dim=-1).sort(-1).values
        positions = torch.cat([chosen, positions_between(layer, older, n)], dim=-1)
        return gather_entries(layer, positions)
