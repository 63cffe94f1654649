from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.kv import Budget, CompressedKV, LayerKV, gather_entries
from kvbench.methods._draws import places
from kvbench.methods._select import with_sink_and_window
from kvbench.methods.balancekv import BalanceKV
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Uniform(Method):
    """Keeps sink, window and a uniformly random subset of the middle.

    Every KV head draws round(rate * middle) entries without replacement, independently of other heads.
    An entry stands for middle / kept tokens, so its log-weight is log(middle / kept).

    Args:
        weighted: False drops the log-weights, so that sink and window count too much (an ablation).
        scope: ``middle`` draws from all entries of the middle. ``subset`` runs BalanceKV with gamma = 0,
            where coin flips take the place of the walk: only the entries that BalanceKV halves may be
            dropped, and entries have BalanceKV's weights. At a rate between 1/2 and 1 these are the
            earliest 2 (1 - rate) of the middle, as in both variants of the paper's Table 5.
    """

    paper: ClassVar[str] = "arXiv 2502.07861, section 4.1"
    version: ClassVar[int] = 2
    can_compress_again: ClassVar[bool] = True

    weighted: bool = True
    scope: Literal["middle", "subset"] = "middle"

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        if self.scope == "subset":
            coin_flips = BalanceKV(gamma=0.0, weights="entry" if self.weighted else "none")
            return coin_flips.compress(layer, budget, generator)
        batch, heads = layer.keys.shape[:2]
        middle = budget.middle(layer.n)
        kept = budget.middle_kept(layer.n)
        drawn = places(generator, heads, middle, kept, layer.keys.device) + budget.sink
        positions = with_sink_and_window(layer, budget, drawn.expand(batch, heads, kept))
        log_weights = None
        if self.weighted and kept:
            log_weights = torch.zeros(positions.shape, dtype=torch.float32, device=positions.device)
            log_weights[:, :, budget.sink : budget.sink + kept] = math.log(middle / kept)
        return gather_entries(layer, positions, log_weights)
