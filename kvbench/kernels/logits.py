"""Attention's logits in torch and their softmax, as the models have them: products in float32, bounded
by a hyperbolic tangent (Gemma 2), with attention sinks (gpt-oss)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.quantize import CACHED


def products(query: Tensor, key: Tensor) -> Tensor:
    """Inner products of query [..., q, dim] with key [..., n, dim]: [..., q, n] in their dtype, but
    float32 where that has 16 bits: there a product may overflow before it is scaled, and it loses
    digits that the exponential makes visible."""
    if key.dtype not in (torch.float16, torch.bfloat16):
        return query @ key.mT
    query = query.float()
    if key.is_cuda:
        return query @ key.float().mT
    # On a CPU some keys at a time, whose float32 copies stay in its cache.
    keys_at_a_time = max(1, CACHED // max(1, key[..., :1, :].numel()))
    parts = key.split(keys_at_a_time, dim=-2)
    return torch.cat([query @ part.float().mT for part in parts], dim=-1)


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """Replace logits by softcap * tanh(logits / softcap), in place unless a gradient is wanted; return
    them."""
    if softcap is None:
        return logits
    if logits.requires_grad:
        return (logits / softcap).tanh() * softcap
    return logits.div_(softcap).tanh_().mul_(softcap)


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of logits [..., n] over the last dimension. With `sinks` of a shape that broadcasts to
    [...] the weights sum to 1 less the sink's own, and are 0 where all logits are -inf."""
    if sinks is None:
        return logits.softmax(-1)
    sinks = sinks[..., None].to(logits.dtype)
    largest = torch.maximum(logits.amax(-1, keepdim=True), sinks)
    exponentials = (logits - largest).exp_()
    total = exponentials.sum(-1, keepdim=True) + (sinks - largest).exp_()
    return exponentials / total if logits.requires_grad else exponentials.div_(total)
