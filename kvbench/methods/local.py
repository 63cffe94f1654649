from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.kernels.decode import Eviction
from kvbench.kv import Budget, CompressedKV, LayerKV, gather_entries
from kvbench.methods._select import positions_between
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Keeps the last `capacity` tokens and no sink: "Local" in the H2O paper.

    Departure: in H2O's baseline the cache does not grow while decoding (``decode=evict``). By default
    generated tokens stay, as in BalanceKV's tables and in `streaming_llm`, so that methods differ only
    in the prompt's entries that they keep.

    Args:
        decode: ``grow`` keeps generated tokens; ``evict`` drops the oldest entry for each of them.
    """

    paper: ClassVar[str] = "arXiv 2306.14048, baseline 'Local'"
    can_compress_again: ClassVar[bool] = True

    decode: Literal["grow", "evict"] = "grow"

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        n = layer.n
        return gather_entries(layer, positions_between(layer, n - budget.capacity(n), n))

    def eviction(self, capacity: int, sink: int) -> Eviction | None:
        return Eviction("oldest") if self.decode == "evict" else None
