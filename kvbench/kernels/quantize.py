"""How entries are stored packed: what every scheme is, and one, 2- or 4-bit integers.

As in H2O (arXiv 2306.14048, Tables 6 and 7), asymmetric, by groups: a group's smallest value is its
zero point, its range over 2^bits - 1 its scale. Keys are quantised per channel (a group is `group_size`
consecutive entries of one channel), values per token (consecutive channels of one entry), because
outliers of keys sit in channels and those of values do not. Where single entries are to leave, keys are
quantised per token as well.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial, reduce
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = (2, 4)

CACHED = 1 << 18
"""Numbers that a CPU restores at a time: one MiB of float32, which stays in its cache."""

MERGED = 256
"""New rows are merged into a codec's last block while that has fewer rows than this. A larger block is
left alone, so that it is not copied again and again."""


class Block(ABC):
    """Consecutive rows [heads, n, d] in packed form. Subclasses are frozen dataclasses."""

    ROWS: ClassVar[tuple[str, ...]]
    """Fields with a place for every row: tensors [heads, rows, ...], or tuples of such."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Rows of each head."""

    @abstractmethod
    def dot(self, query: Tensor) -> Tensor:
        """Inner products of query [heads, q, d] with every row: [heads, q, n] float32."""

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        sizes: list[int] = []
        for name in self.ROWS:
            map_tensors(lambda x: sizes.append(x.nbytes), getattr(self, name))
        return sum(sizes)

    def joined(self, other: Self) -> Self:
        """These rows, followed by those of another block of the same kind."""
        joined = {
            name: map_tensors(
                lambda *parts: torch.cat(parts, 1), getattr(self, name), getattr(other, name)
            )
            for name in self.ROWS
        }
        return replace(self, **joined)  # type: ignore[type-var]

    def without(self, places: Tensor) -> Self:
        """These rows without one of each head, at places [heads]; the last row moves to its place."""
        left = {
            name: map_tensors(lambda x: without_rows(x, places), getattr(self, name))
            for name in self.ROWS
        }
        return replace(self, **left)  # type: ignore[type-var]


def map_tensors(change: Callable[..., Any], *fields: Any) -> Any:
    """Apply `change` to tensors, or to the tensors at each place of (nested) tuples of equal length."""
    if isinstance(fields[0], Tensor):
        return change(*fields)
    return tuple(map_tensors(change, *parts) for parts in zip(*fields, strict=True))


class ValueBlock(Block):
    """Rows that can be averaged, too, as values must be. The signs of keys cannot."""

    @abstractmethod
    def mix(self, weights: Tensor) -> Tensor:
        """Rows summed with weights [heads, q, n]: [heads, q, d] float32."""


def never(count: int, waiting: int) -> int:
    """`Codec.due` of a codec that packs no further rows: 0."""
    return 0


def without_rows(stored: Tensor, places: Tensor) -> Tensor:
    """stored [heads, n, ...] without one row of each head, at places [heads]: [heads, n - 1, ...]. The
    last row moves to its place."""
    kept = stored[:, :-1].clone()
    inside = (places < kept.shape[1]).nonzero()[:, 0]  # the last row may be the one that leaves
    kept[inside, places[inside]] = stored[inside, -1]
    return kept


B = TypeVar("B", bound=Block)


