"""BalanceKV's walk, in torch and as a Triton kernel, against its definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.interpreted import DEVICE
from support.kernels import BRAIN, FLOAT, FULL_SIZE, HALF, both, generator, put
from torch import Tensor

from kvbench.kernels import balanced_walk

pytestmark = pytest.mark.cuda


def check_walk(
    implementation: str,
    keys: Tensor,
    values: Tensor | None,
    index: Tensor,
    uniforms: Tensor,
    counts: Tensor | None = None,
    weights: Tensor | None = None,
    gamma: float = 4.0,
    **options: Any,
) -> None:
    """Each sign is the one that follows from the signs before it, in float64, unless it is too close
    to call in float32. (One such sign changes all later ones, so signs alone cannot be compared.)"""
    options = {"offset": 0.025, "centre": "mean", **options}
    on_device = put(keys, values, index, uniforms)
    more = dict(zip(("counts", "weights"), put(counts, weights), strict=True))
    positive = balanced_walk.balanced_walk(
        *on_device, gamma=gamma, implementation=implementation, **more, **options
    )
    assert positive.dtype == torch.bool
    assert positive.shape == index.shape
    close = total = 0
    heads = torch.cartesian_prod(*map(torch.arange, index.shape[:2])).tolist()
    for head in map(tuple, heads):
        of_head = [
            None if x is None else x[head] for x in (keys, values, index, uniforms, counts, weights)
        ]
        room, blur, real = rooms_of_walk(positive[head], *put(*of_head), gamma, **options)
        clear = real & (room.abs() > blur)
        clear[:, 0] = False  # the first sign has no choice
        assert not (positive[head] != (room > 0))[clear].any(), head
        assert positive[head][:, 0][real[:, 0]].all()
        close += int((real & (room.abs() <= blur))[:, 1:].sum())
        total += int(real.sum())
    assert close <= 0.02 * total + 1  # else the check would be empty


def rooms_of_walk(
    positive: Tensor,
    keys: Tensor,
    values: Tensor | None,
    index: Tensor,
    uniforms: Tensor,
    counts: Tensor | None,
    weights: Tensor | None,
    gamma: float,
    *,
    offset: float,
    centre: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """By definition and in float64, of the blocks [blocks, b] of one head: the number whose sign is each
    entry's, given the signs before it; how far float32 may be from it; and which entries there are."""
    b = index.shape[1]
    lengths = torch.full(index.shape[:1], b) if counts is None else counts
    real = torch.arange(b, device=index.device) < lengths.to(index.device)[:, None]
    k = keys.double()[index] * real[..., None]
    if centre != "none":
        divisor = real.sum(1).clamp(min=1)[:, None, None] if centre == "mean" else b
        k = k - k.sum(1, keepdim=True) / divisor
    e = k @ k.mT / keys.shape[1] ** 0.5
    earlier = torch.ones(b, b, dtype=torch.bool, device=index.device).tril(-1)
    e = e.masked_fill(~(earlier & real[:, None]), -torch.inf)
    largest = e.amax(-1).clamp(min=0.0)
    g = (e - largest[..., None]).exp()
    if values is not None:
        v = values.double()[index]
        if weights is not None:
            v = v * weights[..., None].double()
        g = g * (v @ v.mT + offset)
    signs = 2.0 * positive.double() - 1.0
    inner = (g @ signs[..., None])[..., 0]
    room = (0.5 - uniforms.double()) / gamma * (-largest).exp() - inner
    blur = 2e-5 * (g.abs().sum(-1) + (-largest).exp() / gamma)
    return room, blur, real


