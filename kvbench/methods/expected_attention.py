"""Expected Attention: the attention that queries to come are expected to pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors.options import Count, NonNegative, Whole
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import group_mean, top_positions
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Method):
    """Keeps the sink and the entries with the largest expected attention.

    Queries before position encoding are taken as Gaussian, with the mean and covariance of the prompt's;
    the encoding is averaged over the `future` positions that follow. With mean mu and covariance C so
    turned, z_i = mu.k_i / sqrt(d) + k_i C k_i / (2 d), and an entry's score is the softmax of z over all
    entries but the sink, averaged over the group, times its value's norm. There is no window.

    A bound on the logits (softcap) is left out of z, whose mean over a Gaussian it would take away.

    As kvpress's ExpectedAttentionPress computes it, in float32 throughout (theirs: the model's dtype for
    the statistics); it keeps int(n (1 - ratio)) entries, here the capacity.

    Args:
        future: positions averaged over. sink: leading tokens that the statistics leave out and that are
            always kept, null: the budget's.
        covariance: use C. value_norm: multiply by the norms. epsilon: added to the softmax before.
    """

    paper: ClassVar[str] = "arXiv 2510.00636; kvpress ExpectedAttentionPress"

    future: Count = 512
    sink: Whole | None = None
    covariance: bool = True
    value_norm: bool = True
    epsilon: NonNegative = 0.0

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """The best-scored positions, ascending.

        Raises:
            KVError: a prompt within the sink, or the layer lacks queries or its rotary table.
        """
        capacity = budget.capacity(layer.n)
        return gather_entries(layer, top_positions(self.token_scores(layer, budget), capacity))

    def token_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        """See `Method.token_scores`; the sink has the largest score and 1."""
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
        turn = mean_rotation(layer, n, self.future)
        turned = mean @ turn.mT
        keys = layer.keys[:, :, sink:].float()
        group = queries.shape[1] // kv_heads
        grouped = turned.view(batch, kv_heads, group, dim)
        z = torch.einsum("bhgd,bhnd->bhgn", grouped, keys) * layer.scaling
        if self.covariance:
            off = queries.sub_(mean[:, :, None])  # they are ours: a prompt's queries are large
            spread = turn @ (off.mT @ off / off.shape[2]) @ turn.mT
            spread = spread.view(batch, kv_heads, group, dim, dim)
            half = layer.scaling**2 / 2
            for head in range(group):  # a product [n, d] at a time
                pushed = keys @ spread[:, :, head]
                z[:, :, head] += half * pushed.mul_(keys).sum(-1)
        scores = group_mean(z.softmax(-1).flatten(1, 2), kv_heads)
        if self.value_norm:
            scores = (scores + self.epsilon) * layer.values[:, :, sink:].float().norm(dim=-1)
        first = (scores.amax() + 1).expand(batch, kv_heads, sink)
        return torch.cat([first, scores], dim=-1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Vectors [..., p, dim] turned by a table [p, width]: halves of the first `width` channels."""
    width, half = cos.shape[-1], cos.shape[-1] // 2
    out = torch.empty_like(x)
    torch.mul(x[..., :width], cos, out=out[..., :width])
    out[..., :half].addcmul_(x[..., half:width], sin[..., :half], value=-1.0)
    out[..., half:width].addcmul_(x[..., :half], sin[..., half:])
    out[..., width:] = x[..., width:]
    return out


def _rotation(layer: LayerKV, positions: Tensor) -> tuple[Tensor, Tensor]:
    if layer.rotary is None:
        raise KVError(
            f"layer {layer.layer_index} has no rotary table of the usual kind; expected_attention is "
            "allowed on models with rotary positions whose halves are rotated"
        )
    cos, sin = layer.rotary(positions)
    return cos.float(), sin.float()


def plain_queries(layer: LayerKV) -> Tensor:
    """All prompt queries that are not withheld, as before position encoding; float32.

    Raises:
        KVError: no rotary table, or not all queries.
    """
    have = 0 if layer.queries is None else layer.queries.shape[2]
    if layer.queries is None or have != layer.n - layer.withheld:
        raise KVError(
            f"layer {layer.layer_index} holds {have} of {layer.n - layer.withheld} prompt queries; "
            "expected_attention needs all of them"
        )
    cos, sin = _rotation(layer, torch.arange(have, device=layer.queries.device))
    length = cos.square() + sin.square()
    return turned(layer.queries.float(), cos / length, -sin / length)


def mean_rotation(layer: LayerKV, start: int, count: int) -> Tensor:
    """Position encoding as a matrix [head_dim, head_dim] that turns a query, mean over the positions
    start .. start + count - 1.

    Raises:
        KVError: no rotary table.
    """
    device, dim = layer.keys.device, layer.keys.shape[-1]
    cos, sin = _rotation(layer, torch.arange(start, start + count, device=device))
    return turned(torch.eye(dim, device=device), cos.mean(0), sin.mean(0)).mT
