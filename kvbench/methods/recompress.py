"""Compression while decoding: another method's, again and again, of what is held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from kvbench.errors.options import Count, Share
from kvbench.kv import Budget, CompressedKV, LayerKV
from kvbench.methods._wrapped import Wrapper
from kvbench.methods.base import Recompression


@dataclass(frozen=True, kw_only=True)
class Recompress(Wrapper):
    """Compresses the prompt as another method does, and what is held every `every` generated tokens.

    The prompt is compressed to the job's budget (``budget.size`` for a fixed size, ``budget.rate=1`` to
    keep it whole until the first time); from then on `to` entries stay each time, sink and window those
    of the smallest and the largest positions. Weights multiply. Between two times `every` more are held.

    Args:
        of: a method that chooses entries by the tensors of a layer. options: its options.
        every: tokens from one time to the next. to: entries per layer and KV head that stay; below 1:
            a share of prompt and tokens so far; null: the job's budget, which the tokens up to the next
            time exceed.
        queries: of the last tokens, kept for it (and counted in bytes).
        phase: steps (after every so many steps, as kvpress's DecodingPress) | tokens (when prompt and
            tokens fed were a multiple of `every` before the step, as R-KV).
    """

    paper: ClassVar[str] = "kvpress DecodingPress; arXiv 2505.24133"
    needs: ClassVar[str] = "recompresses"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "kvpress_decoding": {"every": 512, "to": 2048, "phase": "steps"}
    }

    every: Count = 128
    to: Count | Share | None = 512
    queries: Count = 32
    phase: Literal["steps", "tokens"] = "steps"

    @property
    def recompression(self) -> Recompression:
        """See `Method.recompression`."""
        return Recompression(self.every, self.to, self.queries, self.phase)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """What the other method holds."""
        return self.inner.compress(layer, budget, generator)
