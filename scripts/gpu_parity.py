"""Each Triton kernel beside float64 on the same inputs: the section `parity` of gpu_check.py, which runs
the checks of this module.

A check is a function of `Inputs` that yields figures: a name, a distance, and its limit. The references
are computed on the CPU, by the definition of what the kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.balanced_cut import halve
from kvbench.kernels.balanced_walk import balanced_walk
from kvbench.kernels.decode_attention import append_entries, weighted_decode_attention
from kvbench.kernels.entry_table import entry_table

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Relative distance from float64 of what is rounded to a dtype; dtypes in the order of the checks."""
IN_FLOAT32 = 1e-4
"""Relative distance of what is computed and returned in float32 whatever the dtype of the inputs."""
KV_HEADS = 2


class Figure(NamedTuple):
    """What a check measured: the distance from float64, which must not be above the limit."""

    name: str
    distance: float
    limit: float


def normal(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Normal numbers of the CPU's generator, on a device."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype).to(device)


def relative_error(measured: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what is expected."""
    measured, expected = measured.double().cpu(), expected.double().cpu()
    return float((measured - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Inputs:
    """Random queries, keys and values of one layer.

    Attributes:
        tokens, dim: of the layer.
        group: query heads per KV head; there are `KV_HEADS` of these.
    """

    tokens: int
    dim: int
    group: int
    dtype: torch.dtype
    device: torch.device

    @property
    def scaling(self) -> float:
        """The factor on logits, 1 / sqrt(dim)."""
        return float(self.dim**-0.5)

    @property
    def heads(self) -> int:
        """Query heads."""
        return KV_HEADS * self.group

    @cached_property
    def queries(self) -> Tensor:
        """[1, heads, tokens, dim]."""
        return normal(self.device, self.dtype, 1, self.heads, self.tokens, self.dim)

    @cached_property
    def keys(self) -> Tensor:
        """[1, KV_HEADS, tokens, dim]."""
        return normal(self.device, self.dtype, 1, KV_HEADS, self.tokens, self.dim, seed=1)

    @cached_property
    def values(self) -> Tensor:
        """[1, KV_HEADS, tokens, dim]."""
        return normal(self.device, self.dtype, 1, KV_HEADS, self.tokens, self.dim, seed=2)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} head_dim {self.dim} group {self.group}"


def _double(x: Tensor) -> Tensor:
    """In float64, on the CPU."""
    return x.cpu().double()


def check_mass(inputs: Inputs) -> Iterator[Figure]:
    """Accumulated attention of every key."""
    keys = _double(inputs.keys).repeat_interleave(inputs.group, 1)
    logits = _double(inputs.queries) @ keys.mT * inputs.scaling
    future = torch.ones(inputs.tokens, inputs.tokens, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(future, -torch.inf).softmax(-1).sum(2)
    mass = attention_mass(inputs.queries, inputs.keys, scaling=inputs.scaling)
    yield Figure("attention_mass", relative_error(mass, expected), IN_FLOAT32)


def check_decoding(inputs: Inputs) -> Iterator[Figure]:
    """A token joins a cache, and attends to it with log-weights."""
    n, dim, group, device = inputs.tokens, inputs.dim, inputs.group, inputs.device
    # Room for one more token, which holds the first one's entries until the token has joined.
    keys = torch.cat([inputs.keys[0], inputs.keys[0, :, :1]], 1).contiguous()
    values = torch.cat([inputs.values[0], inputs.values[0, :, :1]], 1).contiguous()
    log_weights = normal(device, torch.float32, KV_HEADS, n + 1, seed=3)
    table = entry_table([keys], [values], [log_weights])
    lengths = torch.tensor([n], dtype=torch.int32, device=device)
    new = normal(device, inputs.dtype, 1, KV_HEADS, dim, seed=4)
    append_entries(table, lengths, new, new)
    wrong = float((keys[:, n] != new[0]).double().mean())
    yield Figure("append_entries (wrong entries)", wrong, 0.0)

    query = normal(device, inputs.dtype, 1, inputs.heads, dim, seed=5)
    out, mass = weighted_decode_attention(
        query, table, lengths + 1, scaling=inputs.scaling, return_mass=True
    )
    assert mass is not None
    grouped = _double(query[0]).view(KV_HEADS, group, dim)
    logits = grouped @ _double(keys).mT * inputs.scaling + _double(log_weights)[:, None]
    attention = logits.softmax(-1)
    error = relative_error(out[0].view(KV_HEADS, group, dim), attention @ _double(values))
    yield Figure("decode_attention", error, TOLERANCE[inputs.dtype])
    yield Figure("decode mass", relative_error(mass[0], attention.mean(1)), IN_FLOAT32)


def check_walk(inputs: Inputs) -> Iterator[Figure]:
    """Each sign of BalanceKV's walk follows from the signs before it, where float32 can tell."""
    b, gamma, offset = 16, 4.0, 0.025
    n = inputs.tokens // b * b
    index = torch.arange(n).view(1, 1, -1, b).expand(1, KV_HEADS, -1, b)
    draws = torch.rand(index.shape, generator=torch.Generator().manual_seed(6))
    signs = balanced_walk(
        inputs.keys,
        inputs.values,
        index.to(inputs.device),
        draws.to(inputs.device),
        gamma=gamma,
        offset=offset,
    ).cpu()
    keys = _double(inputs.keys[:, :, :n]).view(1, KV_HEADS, -1, b, inputs.dim)
    values = _double(inputs.values[:, :, :n]).view(1, KV_HEADS, -1, b, inputs.dim)
    centred = keys - keys.mean(-2, keepdim=True)
    gram = torch.exp(centred @ centred.mT * inputs.scaling) * (values @ values.mT + offset)
    earlier = gram.tril(-1)
    inner = (earlier @ (2.0 * signs.double() - 1.0)[..., None])[..., 0]
    margin = 0.5 - gamma * inner - draws
    terms = gamma * earlier.abs().sum(-1) + 1.0  # whose rounding errors are in the margin
    wrong = ((margin > 0) != signs) & (margin.abs() > 1e-4 * terms)
    yield Figure("balanced_walk (wrong signs)", float(wrong[..., 1:].double().mean()), 0.0)


def check_cut(inputs: Inputs) -> Iterator[Figure]:
    """The entries that BalanceKV's cut keeps."""
    n, device = inputs.tokens, inputs.device
    positive = (normal(device, torch.float32, 1, KV_HEADS, n, seed=7) > 0)[..., : n - 1]
    order = torch.arange(n, device=device).expand(1, KV_HEADS, n).contiguous()
    ones = torch.ones(1, KV_HEADS, n, device=device)
    kept = halve(positive, order, ones)
    expected = halve(positive.cpu(), order.cpu(), ones.cpu(), implementation="torch")
    wrong = [float((x.cpu() != y).double().mean()) for x, y in zip(kept, expected, strict=True)]
    yield Figure("cut (wrong entries)", sum(wrong), 0.0)


CHECKS: tuple[Callable[[Inputs], Iterator[Figure]], ...] = (
    check_decoding,
    check_mass,
    check_walk,
    check_cut,
)
