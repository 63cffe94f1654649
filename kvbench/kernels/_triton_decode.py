"""Triton kernels of `decode`: split over the entries, then reduced (flash decoding).

The entries of each KV head of each row are cut into chunks of equal size. The kernels run one after the
other:

1. `split_kernel` reads each chunk once, for all query heads of the group, and writes a partial result
   of each head. Chunks do not wait for each other, so that a few long rows fill the device as well as
   many short ones. A program whose chunk begins behind the row's last entry ends after a few loads.
2. `reduce_kernel` combines the partial results of each query head.
3. `mass_kernel`, where it is asked for, computes the attention that each entry received.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device
from kvbench.kernels._triton_table import (
    KEY_ENTRY_STRIDE,
    KEY_HEAD_STRIDE,
    KEYS,
    RESERVED,
    TABLE_COLUMNS,
    VALUE_ENTRY_STRIDE,
    VALUE_HEAD_STRIDE,
    VALUES,
    row_pointer,
    row_stride,
    weights_of_head,
)
from kvbench.kernels._triton_tiles import (
    load_rows,
    online_softmax,
    store_partial,
    weighted_logits,
)

STAGE_BYTES = 32768
"""Bytes of keys and values that one stage of the pipeline holds in shared memory. Of multiprocessors
with 227 KB, two programs with three stages each fit into one; of those with 163 KB, one does. Two
stages in flight are far more than latency x bandwidth of a multiprocessor (about 20 KB)."""


@triton.jit(do_not_specialize=["lengths", "chunk", "splits", "longest"])
def split_kernel(
    query,  # [rows, heads, DIM], contiguous, in the keys' dtype
    table,  # [rows, TABLE_COLUMNS] int64, `RowPointers.pointers`
    lengths,  # [rows], entries of each
    partial_out,  # [rows, heads, splits, VALUE_DIM] float32, out
    partial_max,  # [rows, heads, splits] float32, out
    partial_sum,  # [rows, heads, splits] float32, out
    logits_out,  # [rows, heads, longest] float32, out, if KEEP_LOGITS
    scaling,
    softcap,
    chunk,  # entries of a program
    splits,  # chunks for which the partial results have room
    longest,
    kv_heads,
    group,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
    UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KEEP_LOGITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention over one chunk of the entries: program (row x KV head, chunk)."""
    row = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    split = tl.program_id(1)
    reserved = tl.load(table + row * TABLE_COLUMNS + RESERVED)
    n = tl.minimum(tl.load(lengths + row).to(tl.int64), reserved).to(tl.int32)
    first = split * chunk
    if first >= n:
        return
    last = tl.minimum(first + chunk, n)
    dtype: tl.constexpr = query.dtype.element_ty
    keys = row_pointer(table, row, KEYS, dtype, ALIGNED)
    keys += head * row_stride(table, row, KEY_HEAD_STRIDE, ALIGNED, UNIT)
    key_stride = row_stride(table, row, KEY_ENTRY_STRIDE, ALIGNED, UNIT)
    values = row_pointer(table, row, VALUES, dtype, ALIGNED)
    values += head * row_stride(table, row, VALUE_HEAD_STRIDE, ALIGNED, UNIT)
    value_stride = row_stride(table, row, VALUE_ENTRY_STRIDE, ALIGNED, UNIT)
    weights, weight_stride, weights_stored = weights_of_head(table, row, head)

    members = tl.arange(0, GROUP)
    in_group = members < group
    query_heads = row * kv_heads * group + head * group + members  # counted over all rows
    columns = tl.arange(0, D)
    value_columns = tl.arange(0, E)
    q = load_rows(query, DIM, query_heads, in_group, columns, DIM, D)
    largest = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    out = tl.zeros([GROUP, E], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        place = start + tl.arange(0, BLOCK)
        is_entry = place < last
        entries = place.to(tl.int64)
        k = load_rows(keys, key_stride, entries, is_entry, columns, DIM, D)
        v = load_rows(values, value_stride, entries, is_entry, value_columns, VALUE_DIM, E)
        logits = weighted_logits(
            tl.dot(q, tl.trans(k), input_precision=PRECISION),
            scaling,
            softcap,
            weights,
            weight_stride,
            weights_stored,
            entries,
            is_entry,
            SOFTCAP,
        )
        if KEEP_LOGITS:
            tl.store(
                logits_out + query_heads[:, None] * longest + entries[None, :],
                logits,
                mask=in_group[:, None] & is_entry[None, :],
            )
        exponentials, rescale, largest, total = online_softmax(logits, largest, total)
        out = tl.dot(exponentials.to(dtype), v, out * rescale[:, None], input_precision=PRECISION)
    slots = query_heads * splits + split
    store_partial(
        partial_out, partial_max, partial_sum, slots, in_group, out, largest, total, VALUE_DIM, E
    )


@triton.jit(do_not_specialize=["lengths", "chunk", "splits"])
def reduce_kernel(
    table,  # as in `split_kernel`, and so are those that have no comment
    lengths,
    partial_out,
    partial_max,
    partial_sum,
    out,  # [rows, heads, VALUE_DIM], contiguous, out
    log_sum,  # [rows, heads] float32, out: the logarithm of the sum of the exponentials of all logits
    sinks,  # [rows, heads] float32, contiguous, if SINKS
    chunk,
    splits,
    heads,
    VALUE_DIM: tl.constexpr,
    E: tl.constexpr,
    PART: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Combine a query head's partial results, PART chunks at a time: program (row x query head)."""
    query_head = tl.program_id(0).to(tl.int64)
    row = query_head // heads
    reserved = tl.load(table + row * TABLE_COLUMNS + RESERVED)
    n = tl.minimum(tl.load(lengths + row).to(tl.int64), reserved).to(tl.int32)
    chunks = tl.cdiv(n, chunk)  # those behind the last entry wrote nothing
    columns = tl.arange(0, E)
    largest = tl.full([], -float("inf"), tl.float32)
    base = tl.full([], 0.0, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    result = tl.zeros([E], tl.float32)
    if SINKS:  # as a partial result of one entry whose value is 0
        largest = tl.load(sinks + query_head)
        base = largest
        total = tl.full([], 1.0, tl.float32)
    for start in range(0, chunks, PART):
        part = start + tl.arange(0, PART)
        slots = query_head * splits + part
        maxima = tl.load(partial_max + slots, mask=part < chunks, other=-float("inf"))
        sums = tl.load(partial_sum + slots, mask=part < chunks, other=0.0)
        outs = tl.load(
            partial_out + slots[:, None] * VALUE_DIM + columns[None, :],
            mask=(part < chunks)[:, None] & (columns < VALUE_DIM)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(maxima, 0))
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        rescale = tl.exp(largest - base)
        factors = tl.exp(maxima - base)
        total = total * rescale + tl.sum(sums * factors, 0)
        result = result * rescale + tl.sum(outs * factors[:, None], 0)
        largest = new_largest
    # The total is 0 where there is no entry, or all are hidden. A NaN stays one, as in torch.
    attends = total != 0.0
    result = tl.where(attends, result / tl.where(attends, total, 1.0), 0.0)
    tl.store(
        out + query_head * VALUE_DIM + columns,
        result.to(out.dtype.element_ty),
        mask=columns < VALUE_DIM,
    )
    tl.store(
        log_sum + query_head,
        tl.where(attends, base + tl.log(tl.where(attends, total, 1.0)), float("inf")),
    )


@triton.jit(do_not_specialize=["lengths", "longest"])
def mass_kernel(
    table,  # [rows, TABLE_COLUMNS] int64
    lengths,  # [rows]
    logits,  # [rows, heads, longest] float32, as `split_kernel` kept them
    log_sum,  # [rows, heads] float32, from `reduce_kernel`
    mass,  # [rows, kv_heads, longest] float32, out
    longest,
    kv_heads,
    group,
    BLOCK: tl.constexpr,
):
    """The softmax attention of BLOCK entries, mean over the query heads of the group: program (row x KV
    head, block of entries)."""
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // kv_heads
    reserved = tl.load(table + row * TABLE_COLUMNS + RESERVED)
    n = tl.minimum(tl.load(lengths + row).to(tl.int64), reserved)
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    received = tl.zeros([BLOCK], tl.float32)
    for member in range(0, group):
        head = row_head * group + member
        logit = tl.load(logits + head * longest + place, mask=place < n, other=-float("inf"))
        received += tl.exp(logit - tl.load(log_sum + head))
    tl.store(mass + row_head * longest + place, received / group, mask=place < longest)


@triton.jit(do_not_specialize=["lengths"])
def append_kernel(
    table,  # [rows, TABLE_COLUMNS] int64
    lengths,  # [rows], before the new entry
    key,  # [rows, kv_heads, DIM], contiguous
    value,  # [rows, kv_heads, VALUE_DIM], contiguous
    kv_heads,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Write one new entry behind the others of its head, with log-weight 0: program (row x KV head)."""
    row_head = tl.program_id(0).to(tl.int64)
    row, head = row_head // kv_heads, row_head % kv_heads
    place = tl.load(lengths + row).to(tl.int64)
    if place >= tl.load(table + row * TABLE_COLUMNS + RESERVED):
        return  # A caller must not append to a full row, but memory of others stays as it is.
    dtype: tl.constexpr = key.dtype.element_ty
    to_key = row_pointer(table, row, KEYS, dtype, False)
    to_key += head * tl.load(table + row * TABLE_COLUMNS + KEY_HEAD_STRIDE)
    to_key += place * tl.load(table + row * TABLE_COLUMNS + KEY_ENTRY_STRIDE)
    to_value = row_pointer(table, row, VALUES, dtype, False)
    to_value += head * tl.load(table + row * TABLE_COLUMNS + VALUE_HEAD_STRIDE)
    to_value += place * tl.load(table + row * TABLE_COLUMNS + VALUE_ENTRY_STRIDE)
    columns = tl.arange(0, D)
    value_columns = tl.arange(0, E)
    new_key = tl.load(key + row_head * DIM + columns, mask=columns < DIM)
    tl.store(to_key + columns, new_key, mask=columns < DIM)
    new_value = tl.load(
        value + row_head * VALUE_DIM + value_columns, mask=value_columns < VALUE_DIM
    )
    tl.store(to_value + value_columns, new_value, mask=value_columns < VALUE_DIM)
    weights, weight_stride, weights_stored = weights_of_head(table, row, head)
    tl.store(weights + place * weight_stride, 0.0, mask=weights_stored)


def split_options(
    dim: int, value_dim: int, group: int, itemsize: int, aligned: bool
) -> dict[str, int | bool | str]:
    """Choose the compile-time constants of `split_kernel` for entries whose numbers have `itemsize`
    bytes; `aligned` is `RowPointers.aligned`."""
    d, e = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    members = max(16, triton.next_power_of_2(group))  # the matrix units multiply 16 rows at least
    block = min(128, max(16, STAGE_BYTES // (2 * itemsize * max(d, e))))
    stages = 3
    warps = 4
    if members > 64:  # the group itself takes most of the registers, and of 99 KB of shared memory
        block = 32 if itemsize == 2 and max(d, e) <= 128 else 16
        stages = 2 if itemsize == 2 else 1
        warps = 8
    return {
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "D": d,
        "E": e,
        "GROUP": members,
        "BLOCK": block,
        "STAGES": stages,
        "ALIGNED": aligned,
        "UNIT": 16 // itemsize,
        # float32 keys: full precision, as the reference; the kernel waits for memory anyway.
        "PRECISION": "ieee" if itemsize == 4 else "tf32",
        "num_warps": warps,
    }


@on_its_device
def attention(
    query: Tensor,
    pointers: Tensor,
    lengths: Tensor,
    *,
    kv_heads: int,
    value_dim: int,
    longest: int,
    chunk: int,
    aligned: bool,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    return_mass: bool,
) -> tuple[Tensor, Tensor | None]:
    """`decode.weighted_decode_attention` on CUDA: two launches, and one more for the attention
    of the entries. The host reads nothing back. The query has the dtype of the entries; `pointers`,
    `longest`, `chunk` and `aligned` are those of one `RowPointers`."""
    rows, heads, dim = query.shape
    group = heads // kv_heads
    query = query.contiguous()
    splits = max(1, -(-longest // chunk))
    out = query.new_empty(rows, heads, value_dim)
    partial_out = query.new_empty(rows, heads, splits, value_dim, dtype=torch.float32)
    # Two allocations: of one, the second half would be aligned for some shapes only, and Triton compiles
    # another kernel for those.
    partial_max = query.new_empty(rows, heads, splits, dtype=torch.float32)
    partial_sum = torch.empty_like(partial_max)
    log_sum = query.new_empty(rows, heads, dtype=torch.float32)
    # Without `return_mass` no logits are written; the kernel is passed some tensor all the same.
    logits = log_sum.new_empty(rows, heads, longest) if return_mass else log_sum
    split_kernel[(rows * kv_heads, splits)](
        query,
        pointers,
        lengths,
        partial_out,
        partial_max,
        partial_sum,
        logits,
        float(scaling),
        0.0 if softcap is None else float(softcap),
        chunk,
        splits,
        longest,
        kv_heads,
        group,
        SOFTCAP=softcap is not None,
        KEEP_LOGITS=return_mass,
        **split_options(dim, value_dim, group, query.element_size(), aligned),
    )
    reduce_kernel[(rows * heads,)](
        pointers,
        lengths,
        partial_out,
        partial_max,
        partial_sum,
        out,
        log_sum,
        log_sum if sinks is None else sinks.float().contiguous(),
        chunk,
        splits,
        heads,
        VALUE_DIM=value_dim,
        E=triton.next_power_of_2(value_dim),
        PART=16,
        SINKS=sinks is not None,
        num_warps=4,
    )
    if not return_mass:
        return out, None
    mass = log_sum.new_empty(rows, kv_heads, longest)
    block = 1024
    mass_kernel[(rows * kv_heads, -(-longest // block))](
        pointers, lengths, logits, log_sum, mass, longest, kv_heads, group, BLOCK=block, num_warps=4
    )
    return out, mass


@on_its_device
def append(pointers: Tensor, lengths: Tensor, key: Tensor, value: Tensor) -> None:
    """`decode.append_entries` on CUDA: one launch."""
    rows, kv_heads, dim = key.shape
    value_dim = value.shape[2]
    append_kernel[(rows * kv_heads,)](
        pointers,
        lengths,
        key.contiguous(),
        value.contiguous(),
        kv_heads,
        DIM=dim,
        VALUE_DIM=value_dim,
        D=triton.next_power_of_2(dim),
        E=triton.next_power_of_2(value_dim),
        num_warps=1,
    )
