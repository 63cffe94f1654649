"""A decoding step of a cache on tensors without a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvbench.engine.attention import LayerCall


def step(
    cache: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> Any:
    """`LayerCache.step` of tensors [heads, t, d]."""
    call = LayerCall(0, query[None], key[None], value[None], scaling, softcap)
    return cache.step(call, positions)
