"""Triton kernel of greedy k-centre: all rounds of a head in one launch.

Distances to the chosen centres only shrink, so a distance that was not brought up to date is an upper
bound. The points of a head are cut into tiles; of each tile the kernel knows the largest distance as
of the tile's last visit. It visits the tile whose bound is largest, compares its points with the
centres chosen since (a matrix product for 64 of them), and if its largest distance is still no less
than every other tile's bound, that point is the farthest of all: the next centre. No other tile had
to be looked at. The choice is the greedy one exactly, up to ties and rounding.

One program per (batch, KV head): rounds depend on each other, and within a program a barrier is cheap
and certain. That leaves most multiprocessors idle at 8 heads. The alternatives cost more than they
bring: a launch or a host synchronisation per round at thousands of rounds; or several programs per
head that wait for each other at every round, which needs all of them resident at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device


# A count of 1 made a constant leaves a loop that never runs, over which the compiler (3.6) stumbles.
@triton.jit(do_not_specialize=["n", "count"])
def kcentre_kernel(
    points,
    square,  # [batch, n] float32, squared norms
    distance,  # [batch, n] float32, scratch: to the centres, as of the tile's last visit; -1: a centre
    first,  # [batch] int64
    centres,  # [batch, count] int64, out
    n,
    count,
    batch_step,
    step,
    DIM: tl.constexpr,
    D: tl.constexpr,
    POINTS: tl.constexpr,
    CENTRES: tl.constexpr,
    PART: tl.constexpr,
    TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    points += head * batch_step
    square += head * n
    distance += head * n
    centres += head * count
    lane = tl.arange(0, POINTS)
    some = tl.arange(0, CENTRES)
    tiles = tl.arange(0, TILES)
    # Before the first visit a tile's bound is infinite.
    bound = tl.where(tiles * POINTS < n, float("inf"), -float("inf"))
    stamp = tl.zeros([TILES], tl.int32)  # centres known at the tile's last visit
    start = tl.load(first + head)
    tl.store(centres, start)
    tl.store(distance + start, -1.0)
    tl.debug_barrier()  # other threads read what one wrote
    chosen = 1
    while chosen < count:
        tile = tl.argmax(bound, 0)
        since = tl.sum(tl.where(tiles == tile, stamp, 0), 0)
        place = tile * POINTS + lane
        real = place < n
        near = tl.load(distance + place, mask=real, other=-1.0)
        norm = tl.load(square + place, mask=real, other=0.0)
        for done in range(since, chosen, CENTRES):
            fresh = done + some < chosen
            row = tl.load(centres + done + some, mask=fresh, other=0)
            inner = tl.zeros([POINTS, CENTRES], tl.float32)
            for part in range(0, D, PART):
                columns = part + tl.arange(0, PART)
                inside = (columns < DIM)[None, :]
                x = tl.load(
                    points + place.to(tl.int64)[:, None] * step + columns[None, :],
                    mask=real[:, None] & inside,
                    other=0.0,
                )
                c = tl.load(
                    points + row[:, None] * step + columns[None, :],
                    mask=fresh[:, None] & inside,
                    other=0.0,
                )
                inner = tl.dot(x, tl.trans(c), inner, input_precision=PRECISION)
            centre_norm = tl.load(square + row, mask=fresh, other=0.0)
            apart = tl.maximum(norm[:, None] + centre_norm[None, :] - 2.0 * inner, 0.0)
            near = tl.minimum(near, tl.min(tl.where(fresh[None, :], apart, float("inf")), 1))
        best = tl.max(near, 0)
        others = tl.max(tl.where(tiles == tile, -float("inf"), bound), 0)
        farthest = tl.argmax(near, 0)
        if best >= others:
            tl.store(centres + chosen, (tile * POINTS + farthest).to(tl.int64))
            near = tl.where(lane == farthest, -1.0, near)
            # The new centre is not compared yet with the tile: its stamp stays behind.
            stamp = tl.where(tiles == tile, chosen, stamp)
            chosen += 1
            best = tl.max(near, 0)
        else:
            stamp = tl.where(tiles == tile, chosen, stamp)
        bound = tl.where(tiles == tile, best, bound)
        tl.store(distance + place, near, mask=real)
        tl.debug_barrier()


def kcentre_options(n: int, dim: int, itemsize: int) -> dict[str, Any]:
    """Compile-time constants of `kcentre_kernel` for these shapes.

    Tiles of 64 points visited with up to 64 centres are the least that Hopper's wide matrix
    instructions take; more points per tile would bring bounds up to date that nobody asked for.
    Beyond 64k points tiles grow, so that a thread keeps few of the tiles' bounds.
    """
    d = max(16, triton.next_power_of_2(dim))
    points = 64 if n <= 1 << 16 else 128
    return {
        "DIM": dim,
        "D": d,
        "POINTS": points,
        "CENTRES": 64,
        "PART": min(d, 128 // itemsize),
        "TILES": triton.next_power_of_2(-(-n // points)),
        # float32 stays float32, on the ordinary units: tf32, even thrice, loses digits and spills.
        "PRECISION": "ieee" if itemsize == 4 else "tf32",
        "num_warps": 4,
        "num_stages": 2,
    }


@on_its_device
def greedy_k_centre(points: Tensor, square: Tensor, count: int, first: Tensor) -> Tensor:
    """`kernels.kcentre.greedy_k_centre` on CUDA, for 1 <= count: one launch.

    Args:
        points: [batch, n, dim]; 16-bit points as they are, float32 ones less their mean (products of
            16-bit numbers are exact, those of float32 lose what a large mean takes).
        square: [batch, n] float32, their squared norms.
    """
    batch, n, dim = points.shape
    if points.stride(2) != 1:
        points = points.contiguous()
    distance = torch.full_like(square, float("inf"))
    centres = first.new_empty(batch, count)
    kcentre_kernel[(batch,)](
        points,
        square,
        distance,
        first,
        centres,
        n,
        count,
        *points.stride()[:2],
        **kcentre_options(n, dim, points.element_size()),
    )
    return centres
