"""Attention sinks: one more logit of each query head in its softmax, whose value is 0 (gpt-oss)."""

from __future__ import annotations

import torch
from torch import Tensor


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
