"""Greedy k-centre (Gonzalez 1985) on the points of many heads at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CANDIDATES = 128
"""How many of the farthest points a pass over the points compares: at most so many become centres."""


def greedy_k_centre(points: Tensor, count: int, first: Tensor) -> Tensor:
    """Choose centres one after the other: each is the point farthest (l2) from those chosen before.

    The choice is exactly the greedy one, up to ties and rounding, with O(n) memory beyond the points.
    The points that are farthest now are mostly the farthest after the next few choices, too. So a pass
    over the points compares the `CANDIDATES` farthest with each other. It takes candidates for as long
    as their distance to every centre, the new ones included, is no less than the distance of every
    other point to the old centres (which can only shrink): such a candidate is the farthest point of
    all. Then one matrix product brings the distance of every point to its nearest centre up to date.
    The host waits for a GPU in every pass.

    Args:
        points: [batch, n, dim], any float dtype; distances are computed in float32.
        count: 0 to n.
        first: [batch] int64, the centre to start from.

    Returns:
        [batch, count] int64, distinct indices of points, in the order chosen.
    """
    if not 0 <= count <= points.shape[1]:
        raise ValueError(f"{count} centres of {points.shape[1]} points")
    batch, n, dim = points.shape
    x = _centred(points).contiguous()
    flat, heads = x.view(-1, dim), torch.arange(batch, device=x.device).unsqueeze(-1)

    def points_at(places: Tensor) -> Tensor:
        # Whole rows: `gather` would take them number by number, in up to five times the time.
        return flat.index_select(0, (places + n * heads).flatten()).view(batch, -1, dim)

    square = x.square().sum(-1)
    distance = torch.full_like(square, float("inf"))
    wide = min(CANDIDATES, n)
    slots = torch.arange(wide, device=x.device)
    # Room for one pass beyond `count`: heads that took fewer centres repeat their last one there.
    centres = torch.zeros(batch, count + wide + 1, dtype=torch.int64, device=x.device)
    filled = torch.zeros(batch, dtype=torch.int64, device=x.device)
    chosen = first.unsqueeze(-1)
    taken = torch.ones_like(filled)
    while count:
        centres.scatter_(1, filled.unsqueeze(-1) + slots[: chosen.shape[1]], chosen)
        filled = filled + taken
        if bool((filled >= count).all()):
            break
        rows = points_at(chosen)
        near = torch.baddbmm(square.gather(1, chosen).unsqueeze(2), rows, x.mT, alpha=-2).amin(1)
        torch.minimum(distance, near.add_(square).clamp_(min=0.0), out=distance)
        distance.scatter_(1, chosen, -1.0)

        far = distance.topk(min(wide + 1, n), dim=-1)
        candidates, left = far.indices[:, :wide], far.values[:, :wide].clone()
        others = far.values[:, wide:].amax(-1) if n > wide else torch.full_like(left[:, 0], -1.0)
        rows = points_at(candidates)
        norm = square.gather(1, candidates)
        apart = torch.baddbmm(norm.unsqueeze(1), rows, rows.mT, alpha=-2).add_(norm.unsqueeze(2))
        parts = (left.cpu().numpy(), apart.clamp_(min=0.0).cpu().numpy(), others.tolist())
        rooms = (count - filled).clamp(max=wide).tolist()
        orders = [_greedy_order(*head) for head in zip(*parts, rooms, strict=True)]
        taken = torch.tensor([len(order) for order in orders], device=x.device)
        # A head that took fewer than others repeats its last candidate; one that took none, any.
        longest = max(map(len, orders))
        filled_up = []
        for order in orders:
            last = order[-1] if order else 0
            filled_up.append(order + [last] * (longest - len(order)))
        chosen = candidates.gather(1, torch.tensor(filled_up, device=x.device))
    return centres[:, :count]


def _greedy_order(left: np.ndarray, apart: np.ndarray, others: float, room: int) -> list[int]:
    """Choose the candidates that one head takes in a pass, in order.

    Args:
        left: [c] squared distances of the candidates to the centres so far; overwritten.
        apart: [c, c] squared distances of the candidates to each other.
        others: the largest squared distance of any other point to the centres so far.
        room: centres that the head still wants.
    """
    # In numpy, whose calls take less time than torch's for so few numbers.
    order: list[int] = []
    while len(order) < room:
        farthest = int(left.argmax())
        if not left[farthest] >= others:
            break
        order.append(farthest)
        np.minimum(left, apart[farthest], out=left)
        left[farthest] = -1.0
    return order


def nearest_centre(points: Tensor, centres: Tensor) -> Tensor:
    """The number 0 .. count - 1 of the centre nearest (l2) to each of points [batch, n, dim]: [batch, n]
    int64. `centres` [batch, count] int64 are indices of points; each is nearest to itself even where
    another is as near, so that every centre has at least one point."""
    x = _centred(points)
    rows = x.gather(1, centres.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    norm = rows.square().sum(-1).unsqueeze(1)
    step = max(1, (1 << 20) // max(1, centres.shape[1]))
    parts = [
        torch.baddbmm(norm, part, rows.mT, alpha=-2).argmin(-1) for part in x.split(step, dim=1)
    ]
    nearest = torch.cat(parts, dim=1)
    own = torch.arange(centres.shape[1], device=x.device).expand_as(centres)
    return nearest.scatter_(1, centres, own)


def _centred(points: Tensor) -> Tensor:
    """Points [batch, n, dim] less their mean, in float32: their distances then lose fewer digits."""
    x = points.float()
    return x - x.mean(1, keepdim=True)
