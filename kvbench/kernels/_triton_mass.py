"""Triton kernels of `attention_mass`: the logarithm of each query's sum of exponentials, unless the
caller has it from the attention itself, then the sums of the attention's columns.

Each kernel goes once over the tiles of the causal half of q.k, and writes nothing of the size of a
tile. No two programs add to the same sum, so that the sums are equal in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import multiprocessors, on_its_device
from kvbench.kernels._triton_tiles import capped, load_rows, online_softmax


@triton.jit(do_not_specialize=["m", "n", "parts"])
def normaliser_kernel(
    queries,  # [batch, heads, m, DIM], the last m of n, of the strides below (1 within a row)
    keys,  # [batch, kv_heads, n, DIM], of the strides below (1 within a row)
    partial,  # [batch * heads, parts, m] float32, out: logarithms of the sums over a part of the keys
    scaling,
    softcap,
    heads,
    group,
    m,
    n,
    parts,
    query_batch_stride,
    query_head_stride,
    query_stride,
    key_batch_stride,
    key_head_stride,
    key_stride,
    DIM: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (block of QUERIES queries, part of the keys, batch row x query head)."""
    # The last queries see most keys: they start first, so that no long program starts last.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    part = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    batch, own = head // heads, head % heads
    queries += batch * query_batch_stride + own * query_head_stride
    keys += batch * key_batch_stride + (own // group) * key_head_stride
    rows = block * QUERIES + tl.arange(0, QUERIES)
    position = n - m + rows
    columns = tl.arange(0, D)
    q = load_rows(queries, query_stride, rows.to(tl.int64), rows < m, columns, DIM, D)
    seen = tl.minimum(n, n - m + (block + 1) * QUERIES)  # keys the last query of the block sees
    part_keys = tl.cdiv(tl.cdiv(n, parts), KEYS) * KEYS
    first = part * part_keys
    last = tl.minimum(seen, first + part_keys)
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        place = start + tl.arange(0, KEYS)
        k = load_rows(keys, key_stride, place.to(tl.int64), place < n, columns, DIM, D)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        logits = capped(logits, softcap, SOFTCAP)
        logits = tl.where(place[None, :] <= position[:, None], logits, -float("inf"))
        _, _, largest, total = online_softmax(logits, largest, total)
    sees = total > 0.0  # else no key of this part
    logarithm = tl.where(sees, largest + tl.log(tl.where(sees, total, 1.0)), -float("inf"))
    tl.store(partial + (head * parts + part) * m + rows, logarithm, mask=rows < m)


@triton.jit(do_not_specialize=["m", "n"])
def column_kernel(
    queries,  # as in `normaliser_kernel`, and so are those that have no comment
    keys,
    normaliser,  # [batch * heads, m] float32: the logarithm of each query's sum of exponentials
    mass,  # [batch * heads, n] float32, out
    scaling,
    softcap,
    heads,
    group,
    m,
    n,
    query_batch_stride,
    query_head_stride,
    query_stride,
    key_batch_stride,
    key_head_stride,
    key_stride,
    DIM: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (block of KEYS keys, batch row x query head)."""
    block = tl.program_id(0)  # the first keys are seen by most queries: they start first
    head = tl.program_id(1).to(tl.int64)
    batch, own = head // heads, head % heads
    queries += batch * query_batch_stride + own * query_head_stride
    keys += batch * key_batch_stride + (own // group) * key_head_stride
    normaliser += head * m
    place = block * KEYS + tl.arange(0, KEYS)
    columns = tl.arange(0, D)
    k = load_rows(keys, key_stride, place.to(tl.int64), place < n, columns, DIM, D)
    # The first query that sees the block's first key, at the start of a block of queries.
    first = tl.maximum(0, block * KEYS - (n - m)) // QUERIES * QUERIES
    sums = tl.zeros([KEYS], tl.float32)
    for start in tl.range(first, m, QUERIES, num_stages=STAGES):
        rows = start + tl.arange(0, QUERIES)
        q = load_rows(queries, query_stride, rows.to(tl.int64), rows < m, columns, DIM, D)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        logits = capped(logits, softcap, SOFTCAP)
        # A row that is no query has an infinite normaliser and adds nothing.
        log_sum = tl.load(normaliser + rows, mask=rows < m, other=float("inf"))
        seen = place[None, :] <= (n - m + rows)[:, None]
        sums += tl.sum(tl.where(seen, tl.exp(logits - log_sum[:, None]), 0.0), 0)
    tl.store(mass + head * n + place, sums, mask=place < n)


def mass_options(dim: int, itemsize: int) -> dict[str, Any]:
    """Choose the compile-time constants of both kernels; `itemsize` is the bytes of a number."""
    # Tiles are as large as still lets two programs share a multiprocessor's registers and shared memory:
    # while one computes exponentials, the other has the matrix units. Four warps multiply 64 queries at
    # once; rows of 4-byte numbers take smaller tiles.
    d = max(16, triton.next_power_of_2(dim))
    row_bytes = d * itemsize
    queries = 64
    stages = 2
    if itemsize == 2:
        keys = 128 if row_bytes <= 256 else 64
    else:
        queries = 64 if row_bytes <= 128 else 32
        keys = 64 if row_bytes <= 256 else 32
        stages = 2 if row_bytes <= 256 else 1
    return {
        "DIM": dim,
        "D": d,
        "QUERIES": queries,
        "KEYS": keys,
        "STAGES": stages,
        # float32 is multiplied as it is, not on the matrix units: tf32, even three products of it, loses
        # digits and spills.
        "PRECISION": "ieee" if itemsize == 4 else "tf32",
        # Without the matrix units the operands lie in registers, of which four warps have too few.
        "num_warps": 8 if itemsize == 4 else 4,
    }


@on_its_device
def attention_mass(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None = None,
    normalisers: Tensor | None = None,
) -> Tensor:
    """`attention_mass.attention_mass` on CUDA: one launch with normalisers, two without."""
    batch, heads, m, dim = queries.shape
    kv_heads, n = keys.shape[1:3]
    if queries.dtype != keys.dtype:
        queries = queries.to(keys.dtype)
    if queries.stride(3) != 1:
        queries = queries.contiguous()
    if keys.stride(3) != 1:
        keys = keys.contiguous()
    options = mass_options(dim, keys.element_size())
    options["SOFTCAP"] = softcap is not None
    cap = 0.0 if softcap is None else float(softcap)
    shapes = (heads, heads // kv_heads, m, n)
    strides = (*queries.stride()[:3], *keys.stride()[:3])
    if normalisers is None:
        blocks = -(-m // options["QUERIES"])
        # Few queries (an observation window) are too few programs for the device: the keys are divided.
        wanted = 2 * multiprocessors(queries.device) // (batch * heads * blocks)
        parts = max(1, min(wanted, -(-n // 1024)))
        partial = queries.new_empty(batch, heads, parts, m, dtype=torch.float32)
        normaliser_kernel[(blocks, parts, batch * heads)](
            queries, keys, partial, float(scaling), cap, *shapes, parts, *strides, **options
        )
        normalisers = partial[:, :, 0] if parts == 1 else partial.logsumexp(2)
        if sinks is not None:
            normalisers = torch.logaddexp(normalisers, sinks.float()[:, None])
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
