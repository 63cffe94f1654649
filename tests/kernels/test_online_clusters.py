"""Online clusters: the Triton kernels against torch, and torch where its products round."""

from __future__ import annotations

import math

import pytest
import torch
from support.interpreted import DEVICE
from support.kernels import generator, needs_triton

from kvbench.kernels import _choice, online_clusters
from kvbench.kernels.online_clusters import OnlineClusters

pytestmark = pytest.mark.cuda


@needs_triton
@pytest.mark.parametrize(("heads", "n", "most"), [(1, 1, None), (3, 150, None), (2, 90, 7)])
def test_online_clusters(heads, n, most, monkeypatch):
    """The torch form is compared with the algorithm in the tests of SubGen."""
    points = torch.randn(heads, n, 3, generator=generator(n)).to(DEVICE)
    delta, clusters = torch.linspace(0.8, 1.2, heads, device=DEVICE), {}
    for implementation in ("torch", "triton"):
        monkeypatch.setenv(_choice.VARIABLE, implementation)
        clustering = OnlineClusters(heads, 3, delta, most)
        blocks = [clustering.read(block) for block in points.split(64, 1)]
        clusters[implementation] = torch.cat(blocks, 1)
    assert torch.equal(clusters["triton"], clusters["torch"])
    assert most is None or int(clustering.clusters.max()) == most


@pytest.mark.parametrize("size", [1.0, 1e3, 1e4])
def test_far_from_clusters_is_what_differences_say_where_products_round(size):
    """Points at 1 +- 1e-4 times delta from one of the clusters, whose norms are 0 to `size`."""
    g = generator(3)
    others = size * torch.randn(2, 6, 8, generator=g)
    others[:, 0] = 0.0
    place = torch.randint(0, 6, (2, 200), generator=g)
    steps = torch.nn.functional.normalize(torch.randn(2, 200, 8, generator=g), dim=-1)
    delta, factor = torch.tensor([0.5, 2.0]), 1 + 1e-4 * torch.randn(2, 200, 1, generator=g)
    points = (
        others.gather(1, place[..., None].expand(-1, -1, 8)) + delta[:, None, None] * steps * factor
    )
    among = torch.ones(2, 1, 6, dtype=torch.bool)
    among[1, 0, 3] = False
    far = online_clusters._farther(points, others, among, delta)
    apart = (points[:, :, None] - others[:, None]).square().sum(-1).sqrt()
    expected = apart.masked_fill(~among, math.inf).amin(-1) > delta[:, None]
    assert torch.equal(far, expected)
    assert 0.2 < far.float().mean() < 0.8