def walk_inputs(
    heads: int, blocks: int, b: int, d: int, e: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g, n = generator(seed), blocks * b
    keys = torch.randn(1, heads, n, d, generator=g).to(dtype)
    values = torch.randn(1, heads, n, e, generator=g).to(dtype)
    index = torch.stack([torch.randperm(n, generator=g) for _ in range(heads)])
    uniforms = torch.rand(1, heads, blocks, b, generator=g)
    return keys, values, index.view(1, heads, blocks, b), uniforms


WALKS = [
    # heads, blocks, b, d, e, dtype
    *((2, 2, b, d, e, FLOAT) for b, d, e in [(1, 16, 16), (63, 5, 40), (64, 32, 32)]),
    *((1, 2, 130, 64, 64, dtype) for dtype in (FLOAT, BRAIN, HALF)),
    (1, 1, 256, 128, 128, BRAIN),
    *((1, 2, 70, d, d, BRAIN) for d in (80, 96)),
]
FULL_WALKS = [
    (8, 16384 // b, b, d, d, dtype)
    for b, d, dtype in [
        *((64, 32, BRAIN), (64, 80, FLOAT), (64, 128, HALF), (64, 256, BRAIN)),
        *((128, 64, FLOAT), (128, 96, BRAIN), (128, 128, FLOAT), (128, 256, HALF)),
        *((256, 64, HALF), (256, 80, BRAIN), (256, 128, BRAIN), (256, 256, FLOAT)),
    ]
]
"""Of all blocks, dimensions and dtypes a third, each of them several times."""


@both
@pytest.mark.parametrize("shape", WALKS + (FULL_WALKS if FULL_SIZE else []), ids=str)
def test_walk(shape, implementation):
    check_walk(implementation, *walk_inputs(*shape, seed=shape[2]))


@both
@pytest.mark.parametrize(("centre", "gamma"), [("mean", 4.0), ("released", 0.02), ("none", 4.0)])
def test_walk_of_short_blocks_with_weights_and_without_values(centre, gamma, implementation):
    keys, values, index, uniforms = walk_inputs(1, 4, 70, 24, 24, BRAIN)
    counts = torch.tensor([[[70, 65, 1, 0]]])
    weights = 2.0 ** torch.randint(0, 4, index.shape, generator=generator(1))
    check_walk(implementation, keys, values, index, uniforms, counts, weights, gamma, centre=centre)
    check_walk(implementation, keys, None, index, uniforms, counts, gamma=0.1, centre=centre)


@both
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
def test_walk_over_keys_of_any_norm(dtype, implementation):
    """Far beyond float32's exponentials; rows with and without scaling beside each other."""
    keys, values, index, uniforms = walk_inputs(1, 2, 80, 128, 16, FLOAT)
    keys *= 1e3 / keys.norm(dim=-1, keepdim=True)
    keys[:, :, ::3] *= 1e-2
    check_walk(implementation, keys.to(dtype), values.to(dtype), index, uniforms)


@both
def test_walk_over_equal_keys_and_strided_ones(implementation):
    """All-equal keys are zero once centred: a fair coin pulled back by the count of signs alone."""
    keys = torch.full((1, 1, 100, 16), 3.25, dtype=BRAIN)
    ones, index = torch.ones_like(keys), torch.arange(100).view(1, 1, 1, 100)
    uniforms = torch.rand(1, 1, 1, 100, generator=generator(0))
    check_walk(implementation, keys, ones, index, uniforms, gamma=0.001)
    options = {"gamma": 4.0, "offset": 0.025, "implementation": implementation}
    positive = balanced_walk.balanced_walk(*put(keys, ones, index, uniforms), **options)
    assert int(positive.sum()) == 50
    keys, values, index, uniforms = put(*walk_inputs(3, 1, 40, 16, 16, FLOAT))
    wide = torch.zeros(1, 3, 40, 20, device=DEVICE)
    wide[..., :16] = values
    strided = keys.transpose(1, 2).contiguous().transpose(1, 2)  # as a model leaves them
    signs = balanced_walk.balanced_walk(strided, wide[..., :16], index, uniforms, **options)
    assert torch.equal(signs, balanced_walk.balanced_walk(keys, values, index, uniforms, **options))


def test_walk_of_large_values_is_that_in_float64():
    """What the keys alone keep finite, e^55, overflows with values of 1e8, beside tiny ones."""
    keys, values, index, uniforms = walk_inputs(2, 3, 40, 16, 16, FLOAT)
    keys = 220**0.5 * torch.nn.functional.normalize(1 + 0.02 * keys, dim=-1)
    values = torch.nn.functional.normalize(values, dim=-1) * 1e8
    values[:, :, ::3] *= 1e-20
    options = {"gamma": 4.0, "offset": 0.025, "centre": "none", "implementation": "torch"}
    single, double = (
        balanced_walk.balanced_walk(keys.to(kind), values.to(kind), index, uniforms, **options)
        for kind in (torch.float32, torch.float64)
    )
    assert torch.equal(single, double)


def test_walk_without_gamma_is_a_fair_coin():
    keys, values, index, uniforms = walk_inputs(2, 3, 40, 8, 8, FLOAT)
    signs = balanced_walk.balanced_walk(keys, values, index, uniforms, gamma=0.0, offset=0.025)
    assert signs[..., 0].all()
    assert torch.equal(signs[..., 1:], uniforms[..., 1:] < 0.5)
