from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.kernels.decode import Eviction
from kvbench.kv import Budget, CompressedKV, LayerKV, gather_entries
from kvbench.methods._select import positions_between
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Method):
    """Keeps the first `sink` tokens and the most recent ones, `capacity` in all.

    Departure: the paper renumbers positions inside the cache; here only scripts/papers/streams.py does.

    Args:
        decode: ``grow`` keeps generated tokens, as in the tables of papers that compare with this
            method; ``evict`` is the paper's rolling cache, in which the oldest entry after the sink
            leaves for each new token.
    """

    paper: ClassVar[str] = "arXiv 2309.17453, section 3.2"
    can_compress_again: ClassVar[bool] = True

    decode: Literal["grow", "evict"] = "grow"

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        recent = budget.capacity(layer.n) - budget.sink
        sink_positions = positions_between(layer, 0, budget.sink)
        recent_positions = positions_between(layer, layer.n - recent, layer.n)
        positions = torch.cat([sink_positions, recent_positions], dim=-1)
        return gather_entries(layer, positions)

    def eviction(self, capacity: int, sink: int) -> Eviction | None:
        return Eviction("oldest", sink=sink) if self.decode == "evict" else None
