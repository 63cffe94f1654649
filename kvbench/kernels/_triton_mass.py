"""Triton kernels of `attention_mass`: the logarithm of each query's normaliser, unless the attention
itself has told it, then column sums.

A pass each over the tiles of the causal half of q.k, nothing but [heads, m] and [heads, n] numbers
written. The second pass owns its columns (a program is one query head's block of keys and goes over
the queries that see it), so nothing is added atomically and the sums are the same in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import multiprocessors, on_its_device


@triton.jit
def _tile(
    q,
    key,
    key_step,
    place,
    columns,
    n,
    scaling,
    softcap,
    DIM: tl.constexpr,
    D: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits [QUERIES, KEYS] of queries q [QUERIES, D] and the keys at `place`."""
    mask = (place < n)[:, None]
    if D != DIM:
        mask = mask & (columns < DIM)[None, :]
    k = tl.load(
        key + place.to(tl.int64)[:, None] * key_step + columns[None, :], mask=mask, other=0.0
    )
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
    if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1), which saturates as it should
        s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
    return s


@triton.jit(do_not_specialize=["m", "n", "parts"])
def normaliser_kernel(
    queries,
    keys,
    partial,  # [batch * heads, parts, m] float32: log of the sum of exponentials
    scaling,
    softcap,
    heads,
    group,
    m,
    n,
    parts,
    query_batch,
    query_head,
    query_step,
    key_batch,
    key_head,
    key_step,
    DIM: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The last queries see most keys: they start first, so that no long program starts last.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    part = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    batch, own = head // heads, head % heads
    queries += batch * query_batch + own * query_head
    keys += batch * key_batch + (own // group) * key_head
    rows = block * QUERIES + tl.arange(0, QUERIES)
    position = n - m + rows
    columns = tl.arange(0, D)
    q = tl.load(
        queries + rows.to(tl.int64)[:, None] * query_step + columns[None, :],
        mask=(rows < m)[:, None] & (columns < DIM)[None, :],
        other=0.0,
    )
    seen = tl.minimum(n, n - m + (block + 1) * QUERIES)  # keys the last query of the block sees
    share = tl.cdiv(tl.cdiv(n, parts), KEYS) * KEYS
    first = part * share
    last = tl.minimum(seen, first + share)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        place = start + tl.arange(0, KEYS)
        s = _tile(
            q, keys, key_step, place, columns, n, scaling, softcap, DIM, D, SOFTCAP, PRECISION
        )
        s = tl.where(place[None, :] <= position[:, None], s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen in this part yet
        total = total * tl.exp(top - base) + tl.sum(tl.exp(s - base[:, None]), 1)
        top = new_top
    some = total > 0.0
    logarithm = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), -float("inf"))
    tl.store(partial + (head * parts + part) * m + rows, logarithm, mask=rows < m)


@triton.jit(do_not_specialize=["m", "n"])
def column_kernel(
    queries,
    keys,
    normaliser,  # [batch * heads, m] float32
    mass,  # [batch * heads, n] float32
    scaling,
    softcap,
    heads,
    group,
    m,
    n,
    query_batch,
    query_head,
    query_step,
    key_batch,
    key_head,
    key_step,
    DIM: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.program_id(0)  # the first keys are seen by most queries: they start first
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    queries += batch * query_batch + own * query_head
    keys += batch * key_batch + (own // group) * key_head
    normaliser += head * m
    place = block * KEYS + tl.arange(0, KEYS)
    columns = tl.arange(0, D)
    mask = (place < n)[:, None] & (columns < DIM)[None, :]
    k = tl.load(
        keys + place.to(tl.int64)[:, None] * key_step + columns[None, :], mask=mask, other=0.0
    )
    # The first query that sees the block's first key, at the start of a block of queries.
    first = tl.maximum(0, block * KEYS - (n - m)) // QUERIES * QUERIES
    sums = tl.zeros([KEYS], tl.float32)
    for start in tl.range(first, m, QUERIES, num_stages=STAGES):
        rows = start + tl.arange(0, QUERIES)
        q_mask = (rows < m)[:, None]
        if D != DIM:
            q_mask = q_mask & (columns < DIM)[None, :]
        q = tl.load(
            queries + rows.to(tl.int64)[:, None] * query_step + columns[None, :],
            mask=q_mask,
            other=0.0,
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        if SOFTCAP:
            s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
        # Queries beyond m have an infinite normaliser and give nothing.
        log_sum = tl.load(normaliser + rows, mask=rows < m, other=float("inf"))
        seen = place[None, :] <= (n - m + rows)[:, None]
        sums += tl.sum(tl.where(seen, tl.exp(s - log_sum[:, None]), 0.0), 0)
    tl.store(mass + head * n + place, sums, mask=place < n)


def mass_options(dim: int, itemsize: int) -> dict[str, Any]:
    """Compile-time constants of both kernels for rows of `dim` numbers.

    Tiles as large as leaves room for two programs per multiprocessor in registers and shared memory:
    while one computes exponentials, the other has the matrix units. A warpgroup multiplies 64
    queries at once; 4-byte rows take smaller tiles.
    """
    d = max(16, triton.next_power_of_2(dim))
    row = d * itemsize
    if itemsize == 2:
        queries, keys, stages = 64, 128 if row <= 256 else 64, 2
    else:
        queries, keys = 64 if row <= 128 else 32, 64 if row <= 256 else 32
        stages = 2 if row <= 256 else 1
    return {
        "DIM": dim,
        "D": d,
        "QUERIES": queries,
        "KEYS": keys,
        "STAGES": stages,
        # float32 stays float32, on the ordinary units: tf32, even thrice, loses digits and spills.
        "PRECISION": "ieee" if itemsize == 4 else "tf32",
        # The ordinary units keep their operands in registers: four warps have too few.
        "num_warps": 8 if itemsize == 4 else 4,
    }


@on_its_device
def attention_mass(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    softcap: float | None,
    normalisers: Tensor | None = None,
) -> Tensor:
    """`kernels.attention_mass` on CUDA: one launch with normalisers, else two."""
    batch, heads, m, dim = queries.shape
    kv_heads, n = keys.shape[1:3]
    if queries.dtype != keys.dtype:
        queries = queries.to(keys.dtype)
    queries, keys = (x if x.stride(3) == 1 else x.contiguous() for x in (queries, keys))
    options = mass_options(dim, keys.element_size())
    options["SOFTCAP"] = softcap is not None
    cap = 0.0 if softcap is None else float(softcap)
    shapes = (heads, heads // kv_heads, m, n)
    strides = (*queries.stride()[:3], *keys.stride()[:3])
    if normalisers is None:
        blocks = -(-m // options["QUERIES"])
        # Few queries (an observation window) leave multiprocessors idle unless the keys are shared out.
        wanted = 2 * multiprocessors(queries.device) // (batch * heads * blocks)
        parts = max(1, min(wanted, -(-n // 1024)))
        partial = queries.new_empty(batch, heads, parts, m, dtype=torch.float32)
        normaliser_kernel[(blocks, parts, batch * heads)](
            queries, keys, partial, float(scaling), cap, *shapes, parts, *strides, **options
        )
        normalisers = partial[:, :, 0] if parts == 1 else partial.logsumexp(2)
    mass = queries.new_empty(batch, heads, n, dtype=torch.float32)
    column_kernel[(-(-n // options["KEYS"]), batch * heads)](
        queries,
        keys,
        normalisers.float().contiguous(),
        mass,
        float(scaling),
        cap,
        *shapes,
        *strides,
        **options,
    )
    return mass
