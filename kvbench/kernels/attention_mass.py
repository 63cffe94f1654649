"""Accumulated attention: how much softmax attention every key received, in O(n) memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton

TILE_ELEMENTS = 1 << 20
"""Attention scores held at once: 4 MiB of float32, so that they stay in cache."""

TILE = (256, 2048)
"""Queries and keys of a tile where normalisers are known: 2 MiB of float32."""


def attention_mass(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    normalisers: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Column sums of the causal softmax attention of the last m queries.

    Query i of m stands at position n - m + i and attends to keys 0 .. n - m + i. The scores of a
    block of queries are computed only against the keys that block may see, so the masked upper
    triangle costs nothing but the tiles on the diagonal. Keys are never repeated: the query heads
    of a group share one matrix product.

    Args:
        queries: [batch, heads, m, head_dim], the last m of n; any float dtype.
        keys: [batch, kv_heads, n, head_dim]; query head i uses KV head i // group.
        scaling: factor on q.k before the softmax.
        softcap: s of s * tanh(logit / s), applied after scaling; None for none.
        normalisers: [batch, heads, m], the logarithm of each query's sum of exponentials, where the
            attention itself has told it; it saves half of the work (the torch form's with m = n).
            None: unknown.
        implementation: auto (Triton on CUDA, torch elsewhere) | triton | torch.

    Returns:
        [batch, heads, n] float32; each head sums to m. With m = n this is H2O's accumulated score,
        with m = window SnapKV's.

    Raises:
        ValueError: shapes that do not fit; a forced implementation that is not possible.
    """
    batch, heads, m, dim = queries.shape
    kv_heads, n = keys.shape[1], keys.shape[2]
    if m > n or heads % kv_heads:
        raise ValueError(f"{m} queries of {heads} heads over {n} keys of {kv_heads} KV heads")
    if use_triton("attention_mass", implementation, queries, keys):
        from kvbench.kernels import _triton_mass

        return _triton_mass.attention_mass(
            queries, keys, scaling=scaling, softcap=softcap, normalisers=normalisers
        )
    group = heads // kv_heads
    if normalisers is not None and softcap is None and m == n:
        return _normalised_mass(queries, keys, scaling, normalisers)
    q = (queries.float() * scaling).reshape(batch * kv_heads, group, m, dim)
    k = keys.float().reshape(batch * kv_heads, n, dim)
    mass = torch.zeros(batch * kv_heads, group, n, dtype=torch.float32, device=keys.device)
    for head in range(batch * kv_heads):
        start = 0
        while start < m:
            # Later blocks see more keys, so they hold fewer queries.
            seen = n - m + start
            rows = max(8, min(128, TILE_ELEMENTS // (group * (seen + 128))))
            stop = min(m, start + rows)
            seen, rows = n - m + stop, stop - start
            block = q[head, :, start:stop].reshape(group * rows, dim)
            scores = (block @ k[head, :seen].T).view(group, rows, seen)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            future = torch.ones(rows, rows, dtype=torch.bool, device=keys.device).triu_(1)
            scores[:, :, seen - rows :].masked_fill_(future, float("-inf"))
            torch.softmax(scores, -1, out=scores)
            mass[head, :, :seen] += scores.sum(1)
            start = stop
    return mass.view(batch, heads, n)


def _normalised_mass(queries: Tensor, keys: Tensor, scaling: float, normalisers: Tensor) -> Tensor:
    """Of all n queries, their normalisers known: a product, 2^x, and the sums of columns, by tiles that
    stay in cache. 2^x takes a third of the time of e^x on a CPU, so the logits are made in base 2."""
    batch, heads, n, dim = queries.shape
    group = heads // keys.shape[1]
    base = 1.0 / math.log(2.0)
    q = (queries.float() * (scaling * base)).reshape(batch * heads, n, dim)
    k = keys.float().reshape(-1, n, dim)
    offset = (normalisers.float() * -base).reshape(batch * heads, n, 1)
    mass = q.new_zeros(batch * heads, n)
    rows, columns = TILE
    scores, ones = q.new_empty(rows * columns), q.new_ones(1, rows)
    for head in range(batch * heads):
        for queried in (slice(at, min(n, at + rows)) for at in range(0, n, rows)):
            count = queried.stop - queried.start
            for first in range(0, queried.stop, columns):
                seen = slice(first, min(queried.stop, first + columns))
                tile = scores[: count * (seen.stop - first)].view(count, -1)
                torch.addmm(
                    offset[head, queried], q[head, queried], k[head // group, seen].T, out=tile
                )
                tile.exp2_()
                if seen.stop > queried.start:
                    tile.tril_(queried.start - first)
                mass[head, seen] += (ones[:, :count] @ tile)[0]
    return mass.view(batch, heads, n)
