"""The caches of one layer: how what is held of one prompt, and of the tokens decoded since, changes.

A *fork* is one method's cache made from a shared prefill. Forks decode together, one batch row each;
every row attends to its own entries, so nothing is padded and a smaller cache is a cheaper step.

What is stored lies in `kvbench.engine.entries`; a class here says what a decoded token does to it:

- `GrowingCache`: the token joins. `cache_of` chooses between it and the next two.
- `EvictingCache`: the token joins, and its method lets another entry go.
- `RestrictedCache`: the token joins, and its method says which entries its query sees.
- `RecompressedCache` (recompressed_cache.py): the token joins, and its method compresses everything
  again from time to time.
- `RaggedCache` (ragged_cache.py): one cache for each head, where heads hold different numbers of
  entries.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.engine import guard
from kvbench.engine.attention import LayerCall, grown_range, signed_mean
from kvbench.engine.entries import GROWTH, Entries, PackedEntries
from kvbench.kernels.quantize import Scheme
from kvbench.kernels.softcap import capped
from kvbench.kv import CompressedKV, KVError
from kvbench.methods.base import Eviction, Held, Method, rule_of


class LayerCache(ABC):
    """The cache of one layer of a fork.

    Attributes:
        capacity: entries per head that the method may hold after prefill.
        prompt_entries: entries held of the prompt per head, [kv_heads] int64; where a GPU has counted
            them, on the GPU until `Fork.audit_prompt` reads them.
    """

    capacity: int
    prompt_entries: Tensor

    @property
    @abstractmethod
    def steps_by_kernel(self) -> bool:
        """Whether single tokens can join through `kvbench.kernels.decode_attention`."""

    @property
    @abstractmethod
    def stores(self) -> Sequence[Entries]:
        """What is stored: of all heads together, or of one head after the other."""

    @abstractmethod
    def step(self, call: LayerCall, positions: Tensor) -> Tensor:
        """Append the t tokens of a call of one row, at positions [t], and attend, causally among them:
        [heads, t, value_dim]."""

    @abstractmethod
    def clone(self) -> LayerCache:
        """A copy with buffers of its own: no write to one changes the other."""

    @abstractmethod
    def entry_bytes(self) -> int:
        """Bytes of what is held: see `Entries.nbytes`."""

    @abstractmethod
    def held_bytes(self) -> tuple[int, float]:
        """The most bytes held after the prompt or a step since, and their mean."""

    def entries(self) -> Tensor:
        """Entries held per head, padding left out: [kv_heads] int64 on the host."""
        return torch.cat([store.count().cpu() for store in self.stores])

    def charged(self, entries: Tensor) -> int:
        """Entries per head that a budget is charged, of those of each head: the largest head's."""
        return int(entries.max())

    def allowed(self, after_prompt: int, appended: int) -> int:
        """Entries per head that may be held after `appended` tokens since the prompt, of which
        `after_prompt` were held; one entry of rounding included."""
        return self.capacity + 1 + appended

    def reserved_bytes(self) -> int:
        """Bytes of the buffers, which a clone has of its own."""
        return sum(store.reserved_bytes() for store in self.stores)


