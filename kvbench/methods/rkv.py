"""R-KV: entries are scored by the attention of recent queries, minus their similarity to other keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors.options import Count, Fraction, Odd, Share
from kvbench.kernels.logits import softcapped
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import best_and_recent
from kvbench.methods.base import Method, Schedule

TILE = 512
"""Similarities are computed in tiles of TILE x TILE keys, which bounds the memory."""

SIMILAR = 0.5
"""The cosine above which two keys are near-duplicates of each other."""


def redundancy(keys: Tensor, retain: str) -> Tensor:
    """How much each key repeats others: the mean of its cosine similarities to all keys, with a softmax
    over the keys, [batch, heads, n] float32.

    Every key i retains another one, whose similarity to i then counts 0 in the mean of the retained
    key. So the retained of several near-duplicates does not score as redundant.

    Args:
        keys: [batch, heads, n, dim].
        retain: ``last``: key i retains its near-duplicate at the largest place, or the key at place 0 if
            it has none. ``first``: every key retains the key at place 0, which the released code's
            minimum comes to.
    """
    n = keys.shape[2]
    unit = keys.float().flatten(0, 1)
    unit = unit / (unit.norm(dim=-1, keepdim=True) + 1e-8)
    # A CPU takes one head at a time, so that a tile stays in its cache; a GPU takes all heads at once.
    heads_at_once = len(unit) if keys.is_cuda else 1
    parts = [
        _similarity_sums(heads, find_duplicates=retain == "last")
        for heads in unit.split(heads_at_once)
    ]
    total, retained = (torch.cat(column) for column in zip(*parts, strict=True))
    # Subtract the similarity of each key to the key that it retains.
    partners = unit.gather(1, retained[..., None].expand_as(unit))
    own = retained == torch.arange(n, device=keys.device)
    similar = (unit * partners).sum(-1).masked_fill_(own, 0.0)
    total.scatter_add_(1, retained, -similar)
    return (total / n).softmax(-1).view(keys.shape[:3])


class _Similarities(NamedTuple):
    """The similarities of the keys of some heads.

    Attributes:
        total: [heads, n] float32, the sum of each key's similarities to the others.
        last_duplicate: [heads, n] int64, the place of each key's last near-duplicate, 0 where it has
            none or none was searched for.
    """

    total: Tensor
    last_duplicate: Tensor


def _similarity_sums(unit: Tensor, *, find_duplicates: bool) -> _Similarities:
    """Compute the similarities of all pairs of keys.

    Similarities are symmetric: a tile of two different groups of keys is computed once, and its sums
    are taken along its rows and along its columns. Tiles are taken from the last keys to the first, so
    that the first near-duplicate that is found of a key is its last one.

    Args:
        unit: [heads, n, d], keys of norm 1.
        find_duplicates: whether near-duplicates are searched for.
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
            if find_duplicates:
                _find_duplicates(tile, last[:, rows], second)
                if first != second:
                    _find_duplicates(tile.mT, last[:, columns], first)
    return _Similarities(total, last.clamp_(min=0))


def _find_duplicates(tile: Tensor, last: Tensor, first: int) -> None:
    """Write into `last` the last near-duplicate in a tile of every key that has none yet.

    Args:
        tile: [heads, r, c], the similarities of r keys to c others, the first of which is at place
            `first`.
        last: [heads, r] int64, the places of the near-duplicates; -1 where none is known. Written in
            place.
    """
    unknown = last < 0
    # On a GPU this test is left out: the host would wait for its answer longer than it could save.
    if not tile.is_cuda and not (unknown & (tile.amax(2) > SIMILAR)).any():
        return
    places = torch.arange(first, first + tile.shape[2], device=tile.device, dtype=torch.int32)
    last_in_tile = torch.where(tile > SIMILAR, places, -1).amax(2)
    last.copy_(torch.where(unknown, last_in_tile.long(), last))


@dataclass(frozen=True, kw_only=True)
class RKV(Method):
    """Keeps the last `window` entries and the earlier entries with the highest scores; while decoding,
    compresses the cache in the same way again after every `every` tokens.

    The score of an entry is mix * importance - (1 - mix) * redundancy. Its importance is the attention
    of the last `window` queries to the entries before them: of the logits of a group the largest, then
    the softmax, the mean over the queries, and max-pooling along the positions. `redundancy` measures
    how much its key repeats others.

    While decoding, the entries stay within the job's budget; the last `window` queries are held beside
    them and counted in bytes.

    Departures from the authors' code (github.com/Zefan-Cai/R-KV): sums are float32; entries are ordered
    by position; the counter of tokens starts at each prompt, and is never reset there. The authors' code
    compresses the prompt and the cache while decoding to one size, and holds up to `every` tokens beyond
    it. The preset `released` does the same with the job's budget as that size; without the preset the
    budget has room for these tokens.

    Args:
        mix: lambda; 0.07 in the code's default and run script, 0.1 in its README's table.
        kernel_size: over how many positions the importance is pooled; odd.
        window: how many of the last queries determine the importance; their entries are always kept.
        retain: last | first, see `redundancy`.
        every: the number of tokens between two compressions while decoding; null for none.
        to: the entries per KV head that a compression while decoding leaves. A number below 1 is a share
            of the tokens of prompt and generation so far; null stands for what the budget grants.
        phase: ``tokens`` compresses whenever the number of tokens before the step is a multiple of
            `every`, as released; ``steps`` after every `every` steps.
        buffer: with `to` null, where the tokens between two compressions are held: ``inside`` the
            budget, which then is full when a compression removes `every` entries, or an eighth of it if
            that is less, and `phase` is not read; or ``beside`` the budget, as released.
    """

    paper: ClassVar[str] = "arXiv 2505.24133; github.com/Zefan-Cai/R-KV"
    can_compress_again: ClassVar[bool] = True
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
    def schedule(self) -> Schedule | None:
        if self.every is None:
            return None
        inside = self.to is None and self.buffer == "inside"
        return Schedule(self.every, self.to, self.window, self.phase, inside)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        count = budget.capacity(layer.n) - self.window
        if count < 0:
            raise KVError(
                f"rkv.window is {self.window}; allowed: at most {count + self.window} here"
            )
        scores = self.entry_scores(layer)
        return gather_entries(layer, best_and_recent(layer, scores, count, self.window))

    def entry_scores(self, layer: LayerKV) -> Tensor:
        """The scores of the entries before the window, [batch, kv_heads, n - window]."""
        available = 0 if layer.queries is None else layer.queries.shape[2]
        if layer.queries is None or available < self.window or layer.withheld:
            raise KVError(
                f"layer {layer.layer_index} shows {available} queries and withholds {layer.withheld}; "
                f"rkv needs the last {self.window}"
            )
        before = layer.n - self.window
        queries = layer.queries[:, :, available - self.window :].float()
        grouped = queries.unflatten(1, (layer.keys.shape[1], -1))
        logits = grouped @ layer.keys[:, :, None, :before].float().mT * layer.scaling
        logits = softcapped(logits, layer.softcap)
        importance = logits.amax(2).softmax(-1).mean(2)
        importance = F.max_pool1d(importance, self.kernel_size, 1, self.kernel_size // 2)
        redundant = redundancy(layer.keys, self.retain)[:, :, :before]
        return self.mix * importance - (1 - self.mix) * redundant