@dataclass(frozen=True)
class Codec(Generic[B]):
    """The packed rows of a layer's keys, or of its values, oldest first. Newer rows wait in exact form
    until they are due.

    Attributes:
        pack: makes a block of rows [heads, n, d].
        due: how many of the exact rows are to be packed now, from the number of packed rows and the
            number of exact ones.
        fixed_nbytes: bytes held beside the blocks.
        ahead: rows that become due with a token are packed before it attends, not after.
        blocks: the packed rows.
    """

    pack: Callable[[Tensor], B]
    due: Callable[[int, int], int] = never
    fixed_nbytes: int = 0
    ahead: bool = False
    blocks: tuple[B, ...] = field(default=(), repr=False)

    @property
    def count(self) -> int:
        """Rows of each head."""
        return sum(block.count for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.fixed_nbytes + sum(block.nbytes for block in self.blocks)

    def take(self, rows: Tensor) -> tuple[Codec[B], int]:
        """Pack the exact rows that are due.

        Args:
            rows: [heads, t, d], all exact rows, oldest first.

        Returns:
            the codec with them, and how many were packed: the first of `rows`.
        """
        taken = self.due(self.count, rows.shape[1])
        if not taken:
            return self, 0
        block = self.pack(rows[:, :taken])
        if self.blocks and self.blocks[-1].count < MERGED:
            return replace(self, blocks=(*self.blocks[:-1], self.blocks[-1].joined(block))), taken
        return replace(self, blocks=(*self.blocks, block)), taken

    def without(self, places: Tensor) -> Codec[B]:
        """The codec without one row of each head (`Block.without`). No other row is packed anew."""
        (whole,) = self.whole
        return replace(self, blocks=(whole.without(places),))

    @property
    def whole(self) -> tuple[B, ...]:
        """All rows in one block; an empty tuple where there is no row."""
        if not self.blocks:
            return ()
        return (reduce(lambda block, following: block.joined(following), self.blocks),)

    def dot(self, query: Tensor) -> Tensor:
        """Inner products of query [heads, q, d] with every row: [heads, q, count] float32."""
        return torch.cat([block.dot(query) for block in self.blocks], dim=-1)

    def mix(self: Codec[ValueBlock], weights: Tensor) -> Tensor:
        """Rows summed with weights [heads, q, count]: [heads, q, d] float32."""
        parts = weights.split([block.count for block in self.blocks], dim=-1)
        mixed = [block.mix(part) for block, part in zip(self.blocks, parts, strict=True)]
        return torch.stack(mixed).sum(0)


Codecs = tuple[Codec[Any], Codec[ValueBlock]]
"""The codec of a layer's keys, and that of its values."""


@runtime_checkable
class Scheme(Protocol):
    """How entries are stored; it does not choose which are kept. Schemes are frozen dataclasses."""

    @property
    def by_entry(self) -> bool:
        """Whether every entry is packed by itself, new ones at once, so that any of them may leave."""
        ...

    def codecs(self, keys: Tensor, values: Tensor, *, layer: int, seed: int) -> Codecs:
        """Pack the prompt's keys and values [heads, n, d]. Rows that stay exact are the last ones."""
        ...

    def nbytes(self, heads: int, n: int, d: int, itemsize: int, layer: int = 0) -> int:
        """Bytes of n entries with keys and values of d numbers of `itemsize` bytes, as stored."""
        ...

    def model_bytes(self, dims: Mapping[int, tuple[int, int]]) -> int:
        """Bytes that are held once for a model, whatever the prompts; `dims` has the numbers of a key
        and of a value for each layer."""
        ...


@dataclass(frozen=True)
class Quantization:
    """Packed integers with a scale and a zero point per group.

    Attributes:
        bits: 2 or 4 per number.
        group_size: numbers that share a scale and a zero point.
        keys: channel (groups of a key's channel run along the entries; new tokens stay as they are) |
            entry (groups run along an entry's channels, as FlexGen stores what H2O keeps; new tokens are
            packed as well, and entries may leave while decoding).
    """

    bits: int = 4
    group_size: int = 64
    keys: Literal["channel", "entry"] = "channel"

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits is {self.bits}; allowed: bits 2 or 4")
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}; allowed: an integer >= 1")
        if self.keys not in ("channel", "entry"):
            raise ValueError(f"keys is {self.keys!r}; allowed: channel, entry")

    @property
    def by_entry(self) -> bool:
        """See `Scheme`."""
        return self.keys == "entry"

    def codecs(self, keys: Tensor, values: Tensor, *, layer: int, seed: int) -> Codecs:
        """See `Scheme`: keys per channel or per entry, values per entry."""
        return self._codec(keys, not self.by_entry), self._codec(values, False)

    def _codec(self, rows: Tensor, by_channel: bool) -> Codec:
        """A codec that holds these rows and takes no more, unless entries are packed one by one."""
        make = partial(pack, quantization=self, by_channel=by_channel)
        codec = Codec(make, due=lambda _, waiting: waiting).take(rows)[0]
        return codec if self.by_entry else replace(codec, due=never)

    def nbytes(self, heads: int, n: int, d: int, itemsize: int, layer: int = 0) -> int:
        """See `Scheme`."""
        shape = (heads, n, d)
        sides = (not self.by_entry, False)
        return sum(packed_bytes(shape, self, itemsize, by_channel=side) for side in sides)

    def model_bytes(self, dims: Mapping[int, tuple[int, int]]) -> int:
        """See `Scheme`: 0, since nothing is shared between prompts."""
        return 0


