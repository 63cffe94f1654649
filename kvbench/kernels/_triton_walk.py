"""Triton kernels of BalanceKV's halving: the signs of the walk, and the cut that follows from them.

`walk_kernel` forms a block's kernel matrix (see `balanced_walk`) tile by tile and keeps no tile: for
every tile of rows, first what the signs of earlier tiles add up to (matrix products, exponential and
sum in registers), then the steps inside the diagonal tile one by one. On chip are at most two tiles of
keys and two of values, whatever the block size. Device memory is read once for keys, values and draws
(tiles that are needed again come from the caches).

The steps inside a tile wait for each other, so that a block takes a fixed time (the latency of a step,
some hundreds of cycles, times the block size). Speed comes from blocks that walk beside each other:
small tiles, few warps, several programs per multiprocessor.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device
from kvbench.kernels._triton_tiles import load_rows

CENTRES = {"none": 0, "mean": 1, "released": 2}  # `centre` of `balanced_walk`
SCAN = 1024  # entries of a head that the cut scans at once


@triton.jit
def _products(
    matrix,
    row_stride,
    a,
    b,
    is_a,
    is_b,
    mean,
    mean_square,
    DIM: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    CENTRE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Inner products [TILE, TILE] float32 of the rows a [TILE] int64 and the rows b of a matrix (the
    address of the head's first row), less their mean (address; its squared norm) if CENTRE."""
    # float32 rows are centred before they are multiplied. Products of 16-bit rows are exact as they
    # stand and would not be after rounding the centred rows, so that the mean is taken out of the
    # products: <a - mean, b - mean> = <a, b> - <a, mean> - <b, mean> + |mean|^2.
    CENTRE_ROWS: tl.constexpr = matrix.dtype.element_ty == tl.float32
    products = tl.zeros([TILE, TILE], tl.float32)
    a_mean = tl.zeros([TILE], tl.float32)
    b_mean = tl.zeros([TILE], tl.float32)
    # PART columns at a time bound registers and shared memory at any width. One stage: the rows come
    # from the caches, since other tiles and programs have read them before.
    for start in tl.range(0, D, PART, num_stages=1):
        columns = start + tl.arange(0, PART)
        x = load_rows(matrix, row_stride, a, is_a, columns, DIM, D)
        y = load_rows(matrix, row_stride, b, is_b, columns, DIM, D)
        if CENTRE:
            mean_part = tl.load(mean + columns)
            if CENTRE_ROWS:
                x -= mean_part[None, :]
                y -= mean_part[None, :]
            else:
                a_mean += tl.sum(x.to(tl.float32) * mean_part[None, :], 1)
                b_mean += tl.sum(y.to(tl.float32) * mean_part[None, :], 1)
        products = tl.dot(x, tl.trans(y), products, input_precision=PRECISION)
    if CENTRE and not CENTRE_ROWS:
        products -= a_mean[:, None] + b_mean[None, :] - mean_square
    return products


