"""Uniform sampling of the middle."""

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

    Exactly round(rate * middle) entries per head, drawn without replacement and independently per
    KV head. Each stands for middle / kept tokens; its log-weight is log(middle / kept): log 2^T at
    rate 2^-T.

    Args:
        weighted: False drops the log-weights, which over-counts sink and window (an ablation).
        scope: middle (every entry of it may go) | subset (only those that BalanceKV halves at this rate
            may go: between 1/2 and 1 the earliest 2 (1 - rate) of the middle, as in both variants of the
            paper's Table 5). The subset is halved as BalanceKV with gamma = 0 halves it, by coin flips
            and the same cut; the entries it leaves weigh what they weigh there, the others 1.
    """

    paper: ClassVar[str] = "arXiv 2502.07861, section 4.1"
    version: ClassVar[int] = 2
    recompresses: ClassVar[bool] = True

    weighted: bool = True
    scope: Literal["middle", "subset"] = "middle"

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Sink, the drawn entries of the middle, window: ascending; log_weights float32 or None."""
        if self.scope == "subset":
            coin = BalanceKV(gamma=0.0, weights="entry" if self.weighted else "none")
            return coin.compress(layer, budget, generator)
        batch, heads = layer.keys.shape[:2]
        middle, kept = budget.middle(layer.n), budget.middle_kept(layer.n)
        chosen = places(generator, heads, middle, kept, layer.keys.device) + budget.sink
        positions = with_sink_and_window(layer, budget, chosen.expand(batch, heads, kept))
        log_weights = None
        if self.weighted and kept:
            log_weights = torch.zeros(positions.shape, dtype=torch.float32, device=positions.device)
            log_weights[:, :, budget.sink : budget.sink + kept] = math.log(middle / kept)
        return gather_entries(layer, positions, log_weights)
