"""attention_mass against the definition, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.kernels import attention_mass as module
from kvbench.kernels.attention_mass import attention_mass


def by_definition(
    queries: Tensor, keys: Tensor, scaling: float, softcap: float | None = None
) -> Tensor:
    queries, keys = queries.double(), keys.double()
    m, n = queries.shape[2], keys.shape[2]
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    logits = queries @ keys.mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    place = torch.arange(n)
    future = place[None, :] > place[n - m :, None]
    return logits.masked_fill(future, float("-inf")).softmax(-1).sum(2)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "m", "n", "dim"),
    [
        (1, 1, 1, 1, 1, 4),
        (2, 4, 4, 33, 33, 8),
        (1, 8, 1, 301, 301, 16),
        (2, 6, 2, 7, 100, 5),
        (1, 4, 2, 1, 257, 16),
        (1, 2, 2, 200, 201, 3),
    ],
)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("tile", [1, 1 << 10, 1 << 19])
def test_column_sums(batch, heads, kv_heads, m, n, dim, softcap, tile, monkeypatch):
    monkeypatch.setattr(module, "TILE_ELEMENTS", tile)
    generator = torch.Generator().manual_seed(m * n)
    queries = 3 * torch.randn(batch, heads, m, dim, generator=generator)
    keys = torch.randn(batch, kv_heads, n, dim, generator=generator)
    mass = attention_mass(queries, keys, scaling=0.7, softcap=softcap)
    assert mass.dtype == torch.float32
    assert mass.shape == (batch, heads, n)
    expected = by_definition(queries, keys, 0.7, softcap)
    torch.testing.assert_close(mass.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mass.sum(-1), torch.full((batch, heads), float(m)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "dim"), [(1, 1, 1, 4), (6, 2, 301, 5), (8, 1, 90, 16)]
)
@pytest.mark.parametrize("tile", [(1, 1), (7, 64), (64, 7), (256, 2048)])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_column_sums_with_known_normalisers(heads, kv_heads, n, dim, tile, scale, monkeypatch):
    monkeypatch.setattr(module, "TILE", tile)
    generator = torch.Generator().manual_seed(n)
    queries = scale * torch.randn(2, heads, n, dim, generator=generator)
    keys = torch.randn(2, kv_heads, n, dim, generator=generator)
    logits = queries.double() @ keys.double().repeat_interleave(heads // kv_heads, 1).mT * 0.7
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    normalisers = logits.masked_fill(future, float("-inf")).logsumexp(-1).float()
    mass = attention_mass(queries, keys, scaling=0.7, normalisers=normalisers)
    expected = by_definition(queries, keys, 0.7)
    torch.testing.assert_close(mass.double(), expected, rtol=3e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_summed_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(1, 4, 600, 16, generator=generator).to(dtype)
    keys = torch.randn(1, 2, 600, 16, generator=generator).to(dtype)
    expected = by_definition(queries, keys, 0.25)
    mass = attention_mass(queries, keys, scaling=0.25)
    torch.testing.assert_close(mass.double(), expected, rtol=1e-4, atol=1e-5)


def test_huge_logits_stay_finite():
    keys = 1e3 * torch.randn(1, 1, 50, 8, generator=torch.Generator().manual_seed(0))
    mass = attention_mass(keys, keys, scaling=1.0)
    torch.testing.assert_close(mass.double(), by_definition(keys, keys, 1.0))


def test_impossible_shapes_are_refused():
    keys = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="5 queries of 2 heads over 4 keys"):
        attention_mass(torch.zeros(1, 2, 5, 8), keys, scaling=1.0)
    with pytest.raises(ValueError, match="3 heads"):
        attention_mass(torch.zeros(1, 3, 4, 8), keys, scaling=1.0)