class GrowingCache(LayerCache):
    """A layer whose heads hold equally many entries, and one more with every token.

    A layer with a sliding window drops entries that the window has passed, `GROWTH` at a time.

    Args:
        store: what is held of the prompt.
        window: sliding-window length of the layer, None for full attention.

    Attributes:
        rule: the rule by which entries leave; None where none leaves, or where the method is asked at
            every token which one does.
    """

    rule: Eviction | None = None

    def __init__(self, store: Entries, *, capacity: int, window: int | None = None) -> None:
        self.store = store
        self.capacity = capacity
        self.window = window
        self.prompt_entries = store.count()
        self._moments = 0  # at which bytes were counted
        self._bytes_sum = 0
        self._bytes_peak = 0
        self._note_bytes()

    @property
    def stores(self) -> Sequence[Entries]:
        """See `LayerCache.stores`."""
        return [self.store]

    @property
    def limit(self) -> int | None:
        """Entries per head that are held at most; None where the cache grows with every token."""
        return None

    @property
    def steps_by_kernel(self) -> bool:
        """See `LayerCache`."""
        return self.store.is_read_by_kernel and self.window is None

    def entry_bytes(self) -> int:
        """See `LayerCache.entry_bytes`; what a sliding window has passed is left out."""
        count = self.store.length
        return self.store.nbytes(count if self.window is None else min(count, self.window))

    def _note_bytes(self) -> None:
        """Count what is held after the prompt, or after a step, in mean and peak."""
        now = self.entry_bytes()
        self._moments += 1
        self._bytes_sum += now
        self._bytes_peak = max(self._bytes_peak, now)

    def count_steps_by_kernel(self, steps: int) -> None:
        """Count so many steps of one token, which a kernel took: entries joined up to the `limit`."""
        before = self.entry_bytes()
        joined = steps if self.limit is None else min(steps, self.limit - self.store.length)
        self.store.length += joined
        after = self.entry_bytes()
        entry = (after - before) // max(1, joined)
        # Entries that had joined, summed over the steps: 1, 2, ..., joined, and then joined each time.
        joined_at_steps = joined * (joined + 1) // 2 + (steps - joined) * joined
        self._moments += steps
        self._bytes_sum += steps * before + joined_at_steps * entry
        self._bytes_peak = max(self._bytes_peak, after)

    def held_bytes(self) -> tuple[int, float]:
        """See `LayerCache.held_bytes`."""
        return self._bytes_peak, self._bytes_sum / self._moments

    def clone(self) -> GrowingCache:
        """See `LayerCache.clone`."""
        twin = copy.copy(self)
        twin.store = self.store.clone()
        return twin

    def expect(self, position: int, tokens: int) -> None:
        """Make ready for so many tokens, the first at `position`, that a kernel will append."""
        store = self.store
        store.reserve(store.length + tokens)
        following = torch.arange(position, position + tokens, device=store.positions.device)
        store.positions[:, store.length : store.length + tokens] = following

    def step(self, call: LayerCall, positions: Tensor) -> Tensor:
        """See `LayerCache.step`."""
        outs = []
        for begin, end in itertools.pairwise([0, *self._cuts(len(positions))]):
            outs.append(self._append_and_attend(call.of_row(0, begin, end), positions[begin:end]))
        self._note_bytes()
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _cuts(self, tokens: int) -> Sequence[int]:
        """The ends of the pieces in which so many tokens join, the last being `tokens`."""
        return self.store.cuts(tokens)

    def _append_and_attend(self, call: LayerCall, positions: Tensor) -> Tensor:
        """The tokens of a call join together, and attend: [heads, t, value_dim]."""
        store = self.store
        query, value = call.query[0], call.value[0]
        if self.window is not None and store.length >= self.window + GROWTH:
            store.keep_last(self.window)  # entries of a sliding layer lie by position
        store.append(call.key[0], value, positions)
        store.pack_keys()
        heads, tokens, dim = query.shape
        n, stored_heads = store.length, store.keys.shape[0]
        group = heads // stored_heads
        logits = store.dot_keys(query.reshape(stored_heads, group * tokens, dim))
        logits = capped(logits.mul_(call.scaling), call.softcap)
        if store.log_weights is not None:
            logits += store.log_weights[:, None, :n]
        if tokens > 1:
            order = torch.arange(tokens, device=query.device)
            later = (order[None] > order[:, None]).repeat(group, 1)
            logits[..., n - tokens :].masked_fill_(later, float("-inf"))
        if self.window is not None:
            past = store.positions[:, None, :n] <= (positions - self.window)[None, :, None]
            logits.masked_fill_(past.repeat(1, group, 1), float("-inf"))
        self._hide(logits)
        weights = logits.softmax(-1)
        out = store.mix_values(weights)
        if store.denominators is not None:
            ranges, store.value_range = grown_range(store.value_range, value, group)
            out = signed_mean(out, weights, store.denominators[:, :n], ranges)
        store.pack()
        self._after_attention(call, weights.view(stored_heads, group, tokens, n))
        return out.view(stored_heads, group, tokens, -1).reshape(heads, tokens, -1)

    def _hide(self, logits: Tensor) -> None:
        """Set logits [kv_heads, queries, n] to -inf where a query is not to see an entry."""

    def _after_attention(self, call: LayerCall, weights: Tensor) -> None:
        """What the method does when the tokens of a call have attended to all entries.

        Args:
            weights: [kv_heads, group, t, n], the softmax's.
        """


