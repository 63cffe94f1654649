"""Triton kernel of `eviction`: one launch over pieces of the entries, one that combines the pieces.

In the first launch a program has one piece (`BLOCK` entries) of one KV head of a row: it adds the new
attention to the scores of its entries and finds the entry that should leave first. In the second a
program has one KV head of a row: of the entries that the pieces found, the one to leave first is
overwritten by the new entry.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device
from kvbench.kernels._triton_decode import (
    KEY_ENTRY_STRIDE,
    KEY_HEAD_STRIDE,
    KEYS,
    LOG_WEIGHTS,
    RESERVED,
    TABLE_COLUMNS,
    VALUE_ENTRY_STRIDE,
    VALUE_HEAD_STRIDE,
    VALUES,
    WEIGHT_ENTRY_STRIDE,
    WEIGHT_HEAD_STRIDE,
)
from kvbench.kernels.eviction import RULE

RULE_COLUMNS = tl.constexpr(len(RULE))
"""int64 columns of `EvictionTable.numbers`; the next eight are their places."""
SCORES = tl.constexpr(RULE.index("scores"))
POSITIONS = tl.constexpr(RULE.index("positions"))
HEAD_STRIDE = tl.constexpr(RULE.index("head_stride"))
LIMIT = tl.constexpr(RULE.index("limit"))
SINK = tl.constexpr(RULE.index("sink"))
RECENT = tl.constexpr(RULE.index("recent"))
HEAVIEST_LEAVES = tl.constexpr(RULE.index("heaviest_leaves"))
PLACE = tl.constexpr(RULE.index("place"))
STAYS = tl.constexpr(0x7FFFFFFF << 32)
"""Sorting key (worth x 2^32 + place) of an entry that may not leave: larger than every other key. Its
place is 0, so that entry 0 leaves where no entry may."""
BLOCK = 512
"""Entries of a piece: few, since at batch 1 only the pieces of the heads fill the device."""


@triton.jit
def _move(pointer, stride, new, leaving, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Copy the entry at `new` to `leaving`."""
    columns = tl.arange(0, WIDTH)
    entry = tl.load(pointer + new * stride + columns, mask=columns < SIZE)
    tl.store(pointer + leaving * stride + columns, entry, mask=columns < SIZE)


@triton.jit(do_not_specialize=["lengths", "longest", "pieces"])
def evict_kernel(
    table,
    rules,
    lengths,
    mass,  # [rows, kv_heads, longest] float32, where rules weigh
    positions,  # of the tokens fed to the whole batch
    going,
    least,  # [rows, kv_heads, pieces] int64, between the launches: worth x 2^32 + place
    keys,  # of any row: for its type
    longest,
    pieces,
    kv_heads,
    SECOND: tl.constexpr,
    WEIGHS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_head, piece = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, head = row_head // kv_heads, row_head % kv_heads
    new = tl.load(lengths + row).to(tl.int64)
    if piece * BLOCK > new:
        return
    entries, rule = table + row * TABLE_COLUMNS, rules + row * RULE_COLUMNS
    place = tl.load(rule + PLACE)
    if (tl.load(going + place) == 0) | (new >= tl.load(entries + RESERVED)):
        return
    offset = head * tl.load(rule + HEAD_STRIDE)
    to_position = tl.load(rule + POSITIONS).to(tl.pointer_type(tl.int64)) + offset
    to_score = tl.load(rule + SCORES).to(tl.pointer_type(tl.float32)) + offset
    least += row_head * pieces
    lane = tl.arange(0, BLOCK)
    if not SECOND:
        here = piece * BLOCK + lane
        held = here <= new
        newest = tl.load(positions + place)
        worth = tl.load(to_position + here, mask=here < new, other=newest)
        tl.store(to_position + here, worth, mask=here == new)
        free = held & (worth >= tl.load(rule + SINK)) & (worth <= newest - tl.load(rule + RECENT))
        if WEIGHS:
            score = tl.load(to_score + here, mask=here < new, other=0.0)
            score += tl.load(mass + row_head * longest + here, mask=held, other=0.0)
            tl.store(to_score + here, score, mask=held)
            score = tl.where(tl.load(rule + HEAVIEST_LEAVES) != 0, -score, score)
            free &= score < float("inf")  # nor does NaN leave
            # Bits are in the numbers' order once those below 0 are turned round, and 0 has no sign.
            bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
            worth = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
        tl.store(least + piece, tl.min(tl.where(free, (worth << 32) | here, STAYS), 0))
    elif new >= tl.load(rule + LIMIT):
        leaving = tl.full([], STAYS, tl.int64)
        for start in range(0, new // BLOCK + 1, BLOCK):  # what lies beyond was not written
            part = start + lane
            found = tl.load(least + part, mask=part <= new // BLOCK, other=STAYS)
            leaving = tl.minimum(leaving, tl.min(found, 0))
        leaving &= 0xFFFFFFFF  # the place
        tl.store(to_position + leaving, tl.load(to_position + new))
        if WEIGHS:
            tl.store(to_score + leaving, tl.load(to_score + new))
        weight = tl.load(entries + LOG_WEIGHTS)
        if weight != 0:  # a new token's is 0
            pointer = weight.to(tl.pointer_type(tl.float32)) + head * tl.load(
                entries + WEIGHT_HEAD_STRIDE
            )
            tl.store(pointer + leaving * tl.load(entries + WEIGHT_ENTRY_STRIDE), 0.0)
        dtype: tl.constexpr = keys.dtype.element_ty
        key = tl.load(entries + KEYS).to(tl.pointer_type(dtype)) + head * tl.load(
            entries + KEY_HEAD_STRIDE
        )
        value = tl.load(entries + VALUES).to(tl.pointer_type(dtype)) + head * tl.load(
            entries + VALUE_HEAD_STRIDE
        )
        _move(key, tl.load(entries + KEY_ENTRY_STRIDE), new, leaving, DIM, D)
        _move(value, tl.load(entries + VALUE_ENTRY_STRIDE), new, leaving, VALUE_DIM, E)


@on_its_device
def evict(
    pointers: Tensor,
    numbers: Tensor,
    lengths: Tensor,
    mass: Tensor | None,
    positions: Tensor,
    going: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    longest: int,
) -> None:
    """`evict_entries` on CUDA: two launches."""
    kv_heads, _, dim = keys.shape
    value_dim = values.shape[2]
    programs, pieces = numbers.shape[0] * kv_heads, triton.cdiv(longest, BLOCK)
    least = positions.new_empty(programs, pieces)
    for second in (False, True):
        evict_kernel[(programs, 1 if second else pieces)](
            pointers,
            numbers,
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
            WEIGHS=mass is not None,
            DIM=dim,
            VALUE_DIM=value_dim,
            D=triton.next_power_of_2(dim),
            E=triton.next_power_of_2(value_dim),
            BLOCK=BLOCK,
            # No entry in two threads: one might read the score to which the other has added.
            num_warps=max(1, BLOCK // 128),
        )
