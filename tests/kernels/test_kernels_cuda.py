"""The Triton kernels on a GPU, real or pretend, that is not the current one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import kernel_reference
from support.kernels import needs_triton
from support.pretended import counted, needs_cuda, needs_pretend

from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.balanced_cut import halve
from kvbench.kernels.balanced_walk import balanced_walk
from kvbench.kernels.decode import RowPointers, append_entries, weighted_decode_attention
from kvbench.kernels.philox import philox
from kvbench.kv import Budget, LayerKV
from kvbench.methods import build_method

pytestmark = [pytest.mark.cuda, needs_cuda, needs_triton]


def another() -> torch.device:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return torch.device("cuda", torch.cuda.device_count() - 1)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decoded(device: torch.device, implementation: str = "triton") -> Any:
    keys, values = randn(2, 9, 16).to(device), randn(2, 9, 16, seed=1).to(device)
    table, lengths = RowPointers([keys], [values]), torch.tensor([7], dtype=torch.int32).to(device)
    new, query = randn(1, 2, 16, seed=2).to(device), randn(1, 4, 16, seed=3).to(device)
    append, attend = append_entries, weighted_decode_attention
    if implementation == "torch":
        append, attend = kernel_reference.append, kernel_reference.attention
    append(table, lengths, new, new)
    lengths = lengths + 1
    out, mass = attend(query, table, lengths, scaling=0.25, return_mass=True)
    return torch.cat([part.flatten() for part in (out, mass, keys)])


KEYS, VALUES, ORDER = randn(1, 2, 32, 16), randn(1, 2, 32, 16, seed=1), torch.arange(32)
DRAWS, BLOCKS = randn(1, 2, 2, 16, seed=2).sigmoid(), ORDER.view(1, 1, 2, 16).expand(1, 2, 2, 16)
OPERATIONS = {
    "mass": lambda on, **how: attention_mass(on(KEYS), on(VALUES), scaling=0.25, **how),
    "walk": lambda on, **how: balanced_walk(
        on(KEYS), on(VALUES), on(BLOCKS), on(DRAWS), gamma=1.0, offset=0.1, **how
    ),
    "survivors": lambda on, **how: torch.cat(
        halve(on(KEYS[..., 0] > 0), on(ORDER.expand(1, 2, 32)), on(torch.ones(1, 2, 32)), **how), -1
    ),
    "decoded": lambda on, **how: decoded(on(KEYS).device, **how),
    "draws": lambda on, **how: philox(7, 2, 25, dtype=torch.float64, device=on(KEYS).device, **how),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_run_on_the_gpu_of_their_tensors(operation):
    device, current = another(), torch.cuda.current_device()
    result = OPERATIONS[operation](lambda x: x.to(device), implementation="triton")
    assert result.device == device
    assert torch.cuda.current_device() == current
    expected = OPERATIONS[operation](lambda x: x, implementation="torch").to(result.dtype)
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-5)


@needs_pretend
@pytest.mark.parametrize("n", [80, 300])
def test_the_host_waits_once_for_the_clusters_of_a_stream(n):
    """For how many entries there are, whatever the prompt's length; beside k-centre's passes."""
    keys, values = randn(1, 2, n, 8), randn(1, 2, n, 8, seed=1)
    layer = LayerKV(keys.cuda(), values.cuda(), None, 0, 1, 0.35)
    method, budget = build_method("subgen_streaming"), Budget(rate=0.25, sink=0, window=4)
    kept = []

    def compress(layer: LayerKV) -> None:
        kept.append(method.compress(layer, budget, torch.Generator().manual_seed(0)))

    waits = counted(lambda: compress(layer), "sync")
    others = {place: n for place, n in waits.items() if "kernels/kcentre.py" not in place}
    assert sum(others.values()) == 1, waits
    compress(LayerKV(keys, values, None, 0, 1, 0.35))
    assert torch.equal(kept[0].positions.cpu(), kept[1].positions)
