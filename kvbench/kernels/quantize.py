"""Packed storage of entries: what every storage scheme has to offer (`Scheme`), and integers of 2 or 4
bits (`Quantization`).

The integers are those of H2O (arXiv 2306.14048, Tables 6 and 7): asymmetric, by groups. A group's
smallest number is its zero point, its range over 2^bits - 1 is its scale. Keys are quantised per
channel (a group is `group_size` consecutive entries of one channel) and values per entry (a group is
consecutive channels of one entry), because outliers of keys lie in channels and those of values do
not. Where single entries are to leave while decoding, keys are quantised per entry, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, reduce
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.errors import UserError
from kvbench.errors.options import Count, check_options

CACHED = 1 << 18
"""How many numbers a CPU works on at a time: one MiB of float32, which stays in its cache."""

MERGED = 256
"""New rows are merged into a codec's last block while that has fewer rows than this. A larger block is
left alone, so that it is not copied again and again."""


class SchemeError(UserError, ValueError):
    """An option of a storage scheme that is not allowed; its message begins with ``quantize.``."""


class PackedRows(ABC):
    """Consecutive rows [heads, n, d] in packed form. Subclasses are frozen dataclasses."""

    ROWS: ClassVar[tuple[str, ...]]
    """The fields that have a place for every row: tensors [heads, rows, ...], or tuples of such."""

    @property
    @abstractmethod
    def count(self) -> int: ...

    @abstractmethod
    def dot(self, query: Tensor) -> Tensor:
        """Inner products of query [heads, q, d] with every row: [heads, q, n] float32."""

    @property
    def nbytes(self) -> int:
        sizes: list[int] = []
        for name in self.ROWS:
            map_tensors(lambda x: sizes.append(x.nbytes), getattr(self, name))
        return sum(sizes)

    def joined(self, other: Self) -> Self:
        joined = {
            name: map_tensors(
                lambda *parts: torch.cat(parts, 1), getattr(self, name), getattr(other, name)
            )
            for name in self.ROWS
        }
        return replace(self, **joined)  # type: ignore[type-var]

    def without(self, places: Tensor) -> Self:
        """One row of each head less, at places [heads]; the last row moves to that place."""
        left = {
            name: map_tensors(lambda x: without_rows(x, places), getattr(self, name))
            for name in self.ROWS
        }
        return replace(self, **left)  # type: ignore[type-var]


def map_tensors(change: Callable[..., Any], *fields: Any) -> Any:
    """Apply `change` to tensors, or to those at each place of tuples of equal length, which may be
    nested; returns such tuples."""
    if isinstance(fields[0], Tensor):
        return change(*fields)
    return tuple(map_tensors(change, *parts) for parts in zip(*fields, strict=True))


class PackedValues(PackedRows):
    """A block whose rows can also be averaged, as attention does with values. (QJL's signs cannot.)"""

    @abstractmethod
    def mix(self, weights: Tensor) -> Tensor:
        """The rows' sums with weights [heads, q, n]: [heads, q, d] float32."""


def never(count: int, waiting: int) -> int:
    """The `Codec.due` of a codec that packs no further rows."""
    return 0


def without_rows(stored: Tensor, places: Tensor) -> Tensor:
    """`PackedRows.without` of one tensor [heads, n, ...]: a new one [heads, n - 1, ...]."""
    kept = stored[:, :-1].clone()
    inside = (places < kept.shape[1]).nonzero()[:, 0]  # the last row may be the one that leaves
    kept[inside, places[inside]] = stored[inside, -1]
    return kept


B = TypeVar("B", bound=PackedRows)


@dataclass(frozen=True)
class Codec(Generic[B]):
    """The packed rows of a layer's keys, or of its values, oldest first. The newest rows stay exact,
    outside the codec, until they are due.

    Attributes:
        pack: makes a block of rows [heads, n, d].
        due: of how many rows are packed and how many exact, how many of the exact ones, the oldest, are
            to be packed now.
        fixed_nbytes: the bytes that are stored beside the blocks.
        ahead: whether rows that become due with a token are packed before it attends (else after).
    """

    pack: Callable[[Tensor], B]
    due: Callable[[int, int], int] = never
    fixed_nbytes: int = 0
    ahead: bool = False
    blocks: tuple[B, ...] = field(default=(), repr=False)

    @property
    def count(self) -> int:
        return sum(block.count for block in self.blocks)

    @property
    def nbytes(self) -> int:
        return self.fixed_nbytes + sum(block.nbytes for block in self.blocks)

    def take(self, rows: Tensor) -> Codec[B]:
        """The codec with those that are due of the exact rows [heads, t, d], oldest first."""
        due = self.due(self.count, rows.shape[1])
        if not due:
            return self
        blocks = [*self.blocks, self.pack(rows[:, :due])]
        if self.blocks and self.blocks[-1].count < MERGED:
            new = blocks.pop()
            blocks[-1] = blocks[-1].joined(new)
        return replace(self, blocks=tuple(blocks))

    def without(self, places: Tensor) -> Codec[B]:
        """The codec without one row of each head (`PackedRows.without`); no other row is packed anew."""
        whole = reduce(lambda block, following: block.joined(following), self.blocks)
        return replace(self, blocks=(whole.without(places),))

    def dot(self, query: Tensor) -> Tensor:
        """Inner products of query [heads, q, d] with every packed row: [heads, q, count] float32."""
        return torch.cat([block.dot(query) for block in self.blocks], dim=-1)

    def mix(self: Codec[PackedValues], weights: Tensor) -> Tensor:
        """The packed rows' sums with weights [heads, q, count]: [heads, q, d] float32."""
        parts = weights.split([block.count for block in self.blocks], dim=-1)
        mixed = [block.mix(part) for block, part in zip(self.blocks, parts, strict=True)]
        return torch.stack(mixed).sum(0)


Codecs = tuple[Codec[Any], Codec[PackedValues]]
"""The codec of a layer's keys, and that of its values."""


@runtime_checkable
class Scheme(Protocol):
    """A way to store entries; it does not choose which entries are kept. Schemes are frozen
    dataclasses whose fields are the options of `quantize={...}`."""

    @property
    def by_entry(self) -> bool:
        """Whether every entry, new ones included, is packed on its own, so that any of them may
        leave."""
        ...

    def codecs(self, keys: Tensor, values: Tensor, *, layer: int, seed: int) -> Codecs:
        """The codecs of a prompt's keys and values [heads, n, d]; the rows beyond a codec's `count` stay
        exact. `layer` counts the compressed layers from 0; the seed is that of random projections and
        rotations."""
        ...

    def nbytes(self, heads: int, n: int, d: int, itemsize: int, layer: int = 0) -> int:
        """The bytes of n entries with d numbers a key and d a value, of `itemsize` bytes where exact."""
        ...

    def model_bytes(self, dims: Mapping[int, tuple[int, int]]) -> int:
        """The bytes that all prompts of a model share; `dims` has the numbers of a key and of a value of
        each layer."""
        ...


@dataclass(frozen=True)
class Quantization:
    """The scheme of packed integers with a scale and a zero point per group (see the module).

    Attributes:
        keys: channel (groups of a key's channel run along the entries; the keys and values of new
            tokens stay exact) | entry (groups run along an entry's channels, as FlexGen stores what
            H2O keeps; new tokens are packed, too, and entries may leave while decoding).
    """

    bits: Literal[2, 4] = 4
    group_size: Count = 64
    keys: Literal["channel", "entry"] = "channel"

    def __post_init__(self) -> None:
        check_options(self, "quantize.", SchemeError)

    @property
    def by_entry(self) -> bool:
        return self.keys == "entry"

    def codecs(self, keys: Tensor, values: Tensor, *, layer: int, seed: int) -> Codecs:
        return self._codec(keys, not self.by_entry), self._codec(values, False)

    def _codec(self, rows: Tensor, by_channel: bool) -> Codec:
        pack_rows = partial(pack, quantization=self, by_channel=by_channel)
        codec = Codec(pack_rows, due=lambda _, exact: exact).take(rows)
        return codec if self.by_entry else replace(codec, due=never)

    def nbytes(self, heads: int, n: int, d: int, itemsize: int, layer: int = 0) -> int:
        shape = (heads, n, d)
        keys = packed_bytes(shape, self, itemsize, by_channel=not self.by_entry)
        return keys + packed_bytes(shape, self, itemsize, by_channel=False)

    def model_bytes(self, dims: Mapping[int, tuple[int, int]]) -> int:
        return 0


@dataclass(frozen=True)
class Rounded(PackedValues):
    """Keys or values [heads, n, d] in packed integers.

    Attributes:
        codes: [heads, rows, ceil(along * bits / 8)] uint8, several codes in a byte (`pack_bits`).
        scale, zero: [heads, rows, groups] in the dtype of what was packed.
        along: the numbers of a row.
        by_channel: True where the rows of the codes are the d channels (of keys), whose numbers run
            along the n entries; no entry can then join or leave. False where the rows are the n
            entries.
    """

    ROWS = ("codes", "scale", "zero")

    codes: Tensor
    scale: Tensor
    zero: Tensor
    along: int
    by_channel: bool
    quantization: Quantization

    @property
    def count(self) -> int:
        return self.along if self.by_channel else self.codes.shape[1]

    def restored(self, rows: slice) -> Tensor:
        """Numbers of some rows of the codes: [heads, rows, along] float32, each within half a scale of
        what was packed."""
        size = min(self.quantization.group_size, self.along)
        codes = unpack_bits(self.codes[:, rows], self.quantization.bits, self.along).float()
        padded = F.pad(codes, (0, -self.along % size)).unflatten(-1, (-1, size))
        scale, zero = self.scale[:, rows, :, None].float(), self.zero[:, rows, :, None].float()
        return padded.mul_(scale).add_(zero).flatten(-2)[..., : self.along]

    def dot(self, query: Tensor) -> Tensor:
        if self.by_channel:  # a query weights the channels
            return mixture(query.float(), self.along, self.restored)
        return packed_products(query.float(), self.count, self.restored)

    def mix(self, weights: Tensor) -> Tensor:
        return mixture(weights.float(), self.along, self.restored)


def packed_bytes(
    shape: tuple[int, int, int], quantization: Quantization, itemsize: int, *, by_channel: bool
) -> int:
    """The bytes that `pack` makes of a tensor [heads, n, d] of numbers of `itemsize` bytes."""
    heads, n, d = shape
    rows, columns = (d, n) if by_channel else (n, d)
    if not columns:
        return 0
    groups = -(-columns // min(quantization.group_size, columns))
    codes = -(-columns * quantization.bits // 8)
    return heads * rows * (codes + 2 * groups * itemsize)


def pack(x: Tensor, quantization: Quantization, *, by_channel: bool) -> Rounded:
    """Quantise x [heads, n, d]: per channel (groups run along n) or per entry (groups run along d).

    A last group that is short has a scale and a zero point of its own. For that it is padded with its
    last number, which changes neither.
    """
    bits = quantization.bits
    rows = (x.transpose(1, 2) if by_channel else x).float()
    columns = rows.shape[-1]
    size = min(quantization.group_size, columns)
    padded = F.pad(rows, (0, -columns % size), mode="replicate") if columns % size else rows
    groups = padded.unflatten(-1, (-1, size))
    zero = groups.amin(-1).to(x.dtype)
    scale = ((groups.amax(-1) - zero.float()) / (2**bits - 1)).to(x.dtype)
    step = torch.where(scale > 0, scale.float(), 1.0)
    codes = (groups - zero.float()[..., None]).div_(step[..., None]).round_()
    codes = codes.clamp_(0, 2**bits - 1).flatten(-2)[..., :columns].to(torch.uint8)
    return Rounded(pack_bits(codes, bits), scale, zero, columns, by_channel, quantization)


def unpack(packed: Rounded) -> Tensor:
    """The numbers [heads, n, d] that the codes stand for, in the dtype of what was packed."""
    rows = packed.restored(slice(None)).to(packed.scale.dtype)
    return rows.transpose(1, 2) if packed.by_channel else rows


def _word(bits: int) -> tuple[int, torch.dtype]:
    """The fewest bytes that hold a whole number of codes, and a type for them as one number."""
    size = math.lcm(8, bits) // 8
    return size, torch.uint8 if size == 1 else torch.int32 if size < 4 else torch.int64


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., m] below 2^bits into bytes [..., ceil(m * bits / 8)] uint8: code j of a row
    begins at bit j * bits of the row, the lowest bit of a byte first."""
    size, dtype = _word(bits)
    together, count = 8 * size // bits, codes.shape[-1]
    places = F.pad(codes, (0, -count % together)).unflatten(-1, (-1, together)).unbind(-1)
    words = reduce(
        torch.bitwise_or, (code.to(dtype) << (bits * place) for place, code in enumerate(places))
    )
    parts = [((words >> (8 * place)) & 255).to(torch.uint8) for place in range(size)]
    return torch.stack(parts, dim=-1).flatten(-2)[..., : -(-count * bits // 8)]


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The codes [..., count] uint8 that `pack_bits` packed."""
    size, dtype = _word(bits)
    parts = F.pad(packed, (0, -packed.shape[-1] % size)).unflatten(-1, (-1, size)).unbind(-1)
    words = reduce(
        torch.bitwise_or, (part.to(dtype) << (8 * place) for place, part in enumerate(parts))
    )
    codes = [(words >> (bits * place)) & (2**bits - 1) for place in range(8 * size // bits)]
    return torch.stack(codes, dim=-1).flatten(-2)[..., :count].to(torch.uint8)


@lru_cache(maxsize=8)
def _signs_of_bytes(device: torch.device) -> Tensor:
    """The eight signs of each byte, as int8 behind each other, as one int64: the fastest look-up."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    return (2 * (bits & 1) - 1).to(torch.int8).view(torch.int64)[:, 0]


def signs(packed: Tensor) -> Tensor:
    """Packed bits [..., bytes] as -1 for 0 and 1 for 1: [..., 8 * bytes] float32."""
    return looked_up(_signs_of_bytes(packed.device), packed).view(torch.int8).float()


def looked_up(table: Tensor, places: Tensor) -> Tensor:
    """table[places] of a table [m]; on a CPU several times as fast."""
    return table.index_select(0, places.flatten().int()).view(places.shape)


def pieces(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Cut rows of `width` numbers into pieces of as many as a CPU's cache holds; on a GPU 256 MiB."""
    most = 1 << 26 if device.type == "cuda" else CACHED
    step = max(1, most // max(1, width))
    return (slice(start, start + step) for start in range(0, rows, step))


def packed_products(query: Tensor, rows: int, restored: Callable[[slice], Tensor]) -> Tensor:
    """Inner products of query [heads, q, d] float32 with so many rows, of which `restored` makes some
    at a time, [heads, ..., d] float32: [heads, q, rows]."""
    out = query.new_empty(*query.shape[:2], rows)
    for part in pieces(rows, query.shape[0] * query.shape[2], query.device):
        out[..., part] = query @ restored(part).mT
    return out


def mixture(weights: Tensor, width: int, restored: Callable[[slice], Tensor]) -> Tensor:
    """Sums, with weights [heads, q, rows] float32, of rows of `width` numbers (`packed_products`):
    [heads, q, width]."""
    out = weights.new_zeros(*weights.shape[:2], width)
    for part in pieces(weights.shape[-1], weights.shape[0] * width, weights.device):
        out.baddbmm_(weights[..., part], restored(part))
    return out
