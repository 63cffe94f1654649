from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import by_largest_remainder, top_positions
from kvbench.methods.base import Method

IMPORTANCE, ALIVE = "importance", "alive"
"""The names in `LayerKV.carried` of the tokens' importance, and of the mask of tokens that are not
dropped."""


@dataclass(frozen=True, kw_only=True)
class SpAtten(Method):
    """Cascade token pruning: a token dropped at a layer stays dropped in all later ones.

    A token's importance is the softmax attention it received from all prompt queries, summed over the
    heads of this layer and of all earlier layers. Layer l keeps the most important of the tokens that
    layer l - 1 kept, the same for every head. The number of tokens falls linearly over the first third
    of the layers and is constant after it; the mean over the layers is the capacity.

    With m = ceil(num_layers / 3), layer l < m keeps last + (high - last) (m - 1 - l) / m tokens and
    later layers keep `last`. `high` is n, unless `last` would then be less than half the capacity. The
    numbers are rounded by largest remainder, so that their sum is exactly num_layers * capacity.

    Departures from the accelerator's design: tokens are pruned after the prefill, which is exact;
    there is no head pruning and no local value pruning; generated tokens stay.
    """

    paper: ClassVar[str] = "arXiv 2012.09852, as in arXiv 2306.14048, Table 11"

    def layer_capacities(self, budget: Budget, n: int, num_layers: int) -> list[int]:
        capacity = budget.capacity(n)
        falling = math.ceil(num_layers / 3)
        extra = falling - 1
        if n <= capacity or extra == 0:
            return [capacity] * num_layers
        # `high` and `last` solve num_layers * last + (high - last) * extra / 2 = num_layers * capacity,
        # since the factors (m - 1 - l) / m of the falling layers sum to (m - 1) / 2 = extra / 2.
        total = num_layers * capacity
        last = Fraction(2 * total - n * extra, 2 * num_layers - extra)
        last = max(last, Fraction(capacity, 2))
        high = last + 2 * (total - num_layers * last) / extra
        wanted = [
            last + (high - last) * max(0, falling - 1 - layer) / falling
            for layer in range(num_layers)
        ]
        return by_largest_remainder(wanted, total)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        importance = layer.attention_mass().sum(1)
        alive = torch.ones_like(importance, dtype=torch.bool)
        if layer.layer_index:
            if IMPORTANCE not in layer.carried:
                raise KVError(
                    f"spatten sees layer {layer.layer_index} first; allowed: all layers, in order"
                )
            importance = importance + layer.carried[IMPORTANCE]
            alive = layer.carried[ALIVE].bool()
        count = self.layer_capacity(budget, layer.n, layer.layer_index, layer.num_layers)
        # Importance is never negative, so dropped tokens are the least important.
        kept = top_positions(importance.masked_fill(~alive, -1.0), count)
        layer.carried[IMPORTANCE] = importance
        layer.carried[ALIVE] = torch.zeros_like(alive).scatter_(-1, kept, True)
        return gather_entries(layer, kept.unsqueeze(1).expand(-1, layer.keys.shape[1], -1))
