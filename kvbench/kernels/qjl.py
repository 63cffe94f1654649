"""QJL: keys as the signs of a random projection (arXiv 2406.03482), values as low-bit integers.

A storage scheme of the authors' released form (github.com/amirzandieh/QJL): groups of tokens with a few
outlier channels that get a sketch of their own, and a buffer of recent tokens that stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels.quantize import (
    CACHED,
    Block,
    Codec,
    Codecs,
    Quantization,
    ValueBlock,
    at_a_time,
    pack,
    pack_bits,
    packed_bytes,
    signs,
)


@dataclass(frozen=True)
class QJL:
    """Every key as the signs of m projections and its norm; see the module.

    The sketch is drawn once per seed and class of layers, is shared by all heads and examples, and is
    not counted in a prompt's bytes but once for a model (`model_bytes`). A key is packed when a token
    completes its buffer, before that token attends, a value after the step in which it is the oldest of
    more than `buffer`.

    Departures from the authors' code: draws of a seeded CPU generator; the squared norm of the inliers
    is clamped at 0; a value group without range has codes 0; fewer than `buffer` tokens stay exact
    (theirs fails); their option of Hadamard projections is left out.

    Attributes:
        m, m_out: projections of a key and of its outlier channels, multiples of 8.
        first_layers: how many layers, the first, have `first_m` and `first_m_out` instead.
        outliers: channels of each group with the largest norms, at most 255; 0: no second sketch.
        group: consecutive tokens that share them. buffer: recent tokens that stay exact, a multiple.
        value_bits, value_group: of the values, per token (`Quantization`).
        orthogonal: columns orthogonal by chunks of d (the released form), or plain Gaussian.
        unbias: divide out the small bias that orthogonal columns have.
    """

    m: int = 256
    m_out: int = 256
    first_layers: int = 15
    first_m: int = 512
    first_m_out: int = 128
    outliers: int = 8
    group: int = 32
    buffer: int = 128
    value_bits: int = 2
    value_group: int = 32
    orthogonal: bool = True
    unbias: bool = False

    def __post_init__(self) -> None:
        least = {"m": 8, "first_m": 8, "m_out": 0, "first_m_out": 0, "first_layers": 0}
        least |= {"outliers": 0, "group": 1, "buffer": 1, "value_group": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} is {value!r}; allowed: an integer >= {low}")
            if name in ("m", "first_m", "m_out", "first_m_out") and value % 8:
                raise ValueError(f"{name} is {value}; allowed: a multiple of 8")
        if self.outliers > 255:
            raise ValueError(f"outliers is {self.outliers}; allowed: 0..255")
        if self.outliers and not self.m_out:
            raise ValueError("m_out is 0; allowed: at least 8 where outliers > 0")
        if self.m_out > self.m or self.first_m_out > self.first_m:
            raise ValueError("m_out is more than m; allowed: at most m")
        if self.buffer % self.group:
            raise ValueError(f"buffer is {self.buffer}; allowed: a multiple of group, {self.group}")
        Quantization(self.value_bits, self.value_group)

    @property
    def by_entry(self) -> bool:
        """Keys are packed in groups that share their outlier channels."""
        return False

    def widths(self, layer: int) -> tuple[int, int]:
        """m and m_out of a layer."""
        if layer < self.first_layers:
            return self.first_m, self.first_m_out
        return self.m, self.m_out

    def codecs(self, keys: Tensor, values: Tensor, *, layer: int, seed: int) -> Codecs:
        """See `kvbench.kernels.quantize.Scheme`."""
        m_out = self.widths(layer)[1]
        made = sketch(keys.shape[-1], self.m, self.first_m, self.orthogonal, seed)
        projection = made[int(layer < self.first_layers)].to(keys.device)
        stored = Quantization(self.value_bits, self.value_group)
        first = Codec(
            partial(pack_keys, projection=projection, m_out=m_out, scheme=self),
            due=lambda _, waiting: waiting - waiting % self.buffer,
            ahead=True,
        )
        second: Codec[ValueBlock] = Codec(
            partial(pack, quantization=stored, by_channel=False),
            due=lambda _, waiting: max(0, waiting - self.buffer),
        )
        return first.take(keys)[0], second.take(values)[0]

    def nbytes(self, heads: int, n: int, d: int, itemsize: int, layer: int = 0) -> int:
        """See `kvbench.kernels.quantize.Scheme`."""
        m, m_out = self.widths(layer)
        packed, exact = n - n % self.buffer, n % self.buffer
        key = m // 8 + itemsize
        if self.outliers:
            key += m_out // 8 + itemsize
        keys = packed * key + packed // self.group * self.outliers + exact * d * itemsize
        stored = Quantization(self.value_bits, self.value_group)
        old = max(0, n - self.buffer)
        values = packed_bytes((1, old, d), stored, itemsize, by_channel=False) if old else 0
        return heads * (keys + values + (n - old) * d * itemsize)

    def model_bytes(self, dims: Mapping[int, tuple[int, int]]) -> int:
        """See `kvbench.kernels.quantize.Scheme`: a sketch of each class of layers."""
        sketches = {
            (d, layer < self.first_layers, self.widths(layer)) for layer, (d, _) in dims.items()
        }
        return sum(4 * d * m for d, _, (m, _) in sketches)


@lru_cache(maxsize=8)
def sketch(d: int, m: int, first_m: int, orthogonal: bool, seed: int) -> tuple[Tensor, Tensor]:
    """The projections [d, m] of the general layers and [d, first_m] of the first, float32."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(d, columns, generator=generator) for columns in (m, first_m)]
    if orthogonal:
        made = [orthogonalised(one) for one in made]
    return made[0], made[1]


