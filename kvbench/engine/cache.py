"""The caches of one layer: what one method holds of one prompt, and of the tokens decoded since.

A *fork* is one method's cache made from a shared prefill. Forks decode together, one batch row each;
every row attends to its own entries, so nothing is padded and a smaller cache is a cheaper step.

A `LayerCache` keeps its entries in buffers, or packed by a scheme's codecs (`Packed`) before them. A
`RaggedCache` is one cache of one head for each head; a `RecompressedCache` is compressed again while
decoding.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.engine import guard
from kvbench.engine.attention import LayerCall, capped, grown_range, signed_mean
from kvbench.kernels.decode_attention import products
from kvbench.kernels.quantize import Codec, Scheme
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, KVError, LayerKV, weighted_entries
from kvbench.methods.base import Held, Method, Recompression, rule_of

GROWTH = 256
"""Entries by which a cache grows that has more to append than it was told."""

PER_ENTRY = ("positions", "log_weights", "scores", "denominators")
"""Buffers [kv_heads, reserved] of numbers that every entry has, wherever its key and value lie."""
_BUFFERS = ("keys", "values", *PER_ENTRY)


class Packed(NamedTuple):
    """Entries in a scheme's codecs, of which keys and values may have taken different numbers."""

    keys: Codec[Any]
    values: Codec[Any]


