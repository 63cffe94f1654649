"""Triton kernels of greedy k-centre, many programs for each set of points, and no wait of the host.

In: points [batch, n, DIM] (each element of the batch is called a head) and the first centre of each
head. Out: the centres [batch, count] in the order in which they are chosen.

Distances to the chosen centres only shrink, so that a distance to some of the centres is an upper bound
of the distance to all. The points of a head are dealt out to tiles in turn (tile t has the points
t, t + tiles, t + 2 tiles, ...), because neighbours are alike and a tile yields few centres in a pass.
For each tile the largest bound of its points is known. A pass has three launches:

1. `visit_kernel`: a program has one visited tile (program id 0) of one head (id 1). Visited are the
   tiles with the largest bounds. Their points are compared with the centres that were chosen since the
   last visit of the tile, and the `FARTHEST` points of each become candidates.
2. `compare_kernel`: a program has a square of the distances between the candidates (program ids 0 and
   1) of one head (id 2).
3. `choose_kernel`: a program has one head (program id 0). It chooses candidates in order of their
   distance, for as long as that is no less than the bound of every other point.

How many centres a pass finds depends on the points, and the host does not ask. It launches somewhat
more passes than evenly spread points need; passes of a head that has all its centres end at once. What
is left then is chosen by `finish_kernel`, of which a program has one head (program id 0). The choice is
the greedy one up to ties and rounding, whatever the passes found.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device

VISITED = 256
"""Tiles of a head visited in a pass, at most."""
FARTHEST = 2
"""Candidates of a visited tile."""
ROWS = 32
"""Candidates that the choice compares with all others at a time."""


@triton.jit
def _squared_distances(
    points,
    square,
    a,
    b,
    is_a,
    is_b,
    point_stride,
    A: tl.constexpr,
    B: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Squared distances [A, B] between the points at places a [A] and those at places b [B], from their
    squared norms `square` and their inner products, PART columns at a time. What it gives where `is_a`
    or `is_b` is false means nothing."""
    products = tl.zeros([A, B], tl.float32)
    for start in range(0, D, PART):
        columns = start + tl.arange(0, PART)
        # Columns are masked also where D is DIM: else float32 points of 256 numbers spill more.
        inside = (columns < DIM)[None, :]
        place = a.to(tl.int64)[:, None] * point_stride + columns[None, :]
        x = tl.load(points + place, mask=is_a[:, None] & inside, other=0.0)
        place = b.to(tl.int64)[:, None] * point_stride + columns[None, :]
        y = tl.load(points + place, mask=is_b[:, None] & inside, other=0.0)
        products = tl.dot(x, tl.trans(y), products, input_precision=PRECISION)
    a_square = tl.load(square + a, mask=is_a, other=0.0)
    b_square = tl.load(square + b, mask=is_b, other=0.0)
    return tl.maximum(a_square[:, None] + b_square[None, :] - 2.0 * products, 0.0)


