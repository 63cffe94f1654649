"""The entries that a row holds at one layer, and how a decoded token changes them (`Cache`).

A row has one cache for all KV heads of a layer or, where heads hold different numbers of entries, one
for each head. Shapes have no batch dimension. The cache's hook is how the method acts on the entries
while decoding (`kvbench.engine.hooks`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.engine.attention import LayerCall, grown_range, signed_mean
from kvbench.kernels.decode import Eviction
from kvbench.kernels.logits import products, softcapped, softmax
from kvbench.kernels.quantize import Codec, Scheme
from kvbench.kv import CompressedKV, weighted_entries
from kvbench.methods.base import Held

GROWTH = 256
"""How many entries more than necessary a full buffer has room for after it has grown."""
FEW_QUERIES = 8
"""Up to so many queries of a head a CPU multiplies them in less time as second factor: half of it at
1,000 keys of 128 numbers."""
NUMBERS = ("positions", "log_weights", "scores", "denominators")
"""The buffers that hold one number per entry. They begin with the first entry, also where keys and
values of the first entries are packed and not in buffers."""


class Hook:
    """How a method acts on the entries of a cache while decoding; this one leaves them as they are."""

    by_kernel = True
    """Whether steps of one token can go through `kvbench.kernels.decode`."""
    one_by_one = False
    """Whether new tokens are added one at a time, since the entries may change after each."""
    rule: Eviction | None = None
    """The rule by which the kernels evict."""
    granted: int | None = None
    """The entries per head beyond which one leaves for every token; None where the cache grows."""
    keeps_scores = False
    """Whether `CompressedKV.scores` are stored, since the method reads them again."""
    nbytes = 0
    """The bytes that the method needs beside the entries."""

    def hide(self, cache: Cache, logits: Tensor) -> None:
        """Set logits [kv_heads, queries, n] to -inf in place where a query does not see an entry."""

    def after_token(self, cache: Cache, call: LayerCall, weights: Tensor) -> None:
        """Act after a token has attended with the softmax weights [kv_heads, group, 1, n]."""

    def clone(self) -> Hook:
        """The hook of a copy of the cache."""
        return self


GROW = Hook()


PACKING_VERSION = 2
"""To be raised by one when caches of packed entries attend otherwise. A run of a method with `quantize`
does not resume records of another version."""


class PackedEntries(NamedTuple):
    """The entries that a scheme has packed, the first ones of a cache: keys and values may be packed in
    different numbers."""

    keys: Codec[Any]
    values: Codec[Any]


class Cache:
    """The entries of one layer of a row, for KV heads that hold equally many.

    Buffers are reserved once, and new entries are written in place. `length` entries are held; the rest
    of a buffer is room. Keys and values of the first entries may be `packed`; the buffers of keys and
    values then begin with the first entry that is not.

    Args:
        compressed: what a method keeps of the prompt, batch 1.
        room: how many tokens will be added, 0 if the caller does not know.
        capacity: the entries per head that the method may hold after prefill.
        window: the length of the layer's sliding window in tokens; None for full attention.
        scheme: by which entries are packed; None for the model's dtype. `layer` and `seed` decide its
            random draws.

    Attributes:
        length: the entries of each head.
        keys, values: [kv_heads, reserved, head_dim] and [kv_heads, reserved, value_dim].
        positions: [kv_heads, reserved] int64, as in `CompressedKV`.
        log_weights, scores, denominators: [kv_heads, reserved] float32, or None, as in `CompressedKV`.
        keys_only: how many of the first entries have a key and no value.
        value_range: the least and the largest value of each channel so far, two tensors [kv_heads,
            value_dim]; None where outputs are not clamped.
        bytes_peak: the largest number of bytes after the prompt and after every step since.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    log_weights: Tensor | None
    scores: Tensor | None
    denominators: Tensor | None

    def __init__(
        self,
        compressed: CompressedKV,
        room: int = 0,
        hook: Hook = GROW,
        *,
        capacity: int,
        window: int | None = None,
        scheme: Scheme | None = None,
        layer: int = 0,
        seed: int = 0,
    ) -> None:
        if hook.granted is not None:
            # The cache grows up to what is granted; a token is added before one leaves.
            room = min(room, max(0, hook.granted - compressed.keys.shape[2]) + 1)
        self.capacity, self.window, self.hook = capacity, window, hook
        self.packed: PackedEntries | None = None
        if scheme is not None:
            codecs = scheme.codecs(compressed.keys[0], compressed.values[0], layer=layer, seed=seed)
            self.packed = PackedEntries(*codecs)
        self.length = compressed.keys.shape[2]
        self.keys_only = compressed.keys_only
        tensors = {
            "keys": compressed.keys[:, :, self.first_key :],
            "values": compressed.values[:, :, self.first_value - compressed.keys_only :],
            "positions": compressed.positions,
            "log_weights": compressed.log_weights,
            "scores": compressed.scores if hook.keeps_scores else None,
            "denominators": compressed.denominators,
        }
        for name, tensor in tensors.items():
            setattr(self, name, None if tensor is None else _with_room(tensor[0], room))
        self.value_range: tuple[Tensor, Tensor] | None = None
        if compressed.value_range is not None:
            least, largest = compressed.value_range
            self.value_range = (least[0], largest[0])
        self._moments = 0  # how many times bytes were counted: after the prompt, and at every step
        self._bytes_sum = 0
        self.bytes_peak = 0
        self._note_bytes()

    # --- what is held -----------------------------------------------------------------------------

    @property
    def first_key(self) -> int:
        """The number of the entry whose key is the first in the buffer of keys."""
        return 0 if self.packed is None else self.packed.keys.count

    @property
    def first_value(self) -> int:
        """The number of the entry whose value is the first in the buffer of values."""
        return self.keys_only + (0 if self.packed is None else self.packed.values.count)

    @property
    def steps_by_kernel(self) -> bool:
        """Whether steps of one token can go through the kernels, which add the token and attend for all
        rows of a batch at once: entries with key and value, none packed, in an ordinary softmax."""
        plain = self.packed is None and not self.keys_only and self.denominators is None
        has_scores = self.rule is None or self.rule.leaves == "oldest" or self.scores is not None
        return plain and self.window is None and self.hook.by_kernel and has_scores

    @property
    def rule(self) -> Eviction | None:
        """The rule by which the kernels evict; None where no entry leaves."""
        return self.hook.rule

    @property
    def limit(self) -> int | None:
        """The largest number of entries per head: those granted, or those that compression left if
        these are more; None where the cache grows with every token."""
        granted = self.hook.granted
        return None if granted is None else max(granted, self.length)

    def allowed(self, after_prompt: int, fed: int) -> int:
        """The largest number of entries per head that the audit allows, one of rounding included, where
        `after_prompt` were charged after the prompt and `fed` tokens were fed since."""
        granted = self.hook.granted
        return self.capacity + 1 + fed if granted is None else max(granted, after_prompt)

    def count(self) -> Tensor:
        """The entries of each head without padding: [kv_heads] int64, on the host, or on the entries'
        device where log-weights have to be read to tell padding."""
        if self.log_weights is None:
            return torch.full((self.keys.shape[0],), self.length, dtype=torch.int64)
        return weighted_entries(self.log_weights[:, : self.length])

    def held(self, capacity: int, sink: int) -> Held:
        """The entries as `Method.evict` and `Method.restrict` receive them."""
        scores = None if self.scores is None else self.scores[:, : self.length]
        return Held(scores, self.positions[:, : self.length], capacity, sink)

    def buffers(self, names: Sequence[str] = ("keys", "values", *NUMBERS)) -> dict[str, Tensor]:
        """The buffers with these names, by name, without those that the cache does not have."""
        return {name: buffer for name in names if (buffer := getattr(self, name)) is not None}

    def nbytes(self) -> int:
        """The bytes of the entries as stored: keys, values, weights and scores, and what the hook holds.
        Room, positions, and entries that have left a sliding window are not counted."""
        count = self.length if self.window is None else min(self.length, self.window)
        numbers = self.buffers(("log_weights", "scores", "denominators")).values()
        total = self.hook.nbytes + sum(buffer[:, :count].nbytes for buffer in numbers)
        total += sum(extreme.nbytes for extreme in self.value_range or ())
        total += self.keys[:, : count - self.first_key].nbytes
        total += self.values[:, : count - self.first_value].nbytes
        if self.packed is not None:
            total += self.packed.keys.nbytes + self.packed.values.nbytes
        return total

    def reserved_bytes(self) -> int:
        """The bytes of all buffers, room included: the memory that a clone takes."""
        return sum(buffer.nbytes for buffer in self.buffers().values())

    def _note_bytes(self) -> None:
        now = self.nbytes()
        self._moments += 1
        self._bytes_sum += now
        self.bytes_peak = max(self.bytes_peak, now)

    @property
    def bytes_mean(self) -> float:
        """The mean of the bytes after the prompt and after every step since."""
        return self._bytes_sum / self._moments

    def clone(self) -> Cache:
        """A copy with buffers of its own. What the two share, packed entries and `value_range`, is never
        written to: a change replaces it."""
        twin = copy.copy(self)
        twin.hook = self.hook.clone()
        for name, buffer in self.buffers().items():
            setattr(twin, name, buffer.clone())
        return twin

    # --- changes ----------------------------------------------------------------------------------

    def reserve(self, entries: int, more: int = 0) -> None:
        """Make the buffers large enough for `entries` entries. Buffers that are too small are copied to
        larger ones, which have room for `more` entries beyond these."""
        reserved = self.positions.shape[1]
        if entries > reserved:
            for name, buffer in self.buffers().items():
                setattr(self, name, _with_room(buffer, entries + more - reserved))

    def append(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Add t entries with log-weight 0: key [kv_heads, t, head_dim], value [kv_heads, t, value_dim],
        positions [t]."""
        stored_heads = self.keys.shape[0]
        if stored_heads != key.shape[0]:  # the method has repeated keys to query heads
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
        """Remove the entry of each head with the index `entry` [kv_heads]; the last one takes its place.
        Where entries are packed, all must be, each on its own (a scheme `by_entry`)."""
        head = torch.arange(self.keys.shape[0], device=self.keys.device)
        names = NUMBERS if self.packed is not None else ("keys", "values", *NUMBERS)
        for buffer in self.buffers(names).values():
            buffer[head, entry] = buffer[:, self.length - 1].clone()
        self.length -= 1
        if self.packed is not None:
            self.packed = PackedEntries(*(codec.without(entry) for codec in self.packed))

    def replace_with(self, compressed: CompressedKV) -> None:
        """Hold what a method keeps of the entries (`PeriodicCompression.after_token`)."""
        indices, count = compressed.positions[0], compressed.positions.shape[2]
        self.positions[:, :count] = self.positions.gather(1, indices)
        if self.log_weights is not None:
            self.log_weights[:, :count] = self.log_weights.gather(1, indices)
        if compressed.log_weights is not None:
            if self.log_weights is None:
                self.log_weights = compressed.log_weights.new_zeros(self.positions.shape)
            self.log_weights[:, :count] += compressed.log_weights[0]
        self.keys[:, :count] = compressed.keys[0]
        self.values[:, :count] = compressed.values[0]
        self.length = count

    # --- attention --------------------------------------------------------------------------------

    def step(self, call: LayerCall, positions: Tensor) -> Tensor:
        """Add the t tokens of a call of one row, at positions [t], and compute their attention, causal
        among them: [heads, t, value_dim]."""
        outputs = []
        for begin, end in itertools.pairwise([0, *self._cuts(len(positions))]):
            outputs.append(self._attend(call.of_row(0, begin, end), positions[begin:end]))
        self._note_bytes()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _cuts(self, tokens: int) -> Sequence[int]:
        """Cut new tokens into pieces whose tokens are added together: the end of each piece. A token
        whose step packs keys or values ends its piece, since later tokens read them as packed, so that
        the outputs are those of tokens that are fed one by one. It is a piece of its own where keys are
        packed before its query reads them: the tokens before it read them as they were."""
        if self.hook.one_by_one:
            return range(1, tokens + 1)
        ends = {tokens}
        if self.packed is not None:
            for codec, first in zip(self.packed, (self.first_key, self.first_value), strict=True):
                packed, exact = codec.count, self.length - first
                for token in range(tokens):
                    exact += 1
                    due = codec.due(packed, exact)
                    if due:
                        packed, exact = packed + due, exact - due
                        ends |= {token, token + 1} if codec.ahead else {token + 1}
        return sorted(ends - {0})

    def _attend(self, call: LayerCall, positions: Tensor) -> Tensor:
        query, value = call.query[0], call.value[0]
        if self.window is not None and self.length >= self.window + GROWTH:
            # The entries of a sliding-window layer are in the order of their positions.
            self.keep_last(self.window)
        self.append(call.key[0], value, positions)
        if self.packed is not None and self.packed.keys.ahead:
            self._pack_keys()
        heads, tokens, dim = query.shape
        n, stored_heads = self.length, self.keys.shape[0]
        group = heads // stored_heads
        logits = self._dot_keys(query.reshape(stored_heads, group * tokens, dim))
        logits = softcapped(logits.mul_(call.scaling), call.softcap)
        if self.log_weights is not None:
            logits += self.log_weights[:, None, :n]
        if tokens > 1:
            # The new tokens are the last entries; none of them sees a later one.
            order = torch.arange(tokens, device=query.device)
            is_later = (order[None] > order[:, None]).repeat(group, 1)
            logits[..., n - tokens :].masked_fill_(is_later, float("-inf"))
        if self.window is not None:
            has_left = self.positions[:, None, :n] <= (positions - self.window)[None, :, None]
            logits.masked_fill_(has_left.repeat(1, group, 1), float("-inf"))
        self.hook.hide(self, logits)
        sinks = call.sinks
        if sinks is not None:
            sinks = sinks.view(stored_heads, group).repeat_interleave(tokens, dim=1)
        weights = softmax(logits, sinks)
        output = self._mix_values(weights)
        if self.denominators is not None:
            ranges, self.value_range = grown_range(self.value_range, value, group)
            output = signed_mean(
                output, weights, self.denominators[:, :n], ranges, sinks=sinks is not None
            )
        if self.packed is not None:
            self._pack_keys()
            self._pack_values()
        if self.hook.one_by_one:
            self.hook.after_token(self, call, weights.view(stored_heads, group, tokens, n))
        return output.view(stored_heads, group, tokens, -1).reshape(heads, tokens, -1)

    def _dot_keys(self, query: Tensor) -> Tensor:
        """The products of queries [kv_heads, q, head_dim] with the keys of all entries, as `products`
        computes them: [kv_heads, q, entries]."""
        keys = self.keys[:, : self.length - self.first_key]
        if (
            query.shape[1] <= FEW_QUERIES
            and keys.device.type == "cpu"
            and keys.dtype == query.dtype == torch.float32
        ):
            logits = torch.bmm(keys, query.mT).mT.contiguous()
        else:
            logits = products(query, keys)
        if not self.first_key:
            return logits
        assert self.packed is not None
        packed = self.packed.keys.dot(query)
        return torch.cat([packed, logits], dim=-1) if logits.shape[-1] else packed

    def _mix_values(self, weights: Tensor) -> Tensor:
        """The sums of the values of all entries with weights [kv_heads, q, entries] float32: [kv_heads,
        q, value_dim] in the values' dtype."""
        in_buffer = weights[..., self.first_value :].to(self.values.dtype)
        mixed = in_buffer @ self.values[:, : self.length - self.first_value]
        if self.packed is None or not self.packed.values.count:
            return mixed
        packed = self.packed.values.mix(weights[..., self.keys_only : self.first_value])
        return packed.add_(mixed).to(mixed.dtype)

    def _pack_keys(self) -> None:
        """Pack the keys that the scheme packs by now."""
        assert self.packed is not None
        first = self.first_key
        keys = self.packed.keys.take(self.keys[:, : self.length - first])
        self.packed = self.packed._replace(keys=keys)
        self._move_to_front(self.keys, first, self.first_key)

    def _pack_values(self) -> None:
        """Pack the values that the scheme packs by now."""
        assert self.packed is not None
        first = self.first_value
        values = self.packed.values.take(self.values[:, : self.length - first])
        self.packed = self.packed._replace(values=values)
        self._move_to_front(self.values, first, self.first_value)

    def _move_to_front(self, buffer: Tensor, old_first: int, new_first: int) -> None:
        """Let a buffer that begins with the entry number `old_first` begin with `new_first`."""
        if new_first > old_first:
            rest = buffer[:, new_first - old_first : self.length - old_first]
            # A clone, since source and destination may overlap.
            buffer[:, : self.length - new_first] = rest.clone()

    # --- steps that the kernels take --------------------------------------------------------------

    def prepare_steps(self, position: int, tokens: int) -> None:
        """Reserve room for `tokens` tokens that the kernels will add one by one, the first at
        `position`, and write their positions. Where entries leave, the kernel that evicts writes
        them."""
        if self.limit is not None:
            # The new token is added before one leaves.
            self.reserve(min(self.length + tokens, self.limit + 1))
            return
        self.reserve(self.length + tokens)
        following = torch.arange(position, position + tokens, device=self.positions.device)
        self.positions[:, self.length : self.length + tokens] = following

    def count_steps(self, steps: int) -> None:
        """Account for `steps` tokens that the kernels added. Each added an entry, until the `limit` was
        reached; then one left for each that was added."""
        before = self.nbytes()
        added = steps if self.limit is None else min(steps, self.limit - self.length)
        self.length += added
        after = self.nbytes()
        bytes_of_entry = (after - before) // max(1, added)
        # After step i the cache held min(i, added) more entries than before; the sum of these numbers.
        added_after_steps = added * (added + 1) // 2 + (steps - added) * added
        self._moments += steps
        self._bytes_sum += steps * before + added_after_steps * bytes_of_entry
        self.bytes_peak = max(self.bytes_peak, after)


def _with_room(tensor: Tensor, room: int) -> Tensor:
    """A copy of tensor [kv_heads, n, ...] with `room` more entries, which are 0."""
    other_dimensions = [0, 0] * (tensor.dim() - 2)
    return F.pad(tensor, [*other_dimensions, 0, room]).contiguous()
