"""TurboQuant: vectors are rotated at random, then one codebook quantises each coordinate (arXiv
2504.19874).

This is written from the paper's Algorithms 1 and 2; no code by the authors could be found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from kvbench.errors.options import Whole, check_options
from kvbench.kernels.quantize import (
    Codec,
    Codecs,
    PackedValues,
    SchemeError,
    looked_up,
    mixture,
    pack_bits,
    packed_products,
    pieces,
    signs,
    unpack_bits,
)

CodeBits = Annotated[int, Ge(1), Le(5)]


@dataclass(frozen=True)
class TurboQuant:
    """The scheme that packs every key and value on its own, generated ones after the step that fed
    them.

    With two widths the channels are split into two sets, of which each has a coder of its own:
    `outlier_bits` for a share of the channels, `bits` for the others. What the paper leaves open is
    chosen as follows: outlier channels are those of the largest norm over the prompt, for each layer
    and KV head, fixed afterwards, and their indices are counted in the bytes; keys and values are both
    restored by `mse`; no recent token stays exact. Draws depend on the seed alone, or on seed and layer
    (`per`).

    Attributes:
        outlier_bits: None: one set of all channels.
        keys, values: mse (Algorithm 1) | prod (Algorithm 2: one bit less, and the signs of a
            projection of the residual, which makes inner products unbiased and their error larger).
        rotation: qr (the paper's) | hadamard (no part of the paper; the channels of a set must be a
            power of two).
        codebook: beta (optimal for a coordinate of the unit sphere) | normal (for its limit in many
            dimensions, whose centroids the paper prints).
        per: model | layer, what the rotations are drawn for.
    """

    bits: CodeBits = 4
    outlier_bits: CodeBits | None = None
    outlier_share: Annotated[float, Gt(0), Lt(1)] = 0.25
    keys: Literal["mse", "prod"] = "mse"
    values: Literal["mse", "prod"] = "mse"
    rotation: Literal["qr", "hadamard"] = "qr"
    codebook: Literal["beta", "normal"] = "beta"
    per: Literal["model", "layer"] = "model"
    buffer: Whole = 0

    def __post_init__(self) -> None:
        check_options(self, "quantize.", SchemeError)

    @property
    def by_entry(self) -> bool:
        return self.buffer == 0

    def sets(self, d: int) -> list[tuple[int, int]]:
        """How many of d channels each set has, and how many bits: outliers first."""
        if self.outlier_bits is None:
            return [(d, self.bits)]
        size = min(max(1, round(self.outlier_share * d)), d - 1)
        return [(size, self.outlier_bits), (d - size, self.bits)]

    def codecs(self, keys: Tensor, values: Tensor, *, layer: int, seed: int) -> Codecs:
        key_codec = self._codec(keys, self.keys, layer, seed)
        return key_codec, self._codec(values, self.values, layer, seed)

    def _codec(self, rows: Tensor, stage: str, layer: int, seed: int) -> Codec:
        heads, _, d = rows.shape
        sets = self.sets(d)
        order = None
        fixed_nbytes = 0
        if len(sets) > 1:
            outlier_channels = sets[0][0]
            by_norm = rows.float().square().sum(1).argsort(dim=-1, descending=True, stable=True)
            outliers = by_norm[:, :outlier_channels].sort(-1).values
            others = by_norm[:, outlier_channels:].sort(-1).values
            order = torch.cat([outliers, others], dim=-1)
            fixed_nbytes = heads * outlier_channels  # a byte for the index of each
        drawn_for = layer + 1 if self.per == "layer" else 0
        coders = []
        for number, (size, bits) in enumerate(sets):
            set_seed = seed + 7919 * drawn_for + number
            drawn = coder(size, bits, stage, self.rotation, self.codebook, set_seed)
            coders.append(drawn.on(rows.device))
        codec = Codec(
            partial(pack_vectors, coders=tuple(coders), order=order),
            due=lambda _, exact: max(0, exact - self.buffer),
            fixed_nbytes=fixed_nbytes,
        )
        return codec.take(rows)

    def nbytes(self, heads: int, n: int, d: int, itemsize: int, layer: int = 0) -> int:
        sets = self.sets(d)
        packed = max(0, n - self.buffer)
        total = 0
        for stage in (self.keys, self.values):
            vector = sum(vector_bytes(size, bits, stage, itemsize) for size, bits in sets)
            total += packed * vector + (n - packed) * d * itemsize
            if len(sets) > 1:
                total += sets[0][0]  # the indices of the outlier channels
        return heads * total

    def model_bytes(self, dims: Mapping[int, tuple[int, int]]) -> int:
        # Rotation, projection and codebook of every `Coder`.
        coders = {
            (size, bits, stage, number, layer if self.per == "layer" else 0)
            for layer, sides in dims.items()
            for d, stage in zip(sides, (self.keys, self.values), strict=True)
            for number, (size, bits) in enumerate(self.sets(d))
        }
        return sum(
            4 * (size**2 + 2**bits if stage == "mse" else 2 * size**2 + 2 ** (bits - 1))
            for size, bits, stage, *_ in coders
        )


def vector_bytes(size: int, bits: int, stage: str, itemsize: int) -> int:
    """The bytes of a packed vector of `size` numbers: its codes and norm (of `itemsize` bytes); with
    ``prod``, whose `bits` include that of the sign, also the signs of the projected residual and the
    residual's norm."""
    if stage == "mse":
        return math.ceil(size * bits / 8) + itemsize
    return math.ceil(size * (bits - 1) / 8) + math.ceil(size / 8) + 2 * itemsize