class EvictingCache(GrowingCache):
    """A layer whose method drops an entry for every token, once the cache is full.

    Args:
        method: one that `Method.evicts`.
        granted: entries per head that the budget grants it; it evicts beyond these.
        sink: leading tokens that are always kept.
    """

    def __init__(
        self, store: Entries, *, capacity: int, method: Method, granted: int, sink: int
    ) -> None:
        if store.keys_only:
            raise KVError(
                f"{type(method).__name__} evicts and holds {store.keys_only} entries without a value; "
                "allowed: one or the other"
            )
        self.method = method
        self.granted = granted
        self.sink = sink
        self.rule = rule_of(method, granted, sink)
        super().__init__(store, capacity=capacity)

    @property
    def limit(self) -> int | None:
        """What was granted, or what compression left if that is more."""
        return max(self.granted, self.store.length)

    @property
    def steps_by_kernel(self) -> bool:
        """See `LayerCache`: by a rule, for which the cache holds the scores that it needs."""
        if self.rule is None or not super().steps_by_kernel:
            return False
        return self.rule.leaves == "oldest" or self.store.scores is not None

    def allowed(self, after_prompt: int, appended: int) -> int:
        """See `LayerCache.allowed`: no more than was granted, or than compression left."""
        return max(self.granted, after_prompt)

    def expect(self, position: int, tokens: int) -> None:
        """See `GrowingCache.expect`; positions are written by the kernel that evicts."""
        most = max(self.granted, self.store.length) + 1  # and the token that is being read
        self.store.reserve(min(self.store.length + tokens, most))

    def _cuts(self, tokens: int) -> Sequence[int]:
        """See `GrowingCache._cuts`: one by one, since an entry may leave after each."""
        return range(1, tokens + 1)

    def _after_attention(self, call: LayerCall, weights: Tensor) -> None:
        """Let the method drop one entry per head."""
        held = _held(self.store, self.granted, self.sink)
        attention = weights[:, :, 0].mean(1)
        scores, leaving = guard.call(self.method, self.method.evict, held, attention)
        if scores is not None and scores is not held.scores:
            assert held.scores is not None
            held.scores.copy_(scores)
        if leaving is not None:
            self.store.remove(leaving)


class RestrictedCache(GrowingCache):
    """A layer that grows, and of whose entries every query sees those that its method chooses.

    Args:
        method: one that `Method.restricts`.
        granted: entries per head that the budget lets a query see.
        sink: leading tokens that are always kept.
    """

    steps_by_kernel = False

    def __init__(
        self, store: Entries, *, capacity: int, method: Method, granted: int, sink: int
    ) -> None:
        self.method = method
        self.granted = granted
        self.sink = sink
        super().__init__(store, capacity=capacity)

    def _hide(self, logits: Tensor) -> None:
        """Hide what the method hides from each query."""
        held = _held(self.store, self.granted, self.sink)
        hidden = guard.call(self.method, self.method.restrict, held, logits)
        logits.masked_fill_(hidden, float("-inf"))


def _held(store: Entries, granted: int, sink: int) -> Held:
    """What a method is told of the entries when it evicts or restricts."""
    n = store.length
    scores = None if store.scores is None else store.scores[:, :n]
    return Held(scores, store.positions[:, :n], granted, sink)


def store_of(
    held: CompressedKV,
    room: int,
    scheme: Scheme | None = None,
    *,
    layer: int = 0,
    seed: int = 0,
    keeps_scores: bool = False,
) -> Entries:
    """What is held of a prompt, packed where there is a scheme; see `Entries` and `PackedEntries`."""
    if scheme is None:
        return Entries(held, room, keeps_scores=keeps_scores)
    return PackedEntries(held, room, scheme, layer=layer, seed=seed, keeps_scores=keeps_scores)


def cache_of(
    held: CompressedKV,
    room: int,
    method: Method,
    *,
    capacity: int,
    granted: int | None = None,
    sink: int = 0,
    active: bool = True,
    scheme: Scheme | None = None,
    layer: int = 0,
    seed: int = 0,
) -> GrowingCache:
    """The cache of a layer whose heads hold equally many entries, by what its method does when decoding.

    Args:
        held: the compressed prompt, batch 1.
        room: tokens that will be appended, if the caller knows.
        capacity: entries per head that the method may hold after prefill.
        granted: entries per head that the budget grants it (None: the capacity).
        sink: leading tokens that are always kept.
        active: False where the method does nothing while decoding, since it left the prompt whole.
        scheme: how entries are packed. layer, seed: what its draws depend on.

    Raises:
        KVError: the method evicts and restricts, or evicts and holds entries without a value.
    """
    granted = capacity if granted is None else granted
    evicts = active and method.evicts
    restricts = active and method.restricts
    if evicts and restricts:
        raise KVError(
            f"{type(method).__name__} evicts entries and restricts attention while decoding; allowed: "
            "one or the other"
        )
    if evicts:  # the cache grows to what was granted, and by the token that is being read
        room = min(room, max(0, granted - held.keys.shape[2]) + 1)
    keeps_scores = evicts or restricts
    store = store_of(held, room, scheme, layer=layer, seed=seed, keeps_scores=keeps_scores)
    if evicts:
        return EvictingCache(store, capacity=capacity, method=method, granted=granted, sink=sink)
    if restricts:
        return RestrictedCache(store, capacity=capacity, method=method, granted=granted, sink=sink)
    return GrowingCache(store, capacity=capacity)
