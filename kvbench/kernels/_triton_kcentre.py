"""Triton kernels of greedy k-centre: many programs a head, which wait for nothing but the last launch.

Distances to the chosen centres only shrink, so a distance that was not brought up to date is an upper
bound. The points of a head are dealt out to tiles in turn, for neighbours are alike and a tile yields
few centres a pass; of each tile the largest bound is known. A pass

1. visits the tiles with the largest bounds, one program each (`visit_kernel`): their points are compared
   with the centres chosen since the tile's last visit, and the farthest of each become candidates;
2. compares the candidates with each other (`compare_kernel`);
3. chooses, one program a head (`choose_kernel`): candidates in order of their distance, for as long as
   that is no less than the bound of every other point.

How many centres a pass finds depends on the points, and the host does not ask: it launches some more
passes than points that spread need, of which those that find everything done end at once, and then
`finish_kernel`, by which one program a head chooses what is left. The choice is the greedy one exactly,
up to ties and rounding, whatever the passes found.
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
    real_a,
    b,
    real_b,
    step,
    A: tl.constexpr,
    B: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Squared distances [A, B] between the points at places a and those at places b."""
    inner = tl.zeros([A, B], tl.float32)
    for part in range(0, D, PART):
        columns = part + tl.arange(0, PART)
        inside = (columns < DIM)[None, :]
        place = a.to(tl.int64)[:, None] * step + columns[None, :]
        x = tl.load(points + place, mask=real_a[:, None] & inside, other=0.0)
        place = b.to(tl.int64)[:, None] * step + columns[None, :]
        y = tl.load(points + place, mask=real_b[:, None] & inside, other=0.0)
        inner = tl.dot(x, tl.trans(y), inner, input_precision=PRECISION)
    norm_a = tl.load(square + a, mask=real_a, other=0.0)
    norm_b = tl.load(square + b, mask=real_b, other=0.0)
    return tl.maximum(norm_a[:, None] + norm_b[None, :] - 2.0 * inner, 0.0)