class LayerCache:
    """The entries of one layer of one fork, with room for the tokens to come.

    Buffers are reserved once; appending a token writes in place (a cache that was not told how many
    tokens will come grows by `GROWTH` entries when it is full). Shapes (no batch dimension: a fork
    is one row): keys, values [kv_heads, reserved, head_dim]; the buffers of keys begin with entry
    `first`, those of values with entry `first_value`, and `length` entries are held in all.

    Args:
        held: the compressed prompt, batch 1.
        room: tokens that will be appended, if the caller knows.
        method: asked to evict after each token, or to restrict attention, if it does and is `active`.
        capacity: entries per head the method may hold after prefill.
        granted: entries per head the budget grants it; a method that evicts begins when the cache holds
            so many.
        sink: leading tokens that are always kept.
        window: sliding-window length of the layer, None for full attention.
        active: False where the method has no part in this layer (it is left whole).
        quantization: how entries are packed, all or all but the last (`Codec.due`), at once and after
            each step.
        layer, seed: what a scheme's draws depend on.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    log_weights: Tensor | None
    scores: Tensor | None
    denominators: Tensor | None

    def __init__(
        self,
        held: CompressedKV,
        room: int,
        method: Method,
        *,
        capacity: int,
        granted: int | None = None,
        sink: int = 0,
        window: int | None = None,
        active: bool = True,
        quantization: Scheme | None = None,
        layer: int = 0,
        seed: int = 0,
    ) -> None:
        count = held.keys.shape[2]
        self.length = count
        self.capacity = capacity
        self.granted = capacity if granted is None else granted
        self.sink, self.window, self.method = sink, window, method
        self.evicts = method.evicts and active
        self.rule = rule_of(method, self.granted, sink) if self.evicts else None
        self.restricts = method.restricts and active
        if self.evicts:  # it grows to what it was granted, and by the token that is being read
            room = min(room, max(0, self.granted - count) + 1)
        if self.evicts and held.keys_only:
            raise KVError(
                f"{type(method).__name__} evicts and holds {held.keys_only} entries without a value; "
                "allowed: one or the other"
            )
        self.keys_only = held.keys_only
        self.packed: Packed | None = None
        if quantization is not None:
            codecs = quantization.codecs(held.keys[0], held.values[0], layer=layer, seed=seed)
            self.packed = Packed(*codecs)
        self.first, self.first_value = self._packed_counts()
        buffers = {
            "keys": held.keys[:, :, self.first :],
            "values": held.values[:, :, self.first_value - held.keys_only :],
            "positions": held.positions,
            "log_weights": held.log_weights,
            "scores": held.scores if self.evicts or self.restricts else None,
            "denominators": held.denominators,
        }
        for name, part in buffers.items():
            setattr(self, name, None if part is None else _with_room(part[0], room))
        self.value_range: tuple[Tensor, Tensor] | None = None
        if held.value_range is not None:
            self.value_range = (held.value_range[0][0], held.value_range[1][0])
        self.samples, self.bytes_sum, self.bytes_peak = 0, 0, 0
        self.note_bytes()
        # On the host where it is known there; what a GPU has counted, `Fork.audit_prompt` reads.
        self.prompt_entries = self.entries() if self.log_weights is None else held.entries[0]

    def entries(self) -> Tensor:
        """Entries held per head, padding left out: [kv_heads] int64."""
        if self.log_weights is None:
            return torch.full((self.keys.shape[0],), self.length, dtype=torch.int64)
        return weighted_entries(self.log_weights[:, : self.length]).cpu()

    def charged(self, entries: Tensor) -> int:
        """Entries per head that a budget is charged, of those of each head: the largest head's."""
        return int(entries.max())

    def entry_bytes(self) -> int:
        """Bytes of what is held: keys, values, weights and scores, as stored. Room for tokens to
        come is not counted, nor what the window has passed, nor positions."""
        count = self.length if self.window is None else min(self.length, self.window)
        numbers = self._buffers(("log_weights", "scores", "denominators")).values()
        held = sum(part[:, :count].nbytes for part in numbers)
        held += sum(part.nbytes for part in (*(self.packed or ()), *(self.value_range or ())))
        sides = ((self.keys, self.first), (self.values, self.first_value))
        return held + sum(part[:, : count - first].nbytes for part, first in sides)

    def note_bytes(self) -> None:
        """Count what is held after the prompt, or after a step, in mean and peak."""
        held = self.entry_bytes()
        self.samples, self.bytes_sum = self.samples + 1, self.bytes_sum + held
        self.bytes_peak = max(self.bytes_peak, held)

    def grew(self, steps: int, most: int) -> None:
        """Count so many steps of one token that a kernel took, which left at most so many entries."""
        held, more = self.entry_bytes(), min(steps, most - self.length)
        self.length += more
        entry = (self.entry_bytes() - held) // max(1, more)
        joined = more * (more + 1) // 2 + (steps - more) * more  # summed over the steps
        self.samples, self.bytes_sum = self.samples + steps, self.bytes_sum + steps * held
        self.bytes_sum += joined * entry
        self.bytes_peak = max(self.bytes_peak, self.entry_bytes())

    def held_bytes(self) -> tuple[int, float]:
        """The most bytes held after the prompt or a step since, and their mean."""
        return self.bytes_peak, self.bytes_sum / self.samples

    def reserved_bytes(self) -> int:
        """Bytes of the buffers, which a copy has of its own."""
        return sum(part.nbytes for part in self._buffers().values())

    def _buffers(self, names: Sequence[str] = _BUFFERS) -> dict[str, Tensor]:
        """Those of these buffers that there are."""
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def clone(self) -> LayerCache:
        """A copy that shares nothing with this one that either of them writes to."""
        twin = copy.copy(self)
        for name, part in self._buffers().items():
            setattr(twin, name, part.clone())
        return twin

    @property
    def steps_by_kernel(self) -> bool:
        """Whether single tokens can join through `kvbench.kernels.decode_attention`: all entries lie in
        the buffers with key and value, attention is an ordinary softmax over all of them, and the cache
        grows, or evicts by a rule (`Method.eviction`) for which it holds what is needed."""
        rule = self.rule
        return (
            self.packed is None
            and self.window is None
            and not self.restricts
            and not self.keys_only
            and self.denominators is None
            and (not self.evicts or rule is not None)
            and (rule is None or rule.leaves == "oldest" or self.scores is not None)
        )

    def expect(self, position: int, tokens: int) -> None:
        """Make ready for so many tokens, the first at `position`, that a kernel will append."""
        if self.evicts:
            self._reserve(min(self.length + tokens, max(self.granted, self.length) + 1))
            return
        self._reserve(self.length + tokens)
        following = torch.arange(position, position + tokens, device=self.positions.device)
        self.positions[:, self.length : self.length + tokens] = following

    def step(self, call: LayerCall, positions: Tensor) -> Tensor:
        """Append the t tokens of a call of one row, at positions [t], and attend, causally among them:
        [heads, t, value_dim]."""
        parts = itertools.pairwise([0, *self._ends(len(positions))])
        done = [self._append_and_attend(call.of_row(0, a, b), positions[a:b]) for a, b in parts]
        self.note_bytes()
        return done[0] if len(done) == 1 else torch.cat(done, dim=1)

    def _ends(self, tokens: int) -> Sequence[int]:
        """Where to cut so many tokens: after each where entries may leave, and so that one that packs
        keys before it attends is alone."""
        if self.evicts:
            return range(1, tokens + 1)
        if self.packed is None or not self.packed.keys.ahead:
            return [tokens]
        held, ends = self.packed.keys.count, {tokens}
        for i in range(tokens):
            if taken := self.packed.keys.due(held, self.length + i + 1 - held):
                held, ends = held + taken, ends | {i, i + 1}
        return sorted(ends - {0})

    def append(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Hold t more tokens: key, value [kv_heads, t, d], positions [t]."""
        stored = self.keys.shape[0]
        if stored != key.shape[0]:  # a method that repeats keys to query heads
            key = key.repeat_interleave(stored // key.shape[0], dim=0)
            value = value.repeat_interleave(stored // value.shape[0], dim=0)
        if self.window is not None and self.length >= self.window + GROWTH:
            count = self.length - self.window  # entries of a sliding layer lie by position
            for part in self._buffers().values():
                part[:, : self.window] = part[:, count : self.length].clone()
            self.length = self.window
        before, after = self.length, self.length + key.shape[1]
        self._reserve(after, GROWTH)
        self.keys[:, before - self.first : after - self.first] = key
        self.values[:, before - self.first_value : after - self.first_value] = value
        self.positions[:, before:after] = positions
        for part in self._buffers(("log_weights", "scores")).values():
            part[:, before:after] = 0  # the place may be one that an evicted entry left
        if self.denominators is not None:
            self.denominators[:, before:after] = 1
        self.length = after

    def dot_keys(self, query: Tensor) -> Tensor:
        """q.k of query [kv_heads, q, d] with all entries, [kv_heads, q, entries]; see `products`."""
        logits = products(query, self.keys[:, : self.length - self.first])
        if self.packed is None or not self.first:
            return logits
        return torch.cat([self.packed.keys.dot(query), logits], dim=-1)

    def mix_values(self, weights: Tensor) -> Tensor:
        """weights [kv_heads, q, entries] . v of all entries, [kv_heads, q, d]."""
        first = self.first_value
        mixed = weights[..., first:] @ self.values[:, : self.length - first]
        if self.packed is None or first == self.keys_only:
            return mixed
        return mixed + self.packed.values.mix(weights[..., self.keys_only : first])

    def _append_and_attend(self, call: LayerCall, positions: Tensor) -> Tensor:
        query, value = call.query[0], call.value[0]
        heads, tokens, dim = query.shape
        self.append(call.key[0], value, positions)
        if self.packed is not None and self.packed.keys.ahead:
            self._pack_due(self.packed, keys_alone=True)
        n, stored = self.length, self.keys.shape[0]
        group = heads // stored
        logits = self.dot_keys(query.reshape(stored, group * tokens, dim))
        logits = capped(logits.mul_(call.scaling), call.softcap)
        if self.log_weights is not None:
            logits += self.log_weights[:, None, :n]
        if tokens > 1:
            order = torch.arange(tokens, device=query.device)
            hidden = (order[None] > order[:, None]).repeat(group, 1)
            logits[..., n - tokens :].masked_fill_(hidden, float("-inf"))
        if self.window is not None:
            past = self.positions[:, None, :n] <= (positions - self.window)[None, :, None]
            logits.masked_fill_(past.repeat(1, group, 1), float("-inf"))
        if self.restricts:
            hidden = guard.call(self.method, self.method.restrict, self._held(), logits)
            logits.masked_fill_(hidden, float("-inf"))
        weights = logits.softmax(-1)
        out = self.mix_values(weights.to(value.dtype))
        if self.denominators is not None:
            ends, self.value_range = grown_range(self.value_range, value, group)
            out = signed_mean(out, weights, self.denominators[:, :n], ends)
        if self.packed is not None:
            self._pack_due(self.packed)
        if self.evicts:
            self._evict(weights.view(stored, group, n).mean(1))
        return out.view(stored, group, tokens, -1).reshape(heads, tokens, -1)

    def _held(self) -> Held:
        n = self.length
        scores = None if self.scores is None else self.scores[:, :n]
        return Held(scores, self.positions[:, :n], self.granted, self.sink)

    def _evict(self, attention: Tensor) -> None:
        """Let the method drop one entry per head; the last entry moves into its place."""
        n = self.length
        held = self._held()
        scores, leaving = guard.call(self.method, self.method.evict, held, attention)
        if scores is not None and scores is not held.scores:
            assert held.scores is not None
            held.scores.copy_(scores)
        if leaving is None:
            return
        row = torch.arange(self.keys.shape[0], device=self.keys.device)
        for part in self._buffers(PER_ENTRY if self.packed else _BUFFERS).values():
            part[row, leaving] = part[:, n - 1].clone()
        if self.packed is not None:  # all of the entries, the new one too
            self.packed = Packed(*(codec.without(leaving) for codec in self.packed))
            self.first, self.first_value = self._packed_counts()
        self.length = n - 1

    def _packed_counts(self) -> tuple[int, int]:
        """The entries that the buffers of keys and of values begin with, unless others lie before."""
        if self.packed is None:
            return 0, self.keys_only
        return self.packed.keys.count, self.keys_only + self.packed.values.count

    def _pack_due(self, packed: Packed, *, keys_alone: bool = False) -> None:
        """Let the codecs take over the exact entries that are due; what is left moves to the front."""
        n = self.length
        sides = ((self.keys, self.first), (self.values, self.first_value))
        keys, _ = packed.keys.take(self.keys[:, : n - self.first])
        values = packed.values
        if not keys_alone:
            values, _ = values.take(self.values[:, : n - self.first_value])
        self.packed = Packed(keys, values)
        self.first, self.first_value = self._packed_counts()
        for (part, before), now in zip(sides, (self.first, self.first_value), strict=True):
            if now > before:
                part[:, : n - now] = part[:, now - before : n - before].clone()

    def _reserve(self, entries: int, more: int = 0) -> None:
        """Make the buffers hold `entries` at least, or else so many `more`, by a copy."""
        reserved = self.positions.shape[1]
        if entries <= reserved:
            return
        for name, part in self._buffers().items():
            setattr(self, name, _with_room(part, entries + more - reserved))


def _with_room(part: Tensor, room: int) -> Tensor:
    """A copy of part [kv_heads, n, ...] with `room` more entries, zeros."""
    return F.pad(part, [*[0, 0] * (part.dim() - 2), 0, room]).contiguous()


class RaggedCache(LayerCache):
    """A layer whose heads hold different numbers of entries, without padding: one cache of one head for
    each head, so that what is held and counted is the sum of the heads.

    A token joins every head and attends in each to what that head holds. Rows go alone, not through
    `kvbench.kernels.decode_attention`.

    Args:
        held: the compressed prompt, batch 1, with `CompressedKV.lengths`.
        make: makes the cache of what one head holds.
    """

    steps_by_kernel = False
    rule = None

    def __init__(self, held: CompressedKV, make: Callable[[CompressedKV], LayerCache]) -> None:
        assert held.lengths is not None
        if held.keys_only or held.scores is not None or held.denominators is not None:
            raise KVError(
                "heads of different lengths hold scores, signed weights or keys without values; "
                "allowed: keys, values and log_weights"
            )
        self.heads: list[LayerCache] = []
        for head, length in enumerate(held.lengths[0].tolist()):
            here = (slice(None), slice(head, head + 1), slice(length))
            weights = None if held.log_weights is None else held.log_weights[here]
            if weights is not None and not weights.any():
                weights = None
            one = CompressedKV(held.keys[here], held.values[here], weights, held.positions[here])
            self.heads.append(make(one))
        first = self.heads[0]
        self.method, self.capacity, self.granted = first.method, first.capacity, first.granted
        self.evicts, self.restricts = first.evicts, first.restricts
        if self.evicts or self.restricts:
            raise KVError(
                f"{type(self.method).__name__} holds heads of different lengths and acts while "
                "decoding; allowed: one or the other"
            )
        self.prompt_entries = held.lengths[0].cpu()

    def charged(self, entries: Tensor) -> int:
        """See `LayerCache.charged`: the mean of the heads, rounded up."""
        return -int(-entries.sum() // len(self.heads))

    def entries(self) -> Tensor:
        """Entries held per head: [kv_heads] int64."""
        return torch.cat([head.entries() for head in self.heads])

    def entry_bytes(self) -> int:
        """The sum of the heads'."""
        return sum(head.entry_bytes() for head in self.heads)

    def held_bytes(self) -> tuple[int, float]:
        """The sums of the heads'."""
        peaks, means = zip(*(head.held_bytes() for head in self.heads), strict=True)
        return sum(peaks), sum(means)

    def reserved_bytes(self) -> int:
        """The sum of the heads'."""
        return sum(head.reserved_bytes() for head in self.heads)

    def clone(self) -> RaggedCache:
        """A copy that shares nothing with this one that either of them writes to."""
        twin = copy.copy(self)
        twin.heads = [head.clone() for head in self.heads]
        return twin

    def step(self, call: LayerCall, positions: Tensor) -> Tensor:
        """See `LayerCache.step`."""
        of_heads = (
            x.split(x.shape[1] // len(self.heads), 1) for x in (call.query, call.key, call.value)
        )
        return torch.cat(
            [
                head.step(replace(call, query=query, key=key, value=value), positions)
                for head, query, key, value in zip(self.heads, *of_heads, strict=True)
            ]
        )


class RecompressedCache(LayerCache):
    """A layer that its method compresses again while decoding, by its `Method.recompression`.

    Args:
        rule: when, and to how many entries. label, budget: those of the fork.
        prompt: the prompt's layer, with queries.
        generator: draws of all compressions, in order.

    Attributes:
        fed: tokens so far, behind the prompt's.
        queries: the last ones fed, [heads, at most rule.queries, head_dim], whose bytes are counted.
    """

    steps_by_kernel = False

    def __init__(
        self,
        held: CompressedKV,
        room: int,
        method: Method,
        *,
        rule: Recompression,
        label: str,
        budget: Budget,
        prompt: LayerKV,
        generator: torch.Generator,
        **options: Any,
    ) -> None:
        assert prompt.queries is not None
        self.queries = prompt.queries[0, :, -rule.queries :].clone()  # counted from the beginning
        super().__init__(held, room, method, **options)
        self.recompression, self.label, self.generator = rule, label, generator
        self.budget, self.prompt, self.fed = budget, prompt.n, 0
        if rule.to is not None and rule.to >= 1:
            self._size(int(rule.to))  # refuses now, rather than while decoding
        none = prompt.keys[:, :, :0]  # does not keep the prompt in memory
        self.shape = replace(prompt, keys=none, values=none, queries=None, shared={}, carried={})

    def entry_bytes(self) -> int:
        """See `LayerCache.entry_bytes`; with those of the queries."""
        return super().entry_bytes() + self.queries.nbytes

    def clone(self) -> LayerCache:
        """See `LayerCache.clone`; the copy draws the same numbers."""
        twin = super().clone()
        assert isinstance(twin, RecompressedCache)
        twin.generator = torch.Generator()
        twin.generator.set_state(self.generator.get_state())
        return twin

    def _ends(self, tokens: int) -> Sequence[int]:
        return range(1, tokens + 1)

    def _append_and_attend(self, call: LayerCall, positions: Tensor) -> Tensor:
        """Of one token, after which the method may compress.

        Raises:
            BudgetExceeded: the method holds more than it may; and whatever the method raises.
        """
        out = super()._append_and_attend(call, positions)
        self.fed += 1
        self.queries = torch.cat([self.queries, call.query[0]], dim=1)
        self.queries = self.queries[:, -self.recompression.queries :]
        stays = self.recompression.stays(self.budget, self.prompt, self.fed, self.length)
        if stays is not None:
            self._recompress(stays)
        return out

    def _size(self, count: int) -> Budget:
        return Budget(sink=self.budget.sink, window=self.budget.window, size=count)

    def _recompress(self, stays: int) -> None:
        """Hold the entries that the method keeps, `stays` of them: its positions are places among them,
        and its log-weights add to theirs."""
        n = self.length
        layer = replace(
            self.shape,
            keys=self.keys[None, :, :n],
            values=self.values[None, :, :n],
            queries=self.queries[None],
            log_weights=None if self.log_weights is None else self.log_weights[None, :, :n],
            shared={},
        )
        held, _, _ = guard.compress(
            self.label, self.method, layer, self._size(stays), self.generator, {}
        )
        if held.charged > stays + 1:
            raise BudgetExceeded(self.label, layer.layer_index, stays, held.charged)
        places, count = held.positions[0], held.positions.shape[2]
        self.positions[:, :count] = self.positions.gather(1, places)
        if self.log_weights is not None:
            self.log_weights[:, :count] = self.log_weights.gather(1, places)
        if held.log_weights is not None:
            if self.log_weights is None:
                self.log_weights = held.log_weights.new_zeros(self.positions.shape)
            self.log_weights[:, :count] += held.log_weights[0]
        self.keys[:, :count], self.values[:, :count] = held.keys[0], held.values[0]
        self.length = count
