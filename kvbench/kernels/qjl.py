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
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from kvbench.errors.options import Count, Whole, check_options, only
from kvbench.kernels.quantize import (
    CACHED,
    Block,
    Codec,
    Codecs,
    Quantization,
    SchemeError,
    ValueBlock,
    at_a_time,
    pack,
    pack_bits,
    packed_bytes,
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
        m, m_out: projections of a key, and of its outlier channels.
        first_layers: how many of the first layers have `first_m` and `first_m_out` instead.
        outliers: how many channels of a group, those of the largest norms, are its outliers; 0: there
            is no second sketch.
        group: how many consecutive tokens share their outlier channels.
        buffer: how many recent tokens stay exact; a multiple of `group`.
        value_bits, value_group: the bits of a value's number, and how many numbers of a value share a
            scale (`Quantization`).
        orthogonal: whether the columns of each chunk of d are orthogonal (the released form), or all
            are plain Gaussian.
        unbias: whether the small bias of orthogonal columns is divided out.

    Raises:
        SchemeError: an option, or a combination of options, that is not allowed.
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
        for name in ("m_out", "first_m_out"):
            m = getattr(self, name.removesuffix("_out"))
            if getattr(self, name) > m:
                raise SchemeError(
                    f"quantize.{name} is {getattr(self, name)}; allowed: at most "
                    f"{name.removesuffix('_out')}, {m}"
                )
        if self.buffer % self.group:
            raise SchemeError(
                f"quantize.buffer is {self.buffer}; allowed: a multiple of group, {self.group}"
            )

    @property
    def by_entry(self) -> bool:
        """See `kvbench.kernels.quantize.Scheme`: False, since keys are packed in groups."""
        return False

    def widths(self, layer: int) -> tuple[int, int]:
        """The projections of a key, and of its outlier channels, in a layer: m and m_out."""
        if layer < self.first_layers:
            return self.first_m, self.first_m_out
        return self.m, self.m_out

    def codecs(self, keys: Tensor, values: Tensor, *, layer: int, seed: int) -> Codecs:
        """See `kvbench.kernels.quantize.Scheme`."""
        m_out = self.widths(layer)[1]
        general, first = sketch(keys.shape[-1], self.m, self.first_m, self.orthogonal, seed)
        projection = (first if layer < self.first_layers else general).to(keys.device)
        key_codec = Codec(
            partial(pack_keys, projection=projection, m_out=m_out, scheme=self),
            due=lambda _, exact: exact - exact % self.buffer,
            ahead=True,
        )
        value_codec: Codec[ValueBlock] = Codec(
            partial(pack, quantization=self._value_quantization, by_channel=False),
            due=lambda _, exact: max(0, exact - self.buffer),
        )
        return key_codec.take(keys), value_codec.take(values)

    @property
    def _value_quantization(self) -> Quantization:
        return Quantization(self.value_bits, self.value_group)

    def nbytes(self, heads: int, n: int, d: int, itemsize: int, layer: int = 0) -> int:
        """See `kvbench.kernels.quantize.Scheme`."""
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
        """See `kvbench.kernels.quantize.Scheme`: a float32 sketch for each class of layers."""
        sketches = {
            (d, layer < self.first_layers, self.widths(layer)) for layer, (d, _) in dims.items()
        }
        return sum(4 * d * m for d, _, (m, _) in sketches)


@lru_cache(maxsize=8)
def sketch(d: int, m: int, first_m: int, orthogonal: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Draw the sketch [d, m] of the general layers and that of the first layers, [d, first_m], in
    float32."""
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
class Signs(Block):
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
        """The number of keys of each head."""
        return self.bits.shape[1] * self.bits.shape[2]

    def dot(self, query: Tensor) -> Tensor:
        """See `kvbench.kernels.quantize.Block`; the query is not quantised.

        The estimate is that of `QJL`; with outlier channels it is the sum of two, one for these
        channels and one for the others.
        """
        query = query.float()
        m, m_out = 8 * self.bits.shape[-1], 8 * self.outlier_bits.shape[-1]
        unit = math.sqrt(math.pi / 2) / self.bias
        projected = query @ self.projection
        if not m_out:
            dots = signs(query.device).products(projected, self.bits.flatten(1, 2))
            return dots.mul_(self.norms.float().flatten(1)[:, None] * (unit / m))
        dots, outlier_dots = self._products(query, projected)
        outlier_norms = self.outlier_norms.float()
        other_norms = (self.norms.float().square() - outlier_norms.square()).clamp_(min=0).sqrt_()
        dots *= other_norms[:, :, None] * (unit / m)
        outlier_dots *= outlier_norms[:, :, None] * (unit / m_out)
        return dots.add_(outlier_dots).transpose(1, 2).flatten(2)

    def _products(self, query: Tensor, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply projected queries with the signs of the keys' projections.

        A query without the outlier channels differs from group to group of tokens. Its projection is
        that of the whole query less the sketch's rows of these channels, each times the query's
        number.

        Args:
            query: [heads, q, d] float32.
            projected: [heads, q, m], the projections of the whole queries.

        Returns:
            the products with `bits`, of queries without the group's outlier channels, and those with
            `outlier_bits`, of the outlier channels alone: each [heads, groups, q, group].
        """
        heads, queries, d = query.shape
        groups, group = self.bits.shape[1:3]
        count = heads * groups  # groups of all heads, one after the other in memory
        m, m_out = projected.shape[-1], 8 * self.outlier_bits.shape[-1]
        channels = self.outliers.long()[:, :, None].expand(-1, -1, queries, -1)
        numbers = query[:, None].expand(-1, groups, -1, -1).gather(-1, channels)
        # One sum of rows makes such a projection: of the sketch's rows and, behind them, the queries'.
        sketch_and_projected = torch.cat([self.projection, projected.flatten(0, 1)])
        own = d + torch.arange(heads * queries, device=query.device)
        own = own.view(heads, 1, queries, 1).expand(-1, groups, -1, -1)
        places = torch.cat([channels, own], dim=-1).flatten(0, 1)
        factors = torch.cat([-numbers, torch.ones_like(numbers[..., :1])], dim=-1).flatten(0, 1)
        channels, numbers = channels.flatten(0, 1), numbers.flatten(0, 1)
        outlier_sketch = self.projection[:, :m_out].contiguous()

        dots = query.new_empty(count, queries, group)
        outlier_dots = torch.empty_like(dots)
        bits, outlier_bits = self.bits.flatten(0, 1), self.outlier_bits.flatten(0, 1)
        # Sums of rows for many groups at a time: one such call costs as much as the sums of 20 groups.
        groups_at_a_time = max(1, 4 * at_a_time(query.device) // (queries * m))
        for start in range(0, count, groups_at_a_time):
            part = slice(start, start + groups_at_a_time)
            sums = weighted_rows(sketch_and_projected, places[part], factors[part])
            group_products(sums, bits[part], out=dots[part])
            sums = weighted_rows(outlier_sketch, channels[part], numbers[part])
            group_products(sums, outlier_bits[part], out=outlier_dots[part])
        shape = heads, groups, queries, group
        return dots.view(shape), outlier_dots.view(shape)


def group_products(queries: Tensor, bits: Tensor, *, out: Tensor) -> None:
    """Multiply each group's own queries [groups, q, m] with the packed signs of its keys
    [groups, group, m / 8]; the products go into `out` [groups, q, group]."""
    group, m = bits.shape[1], queries.shape[-1]
    groups_at_a_time = max(1, 2 * at_a_time(bits.device) // (group * m))
    pieces = signs(bits.device).pieces(bits.flatten(0, 1)[None], m, rows=groups_at_a_time * group)
    for tokens, numbers in pieces:
        part = slice(tokens.start // group, tokens.stop // group)
        torch.bmm(queries[part], numbers.view(-1, group, m).mT, out=out[part])


def weighted_rows(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Sum rows with weights, without a copy of any row: [..., m].

    Args:
        rows: [k, m].
        places: [..., c] int64, which rows each sum has.
        weights: [..., c], their weights.
    """
    flat = places.reshape(-1, places.shape[-1])
    factors = weights.reshape(flat.shape)
    sums = F.embedding_bag(flat, rows, mode="sum", per_sample_weights=factors)
    return sums.view(*places.shape[:-1], -1)


def pack_keys(keys: Tensor, *, projection: Tensor, m_out: int, scheme: QJL) -> Signs:
    """Pack keys [heads, n, d], n a multiple of `scheme.group`, as signs.

    Args:
        projection: [d, m], the sketch; its first `m_out` columns are that of the outlier channels.

    Raises:
        ValueError: as many outliers as channels, or a norm that the keys' dtype does not hold.
    """
    d = keys.shape[-1]
    if scheme.outliers >= d:
        raise ValueError(
            f"quantize.outliers is {scheme.outliers}; allowed: less than head_dim, {d}"
        )
    groups = keys.float().unflatten(1, (-1, scheme.group))
    norms = groups.norm(dim=-1)
    if not torch.isfinite(norms.to(keys.dtype)).all():
        raise ValueError(f"a key's norm is more than {keys.dtype} holds; allowed: dtype=float32")
    # On a CPU some groups at a time, whose projections stay in its cache.
    groups_at_a_time = groups.shape[1]
    if not keys.is_cuda:
        projected = keys.shape[0] * scheme.group * projection.shape[1]  # numbers of a group
        groups_at_a_time = max(1, CACHED // projected)
    parts = [
        _signs_of(part, projection, m_out if scheme.outliers else 0, scheme.outliers)
        for part in groups.split(groups_at_a_time, dim=1)
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
    """Project groups of keys [heads, groups, group, d] float32, with so many outlier channels each.

    Returns:
        `bits`, `outlier_bits`, `outliers` and `outlier_norms` of `Signs`, without columns where there
        are no outliers.
    """
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
