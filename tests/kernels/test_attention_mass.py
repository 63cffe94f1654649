"""The attention that keys received, in torch and in Triton, against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from support.interpreted import DEVICE
from support.kernels import (
    BRAIN,
    FLOAT,
    FULL_SIZE,
    HALF,
    OF_MODELS,
    both,
    generator,
    needs_triton,
    put,
    relative,
)

from kvbench.kernels import attention_mass as mass_module
from kvbench.kernels.attention_mass import attention_mass

pytestmark = pytest.mark.cuda


def mass_by_definition(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Column sums and logarithms of the normalisers, float64."""
    m, n, group = queries.shape[2], keys.shape[2], queries.shape[1] // keys.shape[1]
    logits = queries.double() @ keys.double().repeat_interleave(group, 1).mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    future = torch.ones(m, n, dtype=torch.bool, device=keys.device).triu(n - m + 1)
    logits = logits.masked_fill(future, -torch.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    return logits.softmax(-1)[..., :n].sum(2), logits.logsumexp(-1)


MASS = [
    # batch, heads, kv_heads, m, n, dim, dtype, softcap
    (1, 1, 1, 1, 1, 4, FLOAT, None),
    (2, 4, 2, 33, 33, 8, BRAIN, 2.0),
    (1, 2, 1, 201, 201, 16, HALF, None),
    (1, 8, 1, 90, 90, 16, FLOAT, 2.0),
    (2, 6, 2, 7, 100, 5, FLOAT, 2.0),
    (1, 2, 2, 130, 190, 40, BRAIN, None),
]
FULL_MASS = [
    (1, 8, 2, 5000, 5000, 128, BRAIN, 2.0),
    *(
        (1, 2 * group, 2, 1024, 1024, d, dtype, None)
        for d, group in OF_MODELS
        for dtype in (FLOAT, BRAIN, HALF)
    ),
]


@both
@pytest.mark.parametrize(("known", "sunk"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("shape", MASS + (FULL_MASS if FULL_SIZE else []), ids=str)
def test_mass(shape, known, sunk, implementation, monkeypatch):
    batch, heads, kv_heads, m, n, dim, dtype, softcap = shape
    g = generator(m * n)
    # As a model leaves them: heads inside positions in memory.
    queries = (3 * torch.randn(batch, m, heads, dim, generator=g)).to(DEVICE, dtype).transpose(1, 2)
    keys = torch.randn(batch, n, kv_heads, dim, generator=g).to(DEVICE, dtype).transpose(1, 2)
    sinks = torch.linspace(-2.0, 4.0, heads, device=DEVICE) if sunk else None
    expected, normalisers = mass_by_definition(queries, keys, 0.4, softcap, sinks)
    options = {"normalisers": normalisers.float()} if known else {"sinks": sinks}
    if known and implementation == "triton":
        from kvbench.kernels import _triton_mass

        monkeypatch.setattr(_triton_mass, "normaliser_kernel", None)  # one launch is enough
    mass = attention_mass(
        queries, keys, scaling=0.4, softcap=softcap, implementation=implementation, **options
    )
    assert mass.dtype == torch.float32
    assert relative(mass, expected) < 3e-4
    if not sunk:
        torch.testing.assert_close(
            mass.sum(-1).cpu(), torch.full((batch, heads), float(m)), rtol=3e-4, atol=0
        )


@pytest.mark.parametrize("tile", [(1, (7, 64)), (1 << 10, (64, 7)), (1 << 19, (256, 2048))])
def test_mass_whatever_the_tiles_and_the_size_of_logits(tile, monkeypatch):
    monkeypatch.setattr(mass_module, "TILE_ELEMENTS", tile[0])
    monkeypatch.setattr(mass_module, "TILE", tile[1])
    queries = 30.0 * torch.randn(2, 6, 90, 5, generator=generator(0))
    keys = torch.randn(2, 2, 90, 5, generator=generator(1))
    expected, normalisers = mass_by_definition(queries, keys, 0.7)
    for known in (None, normalisers.float()):
        mass = attention_mass(queries, keys, scaling=0.7, normalisers=known)
        torch.testing.assert_close(mass.double(), expected, rtol=3e-4, atol=1e-5)
    huge = 1e3 * keys
    mass = attention_mass(huge, huge, scaling=1.0)
    torch.testing.assert_close(mass.double(), mass_by_definition(huge, huge, 1.0)[0])


def test_mass_where_some_tiles_need_a_shift_and_others_do_not(monkeypatch):
    """Blocks of queries whose normalisers lie on both sides of `UNSHIFTED`, and far below zero."""
    monkeypatch.setattr(mass_module, "TILE", (32, 64))
    queries = torch.randn(1, 4, 300, 8, generator=generator(0))
    keys = torch.randn(1, 2, 300, 8, generator=generator(1))
    queries[:, :, 100:200] *= 40.0
    queries[:, :, 0] = -30.0 * keys.repeat_interleave(2, 1)[:, :, 0]  # sees itself alone: e^-200
    expected, normalisers = mass_by_definition(queries, keys, 1.0)
    blocks = (normalisers.abs() > mass_module.UNSHIFTED).split(32, -1)
    assert {bool(block.any()) for block in blocks} == {True, False}
    assert normalisers.min() < -mass_module.UNSHIFTED
    mass = attention_mass(queries, keys, scaling=1.0, normalisers=normalisers.float())
    torch.testing.assert_close(mass.double(), expected, rtol=1e-4, atol=1e-5)


@needs_triton
def test_mass_of_a_window_over_shared_out_keys(monkeypatch):
    """Few queries over many keys: the first pass is split over the keys."""
    from kvbench.kernels import _triton_mass

    monkeypatch.setattr(_triton_mass, "multiprocessors", lambda device: 6)
    queries, keys = put(
        torch.randn(1, 2, 40, 16, generator=generator(0)), torch.randn(1, 1, 3000, 16)
    )
    mass = attention_mass(queries, keys, scaling=1.0, implementation="triton")
    expected, _ = mass_by_definition(queries, keys, 1.0)
    torch.testing.assert_close(mass.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not FULL_SIZE, reason="full size: needs CUDA")
def test_mass_at_128k_fits_where_a_matrix_would_not():
    torch.cuda.reset_peak_memory_stats()
    queries = torch.randn(1, 2, 131072, 128, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(1, 1, 131072, 128, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    mass = attention_mass(queries, keys, scaling=128**-0.5, implementation="triton")
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    torch.testing.assert_close(mass.sum(-1), torch.full_like(mass[..., 0], 131072.0))


def test_more_queries_than_keys_are_refused():
    with pytest.raises(ValueError, match="5 queries of 2 heads over 4 keys"):
        attention_mass(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 4, 8), scaling=1.0)
