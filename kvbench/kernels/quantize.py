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
from functools import cached_property, lru_cache, partial, reduce
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.errors import UserError
from kvbench.errors.options import Count, check_options

CACHED = 1 << 18
"""How many numbers are restored at a time on a CPU: one MiB of float32, which stays in its cache."""

MERGED = 256
"""New rows are merged into a codec's last block while that has fewer rows than this. A larger block is
left alone, so that it is not copied again and again."""


class SchemeError(UserError, ValueError):
    """An option of a storage scheme that is not allowed; its message begins with ``quantize.``."""


class Block(ABC):
    """Consecutive rows [heads, n, d] in packed form. Subclasses are frozen dataclasses."""

    ROWS: ClassVar[tuple[str, ...]]
    """The fields that have a place for every row: tensors [heads, rows, ...], or tuples of such."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of rows of each head."""

    @abstractmethod
    def dot(self, query: Tensor) -> Tensor:
        """Inner products of query [heads, q, d] with every row: [heads, q, n] float32."""

    @property
    def nbytes(self) -> int:
        """The bytes of the rows as they are stored."""
        sizes: list[int] = []
        for name in self.ROWS:
            map_tensors(lambda x: sizes.append(x.nbytes), getattr(self, name))
        return sum(sizes)

    def joined(self, other: Self) -> Self:
        """A block of these rows, followed by those of another block of the same kind."""
        joined = {
            name: map_tensors(
                lambda *parts: torch.cat(parts, 1), getattr(self, name), getattr(other, name)
            )
            for name in self.ROWS
        }
        return replace(self, **joined)  # type: ignore[type-var]

    def without(self, places: Tensor) -> Self:
        """A block without one row of each head, at places [heads]; the last row moves to that
        place."""
        left = {
            name: map_tensors(lambda x: without_rows(x, places), getattr(self, name))
            for name in self.ROWS
        }
        return replace(self, **left)  # type: ignore[type-var]


def map_tensors(change: Callable[..., Any], *fields: Any) -> Any:
    """Apply `change` to tensors, or to the tensors at each place of tuples of equal length, which may
    be nested; return what `change` returns, in such tuples."""
    if isinstance(fields[0], Tensor):
        return change(*fields)
    return tuple(map_tensors(change, *parts) for parts in zip(*fields, strict=True))


class ValueBlock(Block):
    """A block whose rows can also be averaged, as attention does with values. (QJL's signs of keys
    cannot be averaged.)"""

    @abstractmethod
    def mix(self, weights: Tensor) -> Tensor:
        """Sum the rows with weights [heads, q, n]; returns [heads, q, d] float32."""


def never(count: int, waiting: int) -> int:
    """The `Codec.due` of a codec that packs no further rows: always 0."""
    return 0


def without_rows(stored: Tensor, places: Tensor) -> Tensor:
    """Drop one row of each head, at places [heads], from `stored` [heads, n, ...]. The last row moves
    to its place; returns a new tensor [heads, n - 1, ...]."""
    kept = stored[:, :-1].clone()
    inside = (places < kept.shape[1]).nonzero()[:, 0]  # the last row may be the one that leaves
    kept[inside, places[inside]] = stored[inside, -1]
    return kept


B = TypeVar("B", bound=Block)


