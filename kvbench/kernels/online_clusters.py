"""Online clustering (SubGen, arXiv 2402.06082, Algorithm 1): a point that is within a radius of some
representative joins the nearest one; any other point becomes a representative.

Points are read in blocks, with the same result as one after the other: which points of a block become
representatives is decided in their order (`_first_come`), and everything else is products of matrices.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton

BLOCK = 256
"""How many points are read together."""
PAIRS = 1 << 22
"""How many differences are computed at a time where a matrix product leaves distances open."""


class OnlineClusters:
    """The representatives of h heads, whose points are read at the same time.

    Attributes:
        delta: [h] float32, how far (l2) a point may be from the representative that it joins.
        most: a head with so many clusters starts no other, and points join the nearest.
        clusters: [h] int64, the number of clusters of each head so far.
        points: [h, room + 1, dim] float32, the representatives in order; the last place is scratch.
    """

    def __init__(self, heads: int, dim: int, delta: Tensor, most: int | None = None) -> None:
        self.delta, self.most = delta, most
        self.clusters = torch.zeros(heads, dtype=torch.int64, device=delta.device)
        self.room = 0 if most is None else most
        self.points = torch.zeros(heads, self.room + 1, dim, device=delta.device)

    def read(self, points: Tensor) -> Tensor:
        """Read points [h, b, dim] float32 in order. Returns [h, b] int64, the number of the cluster that
        each joins or starts."""
        places = torch.arange(points.shape[1], device=points.device)
        before = self.clusters[:, None]
        exists = self._exists()
        width = exists.shape[2]
        distance, cluster = nearest_points(points, self.points[:, :width], exists)
        started, order, is_started = self._start(points, distance > self.delta[:, None], width)
        if not order.shape[1]:
            return cluster
        # A point may join only what it or an earlier point of the block has started.
        known = is_started.unsqueeze(1) & (order.unsqueeze(1) <= places[:, None])
        new_distance, new_cluster = nearest_points(points, started, known)
        return torch.where(new_distance < distance, before + new_cluster, cluster)

    def count(self, points: Tensor) -> None:
        """Read points [h, b, dim] as `read` does, but only add the clusters that they start."""
        exists = self._exists()
        width = exists.shape[2]
        far = _farther(points, self.points[:, :width], exists, self.delta)
        self._start(points, far, width)

    def _exists(self) -> Tensor:
        """At which places of `points` each head has a representative: [h, 1, width] bool, where `width`
        is at least the largest number of clusters of any head."""
        # Reading that number would make the host wait for a GPU.
        bound = self.most if self.clusters.is_cuda else None
        width = int(self.clusters.max()) if bound is None else bound
        return torch.arange(width, device=self.delta.device) < self.clusters[:, None, None]

    def _start(self, points: Tensor, far: Tensor, width: int) -> tuple[Tensor, ...]:
        """Add those of points [h, b, dim] that become representatives.

        Args:
            far: [h, b] bool, true for points that are farther than `delta` from every representative.
            width: the places that these take up in `self.points`.

        Returns:
            the new representatives [h, u, dim], their places among the points [h, u] int64, and [h, u]
            bool, False where a head has fewer than u.
        """
        order, left = _true_ones(far)
        rows = _rows(points, order)
        places = torch.arange(order.shape[1], device=points.device)
        new = places < left
        if order.shape[1]:
            first, count = _true_ones(_first_come(rows, new, self))
            order = order.gather(1, first)
            u = order.shape[1]
            rows = _rows(points, order)
            new = places[:u] < count
            if self.most is None and self.room < width + u:
                more = max(width, u, 8)
                empty = rows.new_zeros(len(rows), more + 1, rows.shape[2])
                self.points = torch.cat([self.points[:, :-1], empty], 1)
                self.room += more
            into = torch.where(new, self.clusters[:, None] + places[:u], self.room)
            self.points.scatter_(1, into.unsqueeze(-1).expand_as(rows), rows)
            self.clusters = self.clusters + count.squeeze(-1)
        return rows, order, new


def count_clusters(points: Tensor, delta: Tensor, most: int) -> Tensor:
    """Count the clusters that points [h, n, dim] float32 form with radius delta [h]: [h] int64, at
    most `most`, at which counting stops."""
    clustering = OnlineClusters(len(points), points.shape[2], delta, most)
    for block in points.split(BLOCK, dim=1):
        clustering.count(block)
        if not points.is_cuda and int(clustering.clusters.min()) == most:
            break
    return clustering.clusters


def nearest_points(points: Tensor, others: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Find the nearest (l2) of `others` to each point, the first on a tie.

    Distances are float32 roots of sums of squared differences, on a CPU as on CUDA.

    Args:
        points: [h, b, dim] float32.
        others: [h, m, dim] float32.
        among: [h, 1 or b, m] bool, which of the others a point is compared with.

    Returns:
        the distances [h, b] float32, infinite where there is none, and the places of the nearest among
        the others [h, b] int64.
    """
    heads, b, dim = points.shape
    if not others.shape[1]:
        return points.new_full((heads, b), math.inf), among.new_zeros(heads, b, dtype=torch.int64)
    if use_triton("online_clusters", "auto", points, rows_on_chip=False):
        from kvbench.kernels import _triton_clusters

        return _triton_clusters.nearest_points(points, others, among)
    # A matrix product finds the nearest; differences are computed to it alone or, where several may be
    # the nearest for all that the product's rounding lets tell, to all.
    own, theirs = _squared_norm(points), _squared_norm(others)
    squares = torch.baddbmm(theirs.unsqueeze(1), points, others.mT, alpha=-2)  # less `own`
    squares.masked_fill_(~among, math.inf)
    least, index = squares.min(-1)
    limit = least + _rounding(dim) * (own + theirs.amax(-1, keepdim=True))
    rows = others.gather(1, index.unsqueeze(-1).expand_as(points))
    distance = _apart(points, rows).masked_fill_(least == math.inf, math.inf)
    close = (squares <= limit.unsqueeze(-1)).sum(-1) > 1
    for part in (close & (least < math.inf)).nonzero().split(max(1, PAIRS // others[0].numel())):
        head, row = part.T
        apart = _apart(points[head, row].unsqueeze(1), others[head])
        apart.masked_fill_(~among.expand(-1, b, -1)[head, row], math.inf)
        distance[head, row], index[head, row] = apart.min(-1)
    return distance, index


def _farther(points: Tensor, others: Tensor, among: Tensor, delta: Tensor) -> Tensor:
    """Whether each point is farther from its nearest than delta [h]: [h, b] bool."""
    # On a CPU a matrix product decides, and `nearest_points` where its rounding leaves points open.
    far = torch.ones(points.shape[:2], dtype=torch.bool, device=points.device)
    undecided: slice | Tensor = slice(None)
    if not points.is_cuda and others.shape[1]:
        own, theirs, limit = _squared_norm(points), _squared_norm(others), delta.square()[:, None]
        squares = torch.baddbmm(theirs.unsqueeze(1), points, others.mT, alpha=-2)
        over = squares.masked_fill_(~among, math.inf).amin(-1).add_(own).sub_(limit)
        far = over > 0
        doubt = over.abs_() <= _rounding(points.shape[2]) * (own + theirs.amax(-1, True) + limit)
        undecided = doubt.any(0).nonzero()[:, 0]
    far[:, undecided] = nearest_points(points[:, undecided], others, among)[0] > delta[:, None]
    return far


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Distances (l2) of points a and b [..., dim]."""
    return (a - b).square().sum(-1).sqrt()


def _squared_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1).square_()


def _rounding(dim: int) -> float:
    """A bound on the rounding error, as a share of |a|^2 + |b|^2, of the difference of two squared
    distances of points a and b, each from a matrix product or from differences (float32, sums of `dim`
    terms)."""
    return 8 * (dim + 4) * 2.0**-24


def _true_ones(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The places where mask [h, b] is true, [h, u] int64 in order and padded with places where it is
    false; and how many are true, [h, 1] int64. u is at least the largest of these numbers."""
    count = mask.sum(-1, keepdim=True)
    # Reading the largest number would make the host wait for a GPU.
    most = mask.shape[1] if mask.is_cuda else int(count.max())
    return (~mask).to(torch.int8).argsort(dim=-1, stable=True)[:, :most], count


def _rows(points: Tensor, index: Tensor) -> Tensor:
    return points.gather(1, index.unsqueeze(-1).expand(-1, -1, points.shape[2]))


def _first_come(points: Tensor, free: Tensor, known: OnlineClusters) -> Tensor:
    """Decide which of points [h, u, dim] become representatives, in their order: [h, u] bool.

    A point becomes one if no representative of `known` is near it (`free` [h, u] bool), no earlier of
    these points that has become one is within the radius, and its head has room.
    """
    u, dim = points.shape[1:]
    room = torch.full_like(known.clusters, u) if known.most is None else known.most - known.clusters
    if use_triton("online_clusters", "auto", points, rows_on_chip=False):
        from kvbench.kernels import _triton_clusters

        return _triton_clusters.first_come(points, known.delta, free, room)
    radius = known.delta.view(-1, 1, 1)
    norms = _squared_norm(points)
    norms = norms.unsqueeze(1) + norms.unsqueeze(2)
    over = torch.baddbmm(norms, points, points.mT, alpha=-2).sub_(radius.square())
    near = over <= 0
    doubt = (over.abs_() <= norms.add_(radius.square()).mul_(_rounding(dim))).triu_(1)
    doubt &= free.unsqueeze(1)
    for part in doubt.nonzero().split(max(1, PAIRS // dim)):
        head, i, j = part.T
        near[head, i, j] = _apart(points[head, i], points[head, j]) <= known.delta[head]
    fresh = _first_come_numpy(*(x.cpu().numpy() for x in (near, free, room)))
    return torch.from_numpy(fresh).to(points.device)


def _first_come_numpy(near: np.ndarray, free: np.ndarray, room: np.ndarray) -> np.ndarray:
    """`_first_come` from the pairs of points that are within the radius, near [h, u, u] bool (above the
    diagonal), and how many representatives each head may still get, room [h]."""
    heads, places = np.arange(len(near)), np.arange(near.shape[1])
    fresh = np.zeros_like(free)
    while True:
        free = free & (room > 0)[:, None]
        first = free.argmax(1)
        starts = free[heads, first]
        if not starts.any():
            return fresh
        fresh[heads[starts], first[starts]] = True
        room = room - starts
        free = free & ~near[heads, first] & (places > first[:, None])
