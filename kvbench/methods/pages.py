"""Whole pages, common to all heads of a layer, as paged serving engines free memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors.options import Count
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._wrapped import Wrapper
from kvbench.methods.base import HeldShape


@dataclass(frozen=True, kw_only=True)
class Pages(Wrapper):
    """Keeps whole pages of consecutive tokens for every head, by another method's token scores.

    A paged cache frees a page only when no head of the layer needs it. Pages that hold a token of the
    sink or of the window, and a partial last one, are kept; of the others the best, capacity // size
    pages in all (the capacity that the other method has at the layer), ties to the earlier. Scores of a
    head are first divided by their sum over the candidates, so that no head rules by scale; a page's
    score of a head is the largest (or mean) of its tokens', its score the mean (or largest) over the
    heads. The definition is ours; what the constraint costs is the difference to the method alone, in
    the same table.

    Args:
        of: a method with token scores >= 0. options: its options.
        size: tokens of a page.
        tokens: max | mean over a page's tokens. heads: mean | max over the heads.
    """

    paper: ClassVar[str] = "pages of a paged cache (arXiv 2309.06180), all heads alike"
    needs: ClassVar[str] = "token_scores"
    by_head: ClassVar[bool] = False

    size: Count = 16
    tokens: Literal["max", "mean"] = "max"
    heads: Literal["mean", "max"] = "mean"

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """All tokens of the pages kept, ascending, the same of every head of a prompt.

        Raises:
            KVError: the pages of sink and window alone are more than the capacity's.
        """
        scores = self.inner.token_scores(layer, budget)
        n, heads = layer.n, layer.keys.shape[1]
        capacity = self.layer_capacity(budget, n, layer.layer_index, layer.num_layers)
        pages = self.choose(scores, budget, capacity)
        at = (pages[..., None] * self.size + torch.arange(self.size, device=pages.device)).flatten(
            1
        )
        # A partial page is the last of every prompt's, so that all have as many tokens.
        at = at[:, : at.shape[1] - (-n % self.size)]
        kept = gather_entries(layer, at[:, None].expand(-1, heads, -1))
        return self.inner.settle(layer, kept, budget)

    def extras(self, n: int, held: Mapping[int, HeldShape]) -> dict[str, int]:
        """`Method.extras` and two more, summed over all layers: ``page_bytes``, the bytes of the pages
        that a paged cache would hold (a partial page costs a whole one), and ``blocks_freed``, the pages
        of the prompt that it no longer holds."""
        size = self.size
        pages = {layer: -(-shape.entries // size) for layer, shape in held.items()}
        bytes_of_page = {
            layer: size * shape.heads * (shape.dim + shape.value_dim) * shape.itemsize
            for layer, shape in held.items()
        }
        return super().extras(n, held) | {
            "page_bytes": sum(count * bytes_of_page[layer] for layer, count in pages.items()),
            "blocks_freed": sum(-(-n // size) - count for count in pages.values()),
        }

    def choose(self, scores: Tensor, budget: Budget, capacity: int | None = None) -> Tensor:
        """The pages kept, ascending, [batch, pages], of scores [batch, kv_heads, n]; `capacity` of the
        layer, None: the budget's."""
        n, size = scores.shape[-1], self.size
        pages, kept = -(-n // size), (budget.capacity(n) if capacity is None else capacity) // size
        place = torch.arange(pages, device=scores.device)
        forced = place * size < budget.sink
        forced |= (place + 1) * size > n - budget.window
        forced[-1] |= bool(n % size)
        free, fixed = place[~forced], place[forced]
        if len(fixed) > kept:
            least = len(fixed) * size
            raise KVError(
                f"pages: sink and window take {len(fixed)} pages of {size} and the capacity of {n} "
                f"tokens is {kept}; allowed: a budget of at least {least} entries"
            )
        padded = torch.nn.functional.pad(scores, (0, pages * size - n))
        by_page = padded.unflatten(-1, (pages, size))[:, :, free]
        total = by_page.sum((-2, -1), keepdim=True)
        shares = torch.where(total > 0, by_page / total, 1 / max(1, len(free) * size))
        of_head = shares.amax(-1) if self.tokens == "max" else shares.mean(-1)
        of_page = of_head.mean(1) if self.heads == "mean" else of_head.amax(1)
        best = of_page.argsort(dim=-1, descending=True, stable=True)[:, : kept - len(fixed)]
        return torch.cat([free[best], fixed.expand(len(scores), -1)], dim=-1).sort(-1).values
