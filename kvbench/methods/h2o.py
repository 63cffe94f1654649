"""H2O: heavy hitters and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors.options import Fraction
from kvbench.kernels.addresses import Eviction
from kvbench.kernels.sinks import softmax
from kvbench.kernels.softcap import capped
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
    head, and neither of its two masks is an algorithm that could decode (see `released_mask`). They
    exist here to compare likelihoods with the paper's tables: ``released_sequential`` (OPT, GPT-NeoX),
    and ``released_global`` (LLaMA), which sees the future, since it chooses heavy hitters by the
    queries of the whole sequence, the answer included. The released ratios of heavy and recent tokens
    are the budget's share, divided by `heavy_fraction`.

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
        if self.semantics != "paper":
            raise KVError(
                f"h2o.semantics is {self.semantics!r}, a mask of one pass over prompt and answer, which "
                "holds no cache to decode with; allowed: paper (likelihoods alone take the others)"
            )
        capacity = budget.capacity(layer.n)
        recent = self.recent(capacity)
        mass = group_mean(layer.attention_mass(), layer.keys.shape[1])
        older = mass[:, :, : layer.n - recent]
        if self.keeps == "lightest":
            older = -older
        positions = best_and_recent(layer, older, capacity - recent, recent)
        kept = gather_entries(layer, positions)
        if not self.evicts:
            return kept
        return replace(kept, scores=mass.gather(2, positions))

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

    @property
    def holds_a_cache(self) -> bool:
        return self.semantics == "paper"

    def mask(self, layer: LayerKV, budget: Budget) -> Tensor:
        """See `released_mask`. Every query head of a group chooses for itself."""
        assert layer.queries is not None
        heavy, recent = self._ratios(budget)
        return released_mask(
            layer.queries[0].float(),
            layer.keys[0].repeat_interleave(layer.group, dim=0).float(),
            semantics=self.semantics.removeprefix("released_"),
            heavy_ratio=heavy,
            recent_ratio=recent,
            scaling=layer.scaling,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )

    def masked_entries(self, budget: Budget, n: int) -> int:
        """The number of heavy and recent keys. With ``released_global`` a query sees its own key beside
        them."""
        heavy, recent = (int(ratio * n) for ratio in self._ratios(budget))
        own = 1 if self.semantics == "released_global" else 0
        return min(n, heavy + recent + own)

    def _ratios(self, budget: Budget) -> tuple[float, float]:
        if budget.share is None:
            raise KVError(
                f"h2o.semantics is {self.semantics!r} and budget.size is {budget.size}; allowed: a "
                "share of the sequence, as budget.total_rate"
            )
        return self.heavy_fraction * budget.share, (1.0 - self.heavy_fraction) * budget.share


QUERY_ROWS = 512
"""How many rows of the attention matrix are in memory at a time."""


def _largest(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` largest scores of each head, those of lower index on a tie: [heads, n] bool."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def released_mask(
    queries: Tensor,
    keys: Tensor,
    semantics: str = "global",
    heavy_ratio: float = 0.1,
    recent_ratio: float = 0.1,
    scaling: float = 1.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The keys that each query sees in H2O's released evaluation (FMInference/H2O,
    h2o_hf/utils_lm_eval).

    Prompt and answer are n tokens, of which heavy = int(heavy_ratio n) are heavy hitters and recent =
    int(recent_ratio n) are recent. Every row of attention is masked, those of the prompt too.

    ``global``: the heavy hitters are the keys with the largest column sums of attention over all rows,
    the same for all rows. Row i sees the keys j <= i that are heavy hitters or have i - j <= recent.

    ``sequential``: the scores begin as the column sums of the first `heavy` rows, which see all keys
    before them. Each later row sees its own key and the heavy - 1 keys with the largest scores; it adds
    its unmasked attention to the scores of the keys that it sees, and sets all other scores to 0. Every
    row also sees the keys with i - j <= recent.

    Ties go to the lower index. Attention and sums are float32; the release sums in half precision, with
    results that differ from kernel to kernel.

    Args:
        queries, keys: [heads, n, d] float32, after position encoding.
        semantics: global | sequential.

    Returns:
        [heads, n, n] bool, True where query i sees key j; False above the diagonal.
    """
    if semantics not in ("global", "sequential"):
        raise KVError(f"semantics is {semantics!r}; allowed: global, sequential")
    heads, n, _ = queries.shape
    heavy, recent = int(heavy_ratio * n), int(recent_ratio * n)
    index = torch.arange(n, device=queries.device)
    distance = index[:, None] - index[None]
    seen = ((distance >= 0) & (distance <= recent)).expand(heads, n, n).clone()
    scores = torch.zeros(heads, n, dtype=torch.float32, device=queries.device)
    if heavy == 0:
        return seen
    for begin in range(0, n, QUERY_ROWS):
        block = slice(begin, begin + QUERY_ROWS)
        logits = capped(queries[:, block].float() @ keys.float().mT * scaling, softcap)
        logits = logits.masked_fill(distance[block] < 0, -torch.inf)
        rows = softmax(logits, None if sinks is None else sinks[:, None])
        if semantics == "global":
            scores += rows.sum(1)
            continue
        for i, row in enumerate(rows.unbind(1), begin):
            if i < heavy:
                scores[:, :heavy] += row[:, :heavy]
                seen[:, i, : i + 1] = True
                continue
            kept = _largest(scores, heavy - 1)
            kept[:, i] = True
            seen[:, i] |= kept
            scores = torch.where(kept, scores + row, 0.0)
    if semantics == "global":
        seen |= _largest(scores, heavy)[:, None]
    return seen & (distance >= 0)
