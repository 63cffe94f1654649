"""Local attention: only the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv import Budget, CompressedKV, LayerKV, gather_entries
from kvbench.methods._select import positions_between
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Keeps the last `capacity` tokens and no sink: "Local" in the H2O paper."""

    paper: ClassVar[str] = "arXiv 2306.14048, baseline 'Local'"

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """The last `capacity` entries, ascending."""
        n = layer.n
        return gather_entries(layer, positions_between(layer, n - budget.capacity(n), n))
