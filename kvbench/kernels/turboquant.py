"""TurboQuant: vectors rotated at random, each coordinate by one codebook (arXiv 2504.19874).

Written from the paper's algorithms 1 and 2; no code by the authors could be found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
import torch
from scipy import special
from torch import Tensor

from kvbench.kernels.quantize import CACHED, Codec, Codecs, CodeTable, ValueBlock, pack_bits, signs


@dataclass(frozen=True)
class TurboQuant:
    """Every key and value on its own, generated ones too, after the step that fed them.

    Two widths split the channels into two sets with an instance each: `outlier_bits` for a share of the
    channels, `bits` for the others. What the paper leaves open, as chosen here: outlier channels are
    those of the largest norm over the prompt, per layer and KV head, fixed afterwards, their indices
    counted; keys and values are both restored by `mse`; nothing recent stays exact. Draws depend on the
    seed alone, or on seed and layer.

    Attributes:
        bits, outlier_bits: 1..5 per number; outlier_bits null: one set.
        outlier_share: of the channels, rounded.
        keys, values: mse | prod (bits - 1 of them and a sign of a projection of the residual: unbiased
            inner products, larger error).
        rotation: hadamard (channels of a set a power of two; ours) | qr (the paper's).
        codebook: beta (a coordinate of the unit sphere) | normal (its limit; what the paper prints).
        per: model | layer, the rotations.
        buffer: recent tokens that stay exact.
    """

    bits: int = 4
    outlier_bits: int | None = None
    outlier_share: float = 0.25
    keys: str = "mse"
    values: str = "mse"
    rotation: str = "qr"
    codebook: str = "beta"
    per: str = "model"
    buffer: int = 0

    def __post_init__(self) -> None:
        allowed = {"keys": ("mse", "prod"), "values": ("mse", "prod"), "per": ("model", "layer")}
        allowed |= {"rotation": ("qr", "hadamard"), "codebook": ("beta", "normal")}
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; allowed: {' | '.join(choices)}"
                )
        for name in ("bits", "outlier_bits"):
            if getattr(self, name) not in (1, 2, 3, 4, 5, *([None] if name != "bits" else [])):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: 1..5")
        if not isinstance(self.outlier_share, float) or not 0 < self.outlier_share < 1:
            raise ValueError(f"outlier_share is {self.outlier_share!r}; allowed: between 0 and 1")
        if not isinstance(self.buffer, int) or self.buffer < 0:
            raise ValueError(f"buffer is {self.buffer!r}; allowed: an integer >= 0")

    @property
    def by_entry(self) -> bool:
        """See `kvbench.kernels.quantize.Scheme`."""
        return self.buffer == 0

    def sets(self, d: int) -> list[tuple[int, int]]:
        """(channels, bits) of each set, outliers first."""
        if self.outlier_bits is None:
            return [(d, self.bits)]
        size = min(max(1, round(self.outlier_share * d)), d - 1)
        return [(size, self.outlier_bits), (d - size, self.bits)]

    def codecs(self, keys: Tensor, values: Tensor, *, layer: int, seed: int) -> Codecs:
        """See `kvbench.kernels.quantize.Scheme`."""
        return self._codec(keys, self.keys, layer, seed), self._codec(
            values, self.values, layer, seed
        )

    def _codec(self, rows: Tensor, stage: str, layer: int, seed: int) -> Codec:
        heads, _, d = rows.shape
        sets, order, fixed = self.sets(d), None, 0
        if len(sets) > 1:
            norms = rows.float().square().sum(1)
            order = norms.argsort(dim=-1, descending=True, stable=True)
            outliers, others = (
                order[:, : sets[0][0]].sort(-1).values,
                order[:, sets[0][0] :].sort(-1).values,
            )
            order = torch.cat([outliers, others], dim=-1)
            fixed = heads * sets[0][0]  # a byte per index of an outlier
        place = layer + 1 if self.per == "layer" else 0
        coders = tuple(
            coder(size, bits, stage, self.rotation, self.codebook, seed + 7919 * place + number).on(
                rows.device
            )
            for number, (size, bits) in enumerate(sets)
        )
        codec = Codec(
            partial(pack_vectors, coders=coders, order=order),
            due=lambda _, waiting: max(0, waiting - self.buffer),
            fixed_nbytes=fixed,
        )
        return codec.take(rows)[0]

    def nbytes(self, heads: int, n: int, d: int, itemsize: int, layer: int = 0) -> int:
        """See `kvbench.kernels.quantize.Scheme`."""
        sets, total = self.sets(d), 0
        packed = max(0, n - self.buffer)
        for stage in (self.keys, self.values):
            vector = sum(vector_bytes(size, bits, stage, itemsize) for size, bits in sets)
            total += packed * vector + (n - packed) * d * itemsize
            total += sets[0][0] if len(sets) > 1 else 0
        return heads * total

    def model_bytes(self, dims: Mapping[int, tuple[int, int]]) -> int:
        """See `kvbench.kernels.quantize.Scheme`: rotation, projection and codebook of every `Coder`."""
        instances = {
            (size, bits, stage, number, layer if self.per == "layer" else 0)
            for layer, sides in dims.items()
            for d, stage in zip(sides, (self.keys, self.values), strict=True)
            for number, (size, bits) in enumerate(self.sets(d))
        }
        return sum(
            4 * (size**2 * (1 + (stage == "prod")) + 2 ** (bits - (stage == "prod")))
            for size, bits, stage, *_ in instances
        )


def vector_bytes(size: int, bits: int, stage: str, itemsize: int) -> int:
    """Bytes of a packed vector of `size` numbers: its codes and norm; with ``prod`` also the signs of
    the projected residual and the residual's norm."""
    if stage == "mse":
        return math.ceil(size * bits / 8) + itemsize
    return math.ceil(size * (bits - 1) / 8) + math.ceil(size / 8) + 2 * itemsize


@dataclass(frozen=True)
class Coder:
    """Packs vectors of `size` numbers: TurboQuant's Algorithm 1 (mse), with a projection Algorithm 2
    (prod).

    Attributes:
        rotation: [size, size], the paper's Pi.
        centroids: [2^bits] ascending.
        projection: [size, size], the paper's S; None with mse.
        bits: bits of a code; with prod one less than was asked for.
    """

    rotation: Tensor
    centroids: Tensor
    projection: Tensor | None
    bits: int

    def on(self, device: torch.device) -> Coder:
        """The same coder with its tensors on `device`."""
        projection = None if self.projection is None else self.projection.to(device)
        return Coder(self.rotation.to(device), self.centroids.to(device), projection, self.bits)

    def encode(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Pack vectors x [heads, n, size] float32.

        Returns:
            packed codes [heads, n, bytes] uint8 and norms [heads, n] in `dtype`; with a projection
            also the packed signs of the projected residual and the residual's norm, where the residual
            is that of the vector scaled to norm 1.

        Raises:
            ValueError: a norm that `dtype` does not hold.
        """
        norms = x.norm(dim=-1)
        if not torch.isfinite(norms.to(dtype)).all():
            raise ValueError(f"a vector's norm is more than {dtype} holds; allowed: dtype=float32")
        # On a CPU some tokens at a time, so that their numbers stay in its cache.
        tokens = x.shape[1] if x.is_cuda else max(1, CACHED // max(1, x.shape[0] * x.shape[2]))
        parts = [
            self._encode(*part, dtype)
            for part in zip(x.split(tokens, dim=1), norms.split(tokens, dim=1), strict=True)
        ]
        return tuple(torch.cat(column, dim=1) for column in zip(*parts, strict=True))

    def _encode(self, x: Tensor, norms: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        unit = x / norms.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        codes = nearest_code(unit @ self.rotation.T, self.centroids)
        if x.is_cuda or bool((norms == 0).any()):
            codes.masked_fill_(norms[..., None] == 0, 0)
        packed = pack_bits(codes, self.bits) if self.bits else codes[..., :0]
        if self.projection is None:
            return packed, norms.to(dtype)
        residual = unit - looked_up(self.centroids, codes) @ self.rotation
        signed = pack_bits((residual @ self.projection.T > 0).byte(), 1)
        return packed, norms.to(dtype), signed, residual.norm(dim=-1).to(dtype)

    @cached_property
    def codebook(self) -> CodeTable:
        """A table that restores codes to their centroids."""
        return CodeTable(self.centroids, self.bits)

    def dot(self, query: Tensor, part: tuple[Tensor, ...]) -> Tensor:
        """Inner products of query [heads, q, size] with packed vectors: [heads, q, n] float32. The query
        is rotated (and projected) once; no vector is rotated back.

        Args:
            part: the vectors as `encode` returned them.
        """
        norms = part[1].float()[:, None]
        if self.bits:
            dots = self.codebook.products(query @ self.rotation.T, part[0])
        else:  # the single centroid of no bits is 0
            dots = query.new_zeros(*query.shape[:2], norms.shape[-1])
        if self.projection is not None:
            signed = signs(part[2].device).products(query @ self.projection.T, part[2])
            dots += signed.mul_(self._scale(part[3]))
        return dots.mul_(norms)

    def mix(self, weights: Tensor, part: tuple[Tensor, ...]) -> Tensor:
        """Packed vectors summed with weights [heads, q, n]: [heads, q, size] float32. They are summed in
        rotated form, and the sum is rotated back.

        Args:
            part: the vectors as `encode` returned them.
        """
        size = self.rotation.shape[0]
        scaled = weights.float() * part[1].float()[:, None]
        mixed = weights.new_zeros(*weights.shape[:2], size, dtype=torch.float32)
        if self.bits:
            mixed = self.codebook.mixture(scaled, part[0], size) @ self.rotation
        if self.projection is not None:
            signed = signs(part[2].device).mixture(scaled * self._scale(part[3]), part[2], size)
            mixed += signed @ self.projection
        return mixed

    def _scale(self, residuals: Tensor) -> Tensor:
        """Factors [heads, 1, n] on products with the signs of vectors with these residual norms
        [heads, n]."""
        return math.sqrt(math.pi / 2) / self.rotation.shape[0] * residuals.float()[:, None]


def looked_up(table: Tensor, places: Tensor) -> Tensor:
    """table[places] for a table [m]; on a CPU several times as fast as indexing."""
    return table.index_select(0, places.flatten().int()).view(places.shape)


def nearest_code(x: Tensor, centroids: Tensor) -> Tensor:
    """The index of the nearest of the ascending centroids for each number, uint8; the lower on a tie."""
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    above = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    # There are at most 31 edges: comparing with all is faster than a search for each number.
    for edge in (centroids[1:] + centroids[:-1]) / 2:
        codes += torch.gt(x, edge, out=above)
    return codes


@lru_cache(maxsize=64)
def coder(size: int, bits: int, stage: str, rotation: str, codebook: str, seed: int) -> Coder:
    """A coder whose rotation and projection are drawn from a seed: first the rotation's Gaussian matrix,
    or its signs, then the projection, in float64.

    Raises:
        ValueError: a Hadamard rotation of a size that is no power of two.
    """
    generator = torch.Generator().manual_seed(seed)
    if rotation == "hadamard":
        if size & (size - 1):
            raise ValueError(
                f"turboquant.rotation is hadamard and a set has {size} channels; allowed: a power of "
                "two, or rotation=qr"
            )
        signs = 2 * torch.randint(0, 2, (size,), generator=generator) - 1
        turn = hadamard_rotation(signs)
    else:
        drawn = torch.randn(size, size, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(drawn)
        turn = (q * r.diagonal().sign()).T.float()
    projection = None
    if stage == "prod":
        projection = torch.randn(size, size, generator=generator, dtype=torch.float64).float()
    stored = bits - (stage == "prod")
    centroids = torch.from_numpy(lloyd_max(size, stored, codebook)).float()
    return Coder(turn.contiguous(), centroids, projection, stored)


def hadamard_rotation(signs: Tensor) -> Tensor:
    """H diag(signs) / sqrt(d), H the Sylvester matrix, [d, d] float32."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < len(signs):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (h * signs / math.sqrt(len(signs))).float()


@lru_cache(maxsize=64)
def lloyd_max(d: int, bits: int, codebook: str) -> np.ndarray:
    """The 2^bits centroids, ascending, with the least squared error for one coordinate of a uniform
    point of the unit sphere of R^d (beta), or of N(0, 1/d); by fixed point, float64."""
    if bits == 0:
        return np.zeros(1)
    a = (d - 3) / 2

    def mass(x: np.ndarray) -> np.ndarray:
        if codebook == "normal":
            return np.asarray(special.ndtr(x * math.sqrt(d)))
        return np.asarray(special.betainc((d - 1) / 2, (d - 1) / 2, (1 + np.clip(x, -1, 1)) / 2))

    def moment(x: np.ndarray) -> np.ndarray:  # an antiderivative of x times the density
        if codebook == "normal":
            return -np.exp(-d * x**2 / 2) / math.sqrt(2 * math.pi * d)
        inside = np.clip(1 - x**2, 0, None) ** (a + 1)
        return -inside / (2 * (a + 1) * special.beta(0.5, (d - 1) / 2))

    far = 1.0 if codebook == "beta" else 40.0
    levels = 2**bits
    centroids = special.ndtri((np.arange(levels) + 0.5) / levels) / math.sqrt(d)
    for _ in range(20_000):
        edges = np.concatenate([[-far], (centroids[1:] + centroids[:-1]) / 2, [far]])
        moved = np.diff(moment(edges)) / np.diff(mass(edges))
        moved = (moved - moved[::-1]) / 2
        done = np.abs(moved - centroids).max() < 1e-13
        centroids = moved
        if done:
            break
    return np.asarray(centroids)


@dataclass(frozen=True)
class Rotated(ValueBlock):
    """Packed vectors, whose channels are split into sets with a coder each (see `TurboQuant.sets`).

    Attributes:
        parts: for each set, what its coder's `encode` returned.
        coders: one for each set.
        order: [heads, d], the channels set after set; None where one set has all channels in order.
    """

    ROWS = ("parts",)

    parts: tuple[tuple[Tensor, ...], ...]
    coders: tuple[Coder, ...]
    order: Tensor | None

    @property
    def count(self) -> int:
        """Vectors of each head."""
        return self.parts[0][1].shape[1]

    def dot(self, query: Tensor) -> Tensor:
        """See `kvbench.kernels.quantize.Block` and `Coder.dot`."""
        split = split_channels(query, self.order, self.coders)
        sets = zip(self.coders, split, self.parts, strict=True)
        first, *further = (coder.dot(channels, part) for coder, channels, part in sets)
        return sum(further, start=first)

    def mix(self, weights: Tensor) -> Tensor:
        """See `kvbench.kernels.quantize.ValueBlock` and `Coder.mix`."""
        sets = zip(self.coders, self.parts, strict=True)
        mixed = [coder.mix(weights, part) for coder, part in sets]
        out = torch.cat(mixed, dim=-1)
        if self.order is None:
            return out
        return torch.empty_like(out).scatter_(-1, self.order[:, None].expand_as(out), out)


def split_channels(x: Tensor, order: Tensor | None, coders: Sequence[Coder]) -> Sequence[Tensor]:
    """Split x [heads, n, d] into the sets' channels, [heads, n, size] each, in float32."""
    if order is not None:
        x = x.gather(-1, order[:, None].expand_as(x))
    return x.float().split([len(coder.rotation) for coder in coders], dim=-1)


def pack_vectors(rows: Tensor, *, coders: tuple[Coder, ...], order: Tensor | None) -> Rotated:
    """Pack vectors [heads, n, d], whose channels are split into one set for each coder.

    Raises:
        ValueError: a norm that the vectors' dtype does not hold.
    """
    split = split_channels(rows, order, coders)
    parts = tuple(coder.encode(x, rows.dtype) for coder, x in zip(coders, split, strict=True))
    return Rotated(parts, coders, order)
