"""Triton kernels of online clustering: each point's nearest representative, and which points become
representatives themselves.

Distances are sums of squared differences. Matrix products would be faster, but their rounding leaves
some comparisons in question, and the host would have to wait for the device to learn which.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device

PART = tl.constexpr(16)
"""Numbers of a point that are looked at together."""


@triton.jit
def _apart(
    points,
    a,
    real_a,
    others,
    b,
    real_b,
    DIM: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
):
    """Distances [A, B] of the points at places a and the others at places b."""
    squares = tl.zeros([A, B], tl.float32)
    for part in range(0, DIM, PART):
        columns = part + tl.arange(0, PART)
        inside = (columns < DIM)[None, :]
        x = tl.load(points + a[:, None] * DIM + columns, mask=real_a[:, None] & inside, other=0.0)
        y = tl.load(others + b[:, None] * DIM + columns, mask=real_b[:, None] & inside, other=0.0)
        difference = x[:, None, :] - y[None, :, :]
        squares += tl.sum(difference * difference, 2)
    return tl.sqrt_rn(squares)


@triton.jit(
    do_not_specialize=["b", "m", "points_step", "others_step", "among_step", "among_row", "among"]
)
def nearest_kernel(
    points,  # [h, b, DIM] float32
    others,  # [h, m, DIM] float32
    among,  # [h, 1 or b, m] uint8
    distance,  # [h, b] float32, out
    index,  # [h, b] int64, out
    b,
    m,
    points_step,
    others_step,
    among_step,
    among_row,
    DIM: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * A + tl.arange(0, A)
    best, where = tl.full([A], float("inf"), tl.float32), tl.zeros([A], tl.int32)
    for start in range(0, m, B):
        column = start + tl.arange(0, B)
        real = (row < b)[:, None] & (column < m)[None, :]
        place = head * among_step + row[:, None] * among_row + column
        seen = tl.load(among + place, mask=real, other=0) != 0
        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
            apart = _apart(
                points + head * points_step,
                row,
                row < b,
                others + head * others_step,
                column,
                column < m,
                DIM,
                A,
                B,
            )
            apart = tl.where(seen, apart, float("inf"))
            least = tl.min(apart, 1)
            first = tl.min(tl.where(apart == least[:, None], column[None, :], m), 1)
            where = tl.where(least < best, first, where)
            best = tl.minimum(best, least)
    tl.store(distance + head * b + row, best, mask=row < b)
    tl.store(index + head * b + row, where.to(tl.int64), mask=row < b)


@triton.jit(do_not_specialize=["b"])
def first_come_kernel(
    points,  # [h, b, DIM] float32
    radius,  # [h] float32
    free,  # [h, b] uint8
    room,  # [h] int64
    fresh,  # [h, b] uint8, out
    b,
    DIM: tl.constexpr,
    B: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    points += head * b * DIM
    place = tl.arange(0, B)
    real = place < b
    taken = 1 - tl.load(free + head * b + place, mask=real, other=0).to(tl.int32)
    chosen = tl.zeros([B], tl.int32)
    left, within = tl.load(room + head), tl.load(radius + head)
    for i in range(b):
        goes = (tl.sum(tl.where(place == i, taken, 0), 0) == 0) & (left > 0)
        if goes:
            one = i + tl.arange(0, 1)
            apart = _apart(points, place, real, points, one, one < b, DIM, B, 1)
            taken = taken | (tl.sum(apart, 1) <= within).to(tl.int32)
            chosen = tl.where(place == i, 1, chosen)
            left -= 1
    tl.store(fresh + head * b + place, chosen.to(tl.uint8), mask=real)


@on_its_device
def nearest(points: Tensor, others: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """`online_clusters.nearest` in one launch."""
    (heads, b, dim), m = points.shape, others.shape[1]
    distance = points.new_empty(heads, b)
    index = torch.empty_like(distance, dtype=torch.int64)
    nearest_kernel[(heads, triton.cdiv(b, 16))](
        points,
        others,
        among.byte(),
        distance,
        index,
        b,
        m,
        points.stride(0),
        others.stride(0),
        among.stride(0),
        among.stride(1) if among.shape[1] > 1 else 0,
        DIM=dim,
        A=16,
        B=32,
        num_warps=4,
    )
    return distance, index


@on_its_device
def first_come(points: Tensor, radius: Tensor, free: Tensor, room: Tensor) -> Tensor:
    """`online_clusters._first_come` in one launch: points [h, b, dim] float32, radius [h], free [h, b]
    bool, room [h] int64; [h, b] bool."""
    heads, b, dim = points.shape
    fresh = torch.empty_like(free, dtype=torch.uint8)
    options = {"DIM": dim, "B": triton.next_power_of_2(b), "num_warps": 4}
    first_come_kernel[(heads,)](points, radius, free.byte(), room, fresh, b, **options)
    return fresh.bool()
