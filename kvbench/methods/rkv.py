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

ROWS = 512
"""Keys whose similarities are held at once: bounds memory to 2 x ROWS x n of a head."""

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
    total = unit.new_zeros(unit.shape[:2])
    place = torch.arange(n, device=keys.device, dtype=torch.float32)  # exact below 2^24
    together = len(unit) if keys.is_cuda else 1  # on a processor a head's rows stay near
    space = unit.new_empty(2, together, min(ROWS, n), n)
    for head in range(0, len(unit), together):
        some = unit[head : head + together]
        for start in range(0, n, ROWS):
            rows, similar = space[:, :, : n - start]
            torch.bmm(some[:, start : start + ROWS], some.mT, out=rows)
            rows.diagonal(start, 1, 2).zero_()
            dropped = torch.zeros_like(rows[..., :1])
            if retain == "last":
                torch.gt(rows, SIMILAR, out=similar)
                dropped = similar.mul_(place).amax(-1, keepdim=True)
            total[head : head + together] += rows.scatter_(-1, dropped.long(), 0.0).sum(1)
    return (total / n).softmax(-1).view(keys.shape[:3])


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
