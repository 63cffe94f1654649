"""What the position of a key alone adds to attention's logits (ALiBi)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PositionBias:
    """A slope per head times the key's position, rounded where the model rounds it.

    The distance to the query would do the same: a softmax does not see what all its logits share. So a
    key needs its own position and no other, and keeps it when other keys are evicted.

    Attributes:
        slopes: [kv_heads], in the dtype that the model multiplies in. Every KV head has one query head.
        dtype: of the product, before it is divided.
        divisor: of the product (Falcon scales it with the logits).
    """

    slopes: Tensor
    dtype: torch.dtype = torch.float32
    divisor: float = 1.0

    def at(self, positions: Tensor) -> Tensor:
        """The logits' addend of keys at positions [n] or [..., kv_heads, n] int64: [..., kv_heads, n]
        float32."""
        product = self.slopes[:, None] * positions.to(self.slopes.device)
        return (product.to(self.dtype) / self.divisor).float()

    def of_head(self, head: int) -> PositionBias:
        """That of one KV head."""
        return replace(self, slopes=self.slopes[head : head + 1])
