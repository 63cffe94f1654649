"""Triton kernels of BalanceKV's halving: signs of the walk, and the cut that follows from them.

One program walks one block. Its kernel matrix is formed in tiles, used and forgotten: for every tile
of rows, what the signs of earlier tiles add up to (matrix products on the matrix units, exponential
and sum in registers), then the steps inside the diagonal tile one by one. On chip are at most two
tiles of keys and two of values, whatever the block size; device memory sees keys, values and draws
read once (tiles met again come from the caches) and one byte of sign per entry written.

The steps inside a tile wait for each other, so a block takes a fixed time (about a step's latency,
some hundreds of cycles, times the block size) and speed comes from blocks walking beside each other:
small tiles, few warps, several programs per multiprocessor.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device

CENTRES = {"none": 0, "mean": 1, "released": 2}
SCAN = 1024
"""Entries of a head that the cut scans at once."""


@triton.jit
def _products(
    rows,  # of the head's first row
    step,
    a,  # [TILE] int64, rows
    b,
    a_real,
    b_real,
    mean,  # [PADDED] float32
    mean_square,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    CENTRE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """<row of a, row of b>, [TILE, TILE] float32, of rows less their mean if CENTRE.

    float32 rows are centred before they are multiplied. Products of 16-bit rows are exact as they
    stand and would not be after rounding the centred rows, so there the mean is taken out of the
    products. Columns come in parts, which bounds registers and shared memory at any width.
    """
    FIRST: tl.constexpr = rows.dtype.element_ty == tl.float32
    out = tl.zeros([TILE, TILE], tl.float32)
    a_mean = tl.zeros([TILE], tl.float32)
    b_mean = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, PADDED, PART, num_stages=1):
        columns = start + tl.arange(0, PART)
        # Set anew in every round: a value that a loop carries may not change its shape.
        a_mask = a_real[:, None]
        b_mask = b_real[:, None]
        if SIZE != PADDED:
            a_mask = a_mask & (columns < SIZE)[None, :]
            b_mask = b_mask & (columns < SIZE)[None, :]
        x = tl.load(rows + a[:, None] * step + columns[None, :], mask=a_mask, other=0.0)
        y = tl.load(rows + b[:, None] * step + columns[None, :], mask=b_mask, other=0.0)
        if CENTRE:
            middle = tl.load(mean + columns)
            if FIRST:
                x -= middle[None, :]
                y -= middle[None, :]
            else:
                a_mean += tl.sum(x.to(tl.float32) * middle[None, :], 1)
                b_mean += tl.sum(y.to(tl.float32) * middle[None, :], 1)
        out = tl.dot(x, tl.trans(y), out, input_precision=PRECISION)
    if CENTRE and not FIRST:
        out -= a_mean[:, None] + b_mean[None, :] - mean_square
    return out


@triton.jit(do_not_specialize=["blocks_per_head"])
def walk_kernel(
    keys,
    values,
    index,  # [blocks, BLOCK] int64, rows within the head
    uniforms,  # [blocks, BLOCK] float32
    counts,  # [blocks] int64
    weights,  # [blocks, BLOCK] float32
    mean,  # [blocks, D] float32, scratch
    positive,  # [blocks, BLOCK] int8, out: 1 for the sign +1, else 0
    scale,
    offset,
    reach,  # exp(beta) / gamma
    kv_heads,
    blocks_per_head,
    key_batch,
    key_head,
    key_step,
    value_batch,
    value_head,
    value_step,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PART: tl.constexpr,
    VALUES: tl.constexpr,
    COUNTS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    CENTRE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    head = block // blocks_per_head
    keys += (head // kv_heads) * key_batch + (head % kv_heads) * key_head
    if VALUES:
        values += (head // kv_heads) * value_batch + (head % kv_heads) * value_head
    index += block * BLOCK
    uniforms += block * BLOCK
    positive += block * BLOCK
    weights += block * BLOCK
    count = BLOCK
    if COUNTS:
        count = tl.load(counts + block).to(tl.int32)
    tile = tl.arange(0, TILE)
    mean += block * D
    mean_square = 0.0
    if CENTRE != 0:
        for start in range(0, D, PART):
            columns = start + tl.arange(0, PART)
            total = tl.zeros([PART], tl.float32)
            for top in range(0, count, TILE):
                real = top + tile < count
                row = tl.load(index + top + tile, mask=real, other=0)
                mask = real[:, None] & (columns < DIM)[None, :]
                k = tl.load(keys + row[:, None] * key_step + columns[None, :], mask=mask, other=0.0)
                total += tl.sum(k.to(tl.float32), 0)
            if CENTRE == 1:
                total /= tl.maximum(count, 1)
            else:
                total /= BLOCK
            mean_square += tl.sum(total * total, 0)
            tl.store(mean + columns, total)
        tl.debug_barrier()  # other threads read what these wrote

    for top in range(0, count, TILE):
        place = top + tile
        real = place < count
        row = tl.load(index + place, mask=real, other=0)
        if WEIGHTS:
            row_weight = tl.load(weights + place, mask=real, other=0.0)
        # exp(-largest) scales the row: its largest exponent over earlier places, at least 0.
        largest = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE], tl.float32)
        for left in range(0, top, TILE):
            other = left + tile
            full = other < count  # always: an earlier tile
            column = tl.load(index + other)
            e = scale * _products(
                keys,
                key_step,
                row,
                column,
                real,
                full,
                mean,
                mean_square,
                DIM,
                D,
                PART,
                TILE,
                CENTRE != 0,
                PRECISION,
            )
            larger = tl.maximum(largest, tl.max(e, 1))
            g = tl.exp(e - larger[:, None])
            if VALUES:
                p = _products(
                    values,
                    value_step,
                    row,
                    column,
                    real,
                    full,
                    mean,
                    0.0,
                    VALUE_DIM,
                    E,
                    PART,
                    TILE,
                    False,
                    PRECISION,
                )
                if WEIGHTS:
                    p *= row_weight[:, None] * tl.load(weights + other)[None, :]
                g *= p + offset
            sign = 2.0 * tl.load(positive + other).to(tl.float32) - 1.0
            total = total * tl.exp(largest - larger) + tl.sum(g * sign[None, :], 1)
            largest = larger

        e = scale * _products(
            keys,
            key_step,
            row,
            row,
            real,
            real,
            mean,
            mean_square,
            DIM,
            D,
            PART,
            TILE,
            CENTRE != 0,
            PRECISION,
        )
        e = tl.where(tile[None, :] < tile[:, None], e, -float("inf"))
        larger = tl.maximum(largest, tl.max(e, 1))
        g = tl.exp(e - larger[:, None])  # 0 on and above the diagonal
        if VALUES:
            p = _products(
                values,
                value_step,
                row,
                row,
                real,
                real,
                mean,
                0.0,
                VALUE_DIM,
                E,
                PART,
                TILE,
                False,
                PRECISION,
            )
            if WEIGHTS:
                p *= row_weight[:, None] * row_weight[None, :]
            g *= p + offset
        total *= tl.exp(largest - larger)
        draw = tl.load(uniforms + place, mask=place < count, other=0.5)
        room = (0.5 - draw) * reach * tl.exp(-larger) - total
        room = tl.where(place == 0, 1.0, room)  # the first sign has no choice
        chosen = tl.zeros([TILE], tl.float32)
        for step in range(0, tl.minimum(TILE, count - top)):
            here = tile == step
            sign = tl.where(tl.sum(tl.where(here, room, 0.0), 0) > 0.0, 1.0, -1.0)
            column = tl.sum(tl.where(here[None, :], g, 0.0), 1)
            room -= column * sign
            chosen = tl.where(here, sign, chosen)
        tl.store(positive + place, (chosen > 0.0).to(tl.int8), mask=place < count)
        tl.debug_barrier()  # other threads read these signs with the next tiles


@triton.jit(do_not_specialize=["m", "held", "step"])
def cut_kernel(
    positive,  # [heads, step] int8, 1 for the sign +1
    order,  # [heads, held] int64
    weights,  # [heads, held] float32
    kept_order,  # [heads, held - m + m // 2], out
    kept_weights,
    m,
    held,
    step,
    SCAN: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    half = m // 2
    kept = held - m + half
    positive += head * step
    order += head * held
    weights += head * held
    kept_order += head * kept
    kept_weights += head * kept
    lane = tl.arange(0, SCAN)
    # Where each class has its half-th member; -1: nowhere. The later place ends the scan.
    end_plus = -1
    end_minus = -1
    seen = 0
    for start in range(0, m, SCAN):
        place = start + lane
        plus = tl.load(positive + place, mask=place < m, other=0).to(tl.int32)
        plus_seen = seen + tl.cumsum(plus, 0)
        minus_seen = place + 1 - plus_seen
        there = (plus_seen == half) & (plus > 0)
        end_plus = tl.maximum(end_plus, tl.max(tl.where(there, place, -1), 0))
        there = (minus_seen == half) & (plus == 0) & (place < m)
        end_minus = tl.maximum(end_minus, tl.max(tl.where(there, place, -1), 0))
        seen += tl.sum(plus, 0)
    end = tl.maximum(end_plus, end_minus)
    dropped = (end == end_plus).to(tl.int32)  # the class of the sign at `end`
    taken = 0
    for start in range(0, m, SCAN):
        place = start + lane
        real = place < m
        plus = tl.load(positive + place, mask=real, other=0).to(tl.int32)
        keep = real & ((place > end) | (plus != dropped))
        to = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
        keep_here = keep & (to < half)  # of an odd m the last one goes too
        entry = tl.load(order + place, mask=keep_here, other=0)
        weight = tl.load(weights + place, mask=keep_here, other=0.0)
        tl.store(kept_order + to, entry, mask=keep_here)
        tl.store(kept_weights + to, tl.where(place <= end, 2.0 * weight, weight), mask=keep_here)
        taken += tl.sum(keep.to(tl.int32), 0)
    for start in range(m, held, SCAN):
        place = start + lane
        rest = place < held
        to = place - m + half
        tl.store(kept_order + to, tl.load(order + place, mask=rest, other=0), mask=rest)
        tl.store(kept_weights + to, tl.load(weights + place, mask=rest, other=0.0), mask=rest)


def walk_options(dim: int, value_dim: int, itemsize: int) -> dict[str, Any]:
    """Compile-time constants of `walk_kernel` for these shapes: see the module's docstring.

    Tiles of 64 rows are the least that Hopper's wide matrix instructions take, and the fewer the
    tiles the fewer rounds of loads. Parts of 128 bytes of a row are whole cache lines. One stage:
    the products wait for the caches, not for device memory.
    """
    d, e = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    return {
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "D": d,
        "E": e,
        "PART": min(d, e, 64 // itemsize),
        "TILE": 64,
        # float32 stays float32, on the ordinary units: tf32, even thrice, loses digits and spills.
        "PRECISION": "ieee" if itemsize == 4 else "tf32",
        "num_warps": 4,
    }


@on_its_device
def walk(
    keys: Tensor,
    values: Tensor | None,
    index: Tensor,
    uniforms: Tensor,
    *,
    scale: float,
    offset: float,
    reach: float,
    counts: Tensor | None,
    weights: Tensor | None,
    centre: str,
) -> Tensor:
    """`balanced_walk` on [batch, kv_heads, ...] tensors: one launch."""
    batch, kv_heads, blocks, b = index.shape
    index = index.contiguous()
    positive = index.new_zeros(index.shape, dtype=torch.int8)
    v = keys if values is None else values
    options = walk_options(keys.shape[3], v.shape[3], keys.element_size())
    mean = keys.new_empty(batch * kv_heads * blocks, options["D"], dtype=torch.float32)
    walk_kernel[(batch * kv_heads * blocks,)](
        keys,
        v,
        index,
        uniforms.float().contiguous(),
        index if counts is None else counts.contiguous(),
        uniforms if weights is None else weights.float().contiguous(),
        mean,
        positive,
        float(scale),
        float(offset),
        float(reach),
        kv_heads,
        blocks,
        *keys.stride()[:3],
        *v.stride()[:3],
        BLOCK=b,
        VALUES=values is not None,
        COUNTS=counts is not None,
        WEIGHTS=weights is not None,
        CENTRE=CENTRES[centre],
        **options,
    )
    return positive.view(torch.bool)


@on_its_device
def cut(positive: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`balanced_cut.halve` on [heads, ...] tensors: one launch, one program per head."""
    (heads, held), m = order.shape, positive.shape[1]
    if positive.stride(1) != 1:
        positive = positive.contiguous()
    kept = held - m + m // 2
    kept_order = order.new_empty(heads, kept)
    kept_weights = weights.new_empty(heads, kept)
    cut_kernel[(heads,)](
        positive.view(torch.int8),
        order.contiguous(),
        weights.contiguous(),
        kept_order,
        kept_weights,
        m,
        held,
        positive.stride(0),
        SCAN=SCAN,
        num_warps=4,
    )
    return kept_order, kept_weights
