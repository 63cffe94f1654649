"""What a layer's cache stores: the entries of one layer of one fork, in the model's dtype or packed.

In: what a method keeps of the prompt (`CompressedKV`), and the keys and values of new tokens. Out:
products of queries with all keys, and mixtures of all values. The caches of `kvbench.engine.cache`
decide when entries are added and which are removed.

Shapes have no batch dimension, since a fork is one row of a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels.decode_attention import products
from kvbench.kernels.entry_table import EntryTable, entry_table
from kvbench.kernels.quantize import Codec, Scheme
from kvbench.kv import CompressedKV, weighted_entries

GROWTH = 256
"""How many entries more than necessary a full buffer has room for after it has grown."""

NUMBERS = ("positions", "log_weights", "scores", "denominators")
"""The buffers that hold one number per entry, [kv_heads, reserved]. They begin with the first entry,
also where keys and values of the first entries are packed and not in buffers."""

BUFFERS = ("keys", "values", *NUMBERS)
"""All buffers of a store."""


class Entries:
    """Entries in buffers, in the model's dtype.

    Buffers are reserved once, and new entries are written in place. `length` entries are held; the rest
    of a buffer is room for entries to come. The buffer of keys begins with the entry number `first_key`,
    the buffer of values with the entry number `first_value`.

    Args:
        compressed: what a method keeps of the prompt, batch 1.
        room: how many entries will be added, 0 if the caller does not know.
        keeps_scores: whether `CompressedKV.scores` are stored, for a method that reads them again while
            decoding.

    Attributes:
        length: the number of entries per head.
        keys: [kv_heads, reserved, head_dim].
        values: [kv_heads, reserved, value_dim].
        positions: [kv_heads, reserved] int64, as in `CompressedKV`.
        log_weights, scores, denominators: [kv_heads, reserved] float32, or None, as in `CompressedKV`.
        keys_only: how many of the first entries have a key and no value.
        value_range: the least and the largest value of each channel so far, two tensors [kv_heads,
            value_dim]; None where outputs are not clamped (`CompressedKV.value_range`).
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    log_weights: Tensor | None
    scores: Tensor | None
    denominators: Tensor | None

    def __init__(self, compressed: CompressedKV, room: int, *, keeps_scores: bool = False) -> None:
        self.length = compressed.keys.shape[2]
        self.keys_only = compressed.keys_only
        tensors = {
            "keys": compressed.keys[:, :, self.first_key :],
            "values": compressed.values[:, :, self.first_value - compressed.keys_only :],
            "positions": compressed.positions,
            "log_weights": compressed.log_weights,
            "scores": compressed.scores if keeps_scores else None,
            "denominators": compressed.denominators,
        }
        for name, tensor in tensors.items():
            setattr(self, name, None if tensor is None else _with_room(tensor[0], room))
        self.value_range: tuple[Tensor, Tensor] | None = None
        if compressed.value_range is not None:
            least, largest = compressed.value_range
            self.value_range = (least[0], largest[0])

    @property
    def first_key(self) -> int:
        """The number of the entry whose key is the first in the buffer of keys."""
        return 0

    @property
    def first_value(self) -> int:
        """The number of the entry whose value is the first in the buffer of values."""
        return self.keys_only

    @property
    def is_read_by_kernel(self) -> bool:
        """Whether `kvbench.kernels.decode_attention` can compute the attention to these entries: none
        is packed, all have a key and a value, and attention is an ordinary softmax over them."""
        return not self.keys_only and self.denominators is None

    def count(self) -> Tensor:
        """Count the entries of each head without padding: [kv_heads] int64. The result is on the host,
        or on the entries' device where log-weights have to be read to tell padding."""
        if self.log_weights is None:
            return torch.full((self.keys.shape[0],), self.length, dtype=torch.int64)
        return weighted_entries(self.log_weights[:, : self.length])

    def nbytes(self, count: int) -> int:
        """The bytes of `count` entries as stored: keys, values, weights and scores. Room for entries to
        come and positions are not counted."""
        total = 0
        for buffer in self.buffers(("log_weights", "scores", "denominators")).values():
            total += buffer[:, :count].nbytes
        for extreme in self.value_range or ():
            total += extreme.nbytes
        total += self.keys[:, : count - self.first_key].nbytes
        total += self.values[:, : count - self.first_value].nbytes
        return total

    def reserved_bytes(self) -> int:
        """The bytes of all buffers, room included: the memory that a clone takes."""
        return sum(buffer.nbytes for buffer in self.buffers().values())

    def buffers(self, names: Sequence[str] = BUFFERS) -> dict[str, Tensor]:
        """The buffers with these names, by name, without those that the store does not have."""
        return {name: buffer for name in names if (buffer := getattr(self, name)) is not None}

    def clone(self) -> Entries:
        """A copy with buffers of its own. What the two share, packed entries and `value_range`, is never
        written to: a change replaces it."""
        twin = copy.copy(self)
        for name, buffer in self.buffers().items():
            setattr(twin, name, buffer.clone())
        return twin

    def reserve(self, entries: int, more: int = 0) -> None:
        """Make the buffers large enough for `entries` entries. Buffers that are too small are copied to
        larger ones, which have room for `more` entries beyond these."""
        reserved = self.positions.shape[1]
        if entries <= reserved:
            return
        for name, buffer in self.buffers().items():
            setattr(self, name, _with_room(buffer, entries + more - reserved))

    def append(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Add t entries with log-weight 0.

        Args:
            key: [kv_heads, t, head_dim].
            value: [kv_heads, t, value_dim].
            positions: [t] int64.
        """
        stored_heads = self.keys.shape[0]
        if stored_heads != key.shape[0]:
            # The method has repeated keys to query heads.
            key = key.repeat_interleave(stored_heads // key.shape[0], dim=0)
            value = value.repeat_interleave(stored_heads // value.shape[0], dim=0)
        before, after = self.length, self.length + key.shape[1]
        self.reserve(after, GROWTH)
        self.keys[:, before - self.first_key : after - self.first_key] = key
        self.values[:, before - self.first_value : after - self.first_value] = value
        self.positions[:, before:after] = positions
        # The numbers of an entry that was removed may still be here.
        for buffer in self.buffers(("log_weights", "scores")).values():
            buffer[:, before:after] = 0
        if self.denominators is not None:
            self.denominators[:, before:after] = 1
        self.length = after

    def keep_last(self, count: int) -> None:
        """Remove all entries but the last `count`."""
        removed = self.length - count
        for buffer in self.buffers().values():
            # A clone, since source and destination may overlap.
            buffer[:, :count] = buffer[:, removed : self.length].clone()
        self.length = count

    def remove(self, entry: Tensor) -> None:
        """Remove one entry of each head, with the index `entry` [kv_heads]. The last entry takes its
        place."""
        self._overwrite_with_last(entry, BUFFERS)

    def _overwrite_with_last(self, entry: Tensor, names: Sequence[str]) -> None:
        """In the named buffers, move the last entry of each head to the place of `entry` [kv_heads]."""
        head = torch.arange(self.keys.shape[0], device=self.keys.device)
        for buffer in self.buffers(names).values():
            buffer[head, entry] = buffer[:, self.length - 1].clone()
        self.length -= 1

    def dot_keys(self, query: Tensor) -> Tensor:
        """The products of queries [kv_heads, q, head_dim] with the keys of all entries, as `products`
        computes them: [kv_heads, q, entries]."""
        return products(query, self.keys[:, : self.length])

    def mix_values(self, weights: Tensor) -> Tensor:
        """The sums of the values of all entries with weights [kv_heads, q, entries] float32: [kv_heads,
        q, value_dim] in the values' dtype."""
        weights = weights[..., self.first_value :].to(self.values.dtype)
        return weights @ self.values[:, : self.length - self.first_value]

    def cuts(self, tokens: int) -> Sequence[int]:
        """Cut a run of `tokens` new tokens into pieces whose tokens may be added together: the number of
        tokens up to the end of each piece, ascending, the last being `tokens`."""
        return [tokens]

    def pack_keys(self) -> None:
        """Pack the keys that have to be packed before the queries of the same step read them. Nothing
        here; see `PackedEntries`."""

    def pack(self) -> None:
        """Pack the keys and values that have to be packed at the end of a step. Nothing here; see
        `PackedEntries`."""


class Codecs(NamedTuple):
    """The codecs of a scheme, one for keys and one for values, which hold the packed entries. They may
    have packed different numbers of entries."""

    keys: Codec[Any]
    values: Codec[Any]


class PackedEntries(Entries):
    """Entries of which a scheme has packed the first ones. The others are in buffers.

    A scheme packs all entries, or all but the last ones (`Codec.due`). The codecs hold the packed
    entries; the buffers of keys and values begin with the first entry that is not packed.

    Args:
        scheme: how entries are packed.
        layer, seed: the numbers on which the scheme's random draws depend.
    """

    is_read_by_kernel = False

    def __init__(
        self,
        compressed: CompressedKV,
        room: int,
        scheme: Scheme,
        *,
        layer: int,
        seed: int,
        keeps_scores: bool = False,
    ) -> None:
        keys, values = compressed.keys[0], compressed.values[0]
        # Before the buffers are made, since the buffers hold what the codecs have not packed.
        self.codecs = Codecs(*scheme.codecs(keys, values, layer=layer, seed=seed))
        super().__init__(compressed, room, keeps_scores=keeps_scores)

    @property
    def first_key(self) -> int:
        """See `Entries.first_key`."""
        return self.codecs.keys.count

    @property
    def first_value(self) -> int:
        """See `Entries.first_value`."""
        return self.keys_only + self.codecs.values.count

    def nbytes(self, count: int) -> int:
        """See `Entries.nbytes`; the bytes of the packed entries are included."""
        return super().nbytes(count) + self.codecs.keys.nbytes + self.codecs.values.nbytes

    def remove(self, entry: Tensor) -> None:
        """See `Entries.remove`. Every entry must be packed, and on its own (a scheme `by_entry`)."""
        self._overwrite_with_last(entry, NUMBERS)
        keys, values = self.codecs
        self.codecs = Codecs(keys.without(entry), values.without(entry))

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
        """See `Entries.cuts`. A token is a piece of its own if its step packs keys before its query
        reads them: tokens before it must read these keys as they were."""
        codec = self.codecs.keys
        if not codec.ahead:
            return [tokens]
        packed = codec.count
        ends = {tokens}
        for token in range(tokens):
            unpacked = self.length + token + 1 - packed
            newly_packed = codec.due(packed, unpacked)
            if newly_packed:
                packed += newly_packed
                ends |= {token, token + 1}  # a piece ends before the token, and one with it
        return sorted(ends - {0})

    def pack_keys(self) -> None:
        """See `Entries.pack_keys`."""
        if self.codecs.keys.ahead:
            first = self.first_key
            keys = self.codecs.keys.take(self.keys[:, : self.length - first])
            self.codecs = self.codecs._replace(keys=keys)
            self._move_to_front(self.keys, first, self.first_key)

    def pack(self) -> None:
        """See `Entries.pack`."""
        first_key, first_value = self.first_key, self.first_value
        keys = self.codecs.keys.take(self.keys[:, : self.length - first_key])
        values = self.codecs.values.take(self.values[:, : self.length - first_value])
        self.codecs = Codecs(keys, values)
        self._move_to_front(self.keys, first_key, self.first_key)
        self._move_to_front(self.values, first_value, self.first_value)

    def _move_to_front(self, buffer: Tensor, old_first: int, new_first: int) -> None:
        """Let a buffer that begins with the entry number `old_first` begin with `new_first`."""
        if new_first > old_first:
            rest = buffer[:, new_first - old_first : self.length - old_first]
            # A clone, since source and destination may overlap.
            buffer[:, : self.length - new_first] = rest.clone()


def table_of(stores: Sequence[Entries]) -> EntryTable:
    """Make the table by which the kernels find the entries of several rows.

    The kernels' grids are as large as the longest row, rounded up to a power of two, so that a captured
    step can be replayed for rows of about the same length.

    Args:
        stores: one per row. Each `is_read_by_kernel`.
    """
    longest = max(store.keys.shape[1] for store in stores)
    return entry_table(
        [store.keys for store in stores],
        [store.values for store in stores],
        [store.log_weights for store in stores],
        longest=1 << (longest - 1).bit_length() if longest else 0,
    )


def _with_room(tensor: Tensor, room: int) -> Tensor:
    """A copy of tensor [kv_heads, n, ...] with `room` more entries, which are 0."""
    other_dimensions = [0, 0] * (tensor.dim() - 2)
    return F.pad(tensor, [*other_dimensions, 0, room]).contiguous()
