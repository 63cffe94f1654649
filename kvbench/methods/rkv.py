"""R-KV: what recent queries look at, less what other keys repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors.options import Count, Fraction, Odd, Share
from kvbench.kernels.softcap import capped
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import best_and_recent
from kvbench.methods.base import Method, Recompression

TILE = 512
"""Similarities of so many keys with as many are held at once: bounds memory to TILE x TILE of a head."""

SIMILAR = 0.5
"""Cosine above which two keys count as near-duplicates."""


def redundancy(keys: Tensor, retain: str) -> Tensor:
    """Softmax over the keys of how similar the others are to each on average, [batch, heads, n] float32.

    Of the near-duplicates of every key one is retained: its similarity counts 0. `retain` last: the one
    of the largest place (place 0 where there is none); first: place 0, whatever is there, as the
    released code's minimum has it.
    """
    n = keys.shape[2]
    unit = keys.float().flatten(0, 1)
    unit = unit / (unit.norm(dim=-1, keepdim=True) + 1e-8)
    together = len(unit) if keys.is_cuda else 1  # on a processor a head's tile stays in its cache
    parts = [_similarity_sums(part, retain == "last") for part in unit.split(together)]
    total, retained = (torch.cat(column) for column in zip(*parts, strict=True))
    # The similarity of each key to the one that it retains is taken back.
    partners = unit.gather(1, retained[..., None].expand_as(unit))
    own = retained == torch.arange(n, device=keys.device)
    similar = (unit * partners).sum(-1).masked_fill_(own, 0.0)
    total.scatter_add_(1, retained, -similar)
    return (total / n).softmax(-1).view(keys.shape[:3])


def _similarity_sums(unit: Tensor, duplicates: bool) -> tuple[Tensor, Tensor]:
    """The sum of each key's similarities to the others, and its last near-duplicate.

    Similarities are symmetric: each tile above the diagonal is computed once, and read along its rows
    and along its columns. Tiles come from the last keys to the first, so that the first near-duplicate
    that is found of a key is its last one.

    Args:
        unit: [heads, n, d] keys of norm 1.
        duplicates: whether near-duplicates are looked for.

    Returns:
        [heads, n] float32; and [heads, n] int64, places, 0 where there is none.
    """
    heads, n, _ = unit.shape
    total = unit.new_zeros(heads, n)
    last = torch.full((heads, n), -1, device=unit.device)
    starts = range((n - 1) // TILE * TILE, -1, -TILE)
    for first in starts:
        rows = slice(first, min(n, first + TILE))
        for second in starts:
            if second < first:
                break
            columns = slice(second, min(n, second + TILE))
            tile = torch.bmm(unit[:, rows], unit[:, columns].mT)
            if first == second:
                tile.diagonal(0, 1, 2).zero_()
            else:
                total[:, rows] += tile.sum(2)
            total[:, columns] += tile.sum(1)
            if duplicates:
                _find_duplicates(tile, last[:, rows], second)
                if first != second:
                    _find_duplicates(tile.mT, last[:, columns], first)
    return total, last.clamp_(min=0)


def _find_duplicates(tile: Tensor, last: Tensor, first: int) -> None:
    """Enter the last near-duplicate of each key of whom none is known yet.

    Args:
        tile: [heads, r, c], similarities of r keys to c others, the first of them at place `first`.
        last: [heads, r], places; -1 where none is known.
    """
    unknown = last < 0
    # A GPU's host would have to wait for the answer, which saves less than that there.
    if not tile.is_cuda and not (unknown & (tile.amax(2) > SIMILAR)).any():
        return
    places = torch.arange(first, first + tile.shape[2], device=tile.device, dtype=torch.int32)
    found = torch.where(tile > SIMILAR, places, -1).amax(2)
    last.copy_(torch.where(unknown, found.long(), last))


@dataclass(frozen=True, kw_only=True)
class RKV(Method):
    """Keeps the last `window` entries and those with the best importance - redundancy, again every
    `every` generated tokens.

    Importance: attention of the last `window` queries to the entries before them, logits the largest of
    the group's, mean over the queries, max-pooled. Score: mix * importance - (1 - mix) * redundancy.

    What is held while decoding stays within the job's budget, and beside it the last `window` queries.

    Departures from the authors' code (github.com/Zefan-Cai/R-KV): sums in float32; entries by position;
    its counter of tokens, never reset there, starts at the prompt. It has one size for the prompt and
    while decoding, and holds up to `every` tokens more than that: so does the preset `released`, whose
    one size is the job's budget; without it the budget holds these tokens, too.

    Args:
        mix: lambda; 0.07 in the code's default and run script, 0.1 in its README's table.
        kernel_size: positions that the importance is pooled over. window: observing queries.
        retain: last | first (see `redundancy`).
        every: tokens from one compression while decoding to the next; null: never again.
        to: entries that stay then; below 1: a share of prompt and tokens so far; null: the budget's.
        phase: tokens (when prompt and tokens fed were a multiple of `every` before the step, as
            released) | steps (after every so many steps).
        buffer: with `to` null, the tokens up to the next time: inside (the budget has room for them:
            whenever it is full, `every` entries leave, or an eighth of it; `phase` says nothing) |
            beside (they come on top, as released).
    """

    paper: ClassVar[str] = "arXiv 2505.24133; github.com/Zefan-Cai/R-KV"
    recompresses: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "released": {"phase": "tokens", "mix": 0.07, "buffer": "beside"}
    }
    version: ClassVar[int] = 2

    mix: Fraction = 0.07
    kernel_size: Odd = 7
    window: Count = 8
    retain: Literal["last", "first"] = "last"
    every: Count | None = 128
    to: Count | Share | None = None
    phase: Literal["tokens", "steps"] = "tokens"
    buffer: Literal["inside", "beside"] = "inside"

    @property
    def recompression(self) -> Recompression | None:
        """See `Method.recompression`."""
        if self.every is None:
            return None
        inside = self.to is None and self.buffer == "inside"
        return Recompression(self.every, self.to, self.window, self.phase, inside)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """The best, ascending, then the window.

        Raises:
            KVError: fewer entries than the window, or the layer lacks its queries.
        """
        count = budget.capacity(layer.n) - self.window
        if count < 0:
            raise KVError(
                f"rkv.window is {self.window}; allowed: at most {count + self.window} here"
            )
        scores = self.entry_scores(layer)
        return gather_entries(layer, best_and_recent(layer, scores, count, self.window))

    def entry_scores(self, layer: LayerKV) -> Tensor:
        """Scores of the entries before the window, [batch, kv_heads, n - window]."""
        have = 0 if layer.queries is None else layer.queries.shape[2]
        if layer.queries is None or have < self.window or layer.withheld:
            raise KVError(
                f"layer {layer.layer_index} shows {have} queries and withholds {layer.withheld}; rkv "
                f"needs the last {self.window}"
            )
        before = layer.n - self.window
        queries = layer.queries[:, :, have - self.window :].float()
        grouped = queries.unflatten(1, (layer.keys.shape[1], -1))
        logits = grouped @ layer.keys[:, :, None, :before].float().mT * layer.scaling
        logits = capped(logits, layer.softcap)
        importance = logits.amax(2).softmax(-1).mean(2)
        importance = F.max_pool1d(importance, self.kernel_size, 1, self.kernel_size // 2)
        repeated = redundancy(layer.keys, self.retain)[:, :, :before]
        return self.mix * importance - (1 - self.mix) * repeated
