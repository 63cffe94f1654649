"""The Triton kernels on a GPU, real or pretend, that is not the current one."""

from __future__ import annotations

import pytest
import torch
from support.interpreted import HAVE_TRITON
from support.pretended import counted, needs_cuda, needs_pretend

from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.balanced_cut import halve
from kvbench.kernels.balanced_walk import balanced_walk
from kvbench.kernels.decode_attention import append_entries, entry_table, weighted_decode_attention
from kvbench.kernels.kcentre import greedy_k_centre
from kvbench.kernels.philox import philox
from kvbench.kv import Budget, LayerKV
from kvbench.methods import build_method

pytestmark = [
    pytest.mark.cuda,
    needs_cuda,
    pytest.mark.skipif(not HAVE_TRITON, reason="the package triton is not installed"),
]


def another() -> torch.device:
    """The last GPU; the current one is the first."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return torch.device("cuda", torch.cuda.device_count() - 1)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mass(device, implementation):
    q, k = randn(1, 4, 20, 16).to(device), randn(1, 2, 20, 16, seed=1).to(device)
    return attention_mass(q, k, scaling=0.25, implementation=implementation)


def centres(device, implementation):
    points, first = randn(2, 40, 16).to(device), torch.tensor([3, 5]).to(device)
    return greedy_k_centre(points, 6, first, implementation=implementation)


def walk(device, implementation):
    keys, values = randn(1, 2, 32, 16).to(device), randn(1, 2, 32, 16, seed=1).to(device)
    index = torch.arange(32).view(1, 1, 2, 16).expand(1, 2, 2, 16).to(device)
    draws = randn(1, 2, 2, 16, seed=2).sigmoid().to(device)
    return balanced_walk(
        keys, values, index, draws, gamma=1.0, offset=0.1, implementation=implementation
    )


def survivors(device, implementation):
    positive = (randn(1, 2, 20) > 0).to(device)
    order = torch.arange(20).expand(1, 2, 20).to(device)
    weights = torch.ones(1, 2, 20).to(device)
    return torch.cat(halve(positive, order, weights, implementation=implementation), -1)


def decoded(device, implementation):
    keys, values = randn(2, 9, 16).to(device), randn(2, 9, 16, seed=1).to(device)
    table = entry_table([keys], [values])
    lengths = torch.tensor([7], dtype=torch.int32).to(device)
    new = randn(1, 2, 16, seed=2).to(device)
    append_entries(table, lengths, new, new, implementation=implementation)
    out, received = weighted_decode_attention(
        randn(1, 4, 16, seed=3).to(device), table, lengths + 1, scaling=0.25,
        return_mass=True, implementation=implementation,
    )  # fmt: skip
    return torch.cat([out.flatten(), received.flatten(), keys.flatten()])


def draws(device, implementation):
    how = {"device": torch.device(device), "implementation": implementation}
    return philox(7, 2, 25, dtype=torch.float64, **how)


@pytest.mark.parametrize("operation", [mass, centres, walk, survivors, decoded, draws])
def test_kernels_run_on_the_gpu_of_their_tensors(operation):
    device = another()
    current = torch.cuda.current_device()
    found = operation(device, "triton")
    assert found.device == device
    assert torch.cuda.current_device() == current
    expected = operation("cpu", "torch").to(found.dtype)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


@needs_pretend
def test_the_host_does_not_wait_for_centres(monkeypatch):
    from kvbench.kernels import _triton_kcentre

    options = _triton_kcentre.kcentre_options
    small = {"POINTS": 16, "CENTRES": 16}
    monkeypatch.setattr(_triton_kcentre, "kcentre_options", lambda *a: {**options(*a), **small})
    points, first = randn(1, 150, 16).cuda(), torch.tensor([3]).cuda()
    assert not counted(lambda: greedy_k_centre(points, 12, first), "sync")
    launches = counted(lambda: greedy_k_centre(points, 12, first), "launch triton")
    assert sum(launches.values()) == 3 * _triton_kcentre.passes(12, 16) + 1


@needs_pretend
@pytest.mark.parametrize("n", [80, 300])
def test_the_host_waits_once_for_the_clusters_of_a_stream(n):
    """For how many entries there are, whatever the prompt's length."""
    keys, values = randn(1, 2, n, 8), randn(1, 2, n, 8, seed=1)
    layer = LayerKV(keys.cuda(), values.cuda(), None, 0, 1, 0.35)
    method, budget = build_method("subgen_streaming"), Budget(rate=0.25, sink=0, window=4)
    held = []
    waits = counted(
        lambda: held.append(method.compress(layer, budget, torch.Generator().manual_seed(0))),
        "sync",
    )
    assert sum(waits.values()) == 1, waits
    expected = method.compress(
        LayerKV(keys, values, None, 0, 1, 0.35), budget, torch.Generator().manual_seed(0)
    )
    assert torch.equal(held[0].positions.cpu(), expected.positions)
