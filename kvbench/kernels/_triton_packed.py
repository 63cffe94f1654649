"""Triton kernel of `decode_attention` for entries that are packed as integers of 2 or 4 bits.

It does for the packed entries of the rows, which come first, what `_triton_decode.split_kernel` does
for those in buffers. In: queries and table as there; the table has the addresses of codes, scales and
zero points, which lie as `kvbench.kernels.quantize.Packed` stores them (of keys, the rows of the codes
are channels, of values they are entries). Out: partial results as there. A program has one chunk
(program id 1) of one KV head of one row (program id 0). It restores a block of keys and values at a
time, in registers; no restored number is written to memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._triton_table import (
    KEY_CODES,
    KEY_SCALES,
    KEY_ZEROS,
    PACKED,
    TABLE_COLUMNS,
    VALUE_CODES,
    VALUE_SCALES,
    VALUE_ZEROS,
    row_pointer,
    weights_of_head,
)
from kvbench.kernels._triton_tiles import (
    load_rows,
    online_softmax,
    store_partial,
    weighted_logits,
)
from kvbench.kernels.quantize import Quantization

NUMBERS = 4096
"""Numbers of keys that are restored at once in 16 bits, and as many of values."""


@triton.jit
def _codes_of(packed, BITS: tl.constexpr):
    """Split bytes [m, n] into the codes that they hold, lowest bits first: [m, n * 8 / BITS]
    float32."""
    if BITS == 4:
        codes = tl.interleave(packed & 15, packed >> 4)
    else:
        even = tl.interleave(packed & 3, (packed >> 4) & 3)
        odd = tl.interleave((packed >> 2) & 3, packed >> 6)
        codes = tl.interleave(even, odd)
    return codes.to(tl.float32)


@triton.jit
def _restored(codes, scale, zero, M: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr):
    """Restore numbers [M, N] float32 from their codes: code * scale + zero, where the columns of a row
    lie in GROUPS groups of equal size, and scale and zero point [M, GROUPS] are those of the group."""
    grouped = tl.reshape(codes, [M, GROUPS, N // GROUPS])
    numbers = grouped * scale.to(tl.float32)[:, :, None] + zero.to(tl.float32)[:, :, None]
    return tl.reshape(numbers, [M, N])


@triton.jit(do_not_specialize=["chunk", "splits"])
def packed_kernel(
    query,  # [rows, heads, DIM], contiguous, in the dtype of the scales
    table,  # [rows, TABLE_COLUMNS] int64
    partial_out,  # [rows, heads, splits, VALUE_DIM] float32, out
    partial_max,  # [rows, heads, splits] float32, out
    partial_sum,  # [rows, heads, splits] float32, out
    scaling,
    softcap,
    chunk,  # entries of a program, a multiple of BLOCK
    splits,  # chunks for which the partial results have room
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
    """Attention over one chunk of packed entries: program (row x KV head, chunk)."""
    row = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = (tl.program_id(0) % kv_heads).to(tl.int64)
    split = tl.program_id(1)
    n = tl.load(table + row * TABLE_COLUMNS + PACKED).to(tl.int32)
    first = split * chunk
    if first >= n:
        return
    last = tl.minimum(first + chunk, n)
    dtype: tl.constexpr = query.dtype.element_ty
    CODES_PER_BYTE: tl.constexpr = 8 // BITS
    # What is stored of a channel of the keys runs along the entries.
    key_bytes = tl.cdiv(n * BITS, 8)
    key_groups = tl.cdiv(n, KEY_GROUP)
    BLOCK_BYTES: tl.constexpr = BLOCK // CODES_PER_BYTE
    BLOCK_GROUPS: tl.constexpr = max(1, BLOCK // KEY_GROUP)
    # What is stored of a value runs along its channels; a tile has more, up to E.
    VALUE_BYTES: tl.constexpr = (VALUE_DIM * BITS + 7) // 8
    VALUE_GROUPS: tl.constexpr = (VALUE_DIM + VALUE_GROUP - 1) // VALUE_GROUP
    TILE_BYTES: tl.constexpr = E // CODES_PER_BYTE
    TILE_GROUPS: tl.constexpr = max(1, E // VALUE_GROUP)
    key_codes = row_pointer(table, row, KEY_CODES, tl.uint8, ALIGNED) + head * DIM * key_bytes
    key_scales = row_pointer(table, row, KEY_SCALES, dtype, False) + head * DIM * key_groups
    key_zeros = row_pointer(table, row, KEY_ZEROS, dtype, False) + head * DIM * key_groups
    value_codes = row_pointer(table, row, VALUE_CODES, tl.uint8, ALIGNED) + head * n * VALUE_BYTES
    value_scales = row_pointer(table, row, VALUE_SCALES, dtype, False) + head * n * VALUE_GROUPS
    value_zeros = row_pointer(table, row, VALUE_ZEROS, dtype, False) + head * n * VALUE_GROUPS
    weights, weight_stride, weights_stored = weights_of_head(table, row, head)

    members = tl.arange(0, GROUP)
    in_group = members < group
    query_heads = row * kv_heads * group + head * group + members  # counted over all rows
    columns = tl.arange(0, D)
    is_channel = columns < DIM
    value_bytes = tl.arange(0, TILE_BYTES)
    value_groups = tl.arange(0, TILE_GROUPS)
    q = load_rows(query, DIM, query_heads, in_group, columns, DIM, D)
    largest = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    out = tl.zeros([GROUP, E], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        place = start + tl.arange(0, BLOCK)
        is_entry = place < last
        entries = place.to(tl.int64)
        block_bytes = start // CODES_PER_BYTE + tl.arange(0, BLOCK_BYTES)
        k_codes = tl.load(
            key_codes + columns.to(tl.int64)[:, None] * key_bytes + block_bytes[None, :],
            mask=is_channel[:, None] & (block_bytes < key_bytes)[None, :],
            other=0,
        )
        block_groups = start // KEY_GROUP + tl.arange(0, BLOCK_GROUPS)
        k_groups = columns[:, None] * key_groups + block_groups[None, :]
        k_mask = is_channel[:, None] & (block_groups < key_groups)[None, :]
        k_scale = tl.load(key_scales + k_groups, mask=k_mask, other=0.0)
        k_zero = tl.load(key_zeros + k_groups, mask=k_mask, other=0.0)
        k = _restored(_codes_of(k_codes, BITS), k_scale, k_zero, D, BLOCK, BLOCK_GROUPS)
        logits = weighted_logits(
            tl.dot(q, k.to(dtype), input_precision=PRECISION),
            scaling,
            softcap,
            weights,
            weight_stride,
            weights_stored,
            entries,
            is_entry,
            SOFTCAP,
        )
        exponentials, rescale, largest, total = online_softmax(logits, largest, total)
        v_codes = tl.load(
            value_codes + entries[:, None] * VALUE_BYTES + value_bytes[None, :],
            mask=is_entry[:, None] & (value_bytes < VALUE_BYTES)[None, :],
            other=0,
        )
        v_groups = entries[:, None] * VALUE_GROUPS + value_groups[None, :]
        v_mask = is_entry[:, None] & (value_groups < VALUE_GROUPS)[None, :]
        v_scale = tl.load(value_scales + v_groups, mask=v_mask, other=0.0)
        v_zero = tl.load(value_zeros + v_groups, mask=v_mask, other=0.0)
        v = _restored(_codes_of(v_codes, BITS), v_scale, v_zero, BLOCK, E, TILE_GROUPS)
        out = tl.dot(
            exponentials.to(dtype), v.to(dtype), out * rescale[:, None], input_precision=PRECISION
        )
    slots = query_heads * splits + split
    store_partial(
        partial_out, partial_max, partial_sum, slots, in_group, out, largest, total, VALUE_DIM, E
    )


def packed_options(
    dim: int, value_dim: int, group: int, itemsize: int, quantization: Quantization
) -> dict[str, int | bool | str]:
    """Choose the compile-time constants of `packed_kernel`; see `_triton_decode.split_options` on the
    arguments."""
    d, e = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    members = max(16, triton.next_power_of_2(group))  # the matrix units multiply 16 rows at least
    # What is restored of a block, and the products of float32, must fit into registers.
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
        query: [rows, heads, dim], contiguous, in the dtype of the scales.
        pointers: `EntryTable.pointers`.
        partial: `partial_out`, `partial_max` and `partial_sum` of `split_kernel`, which are written to;
            the first `packed_splits` of a (row, head) are those of packed entries.
    """
    rows, heads, dim = query.shape
    partial_out, partial_max, partial_sum = partial
    group = heads // kv_heads
    packed_kernel[(rows * kv_heads, packed_splits)](
        query,
        pointers,
        partial_out,
        partial_max,
        partial_sum,
        float(scaling),
        0.0 if softcap is None else float(softcap),
        chunk,
        partial_out.shape[2],
        kv_heads,
        group,
        ALIGNED=aligned,
        SOFTCAP=softcap is not None,
        **packed_options(dim, partial_out.shape[3], group, query.element_size(), quantization),
    )
