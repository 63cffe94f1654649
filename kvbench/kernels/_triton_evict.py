"""Triton kernel of `eviction`, launched twice.

In the first launch a program has one piece (`BLOCK` entries) of a KV head. It adds the new attention to
the scores of its entries and finds the entry that should leave first. In the second a program has one
KV head. Of the entries that the pieces found, it overwrites the one to leave first by the new entry.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device
from kvbench.kernels._triton_table import (
    HEAVIEST_LEAVES,
    KEY_ENTRY_STRIDE,
    KEY_HEAD_STRIDE,
    KEYS,
    LIMIT,
    NUMBER_HEAD_STRIDE,
    PLACE,
    POSITIONS,
    RECENT,
    RESERVED,
    SCORES,
    SINK,
    TABLE_COLUMNS,
    VALUE_ENTRY_STRIDE,
    VALUE_HEAD_STRIDE,
    VALUES,
    row_pointer,
    weights_of_head,
)

STAYS = tl.constexpr(0x7FFFFFFF << 32)
"""The sorting key (worth x 2^32 + place) of an entry that may not leave. It is larger than every other
key, and its place is 0, so that entry 0 leaves where no entry may."""
BLOCK = 512
"""Entries of a piece: few, since in a batch of one row only the pieces of its heads fill the device."""


@triton.jit
def _move(buffer, entry_stride, new, leaving, DIM: tl.constexpr, D: tl.constexpr):
    columns = tl.arange(0, D)
    entry = tl.load(buffer + new * entry_stride + columns, mask=columns < DIM)
    tl.store(buffer + leaving * entry_stride + columns, entry, mask=columns < DIM)


@triton.jit
def _ordered(score):
    """Integers [entries] int64 in the order of the scores [entries] float32, equal for 0 and -0."""
    # The bits of a float32 that is not negative, read as an integer, are in the numbers' order. Those
    # of negative ones are in the opposite order, which turning their lower 31 bits round corrects.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit(do_not_specialize=["lengths", "longest", "pieces"])
def evict_kernel(
    table,  # [rows, TABLE_COLUMNS] int64, `RowPointers.pointers`; what it points at is changed
    lengths,  # [rows], before the new entry
    mass,  # [rows, kv_heads, longest] float32, the attention that entries received, if BY_SCORE
    positions,  # int64, of the tokens fed to all rows of the batch
    going,  # int64, 0 for rows of the batch that have ended
    least,  # [rows, kv_heads, pieces] int64, the pieces' least sorting keys: out, then in
    keys,  # the keys of any row, for their dtype
    longest,
    pieces,
    kv_heads,
    SECOND: tl.constexpr,
    BY_SCORE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first launch, or the SECOND: program (row x KV head, piece)."""
    row_head, piece = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, head = row_head // kv_heads, row_head % kv_heads
    new = tl.load(lengths + row).to(tl.int64)  # the place of the new entry
    if piece * BLOCK > new:
        return
    entries = table + row * TABLE_COLUMNS  # the row's line
    batch_row = tl.load(entries + PLACE)
    reserved = tl.load(entries + RESERVED)
    if (tl.load(going + batch_row) == 0) | (new >= reserved):
        return
    head_offset = head * tl.load(entries + NUMBER_HEAD_STRIDE)
    to_position = tl.load(entries + POSITIONS).to(tl.pointer_type(tl.int64)) + head_offset
    to_score = tl.load(entries + SCORES).to(tl.pointer_type(tl.float32)) + head_offset
    least += row_head * pieces
    lane = tl.arange(0, BLOCK)
    if not SECOND:
        place = piece * BLOCK + lane
        is_entry = place <= new
        newest = tl.load(positions + batch_row)
        position = tl.load(to_position + place, mask=place < new, other=newest)
        tl.store(to_position + place, position, mask=place == new)
        may_leave = is_entry & (position >= tl.load(entries + SINK))
        may_leave &= position <= newest - tl.load(entries + RECENT)
        worth = position
        if BY_SCORE:
            score = tl.load(to_score + place, mask=place < new, other=0.0)
            score += tl.load(mass + row_head * longest + place, mask=is_entry, other=0.0)
            tl.store(to_score + place, score, mask=is_entry)
            score = tl.where(tl.load(entries + HEAVIEST_LEAVES) != 0, -score, score)
            may_leave &= score < float("inf")  # which is false for NaN, too
            worth = _ordered(score)
        tl.store(least + piece, tl.min(tl.where(may_leave, (worth << 32) | place, STAYS), 0))
    elif new >= tl.load(entries + LIMIT):
        leaving = tl.full([], STAYS, tl.int64)
        last_piece = new // BLOCK  # pieces behind it wrote nothing
        for start in range(0, last_piece + 1, BLOCK):
            part = start + lane
            sorting_keys = tl.load(least + part, mask=part <= last_piece, other=STAYS)
            leaving = tl.minimum(leaving, tl.min(sorting_keys, 0))
        leaving &= 0xFFFFFFFF  # the place
        tl.store(to_position + leaving, tl.load(to_position + new))
        if BY_SCORE:
            tl.store(to_score + leaving, tl.load(to_score + new))
        weights, weight_stride, weights_stored = weights_of_head(table, row, head)
        tl.store(weights + leaving * weight_stride, 0.0, mask=weights_stored)  # a new entry's is 0
        dtype: tl.constexpr = keys.dtype.element_ty
        head_keys = row_pointer(table, row, KEYS, dtype, False)
        head_keys += head * tl.load(entries + KEY_HEAD_STRIDE)
        head_values = row_pointer(table, row, VALUES, dtype, False)
        head_values += head * tl.load(entries + VALUE_HEAD_STRIDE)
        _move(head_keys, tl.load(entries + KEY_ENTRY_STRIDE), new, leaving, DIM, D)
        _move(head_values, tl.load(entries + VALUE_ENTRY_STRIDE), new, leaving, VALUE_DIM, E)


@on_its_device
def evict(
    pointers: Tensor,
    lengths: Tensor,
    mass: Tensor | None,
    positions: Tensor,
    going: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    longest: int,
) -> None:
    """`decode.evict_entries` on CUDA: two launches. `pointers` and `longest` are those of one
    `RowPointers`, `keys` and `values` those of any of its rows."""
    kv_heads, _, dim = keys.shape
    value_dim = values.shape[2]
    programs = pointers.shape[0] * kv_heads
    pieces = triton.cdiv(longest, BLOCK)
    least = positions.new_empty(programs, pieces)
    for second in (False, True):
        evict_kernel[(programs, 1 if second else pieces)](
            pointers,
            lengths,
            positions if mass is None else mass,
            positions,
            going,
            least,
            keys,
            longest,
            pieces,
            kv_heads,
            SECOND=second,
            BY_SCORE=mass is not None,
            DIM=dim,
            VALUE_DIM=value_dim,
            D=triton.next_power_of_2(dim),
            E=triton.next_power_of_2(value_dim),
            BLOCK=BLOCK,
            # No entry in two threads: one might read the score to which the other has added.
            num_warps=max(1, BLOCK // 128),
        )
