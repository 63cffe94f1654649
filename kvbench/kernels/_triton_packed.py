"""Triton kernel of `decode_attention` for entries that are packed as integers of 2 or 4 bits.

It does for a chunk of packed entries what `_triton_decode.split_kernel` does for a chunk of a buffer. It
reads codes, scales and zero points as `kvbench.kernels.quantize.Packed` stores them: of keys, the rows
of the codes are channels, of values they are entries. No restored number is written to memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._triton_decode import (
    KEY_CODES,
    KEY_SCALES,
    KEY_ZEROS,
    LOG_WEIGHTS,
    PACKED,
    TABLE_COLUMNS,
    VALUE_CODES,
    VALUE_SCALES,
    VALUE_ZEROS,
    WEIGHT_ENTRY_STRIDE,
    WEIGHT_HEAD_STRIDE,
    _row_pointer,
)
from kvbench.kernels.quantize import Quantization

NUMBERS = 4096
"""Numbers of keys that a block restores at once, and as many of values."""


@triton.jit
def _codes_of(packed, BITS: tl.constexpr):
    """Bytes [m, n] as the codes that lie in them, lowest bits first: [m, n * 8 / BITS] float32."""
    if BITS == 4:
        codes = tl.interleave(packed & 15, packed >> 4)
    else:
        even = tl.interleave(packed & 3, (packed >> 4) & 3)
        odd = tl.interleave((packed >> 2) & 3, packed >> 6)
        codes = tl.interleave(even, odd)
    return codes.to(tl.float32)


@triton.jit
def _restored(codes, scale, zero, M: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr):
    """Codes [M, N] in GROUPS groups of adjacent columns, with a scale and a zero point [M, GROUPS] each:
    the numbers [M, N] float32."""
    grouped = tl.reshape(codes, [M, GROUPS, N // GROUPS])
    wide_scale = scale.to(tl.float32)[:, :, None]
    numbers = grouped * wide_scale + zero.to(tl.float32)[:, :, None]
    return tl.reshape(numbers, [M, N])


@triton.jit(do_not_specialize=["chunk", "splits"])
def packed_kernel(
    query,  # [rows, heads, DIM], contiguous, in the dtype of the scales
    table,
    partial_out,  # [rows, heads, splits, VALUE_DIM] float32
    partial_max,  # [rows, heads, splits] float32
    partial_sum,
    scaling,
    softcap,
    chunk,
    splits,
    kv_heads,
    group,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    split = tl.program_id(1)
    n = tl.load(table + row * TABLE_COLUMNS + PACKED).to(tl.int32)
    first = split * chunk
    if first >= n:
        return
    last = tl.minimum(first + chunk, n)
    dtype: tl.constexpr = query.dtype.element_ty
    PER_BYTE: tl.constexpr = 8 // BITS
    KEY_GROUPS: tl.constexpr = max(1, BLOCK // KEY_GROUP)  # of a block of entries
    VALUE_GROUPS: tl.constexpr = max(1, E // VALUE_GROUP)  # of an entry, with padding
    VALUE_BYTES: tl.constexpr = (VALUE_DIM * BITS + 7) // 8
    GROUPS_HELD: tl.constexpr = (VALUE_DIM + VALUE_GROUP - 1) // VALUE_GROUP
    key_bytes = tl.cdiv(n * BITS, 8)
    key_groups = tl.cdiv(n, KEY_GROUP)
    key_code = _row_pointer(table, row, KEY_CODES, tl.uint8, ALIGNED) + head * DIM * key_bytes
    key_scale = _row_pointer(table, row, KEY_SCALES, dtype, False) + head * DIM * key_groups
    key_zero = _row_pointer(table, row, KEY_ZEROS, dtype, False) + head * DIM * key_groups
    value_code = _row_pointer(table, row, VALUE_CODES, tl.uint8, ALIGNED) + head * n * VALUE_BYTES
    value_scale = _row_pointer(table, row, VALUE_SCALES, dtype, False) + head * n * GROUPS_HELD
    value_zero = _row_pointer(table, row, VALUE_ZEROS, dtype, False) + head * n * GROUPS_HELD
    weighted = tl.load(table + row * TABLE_COLUMNS + LOG_WEIGHTS) != 0
    weight = _row_pointer(table, row, LOG_WEIGHTS, tl.float32, False)
    weight += head * tl.load(table + row * TABLE_COLUMNS + WEIGHT_HEAD_STRIDE)
    weight_step = tl.load(table + row * TABLE_COLUMNS + WEIGHT_ENTRY_STRIDE)

    members = tl.arange(0, GROUP)
    columns = tl.arange(0, D)
    value_columns = tl.arange(0, E)
    value_bytes = tl.arange(0, E // PER_BYTE)
    value_groups = tl.arange(0, VALUE_GROUPS)
    places = tl.arange(0, BLOCK)
    in_group = members < group
    in_key = columns < DIM
    query_head = row * kv_heads * group + head * group + members  # over all rows
    q = tl.load(
        query + query_head[:, None] * DIM + columns[None, :],
        mask=in_group[:, None] & in_key[None, :],
        other=0.0,
    )
    top = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    out = tl.zeros([GROUP, E], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        place = start + places
        held = place < last
        step = place.to(tl.int64)
        # Keys lie channel by channel: a block is some bytes of each. What a mask leaves out is 0.
        byte = start // PER_BYTE + tl.arange(0, BLOCK // PER_BYTE)
        packed_k = tl.load(
            key_code + columns.to(tl.int64)[:, None] * key_bytes + byte[None, :],
            mask=in_key[:, None] & (byte < key_bytes)[None, :],
            other=0,
        )
        key_group = start // KEY_GROUP + tl.arange(0, KEY_GROUPS)
        of_key = columns[:, None] * key_groups + key_group[None, :]
        k_mask = in_key[:, None] & (key_group < key_groups)[None, :]
        k_scale = tl.load(key_scale + of_key, mask=k_mask, other=0.0)
        k_zero = tl.load(key_zero + of_key, mask=k_mask, other=0.0)
        k = _restored(_codes_of(packed_k, BITS), k_scale, k_zero, D, BLOCK, KEY_GROUPS)
        s = tl.dot(q, k.to(dtype), input_precision=PRECISION) * scaling
        if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1), which saturates as it should
            s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
        s += tl.load(weight + step * weight_step, mask=held & weighted, other=0.0)[None, :]
        s = tl.where(held[None, :], s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        # Entries of weight -inf so far: nothing to scale by.
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp(s - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(p, 1)
        packed_v = tl.load(
            value_code + step[:, None] * VALUE_BYTES + value_bytes[None, :],
            mask=held[:, None] & (value_bytes < VALUE_BYTES)[None, :],
            other=0,
        )
        of_value = step[:, None] * GROUPS_HELD + value_groups[None, :]
        v_mask = held[:, None] & (value_groups < GROUPS_HELD)[None, :]
        v_scale = tl.load(value_scale + of_value, mask=v_mask, other=0.0)
        v_zero = tl.load(value_zero + of_value, mask=v_mask, other=0.0)
        v = _restored(_codes_of(packed_v, BITS), v_scale, v_zero, BLOCK, E, VALUE_GROUPS)
        out = tl.dot(p.to(dtype), v.to(dtype), out * shrink[:, None], input_precision=PRECISION)
        top = new_top
    slot = query_head * splits + split
    tl.store(partial_max + slot, top, mask=in_group)
    tl.store(partial_sum + slot, total, mask=in_group)
    tl.store(
        partial_out + slot[:, None] * VALUE_DIM + value_columns[None, :],
        out,
        mask=in_group[:, None] & (value_columns < VALUE_DIM)[None, :],
    )


def packed_options(
    dim: int, value_dim: int, group: int, itemsize: int, quantization: Quantization
) -> dict[str, int | bool | str]:
    """Compile-time constants of `packed_kernel` for these shapes."""
    d, e = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    members = max(16, triton.next_power_of_2(group))  # the matrix units' least
    # Restored numbers of a block, and the products of float32, stay in registers.
    block = min(128, max(16, NUMBERS * 2 // itemsize // max(d, e)))
    warps = 4
    if members > 64 or itemsize == 4:  # the group itself takes most of the registers
        block, warps = 16, 8
    size = quantization.group_size
    return {
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "D": d,
        "E": e,
        "GROUP": members,
        "BLOCK": block,
        "BITS": quantization.bits,
        "KEY_GROUP": size,
        "VALUE_GROUP": min(size, e),  # a group of all channels, where a value has fewer than `size`
        "STAGES": 2,
        # float32 keys: full precision, as the reference.
        "PRECISION": "ieee" if itemsize == 4 else "tf32",
        "num_warps": warps,
    }


def read_packed(
    query: Tensor,
    pointers: Tensor,
    partial: tuple[Tensor, Tensor, Tensor],
    quantization: Quantization,
    *,
    kv_heads: int,
    packed_splits: int,
    chunk: int,
    aligned: bool,
    scaling: float,
    softcap: float | None,
) -> None:
    """Write the partial results of all chunks of packed entries: one launch.

    Args:
        query: [rows, heads, dim], contiguous.
        pointers: `EntryTable.pointers`.
        partial: outputs, maxima and sums as `split_kernel` writes them; the first `packed_splits` of a
            (row, head) are those of packed entries.
    """
    rows, heads, dim = query.shape
    parts, tops, sums = partial
    group = heads // kv_heads
    packed_kernel[(rows * kv_heads, packed_splits)](
        query,
        pointers,
        parts,
        tops,
        sums,
        float(scaling),
        0.0 if softcap is None else float(softcap),
        chunk,
        parts.shape[2],
        kv_heads,
        group,
        ALIGNED=aligned,
        SOFTCAP=softcap is not None,
        **packed_options(dim, parts.shape[3], group, query.element_size(), quantization),
    )
