"""Triton kernels of `decode_attention`: split over the entries, then reduced (flash decoding).

A program reads one chunk of one KV head of one row, once, for all query heads of its group; the
chunks of a (row, head) are independent programs, so a few long rows fill the device as well as many
short ones, and a chunk beyond a row's length costs one load. Where the first entries of the rows are
packed, a kernel of its own (`_triton_packed`) reads their chunks. The last kernel reduces all chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device
from kvbench.kernels.decode_attention import COLUMNS
from kvbench.kernels.quantize import Quantization

TABLE_COLUMNS = tl.constexpr(len(COLUMNS))
"""int64 columns of `EntryTable.pointers`; the constants below are their places."""
KEYS = tl.constexpr(COLUMNS.index("keys"))
VALUES = tl.constexpr(COLUMNS.index("values"))
LOG_WEIGHTS = tl.constexpr(COLUMNS.index("log_weights"))
KEY_HEAD_STRIDE = tl.constexpr(COLUMNS.index("key_head_stride"))
KEY_ENTRY_STRIDE = tl.constexpr(COLUMNS.index("key_entry_stride"))
VALUE_HEAD_STRIDE = tl.constexpr(COLUMNS.index("value_head_stride"))
VALUE_ENTRY_STRIDE = tl.constexpr(COLUMNS.index("value_entry_stride"))
WEIGHT_HEAD_STRIDE = tl.constexpr(COLUMNS.index("weight_head_stride"))
WEIGHT_ENTRY_STRIDE = tl.constexpr(COLUMNS.index("weight_entry_stride"))
RESERVED = tl.constexpr(COLUMNS.index("reserved"))
PACKED = tl.constexpr(COLUMNS.index("packed"))
KEY_CODES = tl.constexpr(COLUMNS.index("key_codes"))
KEY_SCALES = tl.constexpr(COLUMNS.index("key_scales"))
KEY_ZEROS = tl.constexpr(COLUMNS.index("key_zeros"))
VALUE_CODES = tl.constexpr(COLUMNS.index("value_codes"))
VALUE_SCALES = tl.constexpr(COLUMNS.index("value_scales"))
VALUE_ZEROS = tl.constexpr(COLUMNS.index("value_zeros"))
STAGE_BYTES = 32768
"""Keys and values one pipeline stage holds on chip: three stages fit twice in an SM of 227 KB and
once in one of 163 KB, and two in flight are far more than latency x bandwidth of an SM (about 20 KB)."""


@triton.jit
def _row_pointer(table, row, column, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + row * TABLE_COLUMNS + column).to(tl.pointer_type(dtype))
    if ALIGNED:  # 16 bytes: without the promise the compiler loads number by number
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _row_stride(table, row, column, ALIGNED: tl.constexpr, UNIT: tl.constexpr):
    stride = tl.load(table + row * TABLE_COLUMNS + column)
    if ALIGNED:
        stride = tl.multiple_of(stride, UNIT)
    return stride


@triton.jit(do_not_specialize=["lengths", "chunk", "splits", "first_split", "longest"])
def split_kernel(
    query,  # [rows, heads, DIM], contiguous, in the keys' dtype
    table,
    lengths,
    partial_out,  # [rows, heads, splits, VALUE_DIM] float32
    partial_max,  # [rows, heads, splits] float32
    partial_sum,
    logits,  # [rows, heads, longest] float32, where kept
    scaling,
    softcap,
    chunk,
    splits,
    first_split,  # of the entries in buffers; those of packed entries come before
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
    row = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    split = tl.program_id(1)
    packed = tl.load(table + row * TABLE_COLUMNS + PACKED)
    reserved = tl.load(table + row * TABLE_COLUMNS + RESERVED)
    n = (tl.minimum(tl.load(lengths + row).to(tl.int64), reserved) - packed).to(tl.int32)
    first = split * chunk
    if first >= n:
        return
    last = tl.minimum(first + chunk, n)
    dtype: tl.constexpr = query.dtype.element_ty
    key = _row_pointer(table, row, KEYS, dtype, ALIGNED)
    value = _row_pointer(table, row, VALUES, dtype, ALIGNED)
    key += head * _row_stride(table, row, KEY_HEAD_STRIDE, ALIGNED, UNIT)
    key_step = _row_stride(table, row, KEY_ENTRY_STRIDE, ALIGNED, UNIT)
    value += head * _row_stride(table, row, VALUE_HEAD_STRIDE, ALIGNED, UNIT)
    value_step = _row_stride(table, row, VALUE_ENTRY_STRIDE, ALIGNED, UNIT)
    weighted = tl.load(table + row * TABLE_COLUMNS + LOG_WEIGHTS) != 0
    weight = _row_pointer(table, row, LOG_WEIGHTS, tl.float32, False)
    weight += head * tl.load(table + row * TABLE_COLUMNS + WEIGHT_HEAD_STRIDE)
    weight_step = tl.load(table + row * TABLE_COLUMNS + WEIGHT_ENTRY_STRIDE)
    weight += packed * weight_step

    members = tl.arange(0, GROUP)
    columns = tl.arange(0, D)
    value_columns = tl.arange(0, E)
    places = tl.arange(0, BLOCK)
    in_group = members < group
    query_head = row * kv_heads * group + head * group + members  # over all rows
    q = tl.load(
        query + query_head[:, None] * DIM + columns[None, :],
        mask=in_group[:, None] & (columns < DIM)[None, :],
        other=0.0,
    )
    top = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    out = tl.zeros([GROUP, E], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        place = start + places
        held = place < last
        step = place.to(tl.int64)
        k_mask = held[:, None]
        if D != DIM:
            k_mask = k_mask & (columns < DIM)[None, :]
        v_mask = held[:, None]
        if E != VALUE_DIM:
            v_mask = v_mask & (value_columns < VALUE_DIM)[None, :]
        k = tl.load(key + step[:, None] * key_step + columns[None, :], mask=k_mask, other=0.0)
        v = tl.load(
            value + step[:, None] * value_step + value_columns[None, :], mask=v_mask, other=0.0
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling
        if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1), which saturates as it should
            s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
        s += tl.load(weight + step * weight_step, mask=held & weighted, other=0.0)[None, :]
        s = tl.where(held[None, :], s, -float("inf"))
        if KEEP_LOGITS:
            tl.store(
                logits + query_head[:, None] * longest + step[None, :],
                s,
                mask=in_group[:, None] & held[None, :],
            )
        new_top = tl.maximum(top, tl.max(s, 1))
        # Entries of weight -inf so far: nothing to scale by.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp(s - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(dtype), v, out * shrink[:, None], input_precision=PRECISION)
        top = new_top
    slot = query_head * splits + first_split + split
    tl.store(partial_max + slot, top, mask=in_group)
    tl.store(partial_sum + slot, total, mask=in_group)
    tl.store(
        partial_out + slot[:, None] * VALUE_DIM + value_columns[None, :],
        out,
        mask=in_group[:, None] & (value_columns < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["lengths", "chunk", "splits", "first_split"])
def reduce_kernel(
    table,
    lengths,
    partial_out,
    partial_max,
    partial_sum,
    out,  # [rows, heads, VALUE_DIM], contiguous
    log_sum,  # [rows, heads] float32
    chunk,
    splits,
    first_split,  # as in `split_kernel`
    heads,
    VALUE_DIM: tl.constexpr,
    E: tl.constexpr,
    PART: tl.constexpr,
):
    query_head = tl.program_id(0).to(tl.int64)
    row = query_head // heads
    packed = tl.load(table + row * TABLE_COLUMNS + PACKED).to(tl.int32)
    reserved = tl.load(table + row * TABLE_COLUMNS + RESERVED)
    n = tl.minimum(tl.load(lengths + row).to(tl.int64), reserved).to(tl.int32)
    # What later programs would have written was not written.
    used_packed = tl.cdiv(packed, chunk)
    used = used_packed + tl.cdiv(tl.maximum(n - packed, 0), chunk)
    columns = tl.arange(0, E)
    top = tl.full([], -float("inf"), tl.float32)
    base = tl.full([], 0.0, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    result = tl.zeros([E], tl.float32)
    for start in range(0, used, PART):
        part = start + tl.arange(0, PART)
        slot = query_head * splits + part
        slot += tl.where(part < used_packed, 0, first_split - used_packed)
        tops = tl.load(partial_max + slot, mask=part < used, other=-float("inf"))
        sums = tl.load(partial_sum + slot, mask=part < used, other=0.0)
        rows = tl.load(
            partial_out + slot[:, None] * VALUE_DIM + columns[None, :],
            mask=(part < used)[:, None] & (columns < VALUE_DIM)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink, weight = tl.exp(top - base), tl.exp(tops - base)
        total = total * shrink + tl.sum(sums * weight, 0)
        result = result * shrink + tl.sum(rows * weight[:, None], 0)
        top = new_top
    some = total != 0.0  # else no entries, or none that is not hidden; NaN stays NaN, as in torch
    result = tl.where(some, result / tl.where(some, total, 1.0), 0.0)
    tl.store(
        out + query_head * VALUE_DIM + columns,
        result.to(out.dtype.element_ty),
        mask=columns < VALUE_DIM,
    )
    tl.store(
        log_sum + query_head,
        tl.where(some, base + tl.log(tl.where(some, total, 1.0)), float("inf")),
    )


@triton.jit(do_not_specialize=["lengths", "longest"])
def mass_kernel(
    table,
    lengths,
    logits,  # [rows, heads, longest]
    log_sum,  # [rows, heads]
    mass,  # [rows, kv_heads, longest]
    longest,
    kv_heads,
    group,
    BLOCK: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    row = row_head // kv_heads
    reserved = tl.load(table + row * TABLE_COLUMNS + RESERVED)
    n = tl.minimum(tl.load(lengths + row).to(tl.int64), reserved)
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    received = tl.zeros([BLOCK], tl.float32)
    for member in range(0, group):
        head = row_head * group + member
        s = tl.load(logits + head * longest + place, mask=place < n, other=-float("inf"))
        received += tl.exp(s - tl.load(log_sum + head))
    tl.store(mass + row_head * longest + place, received / group, mask=place < longest)


@triton.jit(do_not_specialize=["lengths"])
def append_kernel(
    table,
    lengths,
    key,  # [rows, kv_heads, DIM], contiguous
    value,
    kv_heads,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    row, head = row_head // kv_heads, row_head % kv_heads
    place = tl.load(lengths + row).to(tl.int64)
    if place >= tl.load(table + row * TABLE_COLUMNS + RESERVED):
        return  # no room: documented as the caller's business, but never somebody else's memory
    packed = tl.load(table + row * TABLE_COLUMNS + PACKED)
    dtype: tl.constexpr = key.dtype.element_ty
    to_key = _row_pointer(table, row, KEYS, dtype, False)
    to_key += head * tl.load(table + row * TABLE_COLUMNS + KEY_HEAD_STRIDE)
    to_key += (place - packed) * tl.load(table + row * TABLE_COLUMNS + KEY_ENTRY_STRIDE)
    to_value = _row_pointer(table, row, VALUES, dtype, False)
    to_value += head * tl.load(table + row * TABLE_COLUMNS + VALUE_HEAD_STRIDE)
    to_value += (place - packed) * tl.load(table + row * TABLE_COLUMNS + VALUE_ENTRY_STRIDE)
    columns = tl.arange(0, D)
    value_columns = tl.arange(0, E)
    new_key = tl.load(key + row_head * DIM + columns, mask=columns < DIM)
    tl.store(to_key + columns, new_key, mask=columns < DIM)
    new_value = tl.load(
        value + row_head * VALUE_DIM + value_columns, mask=value_columns < VALUE_DIM
    )
    tl.store(to_value + value_columns, new_value, mask=value_columns < VALUE_DIM)
    weight = tl.load(table + row * TABLE_COLUMNS + LOG_WEIGHTS)
    if weight != 0:
        pointer = weight.to(tl.pointer_type(tl.float32))
        pointer += head * tl.load(table + row * TABLE_COLUMNS + WEIGHT_HEAD_STRIDE)
        tl.store(pointer + place * tl.load(table + row * TABLE_COLUMNS + WEIGHT_ENTRY_STRIDE), 0.0)


def split_options(
    dim: int, value_dim: int, group: int, itemsize: int, aligned: bool
) -> dict[str, int | bool | str]:
    """Compile-time constants of `split_kernel` for these shapes."""
    d, e = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    members = max(16, triton.next_power_of_2(group))  # the matrix units' least
    block, stages, warps = min(128, max(16, STAGE_BYTES // (2 * itemsize * max(d, e)))), 3, 4
    if members > 64:  # the group itself takes most of the registers, and of 99 KB of shared memory
        block = 32 if itemsize == 2 and max(d, e) <= 128 else 16
        stages, warps = (2 if itemsize == 2 else 1), 8
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
    longest_packed: int,
    quantization: Quantization | None,
    chunk: int,
    aligned: bool,
    scaling: float,
    softcap: float | None,
    return_mass: bool,
) -> tuple[Tensor, Tensor | None]:
    """`weighted_decode_attention` on CUDA: three launches at most, nothing read back.

    The partial results of a (row, head) are those of the chunks of its packed entries, then those of the
    chunks of its buffers.
    """
    rows, heads, dim = query.shape
    group = heads // kv_heads
    query = query.contiguous()
    packed_splits = -(-longest_packed // chunk)
    buffer_splits = max(1, -(-longest // chunk))
    splits = packed_splits + buffer_splits
    out = query.new_empty(rows, heads, value_dim)
    parts = query.new_empty(rows, heads, splits, value_dim, dtype=torch.float32)
    # Two allocations: of one, the second half would be aligned for some shapes only, and Triton compiles
    # another kernel for those.
    tops = query.new_empty(rows, heads, splits, dtype=torch.float32)
    sums = torch.empty_like(tops)
    log_sum = query.new_empty(rows, heads, dtype=torch.float32)
    logits = log_sum if not return_mass else log_sum.new_empty(rows, heads, longest)
    if quantization is not None:
        from kvbench.kernels import _triton_packed

        _triton_packed.read_packed(
            query,
            pointers,
            (parts, tops, sums),
            quantization,
            kv_heads=kv_heads,
            packed_splits=packed_splits,
            chunk=chunk,
            aligned=aligned,
            scaling=scaling,
            softcap=softcap,
        )
    split_kernel[(rows * kv_heads, buffer_splits)](
        query,
        pointers,
        lengths,
        parts,
        tops,
        sums,
        logits,
        float(scaling),
        0.0 if softcap is None else float(softcap),
        chunk,
        splits,
        packed_splits,
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
        parts,
        tops,
        sums,
        out,
        log_sum,
        chunk,
        splits,
        packed_splits,
        heads,
        VALUE_DIM=value_dim,
        E=triton.next_power_of_2(value_dim),
        PART=16,
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
    """`append_entries` on CUDA: one launch."""
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
