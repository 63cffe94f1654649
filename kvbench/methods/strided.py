from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.methods._pattern import Pattern


@dataclass(frozen=True, kw_only=True)
class Strided(Pattern):
    """Keeps the most recent tokens with half the capacity, and with the other half (rounded down) every
    k-th older token. There is no separate sink.

    The stride k is the number of older tokens over the number that is kept. It is not rounded, so that
    the budget is spent exactly.

    Args:
        heavy_hitters: see `Pattern`.
    """

    def pattern(self, older: int, count: int) -> Tensor:
        return torch.arange(1, count + 1) * older // max(count, 1) - 1
