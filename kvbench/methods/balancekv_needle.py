"""BalanceKV that protects tokens whose keys point away from those around them."""

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

    At one layer the mean of <k_i, k_j> over the block of the middle that holds token i, keys not
    centred, is compared with a threshold: tokens at or below it, and those within `dilation` places
    of one, are protected there and in every later layer, each KV head by itself. Earlier layers are
    compressed without protection. Protected entries have weight 1.

    Departure: protected tokens count against the budget. The others are halved down to what they
    leave of it; where they alone are too many, those of the lowest mean are protected, the earlier
    ones on a tie.

    Args:
        threshold: of the mean inner product; lower protects less.
        dilation: places around a token below the threshold that are protected too.
        layer: 0-based index of the layer that decides.
    """

    paper: ClassVar[str] = "arXiv 2502.07861, section 4.3"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    weights: Literal["entry", "none"] = "entry"
    threshold: float = 0.0
    dilation: Whole = 25
    layer: Whole = 1

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Sink, protected tokens and survivors by position, window.

        Raises:
            KVError: a later layer than `layer`, of a prompt at which `layer` was not seen.
        """
        if layer.layer_index < self.layer:
            return super().compress(layer, budget, generator)
        means = self._means(layer, budget)
        batch, heads, middle = means.shape
        # One draw for every halving any head may need, shared by the rows of a batch.
        draws = [
            _draws.uniforms(generator, means.device, heads, math.ceil((middle >> step) / b), b)
            for step, b in enumerate(per_halving(self, "block_size", middle.bit_length()))
        ]
        chosen = [
            self._one_head(layer, budget, means[row, head], draws, row, head)
            for row in range(batch)
            for head in range(heads)
        ]
        positions, weights = side_by_side(chosen, 0.0)
        positions, weights = (x.unflatten(0, (batch, heads)) for x in (positions, weights))
        plain = replace(self, normalise=False, order="position")
        return plain._weighted(layer, budget, positions, weights, [])

    def _means(self, layer: LayerKV, budget: Budget) -> Tensor:
        """Each token's mean inner product, lowered to the least within `dilation`: [.., middle]."""
        options = (self.layer, self.dilation, self.block_size, budget)
        name = "/".join(map(str, ("balancekv_needle", *options)))
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
        """Kept prompt positions of the middle of one head, ascending, and their weights."""
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
        rate = budget.rate_of(layer.n) if not len(protected) else room / len(left)
        plan = plan_halvings(len(left), rate, room)
        uniforms = [
            draw[:, head : head + 1, : math.ceil(size / draw.shape[3])]
            for draw, (_, size) in zip(draws, plan, strict=False)
        ]
        survivors, weights = self.select(
            layer.keys[row : row + 1, head : head + 1],
            layer.values[row : row + 1, head : head + 1],
            uniforms,
            plan=plan,
            order=(left + budget.sink).view(1, 1, -1),
        )
        survivors, weights = survivors[0, 0], weights[0, 0]
        if self.normalise:
            weights = weights * (len(left) / weights.sum().clamp(min=1.0))
        positions, order = torch.cat([protected + budget.sink, survivors]).sort()
        exact = torch.ones_like(protected, dtype=weights.dtype)
        return positions, torch.cat([exact, weights])[order]


def needle_means(keys: Tensor, block_size: int, dilation: int) -> Tensor:
    """Mean over its block of <k_i, k_j>, then the least of it within `dilation`: [batch, heads, n].

    Args:
        keys: [batch, heads, n, dim], not centred; cut into blocks of `block_size` from the start,
            the last one as short as it comes.
    """
    batch, heads, n, dim = keys.shape
    blocks = math.ceil(n / block_size)
    padded = F.pad(keys, (0, 0, 0, blocks * block_size - n))
    padded = padded.view(batch, heads, blocks, block_size, dim)
    sizes = (n - torch.arange(blocks, device=keys.device) * block_size).clamp(max=block_size)
    mean_key = padded.sum(3, keepdim=True) / sizes.view(-1, 1, 1)
    means = (padded * mean_key).sum(-1).view(batch, heads, -1)[:, :, :n]
    return -F.max_pool1d(-means, 2 * dilation + 1, stride=1, padding=dilation)
