"""A decoding step of a cache, or of a row, on tensors without a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvbench.engine.attention import LayerCall
from kvbench.engine.row import Row


def step(
    cache: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> Any:
    """`Cache.step`, or `Row.attend` at layer 0, of tensors [heads, t, d]."""
    call = LayerCall(0, query[None], key[None], value[None], scaling, softcap)
    return cache.attend(call, positions) if isinstance(cache, Row) else cache.step(call, positions)
