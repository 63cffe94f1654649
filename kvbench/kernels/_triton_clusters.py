"""Triton kernels of online clustering: each point's nearest representative, and which points become
representatives themselves.

Distances are the roots of sums of squared differences. Matrix products would take less time, but their
rounding leaves some comparisons undecided, and the host would have to wait for the device to learn
which.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device

PART = tl.constexpr(16)  # numbers of a point that are loaded together


@triton.jit
def _apart(
    points,
    a,
    is_a,
    others,
    b,
    is_b,
    DIM: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
):
    """Distances [A, B] between the points at places a [A] and the others at places b [B]; a point for
    which `is_a` or `is_b` is false counts as 0."""
    squares = tl.zeros([A, B], tl.float32)
    for start in range(0, DIM, PART):
        columns = start + tl.arange(0, PART)
        inside = (columns < DIM)[None, :]
        x = tl.load(points + a[:, None] * DIM + columns, mask=is_a[:, None] & inside, other=0.0)
        y = tl.load(others + b[:, None] * DIM + columns, mask=is_b[:, None] & inside, other=0.0)
        difference = x[:, None, :] - y[None, :, :]
        squares += tl.sum(difference * difference, 2)
    return tl.sqrt_rn(squares)


@triton.jit(
    do_not_specialize=[
        "b",
        "m",
        "points_stride",
        "others_stride",
        "among_head_stride",
        "among_point_stride",
        "among",
    ]
)
def nearest_kernel(
    points,  # [heads, b, DIM] float32
    others,  # [heads, m, DIM] float32
    among,  # [heads, 1 or b, m] uint8, 1: the point is compared with this one
    distance,  # [heads, b] float32, out
    index,  # [heads, b] int64, out
    b,
    m,
    points_stride,  # over heads
    others_stride,  # over heads
    among_head_stride,
    among_point_stride,  # 0 where all points are compared with the same
    DIM: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
):
    """The nearest of the others for A points, B others at a time: program (head, block of points)."""
    head = tl.program_id(0).to(tl.int64)
    point = tl.program_id(1) * A + tl.arange(0, A)
    best_distance = tl.full([A], float("inf"), tl.float32)
    best_index = tl.zeros([A], tl.int32)
    for start in range(0, m, B):
        other = start + tl.arange(0, B)
        real = (point < b)[:, None] & (other < m)[None, :]
        place = head * among_head_stride + point[:, None] * among_point_stride + other
        compared = tl.load(among + place, mask=real, other=0) != 0
        if tl.max(tl.max(compared.to(tl.int32), 1), 0) > 0:
            apart = _apart(
                points + head * points_stride,
                point,
                point < b,
                others + head * others_stride,
                other,
                other < m,
                DIM,
                A,
                B,
            )
            apart = tl.where(compared, apart, float("inf"))
            least = tl.min(apart, 1)
            first = tl.min(tl.where(apart == least[:, None], other[None, :], m), 1)
            best_index = tl.where(least < best_distance, first, best_index)
            best_distance = tl.minimum(best_distance, least)
    tl.store(distance + head * b + point, best_distance, mask=point < b)
    tl.store(index + head * b + point, best_index.to(tl.int64), mask=point < b)


@triton.jit(do_not_specialize=["b"])
def first_come_kernel(
    points,  # [heads, b, DIM] float32
    radius,  # [heads] float32
    free,  # [heads, b] uint8, 1: no representative so far is within the radius
    room,  # [heads] int64, how many points may become representatives
    fresh,  # [heads, b] uint8, out: 1 for the points that become representatives
    b,
    DIM: tl.constexpr,
    B: tl.constexpr,
):
    """Take the points of one head in order; B is at least b: program (head)."""
    head = tl.program_id(0).to(tl.int64)
    points += head * b * DIM
    place = tl.arange(0, B)
    real = place < b
    covered = 1 - tl.load(free + head * b + place, mask=real, other=0).to(tl.int32)
    chosen = tl.zeros([B], tl.int32)
    left = tl.load(room + head)
    head_radius = tl.load(radius + head)
    for i in range(b):
        is_covered = tl.sum(tl.where(place == i, covered, 0), 0) != 0
        if (left > 0) & (is_covered == 0):
            representative = i + tl.arange(0, 1)
            apart = _apart(
                points, place, real, points, representative, representative < b, DIM, B, 1
            )
            covered = covered | (tl.sum(apart, 1) <= head_radius).to(tl.int32)
            chosen = tl.where(place == i, 1, chosen)
            left -= 1
    tl.store(fresh + head * b + place, chosen.to(tl.uint8), mask=real)


@on_its_device
def nearest_points(points: Tensor, others: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """`online_clusters.nearest_points` on CUDA: one launch."""
    heads, b, dim = points.shape
    m = others.shape[1]
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
    """`online_clusters._first_come` on CUDA: one launch. The tensors are those of `first_come_kernel`,
    with bool for uint8."""
    heads, b, dim = points.shape
    fresh = torch.empty_like(free, dtype=torch.uint8)
    first_come_kernel[(heads,)](
        points,
        radius,
        free.byte(),
        room,
        fresh,
        b,
        DIM=dim,
        B=triton.next_power_of_2(b),
        num_warps=4,
    )
    return fresh.bool()