@triton.jit
def _up_to_date(
    points,
    square,
    distance,
    centres,
    place,
    since,
    chosen,
    n,
    step,
    DIM: tl.constexpr,
    D: tl.constexpr,
    POINTS: tl.constexpr,
    CENTRES: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Squared distances [POINTS] of the points at `place` to the nearest centre, brought up to date with
    the centres `since` to `chosen` - 1; -1 for a point that is a centre itself."""
    real = place < n
    near = tl.load(distance + place, mask=real, other=-1.0)
    for done in range(since, chosen, CENTRES):
        late = done + tl.arange(0, CENTRES)
        fresh = late < chosen
        row = tl.load(centres + late, mask=fresh, other=0)
        apart = _squared_distances(
            points, square, place, real, row, fresh, step, POINTS, CENTRES, DIM, D, PART, PRECISION
        )
        near = tl.minimum(near, tl.min(tl.where(fresh[None, :], apart, float("inf")), 1))
    return near


# A count of 1 made a constant leaves a loop that never runs, over which the compiler (3.6) stumbles.
@triton.jit(do_not_specialize=["n", "count", "tiles", "visited"])
def visit_kernel(
    points,
    square,  # [batch, n] float32, squared norms
    distance,  # [batch, n] float32: to the centres, as of the tile's last visit; -1: a centre
    centres,  # [batch, count] int64
    filled,  # [batch] int32, centres chosen
    stamp,  # [batch, tiles] int32, centres known at the tile's last visit
    visit,  # [batch, visited] int64, tiles
    value,  # [batch, visited, FARTHEST] float32, out: distances of the candidates
    where,  # [batch, visited, FARTHEST] int64, out: their places
    rest,  # [batch, visited] float32, out: the largest distance of the tile's other points
    n,
    count,
    tiles,
    visited,
    batch_step,
    step,
    FARTHEST: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    POINTS: tl.constexpr,
    CENTRES: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    chosen = tl.load(filled + head)
    if chosen < count:
        slot = head * visited + tl.program_id(0)
        tile = tl.load(visit + slot).to(tl.int32)
        distance += head * n
        since = tl.load(stamp + head * tiles + tile)
        lane = tl.arange(0, POINTS)
        place = tile + tiles * lane
        near = _up_to_date(
            points + head * batch_step,
            square + head * n,
            distance,
            centres + head * count,
            place,
            since,
            chosen,
            n,
            step,
            DIM,
            D,
            POINTS,
            CENTRES,
            PART,
            PRECISION,
        )
        tl.store(distance + place, near, mask=place < n)
        tl.store(stamp + head * tiles + tile, chosen)
        for i in tl.static_range(FARTHEST):
            farthest = tl.argmax(near, 0)
            tl.store(value + slot * FARTHEST + i, tl.max(near, 0))
            # Of a tile with fewer points than candidates the place is one before it.
            tl.store(where + slot * FARTHEST + i, (tile + tiles * farthest).to(tl.int64))
            near = tl.where(lane == farthest, -1.0, near)
        tl.store(rest + slot, tl.max(near, 0))


@triton.jit(do_not_specialize=["n", "count"])
def compare_kernel(
    points,
    square,
    filled,
    value,  # [batch, C]
    where,
    apart,  # [batch, C, C] float32, out
    n,
    count,
    batch_step,
    step,
    C: tl.constexpr,
    PIECE: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(2).to(tl.int64)
    if tl.load(filled + head) < count:
        i = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
        j = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        real_i = tl.load(value + head * C + i) >= 0
        real_j = tl.load(value + head * C + j) >= 0
        a = tl.load(where + head * C + i, mask=real_i, other=0)
        b = tl.load(where + head * C + j, mask=real_j, other=0)
        found = _squared_distances(
            points + head * batch_step,
            square + head * n,
            a,
            real_i,
            b,
            real_j,
            step,
            PIECE,
            PIECE,
            DIM,
            D,
            PART,
            PRECISION,
        )
        tl.store(apart + (head * C + i[:, None]) * C + j[None, :], found)


@triton.jit(do_not_specialize=["n", "count", "tiles"])
def choose_kernel(
    distance,
    centres,
    filled,
    visit,
    value,  # [batch, C], C = V * FARTHEST; written to
    went,  # [batch, C] int32, scratch
    where,
    rest,  # [batch, V]
    unseen,  # [batch] float32, the largest bound of the tiles not visited
    apart,
    bound,  # [batch, tiles] float32, out for the tiles visited
    n,
    count,
    tiles,
    V: tl.constexpr,
    FARTHEST: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
):
    # In greedy order a candidate is brought nearer by those chosen before its turn. Each round applies
    # what is known of that, and chooses all whom neither these nor the undecided before them bring
    # nearer, wherever in the order they are: a few rounds settle all.
    head = tl.program_id(0).to(tl.int64)
    done = tl.load(filled + head)
    if done < count:
        value += head * C
        went += head * C
        apart += head * C * C
        j = tl.arange(0, C)
        left = tl.load(value + j)
        goes = tl.zeros([C], tl.int32)
        tl.store(went + j, goes)
        slots = head * V + tl.arange(0, V)
        tile_rest = tl.load(rest + slots)
        others = tl.maximum(tl.max(tile_rest, 0), tl.load(unseen + head))
        others = tl.maximum(others, 0.0)  # no centre again
        undecided = (left >= others).to(tl.int32)
        tl.debug_barrier()
        while tl.max(undecided, 0) > 0:
            nearer = tl.zeros([C], tl.int32)
            closest = tl.full([C], float("inf"), tl.float32)
            for start in range(0, C, ROWS):
                i = start + tl.arange(0, ROWS)
                mine = tl.load(value + i)
                gone = tl.load(went + i) > 0
                first = mine[:, None] > left[None, :]
                first |= (mine[:, None] == left[None, :]) & (i[:, None] < j[None, :])
                first &= (mine >= others)[:, None] & (undecided > 0)[None, :]
                pair = apart + i[:, None] * C + j[None, :]
                between = tl.load(pair, mask=first, other=float("inf"))
                nearer = tl.maximum(nearer, tl.max((between < left[None, :]).to(tl.int32), 0))
                of_gone = tl.where(gone[:, None], between, float("inf"))
                closest = tl.minimum(closest, tl.min(of_gone, 0))
            goes = tl.where((undecided > 0) & (nearer == 0), 1, goes)
            left = tl.minimum(left, closest)
            undecided = ((left >= others) & (goes == 0)).to(tl.int32)
            tl.debug_barrier()  # every thread has read what now changes
            tl.store(value + j, left)
            tl.store(went + j, goes)
            tl.debug_barrier()
        rank = tl.zeros([C], tl.int32)
        for start in range(0, C, ROWS):
            i = start + tl.arange(0, ROWS)
            mine = tl.load(value + i)
            first = mine[:, None] > left[None, :]
            first |= (mine[:, None] == left[None, :]) & (i[:, None] < j[None, :])
            first &= (tl.load(went + i) > 0)[:, None]
            rank += tl.sum(first.to(tl.int32), 0)
        chosen = (goes > 0) & (done + rank < count)
        place = tl.load(where + head * C + j)
        tl.store(centres + head * count + done + rank, place, mask=chosen)
        tl.store(distance + head * n + place, -1.0, mask=chosen)
        tl.store(filled + head, tl.minimum(done + tl.sum(goes, 0), count))
        best = tl.max(tl.reshape(tl.where(goes > 0, -1.0, left), [V, FARTHEST]), 1)
        tile = tl.load(visit + slots)
        tl.store(bound + head * tiles + tile, tl.maximum(best, tile_rest))


@triton.jit(do_not_specialize=["n", "count", "tiles"])
def finish_kernel(
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
    batch_step,
    step,
    DIM: tl.constexpr,
    D: tl.constexpr,
    POINTS: tl.constexpr,
    CENTRES: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
    TILES: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    points += head * batch_step
    square += head * n
    distance += head * n
    centres += head * count
    lane = tl.arange(0, POINTS)
    every = tl.arange(0, TILES)
    bounds = tl.load(bound + head * tiles + every, mask=every < tiles, other=-float("inf"))
    stamps = tl.load(stamp + head * tiles + every, mask=every < tiles, other=0)
    chosen = tl.load(filled + head)
    while chosen < count:
        tile = tl.argmax(bounds, 0)
        since = tl.sum(tl.where(every == tile, stamps, 0), 0)
        place = tile + tiles * lane
        near = _up_to_date(
            points,
            square,
            distance,
            centres,
            place,
            since,
            chosen,
            n,
            step,
            DIM,
            D,
            POINTS,
            CENTRES,
            PART,
            PRECISION,
        )
        best = tl.max(near, 0)
        others = tl.max(tl.where(every == tile, -float("inf"), bounds), 0)
        # A centre chosen now is not compared yet with the tile: its stamp stays behind.
        stamps = tl.where(every == tile, chosen, stamps)
        if best >= others:
            farthest = tl.argmax(near, 0)
            tl.store(centres + chosen, (tile + tiles * farthest).to(tl.int64))
            near = tl.where(lane == farthest, -1.0, near)
            chosen += 1
            best = tl.max(near, 0)
        bounds = tl.where(every == tile, best, bounds)
        tl.store(distance + place, near, mask=place < n)
        tl.debug_barrier()  # other threads read what one wrote


def kcentre_options(n: int, dim: int, itemsize: int) -> dict[str, Any]:
    """Compile-time constants of the kernels for these shapes.

    Tiles of 64 points visited with up to 64 centres are the least that Hopper's wide matrix
    instructions take; more points per tile would bring bounds up to date that nobody asked for.
    Beyond 64k points tiles grow, so that there are few.
    """
    d = max(16, triton.next_power_of_2(dim))
    return {
        "DIM": dim,
        "D": d,
        "POINTS": 64 if n <= 1 << 16 else 128,
        "CENTRES": 64,
        "PART": min(d, 128 // itemsize),
        # float32 stays float32, on the ordinary units: tf32, even thrice, loses digits and spills.
        "PRECISION": "ieee" if itemsize == 4 else "tf32",
        "num_warps": 4,
        "num_stages": 2,
    }


def passes(count: int, candidates: int) -> int:
    """Passes that are launched: the first find few, later ones a fifth of the candidates. Simulated
    keys, each like its neighbours, need 106 of 122 at n = 32,768 for 8,192 centres (were a tile's points
    neighbours, 169) and 276 of 362 at 131,072 for 32,768."""
    return 2 + min(40, count // 16) + -(-5 * count // candidates)


@on_its_device
def greedy_k_centre(points: Tensor, square: Tensor, count: int, first: Tensor) -> Tensor:
    """`kernels.kcentre.greedy_k_centre` on CUDA, for 1 <= count.

    Args:
        points: [batch, n, dim]; 16-bit points as they are, float32 ones less their mean (products of
            16-bit numbers are exact, those of float32 lose what a large mean takes).
        square: [batch, n] float32, their squared norms.
    """
    batch, n, dim = points.shape
    if points.stride(2) != 1:
        points = points.contiguous()
    options = kcentre_options(n, dim, points.element_size())
    tiles = triton.cdiv(n, options["POINTS"])
    distance = torch.full_like(square, float("inf")).scatter_(1, first.unsqueeze(1), -1.0)
    centres = first.new_empty(batch, count)
    centres[:, 0] = first
    filled = first.new_ones(batch, dtype=torch.int32)
    stamp = first.new_zeros(batch, tiles, dtype=torch.int32)
    bound = square.new_full((batch, tiles), float("inf"))
    steps = points.stride()[:2]
    # As many tiles as a power of two, and one more to tell the largest bound of all others.
    visited = min(VISITED, triton.next_power_of_2(tiles) // 2)
    candidates = visited * FARTHEST
    if candidates >= 16 and count > candidates // 8:  # else the passes are not worth their launches
        value = square.new_empty(batch, visited, FARTHEST)
        where = first.new_empty(batch, visited, FARTHEST)
        went = filled.new_empty(batch, candidates)
        rest = square.new_empty(batch, visited)
        apart = square.new_empty(batch, candidates, candidates)
        piece = min(64, candidates)
        pieces = candidates // piece
        compared = {k: v for k, v in options.items() if k not in ("POINTS", "CENTRES")}
        for _ in range(passes(count, candidates)):
            largest = bound.topk(visited + 1, dim=-1)
            visit = largest.indices[:, :visited].contiguous()
            unseen = largest.values[:, visited].contiguous()
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
                *steps,
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
                *steps,
                C=candidates,
                PIECE=piece,
                **compared,
            )
            choose_kernel[(batch,)](
                distance,
                centres,
                filled,
                visit,
                value,
                went,
                where,
                rest,
                unseen,
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
        *steps,
        TILES=triton.next_power_of_2(tiles),
        **options,
    )
    return centres
