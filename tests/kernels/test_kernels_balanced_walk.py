"""The balanced walk against a plain float64 loop over its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.method_layers import walk_by_definition

from kvbench.kernels import balanced_walk as module
from kvbench.kernels.balanced_walk import balanced_walk


def draw(blocks, b, d, seed, key_scale=0.6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    keys = key_scale * torch.randn(blocks * b, d, generator=generator, dtype=dtype)
    values = 0.5 * torch.randn(blocks * b, d + 1, generator=generator, dtype=dtype)
    index = torch.randperm(blocks * b, generator=generator).view(blocks, b)
    uniforms = torch.rand(blocks, b, generator=generator, dtype=torch.float32)
    return keys, values, index, uniforms


def check(keys, values, index, uniforms, counts=None, weights=None, **options):
    positive = balanced_walk(
        keys, values, index, uniforms, counts=counts, weights=weights, **options
    )
    for block in range(index.shape[0]):
        n = index.shape[1] if counts is None else int(counts[block])
        if not n:
            continue
        rows = index[block, :n]
        v = values
        if v is not None:
            v = values[rows] * (1.0 if weights is None else weights[block, :n, None])
        expected = walk_by_definition(
            keys[rows], v, uniforms[block], padded=index.shape[1] - n, **options
        )
        np.testing.assert_array_equal(positive[block, :n].numpy(), expected)


@pytest.mark.parametrize("gamma", [0.0, 0.02, 0.3, 4.0])
@pytest.mark.parametrize("b", [1, 2, 63, 64, 65, 130])
def test_definition(gamma, b):
    check(*draw(3, b, 16, seed=b), gamma=gamma, offset=0.025)


@pytest.mark.parametrize(
    ("group", "chunk", "strip"), [(1, 1, 1), (2, 1, 7), (3, 2, 16), (8, 8, 99)]
)
def test_tiling_does_not_change_the_signs(group, chunk, strip, monkeypatch):
    for name, value in (("GROUP", group), ("CHUNK", chunk), ("STRIP", strip)):
        monkeypatch.setattr(module, name, value)
    check(*draw(5, 40, 8, seed=5), gamma=0.05, offset=0.025)


@given(
    b=st.integers(2, 40),
    blocks=st.integers(1, 4),
    d=st.integers(1, 9),
    gamma=st.sampled_from([0.01, 0.1, 4.0]),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    beta=st.sampled_from([0.0, 0.7, -0.4]),
    centre=st.sampled_from(["mean", "released", "none"]),
    with_values=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_options_short_blocks_and_weights(
    b, blocks, d, gamma, temperature, beta, centre, with_values, seed
):
    keys, values, index, uniforms = draw(blocks, b, d, seed)
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, b + 1, (blocks,), generator=generator)
    weights = 2.0 ** torch.randint(0, 4, (blocks, b), generator=generator).double()
    check(
        keys,
        values if with_values else None,
        index,
        uniforms,
        counts=counts,
        weights=weights,
        gamma=gamma,
        offset=0.025,
        temperature=temperature,
        beta=beta,
        centre=centre,
    )


@pytest.mark.parametrize("norm", [30.0, 100.0, 1e3])
def test_keys_of_any_norm(norm):
    """Far beyond float32's exponentials; the choices are those of exact arithmetic."""
    keys, values, index, uniforms = draw(3, 70, 16, seed=1)
    keys *= norm / keys.norm(dim=1, keepdim=True)
    check(keys, values, index, uniforms, gamma=4.0, offset=0.025)


def test_norms_that_differ_within_a_block():
    """Rows with and without scaling beside each other."""
    keys, values, index, uniforms = draw(4, 90, 16, seed=2)
    keys *= torch.logspace(-1, 2, keys.shape[0], dtype=torch.float64).unsqueeze(1)
    check(keys, values, index, uniforms, gamma=0.02, offset=0.025)


def test_large_values():
    keys, values, index, uniforms = draw(2, 70, 16, seed=3)
    check(keys, 1e15 * values, index, uniforms, gamma=4.0, offset=0.025)
    double = balanced_walk(keys, 1e15 * values, index, uniforms, gamma=4.0, offset=0.025)
    single = balanced_walk(
        keys.float(), (1e15 * values).float(), index, uniforms, gamma=4.0, offset=0.025
    )
    assert torch.equal(double, single)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_float32(dtype):
    keys, values, index, uniforms = draw(4, 100, 32, seed=4)
    keys, values = keys.to(dtype), values.to(dtype)
    check(keys, values, index, uniforms, gamma=4.0, offset=0.025)


def test_a_fair_coin_without_gamma():
    keys, values, index, uniforms = draw(50, 100, 4, seed=6)
    positive = balanced_walk(keys, values, index, uniforms, gamma=0.0, offset=0.025)
    assert positive[:, 0].all()
    assert torch.equal(positive[:, 1:], uniforms[:, 1:] < 0.5)


def test_the_walk_balances():
    """The signed sum of exp(q.k) v over a block is smaller than with independent signs."""
    generator = torch.Generator().manual_seed(7)
    b, d = 256, 8
    keys, values = torch.randn(2, 20 * b, d, generator=generator).unbind(0)
    index = torch.arange(20 * b).view(20, b)
    uniforms = torch.rand(20, b, generator=generator)
    query = torch.randn(d, generator=generator)
    terms = ((keys @ query / d**0.5).exp().unsqueeze(1) * values).view(20, b, d)

    def discrepancy(gamma: float) -> float:
        signs = balanced_walk(keys, values, index, uniforms, gamma=gamma, offset=0.025)
        return float((terms * (2.0 * signs - 1.0).unsqueeze(-1)).sum(1).norm(dim=-1).mean())

    assert discrepancy(4.0) < 0.75 * discrepancy(0.0)
