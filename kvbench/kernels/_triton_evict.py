"""Triton kernel of `eviction`: a program per (row, KV head) adds up, chooses and overwrites."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device
from kvbench.kernels._triton_decode import TABLE_COLUMNS

RULE_COLUMNS = tl.constexpr(8)
"""int64 columns of `EvictionTable.numbers`."""
BLOCK = 4096
"""Entries that a program looks at together: many, since batch 1 has as many programs as heads."""


@triton.jit
def _move(pointer, stride, new, leaving, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Copy the entry at `new` to `leaving`."""
    columns = tl.arange(0, WIDTH)
    entry = tl.load(pointer + new * stride + columns, mask=columns < SIZE)
    tl.store(pointer + leaving * stride + columns, entry, mask=columns < SIZE)


@triton.jit(do_not_specialize=["lengths", "longest"])
def evict_kernel(
    table,
    rules,
    lengths,
    mass,  # [rows, kv_heads, longest] float32, where rules weigh
    positions,  # of the tokens fed to the whole batch
    going,
    keys,  # of any row: for its type
    longest,
    kv_heads,
    WEIGHS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64)
    row, head = row_head // kv_heads, row_head % kv_heads
    entries, rule = table + row * TABLE_COLUMNS, rules + row * RULE_COLUMNS
    place = tl.load(rule + 7)
    new = tl.load(lengths + row).to(tl.int64)
    if (tl.load(going + place) == 0) | (new >= tl.load(entries + 9)):
        return
    newest = tl.load(positions + place)
    offset = head * tl.load(rule + 2)
    to_position = tl.load(rule + 1).to(tl.pointer_type(tl.int64)) + offset
    to_score = tl.load(rule).to(tl.pointer_type(tl.float32)) + offset
    sink, latest = tl.load(rule + 4), newest - tl.load(rule + 5)  # what lies between may leave
    sign = tl.where(tl.load(rule + 6) != 0, -1.0, 1.0)
    received = mass + row_head * longest

    # Of each lane the least worth so far and, as blocks come in order, its first place.
    never = 0x7FFFFFFFFFFFFFFF
    least = tl.full([BLOCK], float("inf") if WEIGHS else never, tl.float32 if WEIGHS else tl.int64)
    at = tl.zeros([BLOCK], tl.int64)
    for start in range(0, new + 1, BLOCK):
        here = start + tl.arange(0, BLOCK).to(tl.int64)
        held = here <= new
        position = tl.load(to_position + here, mask=here < new, other=0)
        position = tl.where(here == new, newest, position)
        free = held & (position >= sink) & (position <= latest)
        if WEIGHS:
            score = tl.load(to_score + here, mask=here < new, other=0.0)
            score += tl.load(received + here, mask=held, other=0.0)
            tl.store(to_score + here, score, mask=held)
            worth = tl.where(free, sign * score, float("inf"))
        else:
            worth = tl.where(free, position, never)
        at = tl.where(worth < least, here, at)
        least = tl.minimum(least, worth)
    tl.debug_barrier()  # the place that leaves is written a second time, by another thread
    if new < tl.load(rule + 3):
        tl.store(to_position + new, newest)
        return
    leaving = tl.min(tl.where(least == tl.min(least, 0), at, never), 0)
    tl.store(to_position + leaving, newest)
    if WEIGHS:
        tl.store(to_score + leaving, tl.load(received + new))
    weight = tl.load(entries + 2)
    if weight != 0:  # a new token's is 0
        pointer = weight.to(tl.pointer_type(tl.float32)) + head * tl.load(entries + 7)
        tl.store(pointer + leaving * tl.load(entries + 8), 0.0)
    dtype: tl.constexpr = keys.dtype.element_ty
    key = tl.load(entries).to(tl.pointer_type(dtype)) + head * tl.load(entries + 3)
    value = tl.load(entries + 1).to(tl.pointer_type(dtype)) + head * tl.load(entries + 5)
    _move(key, tl.load(entries + 4), new, leaving, DIM, D)
    _move(value, tl.load(entries + 6), new, leaving, VALUE_DIM, E)


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
    """`evict_entries` on CUDA: one launch."""
    kv_heads, _, dim = keys.shape
    value_dim = values.shape[2]
    evict_kernel[(numbers.shape[0] * kv_heads,)](
        pointers,
        numbers,
        lengths,
        positions if mass is None else mass,
        positions,
        going,
        keys,
        longest,
        kv_heads,
        WEIGHS=mass is not None,
        DIM=dim,
        VALUE_DIM=value_dim,
        D=triton.next_power_of_2(dim),
        E=triton.next_power_of_2(value_dim),
        BLOCK=BLOCK,
        num_warps=16,
    )
