"""StreamingLLM: attention sinks and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv import Budget, CompressedKV, LayerKV, gather_entries
from kvbench.methods._select import positions_between
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Method):
    """Keeps the first `sink` tokens and the most recent ones, `capacity` in all.

    Departure: the paper's own cache keeps rolling while decoding and renumbers positions inside the
    cache; here, as in the tables it is compared in, generated tokens stay and keep their positions.
    """

    paper: ClassVar[str] = "arXiv 2309.17453, section 3.2"

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Sink, then the last capacity - sink entries, ascending."""
        n = layer.n
        recent = budget.capacity(n) - budget.sink
        sink = positions_between(layer, 0, budget.sink)
        positions = torch.cat([sink, positions_between(layer, n - recent, n)], dim=-1)
        return gather_entries(layer, positions)
