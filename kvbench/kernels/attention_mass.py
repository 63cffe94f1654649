"""Accumulated attention: how much softmax attention every key received, in O(n) memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton

TILE_ELEMENTS = 1 << 20
"""Attention scores held at once: 4 MiB of float32, so that they stay in cache."""

TILE = (256, 1024)
"""Queries and keys of a tile where normalisers are known: 1 MiB of float32."""

DIAGONAL = 128
"""Queries of a tile on the diagonal: few, since half of its scores are computed for nothing."""

UNSHIFTED = 60.0
"""Where every |normaliser| of a tile's queries is at most this, e^score cannot overflow before it is
multiplied by e^-normaliser (float32 ends at e^88), so that the scores need no shift first."""


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
    """`attention_mass` of all n queries where their normalisers are known, by tiles that stay in cache:
    each tile is a matrix product, then 2^x of its numbers, then the sums of its columns. On a CPU 2^x
    takes a third of the time of e^x, so the logits are made in base 2.

    Columns are summed by a product with a vector. Where no score can overflow (`UNSHIFTED`), that vector
    holds e^-normaliser of each query, and no normaliser has to be subtracted from the scores.
    """
    batch, heads, n, _ = queries.shape
    group = heads // keys.shape[1]
    base = 1.0 / math.log(2.0)
    shift = (normalisers.float() * -base).reshape(batch * heads, n)
    shares, ones = shift.exp2(), shift.new_ones(n)
    rows, columns = TILE
    small = shift.abs() <= UNSHIFTED * base
    unshifted = torch.stack([part.all(1) for part in small.split(rows, 1)], 1).tolist()
    mass = shift.new_zeros(batch * heads, n)
    scratch = shift.new_empty(rows * max(columns, rows))
    for head in range(batch * heads):
        row, member = divmod(head, heads)
        # One head at a time is laid out token by token, and is still in cache when it is used.
        q = (queries[row, member].float() * (scaling * base)).contiguous()
        if member % group == 0:
            k = keys[row, member // group].float().contiguous().T
        for start, stop, first, last in tiles(n, rows, columns):
            tile = scratch[: (stop - start) * (last - first)].view(stop - start, last - first)
            if unshifted[head][start // rows]:
                torch.mm(q[start:stop], k[:, first:last], out=tile)
                share = shares[head, start:stop]
            else:
                rise = shift[head, start:stop, None]
                torch.addmm(rise, q[start:stop], k[:, first:last], out=tile)
                share = ones[: stop - start]
            tile.exp2_()
            if last > start:
                tile.tril_(start - first)
            # Summed by tile first: many small numbers added to one large sum round it as often.
            mass[head, first:last] += torch.mv(tile.T, share)
    return mass.view(batch, heads, n)


def tiles(n: int, rows: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """The causal half of n queries by n keys, as (first query, end, first key, end) of tiles. A tile
    on the diagonal has at most `DIAGONAL` queries, and none has queries of two blocks of `rows`."""
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        for first in range(0, start, columns):
            yield start, stop, first, min(start, first + columns)
        for inner in range(start, stop, DIAGONAL):
            last = min(stop, inner + DIAGONAL)
            yield inner, last, start, last
