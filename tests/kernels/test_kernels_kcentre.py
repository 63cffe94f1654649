"""Greedy k-centre against a plain float64 loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.kernels import kcentre as module
from kvbench.kernels.kcentre import greedy_k_centre, nearest_centre


def by_definition(points, count, first):
    points = points.double()
    chosen = [first]
    distance = (points - points[first]).square().sum(1)
    while len(chosen) < count:
        distance[chosen] = -1.0
        chosen.append(int(distance.argmax()))
        distance = distance.minimum((points - points[chosen[-1]]).square().sum(1))
    return chosen[:count]


def radius(points, centres):
    return float(torch.cdist(points.double(), points[centres].double()).amin(1).amax())


@given(
    n=st.integers(1, 150),
    dim=st.integers(1, 6),
    batch=st.integers(1, 3),
    share=st.floats(0.0, 1.0),
    candidates=st.sampled_from([1, 3, 64]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=50, deadline=None)
def test_the_greedy_choice(n, dim, batch, share, candidates, seed):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(batch, n, dim, generator=generator)
    count = round(share * n)
    first = torch.randint(0, n, (batch,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CANDIDATES", candidates)
        centres = greedy_k_centre(points, count, first)
    for head in range(batch):
        expected = by_definition(points[head], count, int(first[head]))
        found = centres[head].tolist()
        assert len(set(found)) == count
        if found != expected:  # a near tie decided by rounding: then equally good
            # Squared distances in float32 are good to some 1e-7, radii to the root of that.
            best = radius(points[head], expected)
            assert radius(points[head], found) == pytest.approx(best, rel=1e-3, abs=1e-3)


def test_heads_that_progress_at_different_speeds():
    """Clusters let few candidates through per pass, spread points many."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(400, 12, generator=generator)
    hubs = 10 * torch.randn(8, 12, generator=generator)
    clustered = hubs.repeat(50, 1) + 0.5 * torch.randn(400, 12, generator=generator)
    points = torch.stack([spread, clustered])
    centres = greedy_k_centre(points, 100, torch.tensor([3, 5]))
    for head, first in enumerate((3, 5)):
        assert centres[head].tolist() == by_definition(points[head], 100, first)
    assert len({int(index) % 8 for index in centres[1, :8]}) == 8


def test_equal_points_are_chosen_once_each():
    centres = greedy_k_centre(torch.ones(2, 90, 3), 90, torch.tensor([0, 7]))
    assert torch.equal(centres.sort(-1).values, torch.arange(90).expand(2, 90))


def test_within_twice_the_best_radius():
    generator = torch.Generator().manual_seed(1)
    hubs = 20 * torch.randn(6, 3, generator=generator)
    points = hubs.repeat(30, 1) + 0.1 * torch.randn(180, 3, generator=generator)
    centres = greedy_k_centre(points[None], 6, torch.tensor([0]))[0]
    best = float(torch.cdist(points, hubs).amin(1).amax())
    assert radius(points, centres) <= 2 * best + 1e-4


def test_nearest_centre():
    generator = torch.Generator().manual_seed(2)
    points = torch.randn(2, 300, 4, generator=generator)
    centres = greedy_k_centre(points, 40, torch.tensor([0, 1]))
    nearest = nearest_centre(points, centres)
    rows = points.gather(1, centres.unsqueeze(-1).expand(-1, -1, 4))
    torch.testing.assert_close(nearest, torch.cdist(points, rows).argmin(-1))
    same = torch.ones(1, 5, 2)
    assert nearest_centre(same, torch.tensor([[1, 3]]))[0, [1, 3]].tolist() == [0, 1]


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="4 centres of 3 points"):
        greedy_k_centre(torch.zeros(1, 3, 2), 4, torch.tensor([0]))
