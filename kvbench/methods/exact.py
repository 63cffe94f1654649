from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Keeps every entry of every layer; no budget applies."""

    paper: ClassVar[str] = "the exact cache (no compression)"
    saves_memory: ClassVar[bool] = False
    uses_budget: ClassVar[bool] = False

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        return keep_all(layer)

    @property
    def is_exact(self) -> bool:
        return self.quantize is None
