"""What tests of kernels decode attention and others share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.attention import LayerCall


def draw(
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    lengths: Sequence[int],
    reserved: Any,
    dtype: torch.dtype = torch.float32,
    weighted: bool = True,
) -> Any:
    generator = torch.Generator().manual_seed(sum(lengths))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query = 2 * normal(len(lengths), heads, dim)
    keys = [normal(kv_heads, room, dim) for room in reserved]
    values = [normal(kv_heads, room, value_dim) for room in reserved]
    weights: list[Tensor | None] = [None] * len(lengths)
    if weighted:
        weights = [torch.randn(kv_heads, room, generator=generator) for room in reserved]
        weights[0] = None
        for weight, n in zip(weights[1:], lengths[1:], strict=True):
            weight[:, : n // 3] = -torch.inf
    for key, value, n in zip(keys, values, lengths, strict=True):
        key[:, n:], value[:, n:] = torch.nan, torch.nan  # what is beyond must not be read
    return query, keys, values, weights


def by_definition(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    weights: Any,
    lengths: Sequence[int],
    scaling: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    out, mass = [], []
    longest = max(key.shape[1] for key in keys)
    for q, key, value, weight, n in zip(query, keys, values, weights, lengths, strict=True):
        group = q.shape[0] // key.shape[0]
        k = key[:, :n].double().repeat_interleave(group, 0)
        v = value[:, :n].double().repeat_interleave(group, 0)
        logits = torch.einsum("hd,hnd->hn", q.double(), k) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if weight is not None:
            logits = logits + weight[:, :n].double().repeat_interleave(group, 0)
        attention = logits.softmax(-1)
        out.append(torch.einsum("hn,hnd->hd", attention, v))
        received = attention.view(key.shape[0], group, n).mean(1)
        mass.append(torch.nn.functional.pad(received, (0, longest - n)))
    return torch.stack(out), torch.stack(mass)


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
