"""H2O: heavy hitters and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors.options import Fraction
from kvbench.kernels.eviction import Eviction
from kvbench.kernels.softcap import capped
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import best_and_recent, group_mean
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class H2O(Method):
    """Keeps the keys that received most attention so far, and the most recent ones (Algorithm 1).

    A key's score is the softmax attention it received from all prompt queries, averaged over the
    query heads of its group. round(heavy_fraction * capacity) entries go to the heaviest keys that
    are not recent, the rest to the most recent. While decoding every held key's score grows by each
    new token's attention; the new token joins the recent set, the oldest recent one competes with
    the heavy set, and the lowest score leaves, so the cache does not grow.

    The released evaluation drops nothing: it masks one pass over prompt and answer, per query head, and
    its two masks are no algorithm that could decode (see `released_mask`). They are here to compare
    likelihoods with its tables: ``released_sequential`` (OPT, GPT-NeoX) and ``released_global`` (LLaMA),
    which chooses heavy hitters by the queries of the whole sequence, the answer included: it sees the
    future. Their ratios of heavy and recent tokens are the budget's share, split by `heavy_fraction`.

    Departures: the paper chooses per attention head, here per KV head; there is no separate sink.

    Args:
        heavy_fraction: share of the capacity for heavy hitters, in [0, 1]: 1.0 is "heavy only" and
            0.0 "local only" of Table 9.
        decode: evict (the paper's) | grow (all generated tokens stay, as in BalanceKV's tables).
        semantics: paper | released_global | released_sequential; the latter two for likelihoods only.
        keeps: heaviest | lightest: the heavy hitters are what leaves (Figure 2c shows a cache without
            them); the recent tokens stay either way.
    """

    paper: ClassVar[str] = "arXiv 2306.14048, Algorithm 1"

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
        """See `Method.token_scores`: accumulated attention, mean over the group."""
        mass = group_mean(layer.attention_mass(), layer.keys.shape[1])
        return mass if self.keeps == "heaviest" else mass.amax(-1, keepdim=True) - mass

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Heavy hitters, ascending, then the recent tokens; `scores` when the cache evicts.

        Raises:
            KVError: the layer does not hold all prompt queries; released semantics.
        """
        if self.semantics != "paper":
            raise KVError(
                f"h2o.semantics is {self.semantics!r}, a mask of one pass over prompt and answer, which "
                "holds no cache to decode with; allowed: paper (likelihoods alone take the others)"
            )
        n, capacity = layer.n, budget.capacity(layer.n)
        recent = self.recent(capacity)
        mass = group_mean(layer.attention_mass(), layer.keys.shape[1])
        older = mass[:, :, : n - recent] if self.keeps == "heaviest" else -mass[:, :, : n - recent]
        positions = best_and_recent(layer, older, capacity - recent, recent)
        kept = gather_entries(layer, positions)
        return replace(kept, scores=mass.gather(2, positions)) if self.evicts else kept

    def eviction(self, capacity: int, sink: int) -> Eviction | None:
        """Scores grow by each token's attention; the lightest entry that is not recent leaves."""
        if self.decode == "grow" or self.semantics != "paper":
            return None
        recent = self.recent(capacity)
        return Eviction("lightest" if self.keeps == "heaviest" else "heaviest", recent=recent)

    def recent(self, capacity: int) -> int:
        """Entries of a cache of `capacity` that are the most recent tokens."""
        return capacity - round(self.heavy_fraction * capacity)

    @property
    def whole_pass(self) -> H2O | None:
        """The method itself with the released semantics."""
        return None if self.semantics == "paper" else self

    def mask(self, layer: LayerKV, budget: Budget) -> Tensor:
        """See `released_mask`; grouped heads choose each for itself."""
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
        )

    def masked_entries(self, budget: Budget, n: int) -> int:
        """Heavy and recent keys, and with ``released_global`` the query's own."""
        heavy, recent = (int(ratio * n) for ratio in self._ratios(budget))
        return min(n, heavy + recent + (self.semantics == "released_global"))

    def _ratios(self, budget: Budget) -> tuple[float, float]:
        """Shares of the sequence that are heavy and recent."""
        if budget.share is None:
            raise KVError(
                f"h2o.semantics is {self.semantics!r} and budget.size is {budget.size}; allowed: a "
                "share of the sequence, as budget.total_rate"
            )
        return self.heavy_fraction * budget.share, (1.0 - self.heavy_fraction) * budget.share


QUERY_ROWS = 512
"""Rows of attention that exist at a time."""


def _largest(scores: Tensor, count: int) -> Tensor:
    """[heads, n] bool: the `count` largest scores, the lower index first on ties."""
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
) -> Tensor:
    """Which key each query sees in H2O's released evaluation (FMInference/H2O, h2o_hf/utils_lm_eval).

    There are heavy = int(heavy_ratio n) and recent = int(recent_ratio n) keys, n tokens being prompt and
    answer; every row is masked, the prompt's too.

    ``global``: the heavy keys are those of the largest column sums of attention over all rows, one set
    for all rows. Row i sees the keys j <= i that are heavy or have i - j <= recent.

    ``sequential``: scores begin as the column sums of the first `heavy` rows, which see all. Each
    further row sees the heavy - 1 keys of the largest scores and itself, adds its own whole attention to
    the scores, and sets those of all other keys to 0; the keys with i - j <= recent are joined to each
    row.

    Ties go to the lower index, and attention and sums are float32; the release's half-precision sums
    differ from kernel to kernel.

    Args:
        queries, keys: [heads, n, d] float32, after position encoding.

    Returns:
        [heads, n, n] bool, True where query i sees key j; False above the diagonal.

    Raises:
        KVError: another semantics.
    """
    if semantics not in ("global", "sequential"):
        raise KVError(f"semantics is {semantics!r}; allowed: global, sequential")
    heads, n, _ = queries.shape
    heavy, recent = int(heavy_ratio * n), int(recent_ratio * n)
    at = torch.arange(n, device=queries.device)
    distance = at[:, None] - at[None]
    seen = ((distance >= 0) & (distance <= recent)).expand(heads, n, n).clone()
    scores = torch.zeros(heads, n, dtype=torch.float32, device=queries.device)
    if heavy == 0:
        return seen
    for begin in range(0, n, QUERY_ROWS):
        block = slice(begin, begin + QUERY_ROWS)
        logits = capped(queries[:, block].float() @ keys.float().mT * scaling, softcap)
        rows = logits.masked_fill(distance[block] < 0, -torch.inf).softmax(-1)
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
