from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from kvbench.errors.options import Count, Share
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV
from kvbench.methods._wrapped import Wrapper
from kvbench.methods.base import Method, Schedule


@dataclass(frozen=True, kw_only=True)
class Recompress(Wrapper):
    """Compresses the prompt by another method, and the whole cache again every `every` generated tokens.

    The prompt is compressed to the job's budget (``budget.size`` for a fixed size, ``budget.rate=1`` to
    keep it whole until the first compression). Every later compression leaves `to` entries; sink and
    window are then the entries of the smallest and the largest positions, and log-weights of successive
    compressions add up. Between two compressions the cache grows by `every` entries.

    Args:
        of: the inner method, which must choose entries by the tensors of a layer.
        options: the options of the inner method.
        every: the number of tokens between two compressions.
        to: the entries per layer and KV head that a compression leaves. A number below 1 is a share of
            the tokens of prompt and generation so far; null stands for the job's budget, which the
            tokens until the next compression then exceed.
        queries: the number of last tokens whose queries the cache stores for the inner method, and
            counts in bytes.
        phase: ``steps`` compresses after every `every` steps, as kvpress's DecodingPress; ``tokens``
            whenever the number of tokens before the step is a multiple of `every`, as R-KV.
    """

    paper: ClassVar[str] = "kvpress DecodingPress; arXiv 2505.24133"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "kvpress_decoding": {"every": 512, "to": 2048, "phase": "steps"}
    }

    every: Count = 128
    to: Count | Share | None = 512
    queries: Count = 32
    phase: Literal["steps", "tokens"] = "steps"

    @classmethod
    def can_wrap(cls, inner: type[Method]) -> bool:
        return inner.can_compress_again

    def _check_inner(self, inner: Method) -> None:
        super()._check_inner(inner)
        if inner.second_pass is not None:
            raise KVError(
                f"recompress.of is {self.of!r} with options that have the prompt repeated; allowed: "
                "options that do not (of attention_matching: queries=prompt)"
            )

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.every, self.to, self.queries, self.phase)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        return self.inner.compress(layer, budget, generator)