@dataclass(frozen=True)
class Packed(ValueBlock):
    """A tensor [heads, n, d] in packed integers.

    Attributes:
        codes: [heads, rows, ceil(along * bits / 8)] uint8, several codes a byte.
        scale, zero: [heads, rows, groups] in the dtype of what was packed.
        along: numbers of a row.
        by_channel: True where the rows of the codes are channels (of keys), whose numbers run along the
            entries; no entry can then join or leave. False where they are entries.
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
        """Entries of each head."""
        return self.along if self.by_channel else self.codes.shape[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """heads, n, d: of the numbers that are packed."""
        heads, rows, _ = self.codes.shape
        return (heads, self.along, rows) if self.by_channel else (heads, rows, self.along)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """All tensors: codes, scales, zero points."""
        return self.codes, self.scale, self.zero

    def dot(self, query: Tensor) -> Tensor:
        """See `Block`. A number is its code's distance from the middle code times the group's scale,
        plus a number that the whole group shares. The first part is restored for some rows at a time;
        the second is multiplied with the query once for the group.
        """
        query = query.float()
        if self.by_channel:
            return self._dot_channels(query)
        dots = query.new_empty(*query.shape[:2], self.count)
        for rows, codes in self._table.pieces(self.codes, self.along):
            dots[..., rows] = query @ self._scaled(codes, self.scale[:, rows]).mT
        of_groups = in_groups(query, self._size).sum(-1)
        return dots.add_(of_groups @ self._middles.mT)

    def mix(self, weights: Tensor) -> Tensor:
        """See `ValueBlock`, and `dot` for how numbers are restored."""
        wide = weights.float()
        mixed = wide.new_zeros(*wide.shape[:2], self.along)
        for rows, codes in self._table.pieces(self.codes, self.along):
            mixed.baddbmm_(wide[..., rows], self._scaled(codes, self.scale[:, rows]))
        return mixed.add_(self._spread(wide @ self._middles))

    @property
    def _size(self) -> int:
        """Numbers of a group."""
        return min(self.quantization.group_size, self.along)

    @property
    def _table(self) -> CodeTable:
        """Codes as their distance from the middle of all codes, so that rounding is small."""
        return centred(self.quantization.bits, self.codes.device)

    @property
    def _middles(self) -> Tensor:
        """What the middle of all codes stands for, [heads, rows, groups] float32."""
        return self.zero.float() + self.scale.float() * ((2**self.quantization.bits - 1) / 2)

    def _spread(self, of_groups: Tensor) -> Tensor:
        """Numbers of groups [..., groups] as those of their columns [..., along]."""
        return of_groups.repeat_interleave(self._size, dim=-1)[..., : self.along]

    def _scaled(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Codes [heads, rows, columns] times their groups' scales [heads, rows, groups], in place where
        the last group is whole."""
        columns = codes.shape[-1]
        grouped = in_groups(codes, self._size).mul_(scale.float()[..., None])
        return grouped.flatten(-2)[..., :columns]

    def _dot_channels(self, query: Tensor) -> Tensor:
        """`dot` where rows are channels: some groups of entries at a time, which begin with a byte."""
        bits, (heads, d, _) = self.quantization.bits, self.codes.shape
        dots = self._spread(query @ self._middles).contiguous()
        whole = math.lcm(self._size, 8 // bits)
        step = whole * max(1, at_a_time(query.device) // (heads * d * whole))
        for first in range(0, self.along, step):
            last = min(self.along, first + step)
            part = self.codes[..., first * bits // 8 : -(-last * bits // 8)]
            scale = self.scale[..., first // self._size : -(-last // self._size)]
            codes = self._scaled(self._table.restored(part, last - first), scale)
            dots[..., first:last].baddbmm_(query, codes)
        return dots


def in_groups(rows: Tensor, size: int) -> Tensor:
    """Rows [..., columns] as [..., groups, size]; a last group that is short is filled up with zeros."""
    padded = F.pad(rows, (0, -rows.shape[-1] % size)) if rows.shape[-1] % size else rows
    return padded.unflatten(-1, (-1, size))


def packed_bytes(
    shape: tuple[int, int, int], quantization: Quantization, itemsize: int, *, by_channel: bool
) -> int:
    """What `pack` makes of a tensor [heads, n, d] of numbers of `itemsize` bytes: `Packed.nbytes`."""
    heads, n, d = shape
    rows, columns = (d, n) if by_channel else (n, d)
    if not columns:
        return 0
    groups = -(-columns // min(quantization.group_size, columns))
    codes = -(-columns * quantization.bits // 8)
    return heads * rows * (codes + 2 * groups * itemsize)


def pack(x: Tensor, quantization: Quantization, *, by_channel: bool) -> Packed:
    """Quantise x [heads, n, d]: per channel (groups run along n) or per entry (along d).

    A last group that is short stands alone; it is padded with its last number, which changes neither
    its scale nor its zero point.
    """
    bits, size = quantization.bits, min(quantization.group_size, x.shape[1 if by_channel else 2])
    rows = (x.transpose(1, 2) if by_channel else x).float()
    columns = rows.shape[-1]
    padded = F.pad(rows, (0, -columns % size), mode="replicate") if columns % size else rows
    groups = padded.unflatten(-1, (-1, size))
    zero = groups.amin(-1).to(x.dtype)
    scale = ((groups.amax(-1) - zero.float()) / (2**bits - 1)).to(x.dtype)
    step = torch.where(scale > 0, scale.float(), 1.0)
    codes = (groups - zero.float()[..., None]).div_(step[..., None]).round_()
    codes = codes.clamp_(0, 2**bits - 1).flatten(-2)[..., :columns].to(torch.uint8)
    return Packed(pack_bits(codes, bits), scale, zero, columns, by_channel, quantization)


def unpack(packed: Packed) -> Tensor:
    """The numbers [heads, n, d] the codes stand for, each within half a step of what was packed."""
    bits = packed.quantization.bits
    along = packed.along
    size = min(packed.quantization.group_size, along)
    codes = unpack_bits(packed.codes, bits, along).to(packed.scale.dtype)
    scale = packed.scale.repeat_interleave(size, dim=-1)[..., :along]
    zero = packed.zero.repeat_interleave(size, dim=-1)[..., :along]
    rows = torch.addcmul(zero, codes, scale)
    return rows.transpose(1, 2) if packed.by_channel else rows


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., m] below 2^bits as bytes [..., ceil(m bits / 8)]: code j in bits j * bits and on,
    little end first."""
    if 8 % bits:
        shifts = torch.arange(bits, device=codes.device, dtype=torch.uint8)
        return pack_bits(((codes[..., None] >> shifts) & 1).flatten(-2), 1)
    per_byte = 8 // bits
    codes = F.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % per_byte)).contiguous()
    if codes.storage_offset() % per_byte:
        codes = codes.clone()
    # All codes of a byte in one number: each time, the upper half of them moves down to the lower one.
    wide = codes.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[per_byte])
    for halving in range(per_byte.bit_length() - 1):
        wide = wide | (wide >> ((8 - bits) << halving))
    return (wide & 255).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """What `pack_bits` packed, [..., count] uint8."""
    if 8 % bits:
        single = unpack_bits(packed, 1, bits * count).unflatten(-1, (count, bits))
        shifts = torch.arange(bits, device=packed.device, dtype=torch.uint8)
        return (single << shifts).sum(-1, dtype=torch.uint8)
    places = [(packed >> (bits * place)) & (2**bits - 1) for place in range(8 // bits)]
    return torch.stack(places, dim=-1).flatten(-2)[..., :count]


def at_a_time(device: torch.device) -> int:
    """Numbers that are restored from codes at a time: `CACHED` on a CPU, 256 MiB of them on a GPU."""
    return 1 << 26 if device.type == "cuda" else CACHED


@dataclass(frozen=True)
class CodeTable:
    """Restores packed codes to the numbers that they stand for, several codes by one look into a table.

    A CPU reads 16 adjacent bytes of a table nearly as fast as 4. So the table has a row for every
    combination of several adjacent codes, and one look restores all of them.

    Attributes:
        numbers: [2^bits] float32, what each code stands for, or int8, which takes less time where
            codes have one bit.
        bits: bits of a code, 1 to 5.
    """

    numbers: Tensor
    bits: int

    @property
    def together(self) -> int:
        """Codes that one look restores. For int8 numbers these are the codes of a byte; for float32
        numbers four, or two where codes have more than 3 bits, so that the table stays in cache."""
        if self.numbers.dtype == torch.int8:
            return 8 // self.bits
        return 4 if self.bits <= 3 else 2

    @cached_property
    def table(self) -> Tensor:
        """[2^(together * bits)]: for every combination of `together` codes their numbers side by side,
        viewed as one wide number, since torch looks up single numbers fastest."""
        places = torch.arange(1 << (self.together * self.bits), device=self.numbers.device)
        shifts = self.bits * torch.arange(self.together, device=self.numbers.device)
        codes = (places[:, None] >> shifts) & ((1 << self.bits) - 1)
        wide = {2: torch.int16, 4: torch.int32, 8: torch.complex64, 16: torch.complex128}
        side_by_side = self.numbers[codes]
        return side_by_side.view(wide[self.together * self.numbers.itemsize])[:, 0]

    def pieces(
        self, packed: Tensor, count: int, *, rows: int | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Rows of packed codes as numbers, some at a time, which are still in a processor's cache when
        they are used.

        Args:
            packed: [heads, n, bytes], see `pack_bits`. count: codes of a row.
            rows: of a piece; None: `at_a_time`.

        Yields:
            which rows, and their numbers [heads, rows, count] float32. The next piece takes the same
            memory: a piece must be used before the next is asked for.
        """
        heads, n, _ = packed.shape
        if rows is None:
            rows = at_a_time(packed.device) // max(1, heads * count)
        rows = max(1, min(n, rows))
        width = self.bits * self.together
        looks = -(-count // self.together)
        places = torch.empty(heads * rows * looks, dtype=torch.int32, device=packed.device)
        wide = torch.empty(heads * rows * looks, dtype=self.table.dtype, device=packed.device)
        single = torch.empty(heads * rows * looks * self.together, device=packed.device)
        for start in range(0, n, rows):
            part = packed[:, start : start + rows]
            shape = heads, part.shape[1], looks
            size = math.prod(shape)
            place = places[:size]
            place.view(shape).copy_(part if width == 8 else words(part, width)[..., :looks])
            torch.index_select(self.table, 0, place, out=wide[:size])
            numbers = wide[:size].view(self.numbers.dtype)
            if self.numbers.dtype != torch.float32:
                numbers = single[: numbers.numel()].copy_(numbers)
            yield (
                slice(start, start + part.shape[1]),
                numbers.view(heads, part.shape[1], -1)[..., :count],
            )

    def restored(self, packed: Tensor, count: int) -> Tensor:
        """All rows at once: packed [heads, n, bytes] as numbers [heads, n, count] float32."""
        ((_, numbers),) = self.pieces(packed, count, rows=packed.shape[1])
        return numbers

    def products(self, query: Tensor, packed: Tensor) -> Tensor:
        """query [heads, q, count] float32 . numbers of packed [heads, n, bytes]: [heads, q, n]."""
        out = query.new_empty(*query.shape[:2], packed.shape[1])
        for rows, numbers in self.pieces(packed, query.shape[-1]):
            out[..., rows] = query @ numbers.mT
        return out

    def mixture(self, weights: Tensor, packed: Tensor, count: int) -> Tensor:
        """weights [heads, q, n] float32 times the numbers of packed [heads, n, bytes], `count` a row,
        summed over the rows: [heads, q, count]."""
        out = weights.new_zeros(*weights.shape[:2], count)
        for rows, numbers in self.pieces(packed, count):
            out.baddbmm_(weights[..., rows], numbers)
        return out


@lru_cache(maxsize=8)
def centred(bits: int, device: torch.device) -> CodeTable:
    """A table that restores each code as its distance from the mean of all codes."""
    middle = (2**bits - 1) / 2
    return CodeTable(torch.arange(1 << bits, dtype=torch.float32, device=device) - middle, bits)


@lru_cache(maxsize=8)
def signs(device: torch.device) -> CodeTable:
    """A table that restores bits as signs: -1 for 0, 1 for 1."""
    return CodeTable(torch.tensor([-1, 1], dtype=torch.int8, device=device), 1)


def words(packed: Tensor, width: int) -> Tensor:
    """Cut bytes [..., m] into numbers of `width` <= 24 bits each, the lowest bits first: int32,
    [..., at least ceil(8 m / width)]. Bits beyond the last byte are 0."""
    unit = math.lcm(8, width) // 8
    padded = F.pad(packed, (0, -packed.shape[-1] % unit))
    parts = padded.unflatten(-1, (-1, unit)).int().unbind(-1)
    numbers = []
    for begin in range(0, 8 * unit, width):
        first, offset = divmod(begin, 8)
        number = parts[first] >> offset
        for further in range(first + 1, -(-(begin + width) // 8)):
            number = number | (parts[further] << (8 * (further - first) - offset))
        numbers.append(number & ((1 << width) - 1))
    return torch.stack(numbers, dim=-1).flatten(-2)
