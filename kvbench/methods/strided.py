"""Strided attention of the Sparse Transformer: a local window and every k-th token before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.methods._pattern import Pattern


@dataclass(frozen=True, kw_only=True)
class Strided(Pattern):
    """Half the capacity for the most recent tokens, half for every k-th token before them.

    k = older / count is solved from the capacity and not rounded, so that the budget is spent
    exactly. Of an odd capacity the odd entry is local; there is no separate sink.

    Args:
        heavy_hitters: half of the strided half (rounded down) goes to those other keys that
            received most attention from the prompt, as in h2o, per KV head.
    """

    def pattern(self, older: int, count: int) -> Tensor:
        """Positions floor(i * older / count) - 1 for i = 1 .. count: the last is older - 1."""
        return torch.arange(1, count + 1) * older // max(count, 1) - 1