@dataclass(frozen=True)
class Coder:
    """Packs vectors of `size` numbers: by TurboQuant's Algorithm 1 (mse), or with a projection by
    Algorithm 2 (prod).

    Attributes:
        rotation: [size, size] float32, the paper's Pi.
        centroids: [2^bits] float32, ascending.
        projection: [size, size] float32, the paper's S; None for Algorithm 1.
        bits: the bits of a code; with a projection one less than `TurboQuant.bits`.
    """

    rotation: Tensor
    centroids: Tensor
    projection: Tensor | None
    bits: int

    def on(self, device: torch.device) -> Coder:
        projection = None if self.projection is None else self.projection.to(device)
        return Coder(self.rotation.to(device), self.centroids.to(device), projection, self.bits)

    def encode(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Pack vectors x [heads, n, size] float32.

        Returns:
            packed codes [heads, n, bytes] uint8 and norms [heads, n] in `dtype`; with a projection
            also the packed signs of the projected residual [heads, n, size / 8] uint8 and the
            residual's norm [heads, n] in `dtype`. The residual is that of the vector scaled to norm 1.
        """
        norms = x.norm(dim=-1)
        if not torch.isfinite(norms.to(dtype)).all():
            raise ValueError(f"a vector's norm is more than {dtype} holds; allowed: dtype=float32")
        parts = [
            self._encode(x[:, part], norms[:, part], dtype)
            for part in pieces(x.shape[1], x.shape[0] * x.shape[2], x.device)
        ]
        return tuple(torch.cat(column, dim=1) for column in zip(*parts, strict=True))

    def _encode(self, x: Tensor, norms: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        unit = x / norms.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        codes = nearest_code(unit @ self.rotation.T, self.centroids)
        packed = pack_bits(codes, self.bits) if self.bits else codes[..., :0]
        if self.projection is None:
            return packed, norms.to(dtype)
        residual = unit - looked_up(self.centroids, codes) @ self.rotation
        signed = pack_bits((residual @ self.projection.T > 0).byte(), 1)
        return packed, norms.to(dtype), signed, residual.norm(dim=-1).to(dtype)

    def _restored(self, codes: Tensor, rows: slice) -> Tensor:
        """The centroids of packed codes [heads, n, bytes] of some rows: [heads, rows, size]."""
        size = self.rotation.shape[0]
        if not self.bits:  # the single centroid of no bits is 0
            return self.centroids.expand(*codes[:, rows].shape[:2], size)
        return looked_up(self.centroids, unpack_bits(codes[:, rows], self.bits, size))

    def _signs(self, bits: Tensor, rows: slice) -> Tensor:
        return signs(bits[:, rows])[..., : self.rotation.shape[0]]

    def dot(self, query: Tensor, encoded: tuple[Tensor, ...]) -> Tensor:
        """Inner products of query [heads, q, size] float32 with vectors as `encode` returned them:
        [heads, q, n] float32. The query is rotated (and projected) once; no vector is rotated back."""
        codes, norms, *residual = encoded
        n = norms.shape[1]
        dots = packed_products(query @ self.rotation.T, n, partial(self._restored, codes))
        if self.projection is not None:
            bits, residual_norms = residual
            signed = packed_products(query @ self.projection.T, n, partial(self._signs, bits))
            dots += signed.mul_(self._sign_factors(residual_norms))
        return dots.mul_(norms.float()[:, None])

    def mix(self, weights: Tensor, encoded: tuple[Tensor, ...]) -> Tensor:
        """The sums of such vectors with weights [heads, q, n]: [heads, q, size] float32. They are summed
        in rotated form, and the sum is rotated back."""
        codes, norms, *residual = encoded
        size = self.rotation.shape[0]
        scaled = weights.float() * norms.float()[:, None]
        mixed = mixture(scaled, size, partial(self._restored, codes)) @ self.rotation
        if self.projection is not None:
            bits, residual_norms = residual
            scaled *= self._sign_factors(residual_norms)
            mixed += mixture(scaled, size, partial(self._signs, bits)) @ self.projection
        return mixed

    def _sign_factors(self, residual_norms: Tensor) -> Tensor:
        """The factors [heads, 1, n] on products with the signs of projected residuals of these norms
        [heads, n]: sqrt(pi / 2) / size times the norm, as in Algorithm 2."""
        return math.sqrt(math.pi / 2) / self.rotation.shape[0] * residual_norms.float()[:, None]


def nearest_code(x: Tensor, centroids: Tensor) -> Tensor:
    """The index of the ascending centroid that is nearest to each number of x, uint8 of x's shape; the
    lower one on a tie."""
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    # There are at most 31 edges: comparing with all is faster than a search for each number.
    for edge in (centroids[1:] + centroids[:-1]) / 2:
        codes += x > edge
    return codes


@lru_cache(maxsize=64)
def coder(size: int, bits: int, stage: str, rotation: str, codebook: str, seed: int) -> Coder:
    """Draw a coder from a seed: first the rotation's Gaussian matrix, or its signs, then the
    projection, in float64; `bits` and the choices are those of `TurboQuant`."""
    generator = torch.Generator().manual_seed(seed)
    if rotation == "hadamard":
        if size & (size - 1):
            raise ValueError(
                f"quantize.rotation is hadamard and a set has {size} channels; allowed: a power of "
                "two, or rotation=qr"
            )
        turns = 2 * torch.randint(0, 2, (size,), generator=generator) - 1
        rotation_matrix = hadamard_rotation(turns)
    else:
        gaussian = torch.randn(size, size, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian)
        rotation_matrix = (q * r.diagonal().sign()).T.float()
    projection = None
    if stage == "prod":
        projection = torch.randn(size, size, generator=generator, dtype=torch.float64).float()
    code_bits = bits - 1 if stage == "prod" else bits
    centroids = torch.from_numpy(lloyd_max(size, code_bits, codebook)).float()
    return Coder(rotation_matrix.contiguous(), centroids, projection, code_bits)


def hadamard_rotation(signs: Tensor) -> Tensor:
    """The rotation H diag(signs) / sqrt(d), [d, d] float32, where H is the Sylvester matrix and d, the
    number of signs, a power of two."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < len(signs):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (h * signs / math.sqrt(len(signs))).float()


@lru_cache(maxsize=64)
def lloyd_max(d: int, bits: int, codebook: str) -> np.ndarray:
    """The 2^bits centroids, ascending, of the least squared error for one coordinate of a uniform
    point of the unit sphere of R^d (beta), or for N(0, 1 / d) (normal), in float64.

    Lloyd's algorithm: each centroid moves to the mean of the numbers that are nearest to it, until
    none moves.
    """
    if bits == 0:
        return np.zeros(1)
    from scipy import special  # here, since importing it takes longer than all else that is needed

    a = (d - 3) / 2  # the density on the sphere is proportional to (1 - x^2)^a

    def mass(x: np.ndarray) -> np.ndarray:  # the distribution function
        if codebook == "normal":
            return np.asarray(special.ndtr(x * math.sqrt(d)))
        return np.asarray(special.betainc((d - 1) / 2, (d - 1) / 2, (1 + np.clip(x, -1, 1)) / 2))

    def moment(x: np.ndarray) -> np.ndarray:  # the antiderivative of x times the density
        if codebook == "normal":
            return -np.exp(-d * x**2 / 2) / math.sqrt(2 * math.pi * d)
        inside = np.clip(1 - x**2, 0, None) ** (a + 1)
        return -inside / (2 * (a + 1) * special.beta(0.5, (d - 1) / 2))

    end = 1.0 if codebook == "beta" else 40.0  # no number lies beyond it
    levels = 2**bits
    centroids = special.ndtri((np.arange(levels) + 0.5) / levels) / math.sqrt(d)
    for _ in range(20_000):
        edges = np.concatenate([[-end], (centroids[1:] + centroids[:-1]) / 2, [end]])
        moved = np.diff(moment(edges)) / np.diff(mass(edges))
        moved = (moved - moved[::-1]) / 2  # symmetric, as the density is
        largest_move = np.abs(moved - centroids).max()
        centroids = moved
        if largest_move < 1e-13:
            break
    return np.asarray(centroids)


@dataclass(frozen=True)
class Rotated(PackedValues):
    """Packed vectors. Their channels are split into sets (`TurboQuant.sets`), each with a coder, and
    what its `encode` returned. The order [heads, d] has the channels of one set after those of the
    other; None for a single set."""

    ROWS = ("parts",)

    parts: tuple[tuple[Tensor, ...], ...]
    coders: tuple[Coder, ...]
    order: Tensor | None

    @property
    def count(self) -> int:
        return self.parts[0][1].shape[1]

    def dot(self, query: Tensor) -> Tensor:
        split = split_channels(query, self.order, self.coders)
        sets = zip(self.coders, split, self.parts, strict=True)
        first, *further = (coder.dot(channels, part) for coder, channels, part in sets)
        return sum(further, start=first)

    def mix(self, weights: Tensor) -> Tensor:
        sets = zip(self.coders, self.parts, strict=True)
        mixed = [coder.mix(weights, part) for coder, part in sets]
        out = torch.cat(mixed, dim=-1)
        if self.order is None:
            return out
        return torch.empty_like(out).scatter_(-1, self.order[:, None].expand_as(out), out)


def split_channels(x: Tensor, order: Tensor | None, coders: Sequence[Coder]) -> Sequence[Tensor]:
    """The channels of each coder's set of x [heads, n, d]: [heads, n, size] float32."""
    if order is not None:
        x = x.gather(-1, order[:, None].expand_as(x))
    return x.float().split([len(coder.rotation) for coder in coders], dim=-1)


def pack_vectors(rows: Tensor, *, coders: tuple[Coder, ...], order: Tensor | None) -> Rotated:
    """Pack vectors [heads, n, d], whose channels are split into a set for each coder in this `order`
    (see `Rotated`)."""
    split = split_channels(rows, order, coders)
    parts = tuple(coder.encode(x, rows.dtype) for coder, x in zip(coders, split, strict=True))
    return Rotated(parts, coders, order)
