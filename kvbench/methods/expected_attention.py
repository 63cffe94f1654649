from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors.options import Count, NonNegative, Whole
from kvbench.kernels.rotation import rotate, unrotate
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import group_mean, top_positions
from kvbench.methods.base import TokenScoringMethod


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(TokenScoringMethod):
    """Keeps the sink and the entries with the largest expected attention.

    Queries before position encoding are modelled as Gaussian with the mean and covariance of the
    prompt's queries. The rotation of position encoding is averaged over the next `future` positions and
    applied to both. With the rotated mean mu and covariance C, entry i has z_i = mu.k_i / sqrt(d) + k_i
    C k_i / (2 d). Its score is the softmax of z over all entries outside the sink, averaged over the
    group, times the norm of its value. There is no window.

    A bound on the logits (softcap) is ignored, since with it the mean over the Gaussian has no closed
    form.

    The definition is that of kvpress's ExpectedAttentionPress, in float32 throughout (kvpress computes
    the statistics in the model's dtype). kvpress keeps int(n (1 - ratio)) entries; here it is the
    capacity.

    Args:
        future: the number of positions over which the rotation is averaged.
        sink: how many of the first tokens are always kept and left out of the statistics; null for the
            budget's sink.
        covariance: whether z contains the covariance term.
        value_norm: whether scores are multiplied by the norms of values.
        epsilon: the number added to the softmax before this multiplication.
    """

    paper: ClassVar[str] = "arXiv 2510.00636; kvpress ExpectedAttentionPress"

    future: Count = 512
    sink: Whole | None = None
    covariance: bool = True
    value_norm: bool = True
    epsilon: NonNegative = 0.0

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        capacity = budget.capacity(layer.n)
        return gather_entries(layer, top_positions(self.checked_scores(layer, budget), capacity))

    def token_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        sink = budget.sink if self.sink is None else self.sink
        batch, kv_heads, n, dim = layer.keys.shape
        if sink > budget.capacity(n):
            raise KVError(
                f"expected_attention.sink is {sink}; allowed: at most the capacity, {budget.capacity(n)}"
            )
        if n <= sink:
            raise KVError(
                f"expected_attention has a prompt of {n} tokens; allowed: more than {sink}"
            )
        queries = plain_queries(layer)[:, :, sink:]
        mean = queries.mean(2)
        rotation = mean_rotation(layer, n, self.future)
        keys = layer.keys[:, :, sink:].float()
        group = queries.shape[1] // kv_heads
        rotated_mean = (mean @ rotation.mT).view(batch, kv_heads, group, dim)
        z = torch.einsum("bhgd,bhnd->bhgn", rotated_mean, keys) * layer.scaling
        if self.covariance:
            # In place, to save memory: `plain_queries` has made a copy.
            centred = queries.sub_(mean[:, :, None])
            covariance = rotation @ (centred.mT @ centred / centred.shape[2]) @ rotation.mT
            covariance = covariance.view(batch, kv_heads, group, dim, dim)
            # One query head at a time, so that only one product [n, dim] exists per KV head.
            for head in range(group):
                products = (keys @ covariance[:, :, head]).mul_(keys)
                z[:, :, head] += layer.scaling**2 / 2 * products.sum(-1)
        scores = group_mean(z.softmax(-1).flatten(1, 2), kv_heads)
        if self.value_norm:
            scores = (scores + self.epsilon) * layer.values[:, :, sink:].float().norm(dim=-1)
        sink_scores = (scores.amax() + 1).expand(batch, kv_heads, sink)
        return torch.cat([sink_scores, scores], dim=-1)


def _rotation(layer: LayerKV, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's cosines and sines [p, width] at positions [p], float32."""
    if layer.rotary is None:
        raise KVError(
            f"layer {layer.layer_index} has no rotary table of the usual kind; expected_attention is "
            "allowed on layers whose first channels are rotated by halves, or none"
        )
    cos, sin = layer.rotary(positions)
    return cos.float(), sin.float()


def plain_queries(layer: LayerKV) -> Tensor:
    """Undo the position encoding of the prompt's queries: [batch, heads, n - withheld, head_dim]
    float32, a copy.
    """
    available = 0 if layer.queries is None else layer.queries.shape[2]
    if layer.queries is None or available != layer.n - layer.withheld:
        raise KVError(
            f"layer {layer.layer_index} holds {available} of {layer.n - layer.withheld} prompt queries; "
            "expected_attention needs all of them"
        )
    cos, sin = _rotation(layer, torch.arange(available, device=layer.queries.device))
    return unrotate(layer.queries.float(), cos, sin)


def mean_rotation(layer: LayerKV, start: int, count: int) -> Tensor:
    """The mean of the rotation matrices [head_dim, head_dim] of the positions start .. start + count -
    1. A rotation matrix times a query is the query after position encoding.
    """
    device, dim = layer.keys.device, layer.keys.shape[-1]
    cos, sin = _rotation(layer, torch.arange(start, start + count, device=device))
    return rotate(torch.eye(dim, device=device), cos.mean(0), sin.mean(0)).mT