def orthogonalised(projection: Tensor) -> Tensor:
    """Chunks of d columns of [d, m] made orthogonal, of length sqrt(d)."""
    d = projection.shape[0]
    chunks = [torch.linalg.qr(chunk.double()).Q for chunk in projection.split(d, dim=1)]
    return (torch.cat(chunks, dim=1) * math.sqrt(d)).float()


@dataclass(frozen=True)
class Signs(Block):
    """Packed keys of groups of consecutive tokens. The projection belongs to the model, so its bytes are
    not counted in a prompt's.

    Attributes:
        bits, outlier_bits: [heads, groups, group, m / 8] uint8, bit j of byte i for column 8 i + j.
        outliers: [heads, groups, outliers] uint8 channels.
        norms, outlier_norms: [heads, groups, group], of the keys and of their outlier channels.
        projection: [d, m], shared.
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
        """Keys of each head."""
        return self.bits.shape[1] * self.bits.shape[2]

    def dot(self, query: Tensor) -> Tensor:
        """See `kvbench.kernels.quantize.Block`; the query is not quantised. [heads, q, d], float32."""
        q = query.float()
        m, m_out = 8 * self.bits.shape[-1], 8 * self.outlier_bits.shape[-1]
        unit = math.sqrt(math.pi / 2) / self.bias
        whole = q @ self.projection
        if not m_out:
            dots = signs(q.device).products(whole, self.bits.flatten(1, 2))
            return dots.mul_(self.norms.float().flatten(1)[:, None] * (unit / m))
        inner, outer = self._products(q, whole)
        outer_norms = self.outlier_norms.float()
        inner_norms = (self.norms.float().square() - outer_norms.square()).clamp_(min=0).sqrt_()
        inner *= inner_norms[:, :, None] * (unit / m)
        outer *= outer_norms[:, :, None] * (unit / m_out)
        return inner.add_(outer).transpose(1, 2).flatten(2)

    def _products(self, query: Tensor, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Products of queries with the signs of keys without their outlier channels, and with those of
        these channels: two tensors [heads, groups, q, group].

        A query without its outlier channels differs from group to group of tokens. Projected, it is the
        whole query's projection less the rows of the sketch that belong to these channels, each times
        the query's number.

        Args:
            query: [heads, q, d] float32. projected: [heads, q, m], the queries' projections.
        """
        heads, queries, d = query.shape
        groups, group = self.bits.shape[1:3]
        count = heads * groups  # groups of all heads, one after the other in memory
        m, m_out = projected.shape[-1], 8 * self.outlier_bits.shape[-1]
        channels = self.outliers.long()[:, :, None].expand(-1, -1, queries, -1)
        numbers = query[:, None].expand(-1, groups, -1, -1).gather(-1, channels)
        last = d + torch.arange(heads * queries, device=query.device)
        last = last.view(heads, 1, queries, 1).expand(-1, groups, -1, -1)
        without = torch.cat([channels, last], dim=-1).flatten(0, 1)
        factors = torch.cat([-numbers, torch.ones_like(numbers[..., :1])], dim=-1).flatten(0, 1)
        channels, numbers = channels.flatten(0, 1), numbers.flatten(0, 1)
        rows_without = torch.cat([self.projection, projected.flatten(0, 1)])
        rows_of_outliers = self.projection[:, :m_out].contiguous()

        inner = query.new_empty(count, queries, group)
        outer = torch.empty_like(inner)
        bits, outlier_bits = self.bits.flatten(0, 1), self.outlier_bits.flatten(0, 1)
        # Sums of rows for many groups at a time: one such call costs as much as the sums of 20 groups.
        many = max(1, 4 * at_a_time(query.device) // (queries * m))
        for start in range(0, count, many):
            part = slice(start, start + many)
            sums = weighted_rows(rows_without, without[part], factors[part])
            group_products(sums, bits[part], out=inner[part])
            sums = weighted_rows(rows_of_outliers, channels[part], numbers[part])
            group_products(sums, outlier_bits[part], out=outer[part])
        shape = heads, groups, queries, group
        return inner.view(shape), outer.view(shape)


def group_products(queries: Tensor, bits: Tensor, *, out: Tensor) -> None:
    """Products of each group's own queries [groups, q, m] with its keys' packed signs
    [groups, group, m / 8], into out [groups, q, group]."""
    group, m = bits.shape[1], queries.shape[-1]
    at_once = max(1, 2 * at_a_time(bits.device) // (group * m))
    pieces = signs(bits.device).pieces(bits.flatten(0, 1)[None], m, rows=at_once * group)
    for tokens, numbers in pieces:
        part = slice(tokens.start // group, tokens.stop // group)
        torch.bmm(queries[part], numbers.view(-1, group, m).mT, out=out[part])


def weighted_rows(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of rows, without copying any: [..., m].

    Args:
        rows: [k, m].
        places, weights: [..., c], the rows of each sum and their weights.
    """
    flat = places.reshape(-1, places.shape[-1])
    factors = weights.reshape(flat.shape)
    sums = F.embedding_bag(flat, rows, mode="sum", per_sample_weights=factors)
    return sums.view(*places.shape[:-1], -1)


def pack_keys(keys: Tensor, *, projection: Tensor, m_out: int, scheme: QJL) -> Signs:
    """Whole groups of keys [heads, n, d] as signs.

    Raises:
        ValueError: a norm that the keys' dtype does not hold.
    """
    d = keys.shape[-1]
    if scheme.outliers >= d:
        raise ValueError(f"qjl.outliers is {scheme.outliers}; allowed: less than head_dim, {d}")
    groups = keys.float().unflatten(1, (-1, scheme.group))
    norms = groups.norm(dim=-1)
    if not torch.isfinite(norms.to(keys.dtype)).all():
        raise ValueError(f"a key's norm is more than {keys.dtype} holds; allowed: dtype=float32")
    # On a processor some groups at a time, whose projections stay in its cache.
    each = CACHED // (keys.shape[0] * scheme.group * projection.shape[1])
    parts = [
        _signs_of(part, projection, m_out if scheme.outliers else 0, scheme.outliers)
        for part in groups.split(groups.shape[1] if keys.is_cuda else max(1, each), dim=1)
    ]
    bits, outer, at, outer_norms = (torch.cat(c, dim=1) for c in zip(*parts, strict=True))
    bias = 1.0
    if scheme.orthogonal and scheme.unbias:
        bias = math.sqrt(d / 2) * math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2))
    norms, outer_norms = norms.to(keys.dtype), outer_norms.to(keys.dtype)
    return Signs(bits, outer, at, norms, outer_norms, projection, bias)


def _signs_of(
    groups: Tensor, projection: Tensor, m_out: int, outliers: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sketch groups of keys [heads, groups, group, d].

    Returns:
        packed signs of the keys without their outlier channels, packed signs of these channels alone,
        the channels themselves, and the keys' norms in them; shapes as in `Signs`.
    """
    if not outliers:
        none = groups[..., :0]
        bits = pack_bits((groups @ projection > 0).byte(), 1)
        return bits, none.byte(), none[:, :, 0].byte(), none[..., 0, :]
    top = groups.square().sum(2).topk(outliers, dim=-1).indices
    outlying = torch.zeros_like(groups[:, :, :1]).scatter_(-1, top[:, :, None], 1.0)
    out = groups * outlying
    bits = pack_bits((groups * (1 - outlying) @ projection > 0).byte(), 1)
    outer = pack_bits((out @ projection[:, :m_out] > 0).byte(), 1)
    return bits, outer, top.byte(), out.norm(dim=-1)
