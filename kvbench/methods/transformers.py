"""The exact cache as transformers decodes it: a second witness of seconds, no compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Transformers(Method):
    """Exact decoding by transformers' own `generate` and `StaticCache`, of which nothing is kvbench's.

    An arm of task=throughput, which measures it beside `exact` at the same weights, lengths and batch:
    their ratio says whether the yardstick of that table is a fast one. Every other task refuses it.

    Attributes:
        attention: the backend, as transformers names it; the flash ones need their packages and a GPU.
        compiled: whether the decode step goes through torch.compile on a GPU; on a CPU it never does.
    """

    paper: ClassVar[str] = "transformers' StaticCache with torch.compile (no compression)"
    saves_memory: ClassVar[bool] = False
    uses_budget: ClassVar[bool] = False
    decoded_by: ClassVar[str] = "transformers"

    attention: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    compiled: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantize is not None:
            raise KVError(f"transformers.quantize is {self.quantize}; allowed: null")

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """All entries, without a copy."""
        return keep_all(layer)
