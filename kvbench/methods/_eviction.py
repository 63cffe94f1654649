"""The rule by which entries leave a full cache while tokens come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Eviction:
    """Which entry of each KV head leaves a full cache, once a token has joined: of those that are
    neither sink nor recent the oldest, or the one of least (most) accumulated attention.

    Attributes:
        leaves: oldest | lightest | heaviest. The latter two go by `Held.scores`, to which the attention
            of every token is added.
        sink: tokens at positions below it stay.
        recent: so many of the newest tokens stay, the one that joined included.
    """

    leaves: Literal["oldest", "lightest", "heaviest"]
    sink: int = 0
    recent: int = 0

    def choose(self, scores: Tensor | None, positions: Tensor) -> Tensor:
        """Index [kv_heads] of the entry that leaves, the first on a tie; scores [kv_heads, c] float32
        (not read with `oldest`), positions [kv_heads, c], the newest entry last."""
        worth = positions
        if self.leaves != "oldest":
            assert scores is not None
            worth = scores if self.leaves == "lightest" else -scores
        most = torch.inf if worth.is_floating_point() else torch.iinfo(worth.dtype).max
        if self.sink:
            worth = worth.masked_fill(positions < self.sink, most)
        if self.recent:
            # Tokens come one position after the other, and recent ones never leave.
            worth = worth.masked_fill(positions > positions[:, -1:] - self.recent, most)
        return worth.argmin(-1)
