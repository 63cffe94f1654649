"""Layers, budgets, the engine's rule, and attention over what is kept, for tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods.base import Method

LAYERS = 4


def make_layer(
    n: int,
    *,
    batch: int = 1,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layer_index: int = 0,
    num_layers: int = LAYERS,
    scale: float = 1.0,
) -> LayerKV:
    """Random keys, values and all n queries."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, kv_heads * group, n, dim, generator=generator)
    keys = scale * torch.randn(batch, kv_heads, n, dim, generator=generator)
    values = torch.randn(batch, kv_heads, n, dim, generator=generator)
    return LayerKV(
        keys.to(dtype), values.to(dtype), queries.to(dtype), layer_index, num_layers, dim**-0.5
    )


def rotary(dim: int, theta: float = 10000.0) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A model's rotary table: cos, sin [p, dim] of positions [p], halves repeated."""

    def table(positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None] * theta ** (-torch.arange(0, dim, 2).double() / dim)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    return table


def exact_capacity(capacity: int, window: int) -> Budget:
    """A budget of exactly `capacity` entries whatever the prompt, `window` of them the window."""
    return Budget(rate=1e-9, sink=capacity - window, window=window)


def run(method: Method, layer: LayerKV, budget: Budget, seed: int = 0) -> CompressedKV:
    """What the engine does: a prompt within its capacity is kept whole, others are compressed."""
    if layer.n <= budget.capacity(layer.n):
        return keep_all(layer)
    return method.compress(layer, budget, torch.Generator().manual_seed(seed))


def attend(query: Tensor, kept: CompressedKV, scaling: float) -> Tensor:
    """Attention of query [batch, heads, m, dim] over what is kept, in float64."""
    group = query.shape[1] // kept.keys.shape[1]
    keys = kept.keys.double().repeat_interleave(group, 1)
    values = kept.values.double().repeat_interleave(group, 1)
    logits = query.double() @ keys.mT * scaling
    if kept.log_weights is not None:
        logits = logits + kept.log_weights.double().repeat_interleave(group, 1).unsqueeze(2)
    weights = logits.softmax(-1)
    if kept.denominators is None:
        return weights[..., kept.keys_only :] @ values
    ends = kept.value_range and tuple(
        x.double().repeat_interleave(group, 1).unsqueeze(2) for x in kept.value_range
    )
    below = (weights @ kept.denominators.double().repeat_interleave(group, 1)[..., None]).squeeze(
        -1
    )
    mean = (weights @ values) / below[..., None]
    mean[below <= 1e-20] = 0.0
    return mean if ends is None else mean.clamp(*ends)
