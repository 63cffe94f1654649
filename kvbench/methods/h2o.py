"""H2O: heavy hitters and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors.options import Fraction
from kvbench.kv import Budget, CompressedKV, LayerKV, gather_entries
from kvbench.methods._select import group_mean, positions_between, top_positions
from kvbench.methods.base import Held, Method


@dataclass(frozen=True, kw_only=True)
class H2O(Method):
    """Keeps the keys that received most attention so far, and the most recent ones (Algorithm 1).

    A key's score is the softmax attention it received from all prompt queries, averaged over the
    query heads of its group. round(heavy_fraction * capacity) entries go to the heaviest keys that
    are not recent, the rest to the most recent. While decoding every held key's score grows by each
    new token's attention; the new token joins the recent set, the oldest recent one competes with
    the heavy set, and the lowest score leaves, so the cache does not grow.

    Departures: the paper chooses per attention head, here per KV head; there is no separate sink.

    Args:
        heavy_fraction: share of the capacity for heavy hitters, in [0, 1]: 1.0 is "heavy only" and
            0.0 "local only" of Table 9.
        decode: evict (the paper's) | grow (all generated tokens stay, as in BalanceKV's tables).
    """

    paper: ClassVar[str] = "arXiv 2306.14048, Algorithm 1"

    heavy_fraction: Fraction = 0.5
    decode: Literal["evict", "grow"] = "evict"

    @property
    def evicts(self) -> bool:
        """True for ``decode=evict``."""
        return self.decode == "evict"

    def recent(self, capacity: int) -> int:
        """Entries of a cache of `capacity` that are the most recent tokens."""
        return capacity - round(self.heavy_fraction * capacity)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Heavy hitters, ascending, then the recent tokens; `scores` when the cache evicts.

        Raises:
            KVError: the layer does not hold all prompt queries.
        """
        n, capacity = layer.n, budget.capacity(layer.n)
        recent = self.recent(capacity)
        mass = group_mean(layer.attention_mass(), layer.keys.shape[1])
        heavy = top_positions(mass[:, :, : n - recent], capacity - recent)
        positions = torch.cat([heavy, positions_between(layer, n - recent, n)], dim=-1)
        kept = gather_entries(layer, positions)
        return replace(kept, scores=mass.gather(2, positions)) if self.evicts else kept

    def evict(self, held: Held, attention: Tensor) -> tuple[Tensor, Tensor | None]:
        """Accumulate the step's attention; over capacity, the lightest non-recent entry leaves.

        Recent are the largest positions, whatever the order of the entries in the cache. Tokens
        come one position after the other and recent ones never leave, so they are those within
        `recent` positions of the newest. The scores are brought up to date in place.
        """
        assert held.scores is not None
        scores = held.scores.add_(attention)
        if scores.shape[-1] <= held.capacity:
            return scores, None
        oldest_recent = held.positions[:, -1:] - self.recent(held.capacity) + 1
        return scores, scores.masked_fill(held.positions >= oldest_recent, torch.inf).argmin(-1)
