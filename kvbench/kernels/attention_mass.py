"""The softmax attention that every key received, summed over queries, in O(n) memory.

These are the accumulated scores of H2O (arXiv 2306.14048) over all queries, and those of SnapKV (arXiv
2404.14469) over the queries of an observation window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton
from kvbench.kernels.logits import softcapped, softmax

TILE_ELEMENTS = 1 << 20
"""How many attention scores are computed at a time: 4 MiB of float32, so that they stay in cache."""

TILE = (256, 1024)
"""Queries and keys of a tile where normalisers are known: 1 MiB of float32."""

DIAGONAL = 128
"""Queries of a tile on the diagonal: few, since half of its scores are computed and not used."""

UNSHIFTED = 60.0
"""Where every |normaliser| of a tile's queries is at most this, e^score does not overflow (a score is
at most its query's normaliser, and float32 ends at e^88), so that the normaliser need not be
subtracted first."""


def attention_mass(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    normalisers: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Sum the columns of the causal softmax attention of the last m queries over n keys.

    Query i of m is at position n - m + i and attends to the keys 0 .. n - m + i. Of the masked half
    only what lies in tiles on the diagonal is computed.

    Args:
        queries: [batch, heads, m, head_dim], the last m of n; any float dtype.
        keys: [batch, kv_heads, n, head_dim]; query head i uses KV head i // group.
        scaling: factor on q.k before the softmax.
        softcap: s of s * tanh(logit / s), applied after scaling.
        sinks: [heads], one more logit in the softmax of each query head, which belongs to no key.
        normalisers: [batch, heads, m], the logarithm of each query's sum of exponentials, the sink's
            included, if the attention itself has returned it; this saves half of the work (in torch
            only if m = n).
        implementation: auto (Triton on CUDA, torch elsewhere) | triton | torch.

    Returns:
        [batch, heads, n] float32; each head sums to m without a sink. With m = n this is H2O's
        accumulated score, with m = window SnapKV's.

    Raises:
        ValueError: shapes that do not fit.
    """
    batch, heads, m, dim = queries.shape
    kv_heads, n = keys.shape[1], keys.shape[2]
    if m > n or heads % kv_heads:
        raise ValueError(f"{m} queries of {heads} heads over {n} keys of {kv_heads} KV heads")
    if use_triton("attention_mass", implementation, queries, keys):
        from kvbench.kernels import _triton_mass

        return _triton_mass.attention_mass(
            queries, keys, scaling=scaling, softcap=softcap, sinks=sinks, normalisers=normalisers
        )
    group = heads // kv_heads
    if normalisers is not None and softcap is None and m == n:
        return _normalised_mass(queries, keys, scaling, normalisers)
    q = (queries.float() * scaling).reshape(batch * kv_heads, group, m, dim)
    k = keys.float().reshape(batch * kv_heads, n, dim)
    mass = torch.zeros(batch * kv_heads, group, n, dtype=torch.float32, device=keys.device)
    for head in range(batch * kv_heads):
        own_sinks = None if sinks is None else sinks.view(kv_heads, group, 1)[head % kv_heads]
        start = 0
        while start < m:
            # Later blocks see more keys, so they hold fewer queries.
            seen = n - m + start
            rows = max(8, min(128, TILE_ELEMENTS // (group * (seen + 128))))
            stop = min(m, start + rows)
            seen, rows = n - m + stop, stop - start
            block = q[head, :, start:stop].reshape(group * rows, dim)
            scores = (block @ k[head, :seen].T).view(group, rows, seen)
            softcapped(scores, softcap)
            future = torch.ones(rows, rows, dtype=torch.bool, device=keys.device).triu_(1)
            scores[:, :, seen - rows :].masked_fill_(future, float("-inf"))
            mass[head, :, :seen] += softmax(scores, own_sinks).sum(1)
            start = stop
    return mass.view(batch, heads, n)


def _normalised_mass(queries: Tensor, keys: Tensor, scaling: float, normalisers: Tensor) -> Tensor:
    """`attention_mass` of all n queries from their normalisers, in tiles that stay in cache: each is a
    matrix product, then 2^x of its numbers, then the sums of its columns (a product with a vector).

    Where no score can overflow (`UNSHIFTED`), that vector has e^-normaliser of each query, and no
    normaliser has to be subtracted from the scores.
    """
    batch, heads, n, _ = queries.shape
    group = heads // keys.shape[1]
    # To base 2: on a CPU 2^x takes a third of the time of e^x.
    log2_e = 1.0 / math.log(2.0)
    shift = (normalisers.float() * -log2_e).reshape(batch * heads, n)
    factors = shift.exp2()
    ones = shift.new_ones(n)
    rows, columns = TILE
    is_small = shift.abs() <= UNSHIFTED * log2_e
    unshifted = torch.stack([block.all(1) for block in is_small.split(rows, 1)], 1).tolist()
    mass = shift.new_zeros(batch * heads, n)
    scratch = shift.new_empty(rows * max(columns, rows))
    for head in range(batch * heads):
        row, member = divmod(head, heads)
        # Heads are copied one at a time, so that a copy is still in cache when it is used.
        q = (queries[row, member].float() * (scaling * log2_e)).contiguous()
        if member % group == 0:
            k = keys[row, member // group].float().contiguous().T
        for start, stop, first, last in tiles(n, rows, columns):
            tile = scratch[: (stop - start) * (last - first)].view(stop - start, last - first)
            if unshifted[head][start // rows]:
                torch.mm(q[start:stop], k[:, first:last], out=tile)
                query_factors = factors[head, start:stop]
            else:
                query_shift = shift[head, start:stop, None]
                torch.addmm(query_shift, q[start:stop], k[:, first:last], out=tile)
                query_factors = ones[: stop - start]
            tile.exp2_()
            if last > start:  # on the diagonal
                tile.tril_(start - first)
            # A tile is summed first: each small number added to one large sum would round that sum.
            mass[head, first:last] += torch.mv(tile.T, query_factors)
    return mass.view(batch, heads, n)


def tiles(n: int, rows: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut the causal half of n queries by n keys into tiles of at most `rows` queries and `columns`
    keys.

    Yields:
        a tile's first query, the one behind its last, its first key and the one behind its last. On
        the diagonal it has at most `DIAGONAL` queries; no tile has queries of two blocks of `rows`.
    """
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        for first in range(0, start, columns):
            yield start, stop, first, min(start, first + columns)
        for inner in range(start, stop, DIAGONAL):
            last = min(stop, inner + DIAGONAL)
            yield inner, last, start, last
