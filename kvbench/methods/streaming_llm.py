"""StreamingLLM: attention sinks and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.kernels.eviction import Eviction
from kvbench.kv import Budget, CompressedKV, LayerKV, gather_entries
from kvbench.methods._select import positions_between
from kvbench.methods.base import Band, Method


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Method):
    """Keeps the first `sink` tokens and the most recent ones, `capacity` in all.

    Departure: the paper renumbers positions inside the cache, which `task=stream` alone does here.

    Args:
        decode: grow (generated tokens stay, as in the tables the method is compared in) | evict (the
            paper's rolling cache: each new token pushes out the oldest one after the sink).
    """

    paper: ClassVar[str] = "arXiv 2309.17453, section 3.2"
    recompresses: ClassVar[bool] = True

    decode: Literal["grow", "evict"] = "grow"

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Sink, then the last capacity - sink entries, ascending."""
        n = layer.n
        recent = budget.capacity(n) - budget.sink
        sink = positions_between(layer, 0, budget.sink)
        positions = torch.cat([sink, positions_between(layer, n - recent, n)], dim=-1)
        return gather_entries(layer, positions)

    def eviction(self, capacity: int, sink: int) -> Eviction | None:
        """The oldest entry after the sink leaves, with ``decode=evict``."""
        return Eviction("oldest", sink=sink) if self.decode == "evict" else None

    def reading(self, budget: Budget) -> Band | None:
        """Sink, and what the size leaves."""
        return None if budget.size is None else Band(budget.sink, budget.size - budget.sink)
