from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors.options import Whole
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV
from kvbench.methods import _draws
from kvbench.methods._select import side_by_side
from kvbench.methods.balancekv import BalanceKV, per_halving, plan_halvings


@dataclass(frozen=True, kw_only=True)
class BalanceKVNeedle(BalanceKV):
    """Keeps protected tokens of the middle exactly, and runs BalanceKV on the others.

    The middle is cut into blocks. At the layer `layer`, every token i has a mean inner product: the mean
    of <k_i, k_j> over the tokens j of its block, keys not centred. Tokens whose mean is at most
    `threshold` are protected, and so are the tokens within `dilation` places of them, in this layer and
    all later ones. Every KV head protects tokens of its own. Protected entries have weight 1. Earlier
    layers are compressed without protection.

    Departure: protected tokens count against the budget, and the other tokens are halved to fill the
    rest of it. Where the budget cannot hold all protected tokens, those of the lowest means are kept,
    the earlier ones on a tie.

    Args:
        threshold: the largest mean inner product that is protected.
        dilation: how many tokens on each side of such a token are protected too.
        layer: the 0-based index of the layer that decides.
    """

    paper: ClassVar[str] = "arXiv 2502.07861, section 4.3"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    weights: Literal["entry", "none"] = "entry"
    threshold: float = 0.0
    dilation: Whole = 25
    layer: Whole = 1

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        if layer.layer_index < self.layer:
            return super().compress(layer, budget, generator)
        means = self._means(layer, budget)
        batch, heads, middle = means.shape
        # Draws for as many halvings as any head may need; the rows of a batch share them.
        draws = [
            _draws.uniforms(
                generator, means.device, heads, math.ceil((middle >> step) / size), size
            )
            for step, size in enumerate(per_halving(self, "block_size", middle.bit_length()))
        ]
        chosen = [
            self._one_head(layer, budget, means[row, head], draws, row, head)
            for row in range(batch)
            for head in range(heads)
        ]
        positions, weights = side_by_side(chosen, 0.0)
        positions = positions.unflatten(0, (batch, heads))
        weights = weights.unflatten(0, (batch, heads))
        # `_one_head` has ordered the entries and normalised their weights already.
        finished = replace(self, normalise=False, order="position")
        return finished._weighted(layer, budget, positions, weights, [])

    def _means(self, layer: LayerKV, budget: Budget) -> Tensor:
        """The least mean inner product within `dilation` of each middle token, at the layer that
        decides: [batch, kv_heads, middle]. Later layers read it from `LayerKV.carried`."""
        name = f"balancekv_needle/{self.layer}/{self.dilation}/{self.block_size}/{budget}"
        if layer.layer_index == self.layer:
            middle = layer.keys[:, :, budget.sink : layer.n - budget.window]
            layer.carried[name] = needle_means(
                middle.float(), per_halving(self, "block_size", 1)[0], self.dilation
            )
        if name not in layer.carried:
            raise KVError(
                f"balancekv_needle.layer is {self.layer}, a layer that was not seen before layer "
                f"{layer.layer_index}; allowed: a layer that is compressed"
            )
        return layer.carried[name]

    def _one_head(
        self,
        layer: LayerKV,
        budget: Budget,
        means: Tensor,
        draws: list[Tensor],
        row: int,
        head: int,
    ) -> tuple[Tensor, Tensor]:
        """The prompt positions that one head keeps of the middle, ascending, and their weights."""
        kept = budget.middle_kept(layer.n)
        protected = (means <= self.threshold).nonzero().squeeze(-1)
        if len(protected) > kept:
            lowest = means[protected].argsort(stable=True)[:kept]
            protected = protected[lowest].sort().values
        others = torch.ones_like(means, dtype=torch.bool)
        others[protected] = False
        left = others.nonzero().squeeze(-1)
        room = kept - len(protected)
        if not room or not len(left):
            return protected + budget.sink, torch.ones(len(protected), device=means.device)
        rate = room / len(left) if len(protected) else budget.rate_of(layer.n)
        plan = plan_halvings(len(left), rate, room)
        uniforms = [
            draw[:, head : head + 1, : math.ceil(halving.halved / draw.shape[3])]
            for draw, halving in zip(draws, plan, strict=False)
        ]
        one_head = slice(row, row + 1), slice(head, head + 1)
        order = (left + budget.sink).view(1, 1, -1)
        survivors, weights = self.select(
            layer.keys[one_head], layer.values[one_head], uniforms, plan=plan, order=order
        )
        survivors = survivors[0, 0]
        weights = weights[0, 0]
        if self.normalise:
            weights = weights * (len(left) / weights.sum().clamp(min=1.0))
        positions, order = torch.cat([protected + budget.sink, survivors]).sort()
        exact = torch.ones_like(protected, dtype=weights.dtype)
        return positions, torch.cat([exact, weights])[order]


def needle_means(keys: Tensor, block_size: int, dilation: int) -> Tensor:
    """Each token's mean of <k_i, k_j> over its block, then the least of these means within `dilation` of
    the token: [batch, heads, n].

    Args:
        keys: [batch, heads, n, dim], not centred. They are cut into blocks of `block_size` from the
            start; the last block may be shorter.
    """
    batch, heads, n, dim = keys.shape
    blocks = math.ceil(n / block_size)
    padded = F.pad(keys, (0, 0, 0, blocks * block_size - n))
    padded = padded.view(batch, heads, blocks, block_size, dim)
    sizes = (n - torch.arange(blocks, device=keys.device) * block_size).clamp(max=block_size)
    mean_key = padded.sum(3, keepdim=True) / sizes.view(-1, 1, 1)
    means = (padded * mean_key).sum(-1).view(batch, heads, -1)[:, :, :n]
    return -F.max_pool1d(-means, 2 * dilation + 1, stride=1, padding=dilation)