@dataclass(frozen=True)
class Codec(Generic[B]):
    """The packed rows of a layer's keys, or of its values, oldest first. The newest rows stay exact,
    outside the codec, until they are due.

    Attributes:
        pack: a function that packs rows [heads, n, d] into a block.
        due: a function of the number of packed rows and the number of exact rows that returns how many
            exact rows, the oldest, are to be packed now.
        fixed_nbytes: the bytes that are stored beside the blocks.
        ahead: whether rows that become due with a token are packed before it attends (else after).
        blocks: the packed rows.
    """

    pack: Callable[[Tensor], B]
    due: Callable[[int, int], int] = never
    fixed_nbytes: int = 0
    ahead: bool = False
    blocks: tuple[B, ...] = field(default=(), repr=False)

    @property
    def count(self) -> int:
        """The number of packed rows of each head."""
        return sum(block.count for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """The bytes of the packed rows as they are stored."""
        return self.fixed_nbytes + sum(block.nbytes for block in self.blocks)

    def take(self, rows: Tensor) -> Codec[B]:
        """The codec with the exact rows that are due, which are the first of `rows`.

        Args:
            rows: [heads, t, d], all exact rows, oldest first.
        """
        due = self.due(self.count, rows.shape[1])
        if not due:
            return self
        blocks = [*self.blocks, self.pack(rows[:, :due])]
        if self.blocks and self.blocks[-1].count < MERGED:
            new = blocks.pop()
            blocks[-1] = blocks[-1].joined(new)
        return replace(self, blocks=tuple(blocks))

    def without(self, places: Tensor) -> Codec[B]:
        """The codec without one row of each head, at places [heads] (`Block.without`); there must be
        rows. No other row is packed anew."""
        (block,) = self.whole
        return replace(self, blocks=(block.without(places),))

    @property
    def whole(self) -> tuple[B, ...]:
        """All packed rows as one block, in a tuple; an empty tuple where there is no row."""
        if not self.blocks:
            return ()
        return (reduce(lambda block, following: block.joined(following), self.blocks),)

    def dot(self, query: Tensor) -> Tensor:
        """Inner products of query [heads, q, d] with every packed row: [heads, q, count] float32."""
        return torch.cat([block.dot(query) for block in self.blocks], dim=-1)

    def mix(self: Codec[ValueBlock], weights: Tensor) -> Tensor:
        """Sum the packed rows with weights [heads, q, count]; returns [heads, q, d] float32."""
        parts = weights.split([block.count for block in self.blocks], dim=-1)
        mixed = [block.mix(part) for block, part in zip(self.blocks, parts, strict=True)]
        return torch.stack(mixed).sum(0)


Codecs = tuple[Codec[Any], Codec[ValueBlock]]
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
        """Pack a prompt's keys and values [heads, n, d].

        Args:
            layer: the layer's number among the compressed layers, from 0.
            seed: the seed of the random projections and rotations.

        Returns:
            the codecs of the keys and of the values. The rows beyond a codec's `count` stay exact.
        """
        ...

    def nbytes(self, heads: int, n: int, d: int, itemsize: int, layer: int = 0) -> int:
        """The bytes of n entries as they are stored.

        Args:
            heads: KV heads.
            d: numbers of a key, and of a value.
            itemsize: bytes of a number of an exact row.
            layer: see `codecs`.
        """
        ...

    def model_bytes(self, dims: Mapping[int, tuple[int, int]]) -> int:
        """The bytes that all prompts of a model share.

        Args:
            dims: for each layer, the numbers of a key and of a value.
        """
        ...


@dataclass(frozen=True)
class Quantization:
    """The scheme of packed integers with a scale and a zero point per group (see the module).

    Attributes:
        bits: bits of a number.
        group_size: how many numbers share a scale and a zero point.
        keys: channel (groups of a key's channel run along the entries; the keys and values of new
            tokens stay exact) | entry (groups run along an entry's channels, as FlexGen stores what
            H2O keeps; new tokens are packed, too, and entries may leave while decoding).

    Raises:
        SchemeError: an option that its type does not allow.
    """

    bits: Literal[2, 4] = 4
    group_size: Count = 64
    keys: Literal["channel", "entry"] = "channel"

    def __post_init__(self) -> None:
        check_options(self, "quantize.", SchemeError)

    @property
    def by_entry(self) -> bool:
        """See `Scheme`."""
        return self.keys == "entry"

    def codecs(self, keys: Tensor, values: Tensor, *, layer: int, seed: int) -> Codecs:
        """See `Scheme`: keys per channel or per entry, values per entry. Layer and seed change
        nothing."""
        return self._codec(keys, not self.by_entry), self._codec(values, False)

    def _codec(self, rows: Tensor, by_channel: bool) -> Codec:
        """Make a codec of these rows [heads, n, d]. It packs further rows only if `by_entry`."""
        pack_rows = partial(pack, quantization=self, by_channel=by_channel)
        codec = Codec(pack_rows, due=lambda _, exact: exact).take(rows)
        return codec if self.by_entry else replace(codec, due=never)

    def nbytes(self, heads: int, n: int, d: int, itemsize: int, layer: int = 0) -> int:
        """See `Scheme`."""
        shape = (heads, n, d)
        keys = packed_bytes(shape, self, itemsize, by_channel=not self.by_entry)
        return keys + packed_bytes(shape, self, itemsize, by_channel=False)

    def model_bytes(self, dims: Mapping[int, tuple[int, int]]) -> int:
        """See `Scheme`: 0, since nothing is shared between prompts."""
        return 0


@dataclass(frozen=True)
class Packed(ValueBlock):
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
        """The number of entries of each head."""
        return self.along if self.by_channel else self.codes.shape[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (heads, n, d) of the numbers that are packed."""
        heads, rows, _ = self.codes.shape
        return (heads, self.along, rows) if self.by_channel else (heads, rows, self.along)

    def dot(self, query: Tensor) -> Tensor:
        """See `Block`.

        A number is its code's distance from the middle code times the group's scale, plus a number
        that the group shares (`_middles`). The first part is restored for some rows at a time; the
        second is multiplied with the query once for the group.
        """
        query = query.float()
        if self.by_channel:
            return self._dot_channels(query)
        dots = query.new_empty(*query.shape[:2], self.count)
        for rows, codes in self._table.pieces(self.codes, self.along):
            dots[..., rows] = query @ self._scaled(codes, self.scale[:, rows]).mT
        group_sums = in_groups(query, self._size).sum(-1)
        return dots.add_(group_sums @ self._middles.mT)

    def mix(self, weights: Tensor) -> Tensor:
        """See `ValueBlock`, and `dot` for how numbers are restored."""
        weights = weights.float()
        mixed = weights.new_zeros(*weights.shape[:2], self.along)
        for rows, codes in self._table.pieces(self.codes, self.along):
            mixed.baddbmm_(weights[..., rows], self._scaled(codes, self.scale[:, rows]))
        return mixed.add_(self._spread(weights @ self._middles))

    @property
    def _size(self) -> int:
        """The numbers of a group; the last one may have fewer."""
        return min(self.quantization.group_size, self.along)

    @property
    def _table(self) -> CodeTable:
        """The table that restores a code as its distance from the middle code, so that rounding is
        small."""
        return centred(self.quantization.bits, self.codes.device)

    @property
    def _middles(self) -> Tensor:
        """The number that the middle code, (2^bits - 1) / 2, stands for: [heads, rows, groups]
        float32."""
        return self.zero.float() + self.scale.float() * ((2**self.quantization.bits - 1) / 2)

    def _spread(self, groups: Tensor) -> Tensor:
        """Repeat the number of each group [..., groups] for all its columns: [..., along]."""
        return groups.repeat_interleave(self._size, dim=-1)[..., : self.along]

    def _scaled(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Multiply codes [heads, rows, columns] by their groups' scales [heads, rows, groups]; in
        place unless the last group is short."""
        columns = codes.shape[-1]
        grouped = in_groups(codes, self._size).mul_(scale.float()[..., None])
        return grouped.flatten(-2)[..., :columns]

    def _dot_channels(self, query: Tensor) -> Tensor:
        """`dot` where rows are channels: for some groups of entries at a time, the first of which
        begins with a byte."""
        bits = self.quantization.bits
        heads, d, _ = self.codes.shape
        dots = self._spread(query @ self._middles).contiguous()
        unit = math.lcm(self._size, 8 // bits)  # entries that fill groups and bytes
        step = unit * max(1, at_a_time(query.device) // (heads * d * unit))
        for first in range(0, self.along, step):
            last = min(self.along, first + step)
            part = self.codes[..., first * bits // 8 : -(-last * bits // 8)]
            scale = self.scale[..., first // self._size : -(-last // self._size)]
            codes = self._scaled(self._table.restored(part, last - first), scale)
            dots[..., first:last].baddbmm_(query, codes)
        return dots


def in_groups(rows: Tensor, size: int) -> Tensor:
    """View rows [..., columns] as [..., groups, size]; a copy where the last group is short, which
    zeros then fill up."""
    padded = F.pad(rows, (0, -rows.shape[-1] % size)) if rows.shape[-1] % size else rows
    return padded.unflatten(-1, (-1, size))


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


def pack(x: Tensor, quantization: Quantization, *, by_channel: bool) -> Packed:
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
    return Packed(pack_bits(codes, bits), scale, zero, columns, by_channel, quantization)


def unpack(packed: Packed) -> Tensor:
    """Restore the numbers [heads, n, d] that the codes stand for, each within half a scale of what was
    packed."""
    bits = packed.quantization.bits
    along = packed.along
    size = min(packed.quantization.group_size, along)
    codes = unpack_bits(packed.codes, bits, along).to(packed.scale.dtype)
    scale = packed.scale.repeat_interleave(size, dim=-1)[..., :along]
    zero = packed.zero.repeat_interleave(size, dim=-1)[..., :along]
    rows = torch.addcmul(zero, codes, scale)
    return rows.transpose(1, 2) if packed.by_channel else rows


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., m] below 2^bits into bytes [..., ceil(m * bits / 8)] uint8: code j of a row
    begins at bit j * bits of the row, the lowest bit of a byte first."""
    if 8 % bits:
        shifts = torch.arange(bits, device=codes.device, dtype=torch.uint8)
        return pack_bits(((codes[..., None] >> shifts) & 1).flatten(-2), 1)
    per_byte = 8 // bits
    codes = F.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % per_byte)).contiguous()
    if codes.storage_offset() % per_byte:
        codes = codes.clone()
    # The codes of a byte are seen as one wide number. Each step moves the upper half of its codes down,
    # beside the lower half.
    wide = codes.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[per_byte])
    for halving in range(per_byte.bit_length() - 1):
        wide = wide | (wide >> ((8 - bits) << halving))
    return (wide & 255).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Restore the codes [..., count] uint8 that `pack_bits` packed."""
    if 8 % bits:
        single = unpack_bits(packed, 1, bits * count).unflatten(-1, (count, bits))
        shifts = torch.arange(bits, device=packed.device, dtype=torch.uint8)
        return (single << shifts).sum(-1, dtype=torch.uint8)
    places = [(packed >> (bits * place)) & (2**bits - 1) for place in range(8 // bits)]
    return torch.stack(places, dim=-1).flatten(-2)[..., :count]


def at_a_time(device: torch.device) -> int:
    """How many numbers are restored from codes at a time: `CACHED` on a CPU, 256 MiB of them on a
    GPU."""
    return 1 << 26 if device.type == "cuda" else CACHED


@dataclass(frozen=True)
class CodeTable:
    """A table that restores packed codes to the numbers that they stand for, several codes by one
    look-up.

    A CPU reads 16 adjacent bytes of a table nearly as fast as 4. So the table has a row for every
    combination of several adjacent codes, and one look-up restores all of them.

    Attributes:
        numbers: [2^bits], what each code stands for: float32, or int8, which takes less time where
            codes have one bit.
        bits: bits of a code, 1 to 5.
    """

    numbers: Tensor
    bits: int

    @property
    def together(self) -> int:
        """How many codes one look-up restores: for int8 numbers the codes of a byte; for float32
        numbers four, or two where codes have more than 3 bits, so that the table stays in cache."""
        if self.numbers.dtype == torch.int8:
            return 8 // self.bits
        return 4 if self.bits <= 3 else 2

    @cached_property
    def table(self) -> Tensor:
        """[2^(together * bits)]: for every combination of `together` codes their numbers side by side,
        viewed as one number of a wider dtype, because torch looks up single numbers fastest."""
        places = torch.arange(1 << (self.together * self.bits), device=self.numbers.device)
        shifts = self.bits * torch.arange(self.together, device=self.numbers.device)
        codes = (places[:, None] >> shifts) & ((1 << self.bits) - 1)
        wide = {2: torch.int16, 4: torch.int32, 8: torch.complex64, 16: torch.complex128}
        side_by_side = self.numbers[codes]
        return side_by_side.view(wide[self.together * self.numbers.itemsize])[:, 0]

    def pieces(
        self, packed: Tensor, count: int, *, rows: int | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Restore rows of packed codes piece by piece, so that a piece is still in a processor's cache
        when it is used.

        Args:
            packed: [heads, n, bytes], see `pack_bits`.
            count: codes of a row.
            rows: rows of a piece; None for as many as `at_a_time` allows.

        Yields:
            which rows, and their numbers [heads, rows, count] float32. The next piece is written to
            the same memory: a piece must be used before the next is asked for.
        """
        heads, n, _ = packed.shape
        if rows is None:
            rows = at_a_time(packed.device) // max(1, heads * count)
        rows = max(1, min(n, rows))
        width = self.bits * self.together
        lookups = -(-count // self.together)  # of a row
        all_places = torch.empty(heads * rows * lookups, dtype=torch.int32, device=packed.device)
        wide = torch.empty(heads * rows * lookups, dtype=self.table.dtype, device=packed.device)
        as_float = torch.empty(heads * rows * lookups * self.together, device=packed.device)
        for start in range(0, n, rows):
            part = packed[:, start : start + rows]
            shape = heads, part.shape[1], lookups
            size = math.prod(shape)
            places = all_places[:size]
            places.view(shape).copy_(part if width == 8 else words(part, width)[..., :lookups])
            torch.index_select(self.table, 0, places, out=wide[:size])
            numbers = wide[:size].view(self.numbers.dtype)
            if self.numbers.dtype != torch.float32:
                numbers = as_float[: numbers.numel()].copy_(numbers)
            yield (
                slice(start, start + part.shape[1]),
                numbers.view(heads, part.shape[1], -1)[..., :count],
            )

    def restored(self, packed: Tensor, count: int) -> Tensor:
        """Restore all rows at once: packed [heads, n, bytes] as numbers [heads, n, count] float32."""
        ((_, numbers),) = self.pieces(packed, count, rows=packed.shape[1])
        return numbers

    def products(self, query: Tensor, packed: Tensor) -> Tensor:
        """Inner products of query [heads, q, count] float32 with the numbers of packed [heads, n,
        bytes]: [heads, q, n] float32."""
        out = query.new_empty(*query.shape[:2], packed.shape[1])
        for rows, numbers in self.pieces(packed, query.shape[-1]):
            out[..., rows] = query @ numbers.mT
        return out

    def mixture(self, weights: Tensor, packed: Tensor, count: int) -> Tensor:
        """Sum the rows of packed [heads, n, bytes], `count` numbers each, with weights [heads, q, n]
        float32; returns [heads, q, count] float32."""
        out = weights.new_zeros(*weights.shape[:2], count)
        for rows, numbers in self.pieces(packed, count):
            out.baddbmm_(weights[..., rows], numbers)
        return out


@lru_cache(maxsize=8)
def centred(bits: int, device: torch.device) -> CodeTable:
    """The table that restores each code as its distance from the middle code, (2^bits - 1) / 2."""
    middle = (2**bits - 1) / 2
    return CodeTable(torch.arange(1 << bits, dtype=torch.float32, device=device) - middle, bits)


@lru_cache(maxsize=8)
def signs(device: torch.device) -> CodeTable:
    """The table that restores bits as signs: -1 for 0, 1 for 1."""
    return CodeTable(torch.tensor([-1, 1], dtype=torch.int8, device=device), 1)


def words(packed: Tensor, width: int) -> Tensor:
    """Cut each row of bytes [..., m] into numbers of `width` <= 24 bits, the lowest bits first: int32,
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
