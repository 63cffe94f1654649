"""Logits bounded by a hyperbolic tangent, as in Gemma 2."""

from __future__ import annotations

from torch import Tensor


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Replace logits by softcap * tanh(logits / softcap), in place; return `logits`."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)
