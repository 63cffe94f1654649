"""H2O: heavy hitters and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors.options import Fraction
from kvbench.kernels.decode import Eviction
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import best_and_recent, group_mean
from kvbench.methods.base import TokenScoringMethod


@dataclass(frozen=True, kw_only=True)
class H2O(TokenScoringMethod):
    """Keeps the keys that have received most attention, and the most recent keys.

    This is the system of the paper's appendix A: an exact prompt, one selection after it, and for every
    new token one entry that leaves. Its Algorithm 1 evicts from the first token on and protects no
    recent one; nearest to that is ``task=stream``, which reads a text with the cache of this method.

    A key's score is the softmax attention it received from all prompt queries, averaged over the query
    heads of its group. The heavy hitters are the round(heavy_fraction * capacity) keys with the highest
    scores before the recent ones; the recent keys fill the rest of the capacity. While decoding, every
    key's score grows by the attention of each new token. The new token is recent, the oldest recent
    token then competes with the heavy hitters, and the key with the lowest score leaves, so that the
    cache does not grow.

    The released evaluation drops nothing. It masks a single pass over prompt and answer for each query
    head, and neither of its two masks is an algorithm that could decode. They exist to compare
    likelihoods with the paper's tables (`kvbench.lm_eval.released_masks`): ``released_sequential`` (OPT,
    GPT-NeoX), and ``released_global`` (LLaMA), which sees the future, since it chooses heavy hitters by
    the queries of the whole sequence, the answer included. The released ratios of heavy and recent
    tokens are the budget's share, divided by `heavy_fraction`.

    Departures: each KV head chooses, in the paper each attention head; there is no separate sink.

    Args:
        heavy_fraction: the share of the capacity for heavy hitters, in [0, 1]: 1.0 is "heavy only" and
            0.0 "local only" of Table 9.
        decode: ``evict`` (the paper's) or ``grow`` (all generated tokens stay, as in BalanceKV's
            tables).
        semantics: paper | released_global | released_sequential. The latter two score likelihoods only.
        keeps: ``heaviest``; or ``lightest``, with which the heavy hitters leave and the recent tokens
            stay (Figure 2c shows a cache without heavy hitters).
    """

    paper: ClassVar[str] = "arXiv 2306.14048, appendix A (the system of its experiments)"

    heavy_fraction: Fraction = 0.5
    decode: Literal["evict", "grow"] = "evict"
    semantics: Literal["paper", "released_global", "released_sequential"] = "paper"
    keeps: Literal["heaviest", "lightest"] = "heaviest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keeps == "lightest" and self.semantics != "paper":
            raise KVError(
                f"h2o.keeps is 'lightest' and h2o.semantics {self.semantics!r}; allowed: heaviest, or "
                "semantics=paper"
            )

    def token_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        mass = group_mean(layer.attention_mass(), layer.keys.shape[1])
        if self.keeps == "heaviest":
            return mass
        return mass.amax(-1, keepdim=True) - mass

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        self.check_decodes()
        capacity = budget.capacity(layer.n)
        recent = self.recent(capacity)
        mass = group_mean(layer.attention_mass(), layer.keys.shape[1])
        older = mass[:, :, : layer.n - recent]
        if self.keeps == "lightest":
            older = -older
        positions = best_and_recent(layer, older, capacity - recent, recent)
        compressed = gather_entries(layer, positions)
        if not self.evicts:
            return compressed
        return replace(compressed, scores=mass.gather(2, positions))

    def eviction(self, capacity: int, sink: int) -> Eviction | None:
        if self.decode == "grow" or self.semantics != "paper":
            return None
        leaves: Literal["lightest", "heaviest"] = "lightest"
        if self.keeps == "lightest":
            leaves = "heaviest"
        return Eviction(leaves, recent=self.recent(capacity))

    def recent(self, capacity: int) -> int:
        """How many entries of a cache of `capacity` are the most recent tokens."""
        return capacity - round(self.heavy_fraction * capacity)

    def check_decodes(self) -> None:
        if self.semantics != "paper":
            raise KVError(
                f"h2o.semantics is {self.semantics!r}, a mask of one pass over prompt and answer, which "
                "holds no cache to decode with; allowed: paper, or task=lm_eval (likelihoods alone)"
            )