@triton.jit
def _distances_to_centres(
    points,
    square,
    distance,
    centres,
    place,
    since,
    chosen,
    n,
    point_stride,
    DIM: tl.constexpr,
    D: tl.constexpr,
    POINTS: tl.constexpr,
    CENTRES: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Squared distances [POINTS] of the points at `place` to the nearest of the first `chosen` centres;
    -1 for a point that is a centre itself or no point. `distance` has those to the first `since`
    centres."""
    real = place < n
    nearest = tl.load(distance + place, mask=real, other=-1.0)
    for start in range(since, chosen, CENTRES):
        number = start + tl.arange(0, CENTRES)
        is_new = number < chosen
        centre = tl.load(centres + number, mask=is_new, other=0)
        apart = _squared_distances(
            points,
            square,
            place,
            centre,
            real,
            is_new,
            point_stride,
            POINTS,
            CENTRES,
            DIM,
            D,
            PART,
            PRECISION,
        )
        nearest = tl.minimum(nearest, tl.min(tl.where(is_new[None, :], apart, float("inf")), 1))
    return nearest


@triton.jit
def _precedes(a_distance, a_place, b_distance, b_place):
    """Whether each candidate a comes before each candidate b in greedy order, [a, b] bool: the farther
    one first, of equal ones that with the lower place."""
    farther = a_distance[:, None] > b_distance[None, :]
    equal = a_distance[:, None] == b_distance[None, :]
    return farther | (equal & (a_place[:, None] < b_place[None, :]))


# Triton would make a `count` of 1 a constant, and its compiler (3.6) fails at the loop that then never
# runs.
@triton.jit(do_not_specialize=["n", "count", "tiles", "visited"])
def visit_kernel(
    points,  # [batch, n, DIM], of the strides below
    square,  # [batch, n] float32, squared norms
    distance,  # [batch, n] float32, squared: to the centres known at the tile's last visit; -1: centre
    centres,  # [batch, count] int64
    filled,  # [batch] int32, centres chosen so far
    stamp,  # [batch, tiles] int32, centres known at the tile's last visit
    visit,  # [batch, visited] int64, the tiles to visit
    value,  # [batch, visited, FARTHEST] float32, out: squared distances of the candidates
    where,  # [batch, visited, FARTHEST] int64, out: places of the candidates among the points
    rest,  # [batch, visited] float32, out: the largest squared distance of the tile's other points
    n,
    count,
    tiles,
    visited,
    batch_stride,
    point_stride,
    FARTHEST: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    POINTS: tl.constexpr,
    CENTRES: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Bring one tile's distances up to date and find its candidates: program (visited tile, head)."""
    head = tl.program_id(1).to(tl.int64)
    chosen = tl.load(filled + head)
    if chosen < count:
        slot = head * visited + tl.program_id(0)
        tile = tl.load(visit + slot).to(tl.int32)
        distance += head * n
        since = tl.load(stamp + head * tiles + tile)
        lane = tl.arange(0, POINTS)
        place = tile + tiles * lane
        nearest = _distances_to_centres(
            points + head * batch_stride,
            square + head * n,
            distance,
            centres + head * count,
            place,
            since,
            chosen,
            n,
            point_stride,
            DIM,
            D,
            POINTS,
            CENTRES,
            PART,
            PRECISION,
        )
        tl.store(distance + place, nearest, mask=place < n)
        tl.store(stamp + head * tiles + tile, chosen)
        for i in tl.static_range(FARTHEST):
            farthest = tl.argmax(nearest, 0)
            tl.store(value + slot * FARTHEST + i, tl.max(nearest, 0))
            # In a tile with fewer points than candidates this is the place of another point, and the
            # distance is -1, by which nothing is chosen.
            tl.store(where + slot * FARTHEST + i, (tile + tiles * farthest).to(tl.int64))
            nearest = tl.where(lane == farthest, -1.0, nearest)
        tl.store(rest + slot, tl.max(nearest, 0))


@triton.jit(do_not_specialize=["n", "count"])
def compare_kernel(
    points,  # as in `visit_kernel`, and so are those that have no comment
    square,
    filled,
    value,  # [batch, C]
    where,  # [batch, C]
    apart,  # [batch, C, C] float32, out: squared distances
    n,
    count,
    batch_stride,
    point_stride,
    C: tl.constexpr,
    PIECE: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compare PIECE candidates with PIECE candidates: program (piece, piece, head)."""
    head = tl.program_id(2).to(tl.int64)
    if tl.load(filled + head) < count:
        i = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
        j = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        is_i = tl.load(value + head * C + i) >= 0
        is_j = tl.load(value + head * C + j) >= 0
        distances = _squared_distances(
            points + head * batch_stride,
            square + head * n,
            tl.load(where + head * C + i, mask=is_i, other=0),
            tl.load(where + head * C + j, mask=is_j, other=0),
            is_i,
            is_j,
            point_stride,
            PIECE,
            PIECE,
            DIM,
            D,
            PART,
            PRECISION,
        )
        tl.store(apart + (head * C + i[:, None]) * C + j[None, :], distances)


@triton.jit(do_not_specialize=["n", "count", "tiles"])
def choose_kernel(
    distance,  # as in `visit_kernel`, and so are those that have no comment
    centres,
    filled,
    visit,
    value,  # [batch, C], C = V * FARTHEST; in and scratch
    taken,  # [batch, C] int32, scratch: 1 for the candidates that are chosen
    where,
    rest,
    unvisited,  # [batch] float32, the largest bound of the tiles that were not visited
    apart,  # [batch, C, C] float32, from `compare_kernel`
    bound,  # [batch, tiles] float32, out for the tiles visited: the largest bound of their points
    n,
    count,
    tiles,
    V: tl.constexpr,
    FARTHEST: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Choose centres among the candidates of one head: program (head).

    In greedy order a candidate is brought nearer by those chosen before its turn. Each round takes what
    is known of that into account, and chooses every undecided candidate that is brought nearer neither
    by a chosen candidate nor by an undecided one before it, wherever it stands in the order. Few rounds
    decide on all.
    """
    head = tl.program_id(0).to(tl.int64)
    before = tl.load(filled + head)
    if before < count:
        value += head * C
        taken += head * C
        apart += head * C * C
        j = tl.arange(0, C)
        left = tl.load(value + j)  # squared distances to the centres, those taken here included
        is_taken = tl.zeros([C], tl.int32)
        tl.store(taken + j, is_taken)
        slots = head * V + tl.arange(0, V)
        tile_rest = tl.load(rest + slots)
        others = tl.maximum(tl.max(tile_rest, 0), tl.load(unvisited + head))
        others = tl.maximum(others, 0.0)  # a candidate at -1 is a centre already
        undecided = (left >= others).to(tl.int32)
        tl.debug_barrier()
        while tl.max(undecided, 0) > 0:
            is_nearer = tl.zeros([C], tl.int32)
            to_taken = tl.full([C], float("inf"), tl.float32)
            for start in range(0, C, ROWS):
                i = start + tl.arange(0, ROWS)
                i_left = tl.load(value + i)
                i_taken = tl.load(taken + i) > 0
                counts = _precedes(i_left, i, left, j)
                counts &= (i_left >= others)[:, None] & (undecided > 0)[None, :]
                pair = apart + i[:, None] * C + j[None, :]
                between = tl.load(pair, mask=counts, other=float("inf"))
                brings_nearer = (between < left[None, :]).to(tl.int32)
                is_nearer = tl.maximum(is_nearer, tl.max(brings_nearer, 0))
                to_i = tl.where(i_taken[:, None], between, float("inf"))
                to_taken = tl.minimum(to_taken, tl.min(to_i, 0))
            is_taken = tl.where((undecided > 0) & (is_nearer == 0), 1, is_taken)
            left = tl.minimum(left, to_taken)
            undecided = ((left >= others) & (is_taken == 0)).to(tl.int32)
            tl.debug_barrier()  # every thread has read what now changes
            tl.store(value + j, left)
            tl.store(taken + j, is_taken)
            tl.debug_barrier()
        rank = tl.zeros([C], tl.int32)  # among the taken, in greedy order
        for start in range(0, C, ROWS):
            i = start + tl.arange(0, ROWS)
            counts = _precedes(tl.load(value + i), i, left, j)
            counts &= (tl.load(taken + i) > 0)[:, None]
            rank += tl.sum(counts.to(tl.int32), 0)
        is_chosen = (is_taken > 0) & (before + rank < count)
        place = tl.load(where + head * C + j)
        tl.store(centres + head * count + before + rank, place, mask=is_chosen)
        tl.store(distance + head * n + place, -1.0, mask=is_chosen)
        tl.store(filled + head, tl.minimum(before + tl.sum(is_taken, 0), count))
        best = tl.max(tl.reshape(tl.where(is_taken > 0, -1.0, left), [V, FARTHEST]), 1)
        tile = tl.load(visit + slots)
        tl.store(bound + head * tiles + tile, tl.maximum(best, tile_rest))


@triton.jit(do_not_specialize=["n", "count", "tiles"])
def finish_kernel(
    points,  # as in `visit_kernel` and `choose_kernel`
    square,
    distance,
    centres,
    filled,
    stamp,
    bound,
    n,
    count,
    tiles,
    batch_stride,
    point_stride,
    DIM: tl.constexpr,
    D: tl.constexpr,
    POINTS: tl.constexpr,
    CENTRES: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
    TILES: tl.constexpr,
):
    """Choose the centres of one head that the passes left, one after the other: program (head).

    A step brings the tile with the largest bound up to date. If the farthest point of the tile is then
    no nearer than the bound of every other tile, it is the next centre.
    """
    head = tl.program_id(0).to(tl.int64)
    points += head * batch_stride
    square += head * n
    distance += head * n
    centres += head * count
    lane = tl.arange(0, POINTS)
    all_tiles = tl.arange(0, TILES)
    is_tile = all_tiles < tiles
    bounds = tl.load(bound + head * tiles + all_tiles, mask=is_tile, other=-float("inf"))
    stamps = tl.load(stamp + head * tiles + all_tiles, mask=is_tile, other=0)
    chosen = tl.load(filled + head)
    while chosen < count:
        tile = tl.argmax(bounds, 0)
        since = tl.sum(tl.where(all_tiles == tile, stamps, 0), 0)
        place = tile + tiles * lane
        nearest = _distances_to_centres(
            points,
            square,
            distance,
            centres,
            place,
            since,
            chosen,
            n,
            point_stride,
            DIM,
            D,
            POINTS,
            CENTRES,
            PART,
            PRECISION,
        )
        best = tl.max(nearest, 0)
        others = tl.max(tl.where(all_tiles == tile, -float("inf"), bounds), 0)
        # The tile is not compared yet with a centre chosen now, so that its stamp stays behind.
        stamps = tl.where(all_tiles == tile, chosen, stamps)
        if best >= others:
            farthest = tl.argmax(nearest, 0)
            tl.store(centres + chosen, (tile + tiles * farthest).to(tl.int64))
            nearest = tl.where(lane == farthest, -1.0, nearest)
            chosen += 1
            best = tl.max(nearest, 0)
        bounds = tl.where(all_tiles == tile, best, bounds)
        tl.store(distance + place, nearest, mask=place < n)
        tl.debug_barrier()  # other threads read what one wrote


def kcentre_options(n: int, dim: int, itemsize: int) -> dict[str, Any]:
    """Choose the compile-time constants of the kernels for n points of `dim` numbers of `itemsize`
    bytes.

    64 points of a tile and 64 centres at a time are the least that Hopper's wide matrix instructions
    take; larger tiles would bring more bounds up to date than are needed. Beyond 64k points tiles are
    larger, so that `finish_kernel` can hold the bounds of all.
    """
    d = max(16, triton.next_power_of_2(dim))
    return {
        "DIM": dim,
        "D": d,
        "POINTS": 64 if n <= 1 << 16 else 128,
        "CENTRES": 64,
        "PART": min(d, 128 // itemsize),
        # float32 is multiplied as it is, not on the matrix units: tf32, even three products of it, loses
        # digits and spills.
        "PRECISION": "ieee" if itemsize == 4 else "tf32",
        "num_warps": 4,
        "num_stages": 2,
    }


def passes(count: int, candidates: int) -> int:
    """How many passes are launched for `count` centres, with so many candidates in each.

    The first passes find few centres, later ones a fifth of the candidates. Simulated keys, each like
    its neighbours, need 106 of 122 passes at n = 32,768 for 8,192 centres (169 if the points of a tile
    were neighbours) and 276 of 362 at 131,072 for 32,768.
    """
    return 2 + min(40, count // 16) + -(-5 * count // candidates)


@on_its_device
def greedy_k_centre(points: Tensor, square: Tensor, count: int, first: Tensor) -> Tensor:
    """`kcentre.greedy_k_centre` on CUDA, for at least one centre.

    Args:
        points: [batch, n, dim]; 16-bit points as they are, float32 points less their mean (products of
            16-bit numbers are exact, those of float32 lose what a large mean takes).
        square: [batch, n] float32, their squared norms.
        count: centres wanted, 1 <= count <= n.
        first: [batch] int64, the centre to start from.

    Returns:
        [batch, count] int64.
    """
    batch, n, dim = points.shape
    if points.stride(2) != 1:
        points = points.contiguous()
    options = kcentre_options(n, dim, points.element_size())
    tiles = triton.cdiv(n, options["POINTS"])
    distance = torch.full_like(square, float("inf"))
    distance.scatter_(1, first.unsqueeze(1), -1.0)
    centres = first.new_empty(batch, count)
    centres[:, 0] = first
    filled = first.new_ones(batch, dtype=torch.int32)
    stamp = first.new_zeros(batch, tiles, dtype=torch.int32)
    bound = square.new_full((batch, tiles), float("inf"))
    strides = points.stride()[:2]
    # A power of two less than the number of tiles: the next largest bound is that of all others.
    visited = min(VISITED, triton.next_power_of_2(tiles) // 2)
    candidates = visited * FARTHEST
    if candidates >= 16 and count > candidates // 8:  # else `finish_kernel` alone takes less time
        value = square.new_empty(batch, visited, FARTHEST)
        where = first.new_empty(batch, visited, FARTHEST)
        taken = filled.new_empty(batch, candidates)
        rest = square.new_empty(batch, visited)
        apart = square.new_empty(batch, candidates, candidates)
        piece = min(64, candidates)
        pieces = candidates // piece
        compare_options = {
            name: value for name, value in options.items() if name not in ("POINTS", "CENTRES")
        }
        for _ in range(passes(count, candidates)):
            largest = bound.topk(visited + 1, dim=-1)
            visit = largest.indices[:, :visited].contiguous()
            unvisited = largest.values[:, visited].contiguous()
            visit_kernel[(visited, batch)](
                points,
                square,
                distance,
                centres,
                filled,
                stamp,
                visit,
                value,
                where,
                rest,
                n,
                count,
                tiles,
                visited,
                *strides,
                FARTHEST=FARTHEST,
                **options,
            )
            compare_kernel[(pieces, pieces, batch)](
                points,
                square,
                filled,
                value,
                where,
                apart,
                n,
                count,
                *strides,
                C=candidates,
                PIECE=piece,
                **compare_options,
            )
            choose_kernel[(batch,)](
                distance,
                centres,
                filled,
                visit,
                value,
                taken,
                where,
                rest,
                unvisited,
                apart,
                bound,
                n,
                count,
                tiles,
                V=visited,
                FARTHEST=FARTHEST,
                C=candidates,
                ROWS=min(ROWS, candidates),
                num_warps=8,
            )
    finish_kernel[(batch,)](
        points,
        square,
        distance,
        centres,
        filled,
        stamp,
        bound,
        n,
        count,
        tiles,
        *strides,
        TILES=triton.next_power_of_2(tiles),
        **options,
    )
    return centres
