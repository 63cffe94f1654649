"""Exact decoding by the transformers library, whose time is a check of kvbench's own exact decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Transformers(Method):
    """Exact decoding by transformers' own `generate` and `StaticCache`, without any code of kvbench.

    Only task=throughput runs it, beside `exact` at the same weights, lengths and batch. The ratio of
    their times shows whether `exact`, to which that table compares, is fast. Every other task refuses
    it.

    Args:
        attention: the attention backend by transformers' name; ``flash_attention_*`` need their packages
            and a GPU.
        compiled: whether the decode step is compiled by torch.compile; on a CPU it never is.
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
        """Keep all entries, without a copy."""
        return keep_all(layer)
