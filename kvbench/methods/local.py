"""Local attention: only the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.kernels.eviction import Eviction
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import positions_between
from kvbench.methods.base import Band, Method


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Keeps the last `capacity` tokens and no sink: "Local" in the H2O paper.

    Departure: H2O's baseline keeps its size while decoding, every new token pushing out the oldest
    one, which is ``decode=evict``. By default generated tokens stay, the protocol of BalanceKV's tables
    and the default of `streaming_llm`: the methods then differ in what they keep of the prompt only.

    Args:
        decode: grow (generated tokens stay) | evict (each pushes out the oldest one, as in H2O).
        recompute: of streams (``task=stream``): nothing is held, and every token comes from a fresh pass
            over the last ``budget.size`` tokens ("re-computation" of arXiv 2309.17453).
    """

    paper: ClassVar[str] = "arXiv 2306.14048, baseline 'Local'"
    recompresses: ClassVar[bool] = True

    decode: Literal["grow", "evict"] = "grow"
    recompute: bool = False

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """The last `capacity` entries, ascending.

        Raises:
            KVError: ``recompute``, which holds nothing.
        """
        if self.recompute:
            raise KVError("local.recompute is true; allowed: for streams, which task=stream reads")
        n = layer.n
        return gather_entries(layer, positions_between(layer, n - budget.capacity(n), n))

    def eviction(self, capacity: int, sink: int) -> Eviction | None:
        """The oldest entry leaves, with ``decode=evict``."""
        return Eviction("oldest") if self.decode == "evict" and not self.recompute else None

    def reading(self, budget: Budget) -> Band | None:
        """A query sees the last `budget.size` tokens."""
        return None if budget.size is None else Band(0, budget.size, self.recompute)
