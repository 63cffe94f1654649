"""Logits bounded by a hyperbolic tangent, as in Gemma 2."""

from __future__ import annotations

from torch import Tensor


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Replace logits by softcap * tanh(logits / softcap), in place unless a gradient is wanted; return
    them."""
    if softcap is None:
        return logits
    if logits.requires_grad:
        return (logits / softcap).tanh() * softcap
    return logits.div_(softcap).tanh_().mul_(softcap)
