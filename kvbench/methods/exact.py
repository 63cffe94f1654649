"""The uncompressed cache, the yardstick of every table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods.base import Band, Method


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Keeps every entry of every layer; no budget applies."""

    paper: ClassVar[str] = "the exact cache (no compression)"
    saves_memory: ClassVar[bool] = False
    uses_budget: ClassVar[bool] = False

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Keep all entries, without a copy."""
        return keep_all(layer)

    def reading(self, budget: Budget) -> Band | None:
        """All earlier tokens. With `quantize` no stream can be read, since its entries cannot be
        packed."""
        return Band(0, None) if self.quantize is None else None
