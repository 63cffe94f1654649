"""The fork cache: what one method holds of one prompt, layer by layer, while it decodes.

A *fork* is one method's cache made from a shared prefill. Forks decode together, one batch row each;
every row attends to its own entries, so nothing is padded and a smaller cache is a cheaper step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.attention import LayerCall, capped, grown_range, signed_mean
from kvbench.engine.guard import call
from kvbench.engine.recompress import Recompressor
from kvbench.kernels.quantize import Codecs, Scheme, never
from kvbench.kv import CompressedKV, KVError, weighted_entries
from kvbench.methods.base import Held, Method, rule_of

GROWTH = 256
"""Entries by which a cache grows that has more to append than it was told."""


BESIDE = ("positions", "log_weights", "scores", "denominators")
_BUFFERS = ("keys", "values", *BESIDE)


class LayerCache:
    """The entries of one layer of one fork, with room for the tokens to come.

    Buffers are reserved once; appending a token writes in place (a cache that was not told how many
    tokens will come grows by `GROWTH` entries when it is full). Shapes (no batch dimension: a fork
    is one row): keys, values [kv_heads, reserved, head_dim], of which the first `length` are held.

    With a `quantization`, entries are held packed, all or all but the last (`Codec.due`); the buffers
    hold the others and take the new tokens, which may be packed after the step that fed them. Where the
    first entries hold a key only (`CompressedKV.keys_only`), values begin after them. A branch
    (`kvbench.engine.shared`) holds in its buffers what came since it was made, and reads the entries
    before in its `base`.

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
        layer, seed: what a scheme's draws depend on.
    """

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
        heads, count, key_dim = held.keys.shape[1:]
        self.length = count
        self.capacity = capacity
        self.granted = capacity if granted is None else granted
        self.sink = sink
        self.window = window
        self.method = method
        self.active = active
        self.evicts = method.evicts and active
        self.rule = rule_of(method, self.granted, sink) if self.evicts else None
        self.restricts = method.restricts and active
        if self.evicts:  # it grows to what it was granted, and by the token that is being read
            room = min(room, max(0, self.granted - count) + 1)
        reserved = count + room
        self.base: LayerCache | None = None
        self.again: Recompressor | None = None
        self.packed: Codecs | None = None
        if quantization is not None:
            self.packed = quantization.codecs(held.keys[0], held.values[0], layer=layer, seed=seed)
        if self.evicts and held.keys_only:
            raise KVError(
                f"{type(method).__name__} evicts and holds {held.keys_only} entries without a value; "
                "allowed: one or the other"
            )
        self.keys_only = held.keys_only
        self.first, self.first_value = self._packed_counts()
        value_dim = held.values.shape[-1]
        self.keys = held.keys.new_empty(heads, reserved - self.first, key_dim)
        self.values = held.values.new_empty(heads, reserved - self.first_value, value_dim)
        self.keys[:, : count - self.first] = held.keys[0, :, self.first :]
        skipped = self.first_value - held.keys_only
        self.values[:, : count - self.first_value] = held.values[0, :, skipped:]
        self.positions = held.positions.new_zeros(heads, reserved)
        self.positions[:, :count] = held.positions[0]
        self.log_weights: Tensor | None = None
        if held.log_weights is not None:
            self.log_weights = held.log_weights.new_zeros(heads, reserved)
            self.log_weights[:, :count] = held.log_weights[0]
        self.scores: Tensor | None = None
        if held.scores is not None and (self.evicts or self.restricts):
            self.scores = held.scores.new_zeros(heads, reserved)
            self.scores[:, :count] = held.scores[0]
        self.denominators: Tensor | None = None
        self.value_range: tuple[Tensor, Tensor] | None = None
        if held.denominators is not None:
            self.denominators = held.denominators.new_ones(heads, reserved)
            self.denominators[:, :count] = held.denominators[0]
            if held.value_range is not None:
                self.value_range = (held.value_range[0][0], held.value_range[1][0])
        # On the host where it is known there; what a GPU has counted, `Fork.audit_prompt` reads.
        self.prompt_entries = self.entries() if self.log_weights is None else held.entries[0]

    def entries(self) -> Tensor:
        """Entries held per head, padding left out: [kv_heads] int64."""
        if self.log_weights is None:
            return torch.full((self.keys.shape[0],), self.length, dtype=torch.int64)
        return weighted_entries(self.log_weights[:, : self.length]).cpu()

    def entry_bytes(self) -> int:
        """Bytes of what is held: keys, values, weights and scores, as stored. Room for tokens to
        come is not counted, nor positions."""
        parts = [
            part[:, : self.length]
            for part in (self.log_weights, self.scores, self.denominators)
            if part is not None
        ]
        parts += self.value_range or ()
        parts += [] if self.again is None else [self.again.queries]
        return self._kv_bytes() + sum(part.numel() * part.element_size() for part in parts)

    def _kv_bytes(self) -> int:
        held = sum(part.nbytes for part in self.packed or ())
        if self.base is not None:
            held = self.base._kv_bytes()
        sides = ((self.keys, self.first), (self.values, self.first_value))
        return held + sum(part[:, : self.length - first].nbytes for part, first in sides)

    def dot_keys(self, query: Tensor, begin: int = 0) -> Tensor:
        """q.k of query [kv_heads, q, d] with the entries from `begin` on, [kv_heads, q, entries]."""
        new = self.keys[:, max(0, begin - self.first) : self.length - self.first]
        logits = query @ new.transpose(1, 2)
        if self.base is not None:
            return torch.cat([self.base.dot_keys(query), logits], dim=-1)
        if self.packed is None:
            return logits
        return torch.cat([self.packed[0].dot(query), logits], dim=-1) if self.first else logits

    def mix_values(self, weights: Tensor, begin: int = 0) -> Tensor:
        """weights [kv_heads, q, entries] . v of the entries from `begin` on, [kv_heads, q, d]."""
        start = max(begin, self.first_value)
        new = self.values[:, start - self.first_value : self.length - self.first_value]
        if self.base is not None:
            return (
                self.base.mix_values(weights[..., : self.first]) + weights[..., self.first :] @ new
            )
        mixed = weights[..., start - begin :] @ new
        if self.packed is None or not self.packed[1].count:
            return mixed
        return mixed + self.packed[1].mix(weights[..., self.keys_only : start])

    @property
    def packs_as_it_grows(self) -> bool:
        """Whether tokens that are appended will be packed."""
        return any(part.due is not never for part in self.packed or ())

    def _packed_counts(self) -> tuple[int, int]:
        """The entries that the buffers of keys and of values begin with."""
        keys, values = (0, 0) if self.packed is None else (part.count for part in self.packed)
        return keys, self.keys_only + values

    def _pack_due(self) -> None:
        """Let the codecs take over the exact entries that are due; what is left moves to the front."""
        if self.packed is None:
            return
        keys = self.keys[:, : self.length - self.first]
        values = self.values[:, : self.length - self.first_value]
        (first, _), (second, _) = self.packed[0].take(keys), self.packed[1].take(values)
        self.packed = (first, second)
        before, (self.first, self.first_value) = (
            (self.first, self.first_value),
            self._packed_counts(),
        )
        for part, taken, left in (
            (self.keys, self.first - before[0], self.length - self.first),
            (self.values, self.first_value - before[1], self.length - self.first_value),
        ):
            if taken:
                part[:, :left] = part[:, taken : taken + left].clone()

    def _held(self) -> Held:
        n = self.length
        scores = None if self.scores is None else self.scores[:, :n]
        return Held(scores, self.positions[:, :n], self.granted, self.sink)

    def reserved_bytes(self) -> int:
        """Bytes of the buffers, which a copy has of its own."""
        parts = (getattr(self, name) for name in _BUFFERS)
        return sum(part.nbytes for part in parts if part is not None)

    def clone(self) -> LayerCache:
        """A copy that shares nothing with this one that either of them writes to."""
        twin = copy.copy(self)
        for name in _BUFFERS:
            part = getattr(self, name)
            setattr(twin, name, None if part is None else part.clone())
        twin.again = None if self.again is None else self.again.clone()
        return twin

    @property
    def charged(self) -> int:
        """Entries per head that the budget is charged now; of the prompt: `prompt_charged`."""
        return int(self.entries().max())

    @property
    def prompt_charged(self) -> int:
        """Entries per head that the budget was charged after prefill."""
        return int(self.prompt_entries.max())

    @property
    def takes_one_by_kernel(self) -> bool:
        """Whether a single token can join through `kvbench.kernels.decode_attention`: all entries
        lie in the buffers with key and value and are seen, and their number grows by one a token or
        stays the same (a cache that evicts and is not full yet does first the one, then the other)."""
        return self._is_plain and (not self.evicts or self.length == self.granted)

    @property
    def fills_by_kernel(self) -> bool:
        """The same of a cache that evicts by a rule, whether it is full or not."""
        if self.rule is None:
            return False
        return self._is_plain and (self.rule.leaves == "oldest" or self.scores is not None)

    @property
    def _is_plain(self) -> bool:
        plain = self.packed is None and self.window is None and not self.restricts
        plain = plain and not self.keys_only and self.denominators is None and self.base is None
        return plain and self.again is None

    def expect(self, position: int, tokens: int) -> None:
        """Make ready for so many tokens, the first at `position`, that a kernel will append."""
        if self.evicts:
            full = max(self.granted, self.length)
            self._reserve(min(self.length + tokens, full + 1))
            return
        self._reserve(self.length + tokens)
        following = torch.arange(position, position + tokens, device=self.positions.device)
        self.positions[:, self.length : self.length + tokens] = following

    def evict_one(self, attention: Tensor, position: Tensor) -> None:
        """A kernel appended the token at `position` and attended, `attention` [kv_heads, >= length +
        1] being what every entry received: let the method drop an entry in its place.

        Raises:
            RuntimeError: the method dropped none, although the cache was full.
        """
        full = self.length
        self.positions[:, full] = position
        if self.scores is not None:
            self.scores[:, full] = 0
        self.length = full + 1
        self._evict(attention[:, : full + 1])
        if self.length != full:
            raise RuntimeError(
                f"{type(self.method).__name__} evicted nothing from a full cache of {full} entries"
            )

    def _reserve(self, entries: int) -> None:
        """Make the buffers hold `entries` at least; a copy only when they do not."""
        reserved = self.positions.shape[1]
        if entries <= reserved:
            return
        for name in _BUFFERS:
            part = getattr(self, name)
            if part is not None:
                more = entries + GROWTH - reserved
                wider = part.new_zeros(part.shape[0], part.shape[1] + more, *part.shape[2:])
                wider[:, : part.shape[1]] = part
                setattr(self, name, wider)

    def step(self, call: LayerCall, positions: Tensor) -> Tensor:
        """Append the t tokens of a call of one row, at positions [t], and attend, causally among them:
        [heads, t, value_dim]."""
        if not self.evicts and self.again is None:
            return self._append_and_attend(call, positions)
        outputs = []  # what evicts or compresses again changes after a token: a chunk is walked
        for i in range(len(positions)):
            one = call.of_row(0, i, i + 1)
            outputs.append(self._append_and_attend(one, positions[i : i + 1]))
            if self.again is not None:
                self.again.after(self, one.query[0])
        return torch.cat(outputs, dim=1)

    def append(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Hold t more tokens: key, value [kv_heads, t, d], positions [t]."""
        stored = self.keys.shape[0]
        if stored != key.shape[0]:  # a method that repeats keys to query heads
            key = key.repeat_interleave(stored // key.shape[0], dim=0)
            value = value.repeat_interleave(stored // value.shape[0], dim=0)
        before, after = self.length, self.length + key.shape[1]
        self._reserve(after)
        self.keys[:, before - self.first : after - self.first] = key
        self.values[:, before - self.first_value : after - self.first_value] = value
        self.positions[:, before:after] = positions
        for part in (self.log_weights, self.scores):
            if part is not None:  # the place may be one that an evicted entry left
                part[:, before:after] = 0
        if self.denominators is not None:
            self.denominators[:, before:after] = 1
        self.length = after

    def _append_and_attend(self, call: LayerCall, positions: Tensor) -> Tensor:
        query, key, value = call.query[0], call.key[0], call.value[0]
        heads, tokens, dim = query.shape
        stored = self.keys.shape[0]
        self.append(key, value, positions)
        after = self.length
        before = after - tokens
        begin = 0
        if self.window is not None and tokens == 1 and self.packed is None:
            # A sliding layer's entries lie in the order of their positions: what the window has
            # passed is left of a view, and costs nothing.
            begin = max(0, after - self.window)
        group = heads // stored
        logits = self.dot_keys(query.reshape(stored, group * tokens, dim), begin)
        logits = capped(logits.float().mul_(call.scaling), call.softcap)
        if self.log_weights is not None:
            logits += self.log_weights[:, None, begin:after]
        if tokens > 1:
            order = torch.arange(tokens, device=query.device)
            hidden = (order[None] > order[:, None]).repeat(group, 1)
            logits[..., before - begin :].masked_fill_(hidden, float("-inf"))
        if self.window is not None and not begin:
            past = self.positions[:, None, :after] <= (positions - self.window)[None, :, None]
            logits.masked_fill_(past.repeat(1, group, 1), float("-inf"))
        if self.restricts:
            hidden = self._ask(self.method.restrict, self._held(), logits)
            logits.masked_fill_(hidden, float("-inf"))
        weights = logits.softmax(-1)
        out = self.mix_values(weights.to(value.dtype), begin)
        if self.denominators is not None:
            ends, self.value_range = grown_range(self.value_range, value, group)
            out = signed_mean(out, weights, self.denominators[:, begin:after], ends)
        self._pack_due()
        if self.evicts:
            self._evict(weights.view(stored, group, after).mean(1))
        return out.view(stored, group, tokens, -1).reshape(heads, tokens, -1)

    def _ask(self, hook: Callable[..., Any], *arguments: Any) -> Any:
        """What a hook of the method answers, which sees this fork's tensors only."""
        return call(self.method, hook, *arguments)

    def _evict(self, attention: Tensor) -> None:
        """Let the method drop one entry per head; the last entry moves into its place."""
        n = self.length
        held = self._held()
        scores, leaving = self._ask(self.method.evict, held, attention)
        if scores is not None and scores is not held.scores:
            assert held.scores is not None
            held.scores.copy_(scores)
        if leaving is None:
            return
        row = torch.arange(self.keys.shape[0], device=self.keys.device)
        for part in (getattr(self, name) for name in (BESIDE if self.packed else _BUFFERS)):
            if part is not None:
                part[row, leaving] = part[:, n - 1].clone()
        if self.packed is not None:  # all of them, the new one too
            self.packed = (self.packed[0].without(leaving), self.packed[1].without(leaving))
            self.first, self.first_value = self._packed_counts()
        self.length = n - 1
