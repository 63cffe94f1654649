from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvbench.errors.options import Count
from kvbench.methods.kvzip import KVzip


@dataclass(frozen=True, kw_only=True)
class KVgrad(KVzip):
    """`KVzip` with ``score=gradient``, in chunks of 512 tokens: an entry's score is how much it changes
    what the last layer returns while the model repeats its context, to first order."""

    paper: ClassVar[str] = "openreview.net/forum?id=cg1wTCJjjk; kvpress 0.5.5"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    score: Literal["attention", "plus", "gradient"] = "gradient"
    chunk: Count = 512