@triton.jit
def _kernel_tile(
    keys,
    key_stride,
    values,
    value_stride,
    a,
    b,
    is_a,
    is_b,
    a_weight,
    weights,
    b_place,
    largest,
    mean,
    mean_square,
    scale,
    offset,
    DIAGONAL: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    VALUES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    CENTRE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile [TILE, TILE] of the block's kernel matrix, rows a and columns b, each row times
    exp(-largest); 0 on and above the diagonal of a DIAGONAL tile.

    `largest` [TILE] is the largest exponent of each row in the tiles before, at least 0; it is returned,
    too, with the exponents of this tile. `a_weight` [TILE] are the factors on the values of a, if
    WEIGHTS; those of b are at the places `b_place` [TILE] of `weights`.
    """
    exponents = scale * _products(
        keys,
        key_stride,
        a,
        b,
        is_a,
        is_b,
        mean,
        mean_square,
        DIM,
        D,
        PART,
        TILE,
        CENTRE,
        PRECISION,
    )
    if DIAGONAL:
        lane = tl.arange(0, TILE)
        exponents = tl.where(lane[None, :] < lane[:, None], exponents, -float("inf"))
    largest = tl.maximum(largest, tl.max(exponents, 1))
    tile = tl.exp(exponents - largest[:, None])
    if VALUES:
        products = _products(
            values,
            value_stride,
            a,
            b,
            is_a,
            is_b,
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
            # Loaded late: kept in registers all the while, they would take those of another program.
            b_weight = a_weight if DIAGONAL else tl.load(weights + b_place)
            products *= a_weight[:, None] * b_weight[None, :]
        tile *= products + offset
    return tile, largest


@triton.jit
def _store_mean(
    keys,
    key_stride,
    index,
    count,
    mean,
    DIM: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Write the mean [D] of a block's first `count` keys (their sum over BLOCK if CENTRE is `released`)
    to `mean`. Returns its squared norm."""
    mean_square = 0.0
    lane = tl.arange(0, TILE)
    for start in range(0, D, PART):
        columns = start + tl.arange(0, PART)
        total = tl.zeros([PART], tl.float32)
        for top in range(0, count, TILE):
            real = top + lane < count
            row = tl.load(index + top + lane, mask=real, other=0)
            k = load_rows(keys, key_stride, row, real, columns, DIM, D)
            total += tl.sum(k.to(tl.float32), 0)
        if CENTRE == 1:
            total /= tl.maximum(count, 1)
        else:
            total /= BLOCK
        mean_square += tl.sum(total * total, 0)
        tl.store(mean + columns, total)
    return mean_square


@triton.jit(do_not_specialize=["blocks_per_head"])
def walk_kernel(
    keys,  # [batch, kv_heads, rows, DIM], of the strides below
    values,  # [batch, kv_heads, rows, VALUE_DIM], of the strides below, if VALUES
    index,  # [blocks, BLOCK] int64, rows within the head
    uniforms,  # [blocks, BLOCK] float32
    counts,  # [blocks] int64, entries of each block, if COUNTS
    weights,  # [blocks, BLOCK] float32, if WEIGHTS
    mean,  # [blocks, D] float32, scratch
    positive,  # [blocks, BLOCK] int8, out: 1 for the sign +1, else 0
    scale,  # the factor on <k, k>
    offset,
    reach,  # exp(beta) / gamma
    kv_heads,
    blocks_per_head,
    key_batch_stride,
    key_head_stride,
    key_stride,
    value_batch_stride,
    value_head_stride,
    value_stride,
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
    """Walk through one block: program (block, over all heads)."""
    block = tl.program_id(0).to(tl.int64)
    head = block // blocks_per_head
    keys += (head // kv_heads) * key_batch_stride + (head % kv_heads) * key_head_stride
    if VALUES:
        values += (head // kv_heads) * value_batch_stride + (head % kv_heads) * value_head_stride
    index += block * BLOCK
    uniforms += block * BLOCK
    positive += block * BLOCK
    weights += block * BLOCK
    count = BLOCK
    if COUNTS:
        count = tl.load(counts + block).to(tl.int32)
    lane = tl.arange(0, TILE)
    mean += block * D
    mean_square = 0.0
    if CENTRE != 0:
        mean_square = _store_mean(
            keys, key_stride, index, count, mean, DIM, D, PART, TILE, BLOCK, CENTRE
        )
        tl.debug_barrier()  # other threads read what these wrote

    for top in range(0, count, TILE):
        place = top + lane
        real = place < count
        row = tl.load(index + place, mask=real, other=0)
        row_weight = tl.full([TILE], 1.0, tl.float32)
        if WEIGHTS:
            row_weight = tl.load(weights + place, mask=real, other=0.0)
        # Each row is multiplied by exp(-largest): its largest exponent over earlier places, at least 0.
        largest = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE], tl.float32)
        for left in range(0, top, TILE):
            earlier = left + lane  # all of them entries, since `top` is less than `count`
            column = tl.load(index + earlier)
            tile, larger = _kernel_tile(
                keys,
                key_stride,
                values,
                value_stride,
                row,
                column,
                real,
                earlier < count,
                row_weight,
                weights,
                earlier,
                largest,
                mean,
                mean_square,
                scale,
                offset,
                False,
                DIM,
                VALUE_DIM,
                D,
                E,
                PART,
                TILE,
                VALUES,
                WEIGHTS,
                CENTRE != 0,
                PRECISION,
            )
            sign = 2.0 * tl.load(positive + earlier).to(tl.float32) - 1.0
            total = total * tl.exp(largest - larger) + tl.sum(tile * sign[None, :], 1)
            largest = larger

        tile, larger = _kernel_tile(
            keys,
            key_stride,
            values,
            value_stride,
            row,
            row,
            real,
            real,
            row_weight,
            weights,
            place,
            largest,
            mean,
            mean_square,
            scale,
            offset,
            True,
            DIM,
            VALUE_DIM,
            D,
            E,
            PART,
            TILE,
            VALUES,
            WEIGHTS,
            CENTRE != 0,
            PRECISION,
        )
        total *= tl.exp(largest - larger)
        draw = tl.load(uniforms + place, mask=real, other=0.5)
        # A sign is +1 where the threshold is larger than the sum over the signs before it.
        room = (0.5 - draw) * reach * tl.exp(-larger) - total
        room = tl.where(place == 0, 1.0, room)  # the first sign is +1 whatever the draw
        signs = tl.zeros([TILE], tl.float32)
        for step in range(0, tl.minimum(TILE, count - top)):
            here = lane == step
            sign = tl.where(tl.sum(tl.where(here, room, 0.0), 0) > 0.0, 1.0, -1.0)
            room -= tl.sum(tl.where(here[None, :], tile, 0.0), 1) * sign
            signs = tl.where(here, sign, signs)
        tl.store(positive + place, (signs > 0.0).to(tl.int8), mask=real)
        tl.debug_barrier()  # other threads read these signs with the next tiles


@triton.jit(do_not_specialize=["m", "entries", "positive_stride"])
def cut_kernel(
    positive,  # [heads, m] int8, 1 for the sign +1, rows `positive_stride` apart
    order,  # [heads, entries] int64
    weights,  # [heads, entries] float32
    kept_order,  # [heads, entries - m + m // 2] int64, out
    kept_weights,  # [heads, entries - m + m // 2] float32, out
    m,
    entries,
    positive_stride,
    SCAN: tl.constexpr,
):
    """Halve the first m entries of one head, SCAN of them at a time: program (head)."""
    head = tl.program_id(0).to(tl.int64)
    half = m // 2
    kept = entries - m + half
    positive += head * positive_stride
    order += head * entries
    weights += head * entries
    kept_order += head * kept
    kept_weights += head * kept
    lane = tl.arange(0, SCAN)
    # Where each class has its half-th member; -1: nowhere. The later of the two is where the cut ends.
    end_plus = -1
    end_minus = -1
    plus_before = 0
    for start in range(0, m, SCAN):
        place = start + lane
        plus = tl.load(positive + place, mask=place < m, other=0).to(tl.int32)
        plus_seen = plus_before + tl.cumsum(plus, 0)
        minus_seen = place + 1 - plus_seen
        is_end = (plus_seen == half) & (plus > 0)
        end_plus = tl.maximum(end_plus, tl.max(tl.where(is_end, place, -1), 0))
        is_end = (minus_seen == half) & (plus == 0) & (place < m)
        end_minus = tl.maximum(end_minus, tl.max(tl.where(is_end, place, -1), 0))
        plus_before += tl.sum(plus, 0)
    end = tl.maximum(end_plus, end_minus)
    dropped = (end == end_plus).to(tl.int32)  # the class of the sign at `end`
    kept_before = 0
    for start in range(0, m, SCAN):
        place = start + lane
        real = place < m
        plus = tl.load(positive + place, mask=real, other=0).to(tl.int32)
        survives = real & ((place > end) | (plus != dropped))
        target = kept_before + tl.cumsum(survives.to(tl.int32), 0) - 1
        is_kept = survives & (target < half)  # of an odd m the last survivor goes too
        entry = tl.load(order + place, mask=is_kept, other=0)
        weight = tl.load(weights + place, mask=is_kept, other=0.0)
        tl.store(kept_order + target, entry, mask=is_kept)
        tl.store(kept_weights + target, tl.where(place <= end, 2.0 * weight, weight), mask=is_kept)
        kept_before += tl.sum(survives.to(tl.int32), 0)
    for start in range(m, entries, SCAN):
        place = start + lane
        real = place < entries
        target = place - m + half
        tl.store(kept_order + target, tl.load(order + place, mask=real, other=0), mask=real)
        tl.store(kept_weights + target, tl.load(weights + place, mask=real, other=0.0), mask=real)


def walk_options(dim: int, value_dim: int, itemsize: int) -> dict[str, Any]:
    """Choose the compile-time constants of `walk_kernel` for keys and values whose numbers have
    `itemsize` bytes."""
    d, e = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    return {
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "D": d,
        "E": e,
        "PART": min(d, e, 64 // itemsize),
        # The least that Hopper's wide matrix instructions take; less would need more rounds of loads.
        "TILE": 64,
        # float32 is multiplied as it is, not on the matrix units: tf32, even three products of it, loses
        # digits and spills.
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
    """`balanced_walk.balanced_walk` on CUDA, with leading dimensions [batch, kv_heads]: one launch."""
    batch, kv_heads, blocks, b = index.shape
    index = index.contiguous()
    positive = index.new_zeros(index.shape, dtype=torch.int8)
    # The kernel is passed some tensor also where there are no values, counts or weights.
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
    """`balanced_cut.halve` on CUDA, on [heads, ...] tensors: one launch."""
    heads, entries = order.shape
    m = positive.shape[1]
    if positive.stride(1) != 1:
        positive = positive.contiguous()
    kept = entries - m + m // 2
    kept_order = order.new_empty(heads, kept)
    kept_weights = weights.new_empty(heads, kept)
    cut_kernel[(heads,)](
        positive.view(torch.int8),
        order.contiguous(),
        weights.contiguous(),
        kept_order,
        kept_weights,
        m,
        entries,
        positive.stride(0),
        SCAN=SCAN,
        num_warps=4,
    )
    return kept_order, kept_weights
