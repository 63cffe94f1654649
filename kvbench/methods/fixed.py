"""Fixed attention of the Sparse Transformer: a local window and the end of every block before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.errors.options import Count
from kvbench.methods._pattern import Pattern


@dataclass(frozen=True, kw_only=True)
class Fixed(Pattern):
    """Half the capacity for the most recent tokens, half for the last c tokens of every block.

    The older tokens are cut into round(count / c) blocks of equal length l (not rounded) for `count`
    entries; positions are taken by their distance from the end of their block, later blocks first
    on a tie, until the budget is spent exactly. Of an odd capacity the odd entry is local; there is
    no separate sink.

    Args:
        summary: c, tokens kept at the end of a block.
        heavy_hitters: half of the blocks' half (rounded down) goes to those other keys that
            received most attention from the prompt, as in h2o, per KV head.
    """

    summary: Count = 8

    def pattern(self, older: int, count: int) -> Tensor:
        """The `count` positions nearest to the end of their block, ascending."""
        blocks = max(1, round(count / self.summary))
        ends = torch.arange(1, blocks + 1) * older // blocks - 1
        place = torch.arange(older)
        from_end = ends[torch.searchsorted(ends, place)] - place
        by_distance = (from_end * older + (older - 1 - place)).argsort()
        return by_distance[:count].sort().values
