"""Bounded logits, as Gemma 2 has them."""

from __future__ import annotations

from torch import Tensor


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logits / softcap), in place of `logits`; None leaves them as they are."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
