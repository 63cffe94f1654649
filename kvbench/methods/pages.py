from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors.options import Count
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._wrapped import ScoreWrapper
from kvbench.methods.base import HeldShape


@dataclass(frozen=True, kw_only=True)
class Pages(ScoreWrapper):
    """Keeps whole pages of consecutive tokens, the same for every head, by another method's token
    scores.

    A paged cache frees a page only when no head of the layer needs it. The pages that hold a token of
    the sink or of the window are kept, and so is a partial last page. The best of the other pages are
    kept too, up to capacity // size pages in all, where the capacity is that of the inner method at the
    layer; of equal pages the earlier one.

    To score a page, the token scores of a head are divided by their sum over the pages that compete, so
    that all heads count alike. A head's score of the page is the largest (or the mean) of its tokens'
    shares, and the page's score is the mean (or the largest) over the heads. This definition is
    kvbench's own. What the constraint to pages costs is seen by comparing with the inner method alone.

    Args:
        of: the inner method, which must have token scores >= 0.
        options: the options of the inner method.
        size: the number of tokens in a page.
        tokens: max | mean, how a head combines the tokens of a page.
        heads: mean | max, how the heads are combined.
    """

    paper: ClassVar[str] = "pages of a paged cache (arXiv 2309.06180), all heads alike"

    size: Count = 16
    tokens: Literal["max", "mean"] = "max"
    heads: Literal["mean", "max"] = "mean"

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        scores = self.scorer.checked_scores(layer, budget)
        n, heads = layer.n, layer.keys.shape[1]
        capacity = self.layer_capacity(budget, n, layer.layer_index, layer.num_layers)
        pages = self.choose(scores, budget, capacity)
        within = torch.arange(self.size, device=pages.device)
        positions = (pages[..., None] * self.size + within).flatten(1)
        # Every prompt keeps its partial last page, so the same number of places beyond the end is cut
        # off.
        positions = positions[:, : positions.shape[1] - (-n % self.size)]
        compressed = gather_entries(layer, positions[:, None].expand(-1, heads, -1))
        return self.scorer.fit(layer, compressed, budget)

    def extras(self, n: int, held: Mapping[int, HeldShape]) -> dict[str, int]:
        """Add two fields to those of `Method.extras`, summed over all layers: ``page_bytes``, the bytes
        of the pages that a paged cache would hold (a partial page takes the memory of a whole one), and
        ``blocks_freed``, the number of the prompt's pages that are no longer held."""
        page_bytes, blocks_freed = 0, 0
        for shape in held.values():
            pages = self.pages_of(shape.entries)
            page = self.size * shape.heads * (shape.dim + shape.value_dim) * shape.itemsize
            page_bytes += pages * page
            blocks_freed += self.pages_of(n) - pages
        return super().extras(n, held) | {"page_bytes": page_bytes, "blocks_freed": blocks_freed}

    def pages_of(self, tokens: int) -> int:
        """The number of pages that hold so many tokens, a partial page included."""
        return math.ceil(tokens / self.size)

    def choose(self, scores: Tensor, budget: Budget, capacity: int) -> Tensor:
        """Choose the pages of each prompt that are kept: [batch, pages] int64, ascending.

        Args:
            scores: token scores [batch, kv_heads, n].
            capacity: the entries per head that the layer may hold.
        """
        n, size = scores.shape[-1], self.size
        kept = capacity // size
        pages = torch.arange(self.pages_of(n), device=scores.device)
        is_fixed = pages * size < budget.sink
        is_fixed |= (pages + 1) * size > n - budget.window
        is_fixed[-1] |= bool(n % size)
        competing, fixed = pages[~is_fixed], pages[is_fixed]
        if len(fixed) > kept:
            raise KVError(
                f"pages: sink and window take {len(fixed)} pages of {size} and the capacity of {n} "
                f"tokens is {kept}; allowed: a budget of at least {len(fixed) * size} entries"
            )
        padded = torch.nn.functional.pad(scores, (0, len(pages) * size - n))
        by_page = padded.unflatten(-1, (len(pages), size))[:, :, competing]
        total = by_page.sum((-2, -1), keepdim=True)
        shares = torch.where(total > 0, by_page / total, 1 / max(1, len(competing) * size))
        head_scores = shares.amax(-1) if self.tokens == "max" else shares.mean(-1)
        page_scores = head_scores.mean(1) if self.heads == "mean" else head_scores.amax(1)
        best = page_scores.argsort(dim=-1, descending=True, stable=True)[:, : kept - len(fixed)]
        return torch.cat([competing[best], fixed.expand(len(scores), -1)], dim=-1).sort(-1).values
