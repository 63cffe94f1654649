"""What a layer's cache stores: the entries of one layer of one fork, as they are or packed.

In: what a method keeps of the prompt (`CompressedKV`), and the keys and values of new tokens. Out:
products of queries with all keys, and mixtures of all values. When entries join and which leave is the
cache's business (`kvbench.engine.cache`).

Shapes have no batch dimension: a fork is one row.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels.decode_attention import EntryTable, entry_table, is_readable, products
from kvbench.kernels.quantize import Codec, Packed, Scheme, never
from kvbench.kv import CompressedKV, weighted_entries

GROWTH = 256
"""Entries by which buffers grow that are full and were not told how many entries will come."""

NUMBERS = ("positions", "log_weights", "scores", "denominators")
"""Buffers [kv_heads, reserved] of numbers that every entry has, wherever its key and value lie."""

BUFFERS = ("keys", "values", *NUMBERS)


class Entries:
    """Entries in buffers, all of them as they are.

    Buffers are reserved once, and new entries are written in place. The first `length` entries of a
    buffer are held; what lies behind them is room. The buffer of keys begins with entry `first_key`, the
    buffer of values with entry `first_value`.

    Args:
        held: what a method keeps of the prompt, batch 1.
        room: entries that will join, if the caller knows.
        keeps_scores: whether `CompressedKV.scores` are kept, for a method that asks for them again.

    Attributes:
        length: entries held per head.
        keys: [kv_heads, reserved, head_dim]. values: [kv_heads, reserved, value_dim].
        positions: [kv_heads, reserved] int64. log_weights, scores, denominators: [kv_heads, reserved]
            float32, or None; all as in `CompressedKV`.
        keys_only: leading entries that hold a key and no value.
        value_range: least and largest value of each channel so far, two tensors [kv_heads, value_dim];
            None where outputs are not clamped (`CompressedKV.value_range`).
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    log_weights: Tensor | None
    scores: Tensor | None
    denominators: Tensor | None

    def __init__(self, held: CompressedKV, room: int, *, keeps_scores: bool = False) -> None:
        self.length = held.keys.shape[2]
        self.keys_only = held.keys_only
        parts = {
            "keys": held.keys[:, :, self.first_key :],
            "values": held.values[:, :, self.first_value - held.keys_only :],
            "positions": held.positions,
            "log_weights": held.log_weights,
            "scores": held.scores if keeps_scores else None,
            "denominators": held.denominators,
        }
        for name, part in parts.items():
            setattr(self, name, None if part is None else _with_room(part[0], room))
        self.value_range: tuple[Tensor, Tensor] | None = None
        if held.value_range is not None:
            least, largest = held.value_range
            self.value_range = (least[0], largest[0])

    @property
    def first_key(self) -> int:
        """The entry whose key the buffer of keys begins with."""
        return 0

    @property
    def first_value(self) -> int:
        """The entry whose value the buffer of values begins with."""
        return self.keys_only

    @property
    def is_read_by_kernel(self) -> bool:
        """Whether `kvbench.kernels.decode_attention` can attend to these entries: all have key and
        value, attention is an ordinary softmax over them, and it can read those that are packed."""
        return not self.keys_only and self.denominators is None

    @property
    def packed(self) -> tuple[Packed, Packed] | None:
        """Keys and values of the packed entries, where the kernels read them; None otherwise."""
        return None

    def count(self) -> Tensor:
        """Entries held per head, padding left out: [kv_heads] int64, on the entries' device where it
        has to be counted, else on the host."""
        if self.log_weights is None:
            return torch.full((self.keys.shape[0],), self.length, dtype=torch.int64)
        return weighted_entries(self.log_weights[:, : self.length])

    def nbytes(self, count: int) -> int:
        """Bytes of `count` entries as stored: keys, values, weights and scores. Room for entries to come
        and positions are not counted."""
        total = 0
        for part in self.buffers(("log_weights", "scores", "denominators")).values():
            total += part[:, :count].nbytes
        for part in self.value_range or ():
            total += part.nbytes
        total += self.keys[:, : count - self.first_key].nbytes
        total += self.values[:, : count - self.first_value].nbytes
        return total

    def reserved_bytes(self) -> int:
        """Bytes of the buffers, which a clone has of its own."""
        return sum(part.nbytes for part in self.buffers().values())

    def buffers(self, names: Sequence[str] = BUFFERS) -> dict[str, Tensor]:
        """The named buffers that there are, by name."""
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def clone(self) -> Entries:
        """A copy that shares nothing with this one that either of them writes to."""
        twin = copy.copy(self)
        for name, part in self.buffers().items():
            setattr(twin, name, part.clone())
        return twin

    def reserve(self, entries: int, more: int = 0) -> None:
        """Make room for `entries` in all. Where the buffers are too small, they are copied to larger
        ones, with room for `more` entries beyond these."""
        reserved = self.positions.shape[1]
        if entries <= reserved:
            return
        for name, part in self.buffers().items():
            setattr(self, name, _with_room(part, entries + more - reserved))

    def append(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Store t more entries: key [kv_heads, t, head_dim], value [kv_heads, t, value_dim], positions
        [t]. Where a method repeats keys to query heads, the new ones are repeated, too."""
        stored_heads = self.keys.shape[0]
        if stored_heads != key.shape[0]:
            key = key.repeat_interleave(stored_heads // key.shape[0], dim=0)
            value = value.repeat_interleave(stored_heads // value.shape[0], dim=0)
        before, after = self.length, self.length + key.shape[1]
        self.reserve(after, GROWTH)
        self.keys[:, before - self.first_key : after - self.first_key] = key
        self.values[:, before - self.first_value : after - self.first_value] = value
        self.positions[:, before:after] = positions
        # An entry that has left may have stood here.
        for part in self.buffers(("log_weights", "scores")).values():
            part[:, before:after] = 0
        if self.denominators is not None:
            self.denominators[:, before:after] = 1
        self.length = after

    def keep_last(self, count: int) -> None:
        """Let go of all entries but the last `count`."""
        gone = self.length - count
        for part in self.buffers().values():
            part[:, :count] = part[:, gone : self.length].clone()
        self.length = count

    def remove(self, leaving: Tensor) -> None:
        """Let go of one entry of each head, `leaving` [kv_heads]; the last entry takes its place."""
        self._fill_from_last(leaving, BUFFERS)

    def _fill_from_last(self, leaving: Tensor, names: Sequence[str]) -> None:
        head = torch.arange(self.keys.shape[0], device=self.keys.device)
        for part in self.buffers(names).values():
            part[head, leaving] = part[:, self.length - 1].clone()
        self.length -= 1

    def dot_keys(self, query: Tensor) -> Tensor:
        """q.k of query [kv_heads, q, head_dim] with all entries: [kv_heads, q, entries]; see
        `products`."""
        return products(query, self.keys[:, : self.length])

    def mix_values(self, weights: Tensor) -> Tensor:
        """weights [kv_heads, q, entries] float32 . v of all entries: [kv_heads, q, value_dim] in the
        values' dtype."""
        weights = weights[..., self.first_value :].to(self.values.dtype)
        return weights @ self.values[:, : self.length - self.first_value]

    def cuts(self, tokens: int) -> Sequence[int]:
        """The ends of the pieces in which so many tokens may join at once, the last being `tokens`."""
        return [tokens]

    def pack_keys(self) -> None:
        """Pack the keys that are due before the queries of their own step read them."""

    def pack(self) -> None:
        """Pack the keys and values that are due after their step."""


class Codecs(NamedTuple):
    """A scheme's codecs of keys and of values, which may have packed different numbers of entries."""

    keys: Codec[Any]
    values: Codec[Any]


class PackedEntries(Entries):
    """Entries that a scheme has packed, followed by those that it has not packed yet.

    A scheme packs all entries, or all but the last ones (`Codec.due`). The packed ones lie in the
    codecs, and the buffers begin behind them.

    Args:
        scheme: how entries are packed.
        layer, seed: what the scheme's draws depend on.
    """

    def __init__(
        self,
        held: CompressedKV,
        room: int,
        scheme: Scheme,
        *,
        layer: int,
        seed: int,
        keeps_scores: bool = False,
    ) -> None:
        self.codecs = Codecs(*scheme.codecs(held.keys[0], held.values[0], layer=layer, seed=seed))
        super().__init__(held, room, keeps_scores=keeps_scores)

    @property
    def first_key(self) -> int:
        """See `Entries.first_key`."""
        return self.codecs.keys.count

    @property
    def first_value(self) -> int:
        """See `Entries.first_value`."""
        return self.keys_only + self.codecs.values.count

    @property
    def is_read_by_kernel(self) -> bool:
        """See `Entries.is_read_by_kernel`."""
        return super().is_read_by_kernel and self.packed is not None

    @property
    def packed(self) -> tuple[Packed, Packed] | None:
        """See `Entries.packed`: integers of a prompt, to which no token's entry is added."""
        keys, values = self.codecs
        if keys.due is not never or values.due is not never:
            return None
        blocks = [block for codec in (keys, values) for block in codec.blocks]
        if len(blocks) != 2 or not is_readable(*blocks):
            return None
        return blocks[0], blocks[1]

    def nbytes(self, count: int) -> int:
        """See `Entries.nbytes`; with those of the packed entries."""
        return super().nbytes(count) + self.codecs.keys.nbytes + self.codecs.values.nbytes

    def remove(self, leaving: Tensor) -> None:
        """See `Entries.remove`. All entries must be packed (a scheme `by_entry`)."""
        self._fill_from_last(leaving, NUMBERS)
        keys, values = self.codecs
        self.codecs = Codecs(keys.without(leaving), values.without(leaving))

    def dot_keys(self, query: Tensor) -> Tensor:
        """See `Entries.dot_keys`."""
        logits = products(query, self.keys[:, : self.length - self.first_key])
        if not self.first_key:
            return logits
        packed = self.codecs.keys.dot(query)
        return torch.cat([packed, logits], dim=-1) if logits.shape[-1] else packed

    def mix_values(self, weights: Tensor) -> Tensor:
        """See `Entries.mix_values`."""
        mixed = super().mix_values(weights)
        if not self.codecs.values.count:
            return mixed
        packed = self.codecs.values.mix(weights[..., self.keys_only : self.first_value])
        return packed.add_(mixed).to(mixed.dtype)

    def cuts(self, tokens: int) -> Sequence[int]:
        """See `Entries.cuts`: a token whose step packs keys before it attends joins alone."""
        codec = self.codecs.keys
        if not codec.ahead:
            return [tokens]
        packed, ends = codec.count, {tokens}
        for i in range(tokens):
            taken = codec.due(packed, self.length + i + 1 - packed)
            if taken:
                packed += taken
                ends |= {i, i + 1}
        return sorted(ends - {0})

    def pack_keys(self) -> None:
        """See `Entries.pack_keys`."""
        if self.codecs.keys.ahead:
            first = self.first_key
            keys, _ = self.codecs.keys.take(self.keys[:, : self.length - first])
            self.codecs = self.codecs._replace(keys=keys)
            self._move_to_front(self.keys, first, self.first_key)

    def pack(self) -> None:
        """See `Entries.pack`."""
        first_key, first_value = self.first_key, self.first_value
        keys, _ = self.codecs.keys.take(self.keys[:, : self.length - first_key])
        values, _ = self.codecs.values.take(self.values[:, : self.length - first_value])
        self.codecs = Codecs(keys, values)
        self._move_to_front(self.keys, first_key, self.first_key)
        self._move_to_front(self.values, first_value, self.first_value)

    def _move_to_front(self, part: Tensor, before: int, now: int) -> None:
        """A buffer that began with entry `before` begins with entry `now`."""
        if now > before:
            part[:, : self.length - now] = part[:, now - before : self.length - before].clone()


def table_of(stores: Sequence[Entries]) -> EntryTable:
    """Where the entries of these rows are, for the kernels, all of which read them
    (`Entries.is_read_by_kernel`) and either all or none of which have packed ones.

    Launches are made for a power of two of entries, so that a captured step serves all rows of like
    size.
    """
    packed = [store.packed for store in stores if store.packed is not None]
    longest = max(store.keys.shape[1] for store in stores)
    longest_packed = max((keys.count for keys, _ in packed), default=0)
    return entry_table(
        [store.keys for store in stores],
        [store.values for store in stores],
        [store.log_weights for store in stores],
        packed=packed,
        longest=_power_of_two(longest),
        longest_packed=_power_of_two(longest_packed),
    )


def _power_of_two(number: int) -> int:
    """The least power of two that is no less than `number`; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0


def _with_room(part: Tensor, room: int) -> Tensor:
    """A copy of part [kv_heads, n, ...] with `room` more entries, zeros."""
    other_dimensions = [0, 0] * (part.dim() - 2)
    return F.pad(part, [*other_dimensions, 0, room]).contiguous()
