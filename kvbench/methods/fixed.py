from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.errors.options import Count
from kvbench.methods._pattern import Pattern


@dataclass(frozen=True, kw_only=True)
class Fixed(Pattern):
    """Keeps the most recent tokens with half the capacity, and with the other half (rounded down) about
    the last `summary` tokens of every block of older tokens. There is no separate sink.

    To keep `count` older tokens they are cut into round(count / summary) blocks of equal length. Tokens
    are taken by their distance from the end of their block, later blocks first on a tie, until exactly
    `count` are kept.

    Args:
        summary: the number of tokens kept at the end of a block.
        heavy_hitters: see `Pattern`.
    """

    summary: Count = 8

    def pattern(self, older: int, count: int) -> Tensor:
        blocks = max(1, round(count / self.summary))
        ends = torch.arange(1, blocks + 1) * older // blocks - 1
        positions = torch.arange(older)
        to_end = ends[torch.searchsorted(ends, positions)] - positions
        # At equal distances later positions come first.
        by_distance = (to_end * older + (older - 1 - positions)).argsort()
        return by_distance[:count].sort().values
