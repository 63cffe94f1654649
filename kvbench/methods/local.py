"""Local attention: only the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.kv import Budget, CompressedKV, LayerKV, gather_entries
from kvbench.methods._select import oldest_leaves, positions_between
from kvbench.methods.base import Held, Method


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Keeps the last `capacity` tokens and no sink: "Local" in the H2O paper.

    Departure: H2O's baseline keeps its size while decoding, every new token pushing out the oldest
    one, which is ``decode=evict``. By default generated tokens stay, the protocol of BalanceKV's tables
    and the default of `streaming_llm`: the methods then differ in what they keep of the prompt only.

    Args:
        decode: grow (generated tokens stay) | evict (each pushes out the oldest one, as in H2O).
    """

    paper: ClassVar[str] = "arXiv 2306.14048, baseline 'Local'"
    recompresses: ClassVar[bool] = True

    decode: Literal["grow", "evict"] = "grow"

    @property
    def evicts(self) -> bool:
        """True for ``decode=evict``."""
        return self.decode == "evict"

    def band(self, budget: Budget) -> tuple[int, int] | None:
        """The size."""
        return None if budget.size is None else (0, budget.size)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """The last `capacity` entries, ascending."""
        n = layer.n
        return gather_entries(layer, positions_between(layer, n - budget.capacity(n), n))

    def evict(self, held: Held, attention: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The oldest entry leaves, once the cache is over its capacity."""
        return None, oldest_leaves(held, sink=0)
