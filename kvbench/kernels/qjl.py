"""QJL: keys as the signs of a random projection (arXiv 2406.03482), values as low-bit integers.

The storage scheme follows the authors' released code (github.com/amirzandieh/QJL) where that goes
beyond the paper: keys are packed in groups of consecutive tokens, the few outlier channels of a group
have a sketch of their own, and a buffer of recent tokens stays exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvbench.errors.options import Count, Whole, check_options, only
from kvbench.kernels.quantize import (
    Codec,
    Codecs,
    PackedRows,
    PackedValues,
    Quantization,
    SchemeError,
    pack,
    pack_bits,
    packed_bytes,
    packed_products,
    pieces,
    signs,
)

Projections = Annotated[int, Ge(0), only(lambda m: m % 8 == 0, "a multiple of 8")]
KeyProjections = Annotated[int, Ge(8), only(lambda m: m % 8 == 0, "a multiple of 8")]


@dataclass(frozen=True)
class QJL:
    """The scheme that stores every key as the signs of m projections and its norm; see the module.

    A projection is <k, s> with a random vector s, a column of the sketch S. By the paper's section 3,
    sqrt(pi / 2) / m * |k| * <q S, sign(k S)> is an unbiased estimate of <q, k>. The sketch is drawn
    once per seed and class of layers (`first_layers`, and the others) and shared by all heads and
    prompts. Its bytes are counted once for a model (`model_bytes`), not in a prompt's.

    A key is packed when a token completes a buffer, before that token attends. A value is packed after
    the step in which it is the oldest of more than `buffer` exact ones.

    Departures from the authors' code: a seeded generator on the CPU draws the sketch; the squared norm
    of the channels that are no outliers is clamped at 0; a group of equal values has codes 0; a prompt
    of fewer than `buffer` tokens stays exact (theirs fails); their option of Hadamard projections is
    left out.

    Attributes:
        m, m_out: projections of a key, and of its outlier channels; `first_m` and `first_m_out` in the
            `first_layers`.
        outliers: how many channels of a group, those of the largest norms, are its outliers; 0: there
            is no second sketch.
        group: how many consecutive tokens share their outlier channels.
        orthogonal: whether the columns of each chunk of d are orthogonal (the released form), or all
            are plain Gaussian.
        unbias: whether the small bias of orthogonal columns is divided out.
    """

    m: KeyProjections = 256
    m_out: Projections = 256
    first_layers: Whole = 15
    first_m: KeyProjections = 512
    first_m_out: Projections = 128
    outliers: Annotated[int, Ge(0), Le(255)] = 8  # the index of a channel is stored in a byte
    group: Count = 32
    buffer: Count = 128
    value_bits: Literal[2, 4] = 2
    value_group: Count = 32
    orthogonal: bool = True
    unbias: bool = False

    def __post_init__(self) -> None:
        check_options(self, "quantize.", SchemeError)
        if self.outliers and not self.m_out:
            raise SchemeError("quantize.m_out is 0; allowed: at least 8 where outliers > 0")
        for name in ("m", "first_m"):
            m, m_out = getattr(self, name), getattr(self, f"{name}_out")
            if m_out > m:
                raise SchemeError(f"quantize.{name}_out is {m_out}; allowed: at most {name}, {m}")
        if self.buffer % self.group:
            raise SchemeError(
                f"quantize.buffer is {self.buffer}; allowed: a multiple of group, {self.group}"
            )

    @property
    def by_entry(self) -> bool:
        return False

    def widths(self, layer: int) -> tuple[int, int]:
        """The projections of a key, and of its outlier channels, in a layer: m and m_out."""
        if layer < self.first_layers:
            return self.first_m, self.first_m_out
        return self.m, self.m_out

    def codecs(self, keys: Tensor, values: Tensor, *, layer: int, seed: int) -> Codecs:
        m_out = self.widths(layer)[1]
        general, first = sketch(keys.shape[-1], self.m, self.first_m, self.orthogonal, seed)
        projection = (first if layer < self.first_layers else general).to(keys.device)
        key_codec = Codec(
            partial(pack_keys, projection=projection, m_out=m_out, scheme=self),
            due=lambda _, exact: exact - exact % self.buffer,
            ahead=True,
        )
        value_codec: Codec[PackedValues] = Codec(
            partial(pack, quantization=self._value_quantization, by_channel=False),
            due=lambda _, exact: max(0, exact - self.buffer),
        )
        return key_codec.take(keys), value_codec.take(values)

    @property
    def _value_quantization(self) -> Quantization:
        return Quantization(self.value_bits, self.value_group)

    def nbytes(self, heads: int, n: int, d: int, itemsize: int, layer: int = 0) -> int:
        m, m_out = self.widths(layer)
        exact_keys = n % self.buffer
        packed_keys = n - exact_keys
        key = m // 8 + itemsize  # signs and norm
        if self.outliers:
            key += m_out // 8 + itemsize
        channels = packed_keys // self.group * self.outliers  # a byte each
        keys = packed_keys * key + channels + exact_keys * d * itemsize
        exact_values = min(n, self.buffer)
        shape = (1, n - exact_values, d)
        values = packed_bytes(shape, self._value_quantization, itemsize, by_channel=False)
        return heads * (keys + values + exact_values * d * itemsize)

    def model_bytes(self, dims: Mapping[int, tuple[int, int]]) -> int:
        sketches = {
            (d, layer < self.first_layers, self.widths(layer)) for layer, (d, _) in dims.items()
        }
        return sum(4 * d * m for d, _, (m, _) in sketches)


@lru_cache(maxsize=8)
def sketch(d: int, m: int, first_m: int, orthogonal: bool, seed: int) -> tuple[Tensor, Tensor]:
    """The sketches of the general layers, [d, m], and of the first layers, [d, first_m]."""
    generator = torch.Generator().manual_seed(seed)
    general = torch.randn(d, m, generator=generator)
    first = torch.randn(d, first_m, generator=generator)
    if orthogonal:
        return orthogonalised(general), orthogonalised(first)
    return general, first


def orthogonalised(projection: Tensor) -> Tensor:
    """Make the columns of each chunk of d columns of [d, m] orthogonal, of length sqrt(d)."""
    d = projection.shape[0]
    chunks = [torch.linalg.qr(chunk.double()).Q for chunk in projection.split(d, dim=1)]
    return (torch.cat(chunks, dim=1) * math.sqrt(d)).float()


@dataclass(frozen=True)
class Signs(PackedRows):
    """Packed keys of groups of consecutive tokens.

    Attributes:
        bits: [heads, groups, group, m / 8] uint8, the signs of the projections of a key without its
            outlier channels: bit j of byte i for column 8 i + j of the sketch, 1 for positive.
        outlier_bits: [heads, groups, group, m_out / 8] uint8, the same of its outlier channels alone.
        outliers: [heads, groups, outliers] uint8, the outlier channels.
        norms, outlier_norms: [heads, groups, group], of the keys and of their outlier channels.
        projection: [d, m], the sketch. It belongs to the model, so that its bytes are not counted
            here.
        bias: the factor by which the sketch overstates inner products, which `dot` divides out.
    """

    ROWS = ("bits", "outlier_bits", "outliers", "norms", "outlier_norms")

    bits: Tensor
    outlier_bits: Tensor
    outliers: Tensor
    norms: Tensor
    outlier_norms: Tensor
    projection: Tensor
    bias: float

    @property
    def count(self) -> int:
        return self.bits.shape[1] * self.bits.shape[2]

    def dot(self, query: Tensor) -> Tensor:
        """The estimate of `QJL`; with outlier channels it is the sum of two, one for these channels and
        one for the others. The query is not quantised."""
        query = query.float()
        heads, groups, group = self.norms.shape
        m, m_out = 8 * self.bits.shape[-1], 8 * self.outlier_bits.shape[-1]
        unit = math.sqrt(math.pi / 2) / self.bias
        projected = query @ self.projection
        norms, outlier_norms = self.norms.float(), self.outlier_norms.float()
        if not m_out:
            bits = self.bits.flatten(1, 2)
            dots = packed_products(projected, self.count, lambda rows: signs(bits[:, rows]))
            return dots.mul_(norms.flatten(1)[:, None] * (unit / m))
        other_norms = (norms.square() - outlier_norms.square()).clamp_(min=0).sqrt_()
        dots = query.new_empty(heads, groups, query.shape[1], group)
        for part in pieces(groups, heads * self.outliers.shape[-1] * m, query.device):
            channels = self.outliers[:, part].long()
            numbers = query[:, None].take_along_dim(channels[:, :, None], dim=-1)
            sketch = self.projection.index_select(0, channels.flatten())
            outlying = numbers @ sketch.view(*channels.shape, m)  # [heads, groups, q, m]
            other_dots = (projected[:, None] - outlying) @ signs(self.bits[:, part]).mT
            other_dots *= other_norms[:, part, None] * (unit / m)
            outlier_dots = outlying[..., :m_out] @ signs(self.outlier_bits[:, part]).mT
            outlier_dots *= outlier_norms[:, part, None] * (unit / m_out)
            dots[:, part] = other_dots.add_(outlier_dots)
        return dots.transpose(1, 2).flatten(2)


def pack_keys(keys: Tensor, *, projection: Tensor, m_out: int, scheme: QJL) -> Signs:
    """Pack keys [heads, n, d], n a multiple of `scheme.group`, as signs; the first `m_out` columns of
    the sketch [d, m] are that of the outlier channels."""
    d = keys.shape[-1]
    if scheme.outliers >= d:
        raise ValueError(
            f"quantize.outliers is {scheme.outliers}; allowed: less than head_dim, {d}"
        )
    groups = keys.float().unflatten(1, (-1, scheme.group))
    norms = groups.norm(dim=-1)
    if not torch.isfinite(norms.to(keys.dtype)).all():
        raise ValueError(f"a key's norm is more than {keys.dtype} holds; allowed: dtype=float32")
    width = keys.shape[0] * scheme.group * projection.shape[1]
    parts = [
        _signs_of(groups[:, part], projection, m_out if scheme.outliers else 0, scheme.outliers)
        for part in pieces(groups.shape[1], width, keys.device)
    ]
    bits, outlier_bits, outliers, outlier_norms = (
        torch.cat(column, dim=1) for column in zip(*parts, strict=True)
    )
    bias = 1.0
    if scheme.orthogonal and scheme.unbias:
        bias = math.sqrt(d / 2) * math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2))
    return Signs(
        bits,
        outlier_bits,
        outliers,
        norms.to(keys.dtype),
        outlier_norms.to(keys.dtype),
        projection,
        bias,
    )


def _signs_of(
    groups: Tensor, projection: Tensor, m_out: int, outliers: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`bits`, `outlier_bits`, `outliers` and `outlier_norms` of `Signs` for keys [heads, groups, group,
    d] float32; without columns where there are no outliers."""
    if not outliers:
        bits = pack_bits((groups @ projection > 0).byte(), 1)
        empty = groups[..., :0]
        return bits, empty.byte(), empty[:, :, 0].byte(), empty[..., 0, :]
    channels = groups.square().sum(2).topk(outliers, dim=-1).indices
    is_outlier = torch.zeros_like(groups[:, :, :1]).scatter_(-1, channels[:, :, None], 1.0)
    outlying = groups * is_outlier
    bits = pack_bits((groups * (1 - is_outlier) @ projection > 0).byte(), 1)
    outlier_bits = pack_bits((outlying @ projection[:, :m_out] > 0).byte(), 1)
    return bits, outlier_bits, channels.byte(), outlying.norm(dim=-1)
