"""Online clustering (SubGen, arXiv 2402.06082, Algorithm 1): a point that is within a radius of some
representative joins the nearest one; any other point becomes a representative.

Points are read in blocks. The result is that of one point after the other: which points of a block
become representatives is decided in their order (`_first_come`); all else is products of matrices.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton

BLOCK = 256
"""Points read together."""
PAIRS = 1 << 22
"""Numbers held at a time where distances are computed pair by pair."""


class OnlineClusters:
    """The representatives of many heads that read their points in step.

    Attributes:
        delta: [h] float32, how far (l2) a point may be from the representative it joins.
        most: a head with so many clusters starts no other, and a point joins the nearest; None: no end.
        clusters: [h] int64, of each head so far.
        room: clusters that the tensors of this object have places for.
        points: [h, room + 1, dim] float32, the representatives in order; the last place is scratch.
    """

    def __init__(self, heads: int, dim: int, delta: Tensor, most: int | None = None) -> None:
        self.delta, self.most = delta, most
        self.clusters = torch.zeros(heads, dtype=torch.int64, device=delta.device)
        self.room = 0 if most is None else most
        self.points = torch.zeros(heads, self.room + 1, dim, device=delta.device)

    def read(self, points: Tensor) -> Tensor:
        """The cluster of each point [h, b, dim], float32, in order: [h, b] int64."""
        places = torch.arange(points.shape[1], device=points.device)
        before = self.clusters[:, None]
        there = self._there()
        best, where = nearest(points, self.points[:, : there.shape[2]], there)
        rows, order, new = self._start(points, best > self.delta[:, None], there.shape[2])
        if not order.shape[1]:
            return where
        known = new.unsqueeze(1) & (order.unsqueeze(1) <= places[:, None])
        apart, nearer = nearest(points, rows, known)
        return torch.where(apart < best, before + nearer, where)

    def count(self, points: Tensor) -> None:
        """Read points [h, b, dim] as `read` does, but only count the clusters."""
        there = self._there()
        width = there.shape[2]
        self._start(points, _farther(points, self.points[:, :width], there, self.delta), width)

    def _there(self) -> Tensor:
        """Which places of `points` hold a representative of each head: [h, 1, width] bool.

        `width` is the largest number of clusters of any head. On a GPU it is `most`, where that is
        given, since reading the largest number would make the host wait."""
        bound = self.most if self.clusters.is_cuda else None
        width = int(self.clusters.max()) if bound is None else bound
        return torch.arange(width, device=self.delta.device) < self.clusters[:, None, None]

    def _start(self, points: Tensor, far: Tensor, width: int) -> tuple[Tensor, ...]:
        """Find the points that become representatives, and add them.

        Args:
            points: [h, b, dim] float32.
            far: [h, b] bool, the points that no earlier representative is within `delta` of.
            width: places of earlier representatives, see `_there`.

        Returns:
            the new representatives [h, u, dim], their places among the points [h, u], and [h, u] bool,
            False where a head has fewer than u.
        """
        order, left = _true_ones(far)
        rows = _rows(points, order)
        places = torch.arange(order.shape[1], device=points.device)
        new = places < left
        if order.shape[1]:
            first, count = _true_ones(_first_come(rows, new, self))
            order = order.gather(1, first)
            rows, u = _rows(points, order), order.shape[1]
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
    """Number of clusters that points [h, n, dim] float32 form with radius delta [h]: [h] int64, at most
    `most`, where counting stops."""
    clustering = OnlineClusters(len(points), points.shape[2], delta, most)
    for block in points.split(BLOCK, dim=1):
        clustering.count(block)
        if not points.is_cuda and int(clustering.clusters.min()) == most:
            break
    return clustering.clusters


def nearest(points: Tensor, others: Tensor, among: Tensor) -> tuple[Tensor, Tensor]:
    """Distance (l2) to the nearest of `others`, and which that is, the first on a tie.

    Distances are float32 roots of summed squared differences. On CUDA a kernel forms them all; elsewhere
    a matrix product finds the nearest, and differences are taken to it and, where the product's
    rounding leaves several in question, to all.

    Args:
        points: [h, b, dim]. others: [h, m, dim].
        among: [h, 1 or b, m] bool, the others that a point is compared with.

    Returns:
        [h, b] float32, infinite where there is none, and [h, b] int64.
    """
    heads, b, dim = points.shape
    if not others.shape[1]:
        return points.new_full((heads, b), math.inf), among.new_zeros(heads, b, dtype=torch.int64)
    if use_triton("online_clusters", "auto", points, rows_on_chip=False):
        from kvbench.kernels import _triton_clusters

        return _triton_clusters.nearest(points, others, among)
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
    """Whether `nearest` of each point is farther than delta [h], [h, b] bool. On a CPU it is asked only
    for the points that a product's rounding leaves in question."""
    far = torch.ones(points.shape[:2], dtype=torch.bool, device=points.device)
    asked: slice | Tensor = slice(None)
    if not points.is_cuda and others.shape[1]:
        own, theirs, limit = _squared_norm(points), _squared_norm(others), delta.square()[:, None]
        squares = torch.baddbmm(theirs.unsqueeze(1), points, others.mT, alpha=-2)
        over = squares.masked_fill_(~among, math.inf).amin(-1).add_(own).sub_(limit)
        far = over > 0
        doubt = over.abs_() <= _rounding(points.shape[2]) * (own + theirs.amax(-1, True) + limit)
        asked = doubt.any(0).nonzero()[:, 0]
    far[:, asked] = nearest(points[:, asked], others, among)[0] > delta[:, None]
    return far


def _apart(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum(-1).sqrt()


def _squared_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1).square_()


def _rounding(dim: int) -> float:
    """Error bound, as a share of |a|^2 + |b|^2, of the difference of two squared distances of which
    each is from a product or from differences (float32, sums of `dim` terms)."""
    return 8 * (dim + 4) * 2.0**-24


def _true_ones(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The places where mask [h, b] is true.

    Returns:
        places [h, u] int64 in order, filled up with places where the mask is false, and how many are
        true, [h, 1]. u is the largest of these numbers; on a GPU it is b, since reading the largest
        would make the host wait.
    """
    count = mask.sum(-1, keepdim=True)
    most = mask.shape[1] if mask.is_cuda else int(count.max())
    return (~mask).to(torch.int8).argsort(dim=-1, stable=True)[:, :most], count


def _rows(points: Tensor, index: Tensor) -> Tensor:
    return points.gather(1, index.unsqueeze(-1).expand(-1, -1, points.shape[2]))


def _first_come(points: Tensor, free: Tensor, known: OnlineClusters) -> Tensor:
    """Which of the free points become representatives, [h, u] bool: in order, each that is not within
    the radius of one that became a representative before it, as long as its head has room.

    Args:
        points: [h, u, dim] float32.
        free: [h, u] bool, the points that are not within the radius of any representative in `known`.
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
    """`_first_come` in numpy.

    Args:
        near: [h, u, u] bool, pairs of points within the radius of each other; only what is above the
            diagonal is read.
        free: [h, u] bool. room: [h], representatives that each head may still get.
    """
    heads, places = np.arange(len(near)), np.arange(near.shape[1])
    fresh = np.zeros_like(free)
    while True:
        free = free & (room > 0)[:, None]
        first = free.argmax(1)
        goes = free[heads, first]
        if not goes.any():
            return fresh
        fresh[heads[goes], first[goes]] = True
        room = room - goes
        free = free & ~near[heads, first] & (places > first[:, None])
