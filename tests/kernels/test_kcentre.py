"""Greedy k-centre against the greedy choice in float64."""

from __future__ import annotations

import random

import pytest
import torch
from support.interpreted import DEVICE
from support.kernels import BRAIN, FLOAT, FULL_SIZE, HALF, generator, put

from kvbench.kernels import kcentre
from kvbench.kernels.kcentre import greedy_k_centre, nearest_centre

pytestmark = pytest.mark.cuda


def check_centres(points: torch.Tensor, centres: torch.Tensor, first: torch.Tensor) -> None:
    """The greedy choice: every centre is as far from those before it as any point is."""
    assert torch.equal(centres[:, :1], first[: len(centres), None][:, : centres.shape[1]])
    for x, head in zip(points.to(DEVICE).double(), centres, strict=True):
        assert head.unique().numel() == len(head)
        distance = (x - x[head[:1]]).square().sum(1) if len(head) else x[:, 0]
        for step in head[1:].tolist():
            assert float(distance[step]) >= float(distance.max()) * (1 - 1e-4) - 1e-6
            distance = distance.minimum((x - x[step]).square().sum(1))


def points_of(kind: str, batch: int, n: int, dim: int) -> torch.Tensor:
    if kind == "equal":
        return torch.ones(batch, n, dim)
    g = generator(1)
    points = torch.randn(batch, n, dim, generator=g) + 2.0
    if kind == "clustered":
        hubs = 4 * torch.randn(batch, 6, dim, generator=g)
        points = hubs[:, torch.randint(6, (n,), generator=g)] + 0.3 * points
    if kind == "far neighbours":
        points[:, 48:72] *= 20
    return points


CENTRES = [
    # batch, n, dim, count, dtype, kind
    (1, 1, 4, 1, FLOAT, "spread"),
    (2, 65, 3, 65, BRAIN, "spread"),
    (2, 150, 40, 30, HALF, "spread"),
    (2, 150, 5, 24, FLOAT, "clustered"),
    (1, 30, 3, 30, FLOAT, "equal"),
]


@pytest.mark.parametrize(
    "case", CENTRES + ([(8, 16384, 128, 4000, BRAIN, "spread")] if FULL_SIZE else []), ids=str
)
def test_kcentre(case):
    batch, n, dim, count, dtype, kind = case
    points = points_of(kind, batch, n, dim).to(dtype)
    first = torch.randint(0, n, (batch,), generator=generator(n))
    centres = greedy_k_centre(*put(points), count, *put(first)).cpu()
    assert centres.shape == (batch, count)
    check_centres(points, centres, first)


@pytest.mark.parametrize("seed", range(8))
def test_kcentre_in_passes_of_any_size(seed, monkeypatch):
    dice = random.Random(seed)
    for _ in range(6):
        batch, n, dim = dice.randint(1, 3), dice.randint(1, 150), dice.randint(1, 6)
        points = torch.randn(batch, n, dim, generator=generator(n))
        first = torch.randint(0, n, (batch,), generator=generator(n))
        monkeypatch.setattr(kcentre, "CANDIDATES", dice.choice([1, 3, 128]))
        centres = greedy_k_centre(points, dice.randint(0, n), first)
        check_centres(points, centres, first)
        if centres.shape[1]:
            rows = points.gather(1, centres.unsqueeze(-1).expand(-1, -1, dim))
            nearest = nearest_centre(points, centres)
            apart = (points.unsqueeze(2) - rows.unsqueeze(1)).double().norm(dim=-1)
            distance = apart.gather(2, nearest.unsqueeze(-1)).squeeze(-1)
            # Of centres that are nearly as far either may be the nearest.
            torch.testing.assert_close(distance, apart.amin(-1), atol=2e-3, rtol=0)


def test_a_centre_is_nearest_to_itself_and_more_centres_than_points_are_refused():
    same = torch.ones(1, 5, 2)
    assert nearest_centre(same, torch.tensor([[1, 3]]))[0, [1, 3]].tolist() == [0, 1]
    with pytest.raises(ValueError, match="4 centres of 3 points"):
        greedy_k_centre(torch.zeros(1, 3, 2), 4, torch.tensor([0]))
