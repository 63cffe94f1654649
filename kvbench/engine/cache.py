"""The caches of one layer of a fork: how a decoded token changes the entries that are held.

A *fork* is one method's cache made from a shared prefill. Forks decode together, one batch row each;
every row attends to its own entries, so nothing is padded and a smaller cache is a cheaper step.

`kvbench.engine.entries` stores the entries. The classes differ in what they do with a decoded token:

- `GrowingCache` adds the token. `cache_of` chooses between this class and the next two.
- `EvictingCache` adds the token, and its method evicts another entry.
- `RestrictedCache` adds the token, and its method chooses the entries that the token's query sees.
- `RecompressedCache` (recompressed_cache.py) adds the token, and its method compresses all entries again
  from time to time.
- `RaggedCache` (ragged_cache.py) has a cache for each head, where heads hold different numbers of
  entries.

In: a `LayerCall` with the queries, keys and values of new tokens. Out: the attention output of these
tokens; entries and bytes for the audit.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.engine.attention import LayerCall, grown_range, signed_mean
from kvbench.engine.entries import GROWTH, Entries, PackedEntries
from kvbench.kernels.quantize import Scheme
from kvbench.kernels.sinks import softmax
from kvbench.kernels.softcap import capped
from kvbench.kv import CompressedKV, KVError
from kvbench.methods.base import Eviction, Held, Method, rule_of


class BytesOverTime(NamedTuple):
    """The bytes that a cache held after the prompt and after every step since: the largest number, and
    the mean."""

    peak: int
    mean: float


class LayerCache(ABC):
    """The cache of one layer of a fork.

    Attributes:
        capacity: the entries per head that the method may hold after prefill.
        prompt_entries: [kv_heads] int64, the entries that each head holds of the prompt. A count made on
            a GPU stays there until `Fork.audit_prompt` reads the counts of all layers at once.
    """

    capacity: int
    prompt_entries: Tensor

    @property
    @abstractmethod
    def steps_by_kernel(self) -> bool:
        """Whether steps of one token can go through `kvbench.kernels.decode_attention`, which adds the
        token and attends for all rows of a batch at once."""

    @property
    @abstractmethod
    def stores(self) -> Sequence[Entries]:
        """The stores of the entries: one for all heads, or one for each head."""

    @abstractmethod
    def step(self, call: LayerCall, positions: Tensor) -> Tensor:
        """Add the t tokens of a call of one row and compute their attention, causal among them.

        Args:
            positions: [t] int64.

        Returns:
            [heads, t, value_dim].
        """

    @abstractmethod
    def clone(self) -> LayerCache:
        """A copy with buffers of its own, so that the two decode independently."""

    @abstractmethod
    def entry_bytes(self) -> int:
        """The bytes of the entries that are held now, as `Entries.nbytes` counts them."""

    @abstractmethod
    def bytes_over_time(self) -> BytesOverTime:
        """The bytes of the entries after the prompt and after every step since."""

    def entries(self) -> Tensor:
        """The number of entries of each head now, without padding: [kv_heads] int64 on the host."""
        return torch.cat([store.count().cpu() for store in self.stores])

    def charged(self, entries: Tensor) -> int:
        """The number of entries per head that is charged to the budget, by the number of each head
        [kv_heads]: the largest head's."""
        return int(entries.max())

    def allowed(self, after_prompt: int, appended: int) -> int:
        """The largest number of entries per head that the audit allows, one entry of rounding included.

        Args:
            after_prompt: the entries per head that were charged after the prompt.
            appended: the number of tokens fed since.
        """
        return self.capacity + 1 + appended

    def reserved_bytes(self) -> int:
        """The bytes of all buffers, room included: the memory that a clone takes."""
        return sum(store.reserved_bytes() for store in self.stores)


class GrowingCache(LayerCache):
    """A layer whose heads hold equally many entries, and one more with every token.

    A layer with a sliding window removes entries that have left the window, `GROWTH` of them at a time.

    Args:
        store: the entries of the prompt.
        window: the length of the layer's sliding window in tokens; None for full attention.

    Attributes:
        rule: the rule by which the kernels evict entries; None where no entry is evicted, or where the
            method itself chooses the entry at every token.
    """

    rule: Eviction | None = None

    def __init__(self, store: Entries, *, capacity: int, window: int | None = None) -> None:
        self.store = store
        self.capacity = capacity
        self.window = window
        self.prompt_entries = store.count()
        self._moments = 0  # how many times bytes were counted: after the prompt, and at every step
        self._bytes_sum = 0
        self._bytes_peak = 0
        self._note_bytes()

    @property
    def stores(self) -> Sequence[Entries]:
        """See `LayerCache.stores`."""
        return [self.store]

    @property
    def limit(self) -> int | None:
        """The largest number of entries per head; None where the cache grows with every token."""
        return None

    @property
    def steps_by_kernel(self) -> bool:
        """See `LayerCache`."""
        return self.store.is_read_by_kernel and self.window is None

    def entry_bytes(self) -> int:
        """See `LayerCache.entry_bytes`. Entries that have left a sliding window are not counted, even if
        they are still in memory."""
        count = self.store.length
        return self.store.nbytes(count if self.window is None else min(count, self.window))

    def _note_bytes(self) -> None:
        """Take the bytes that are held now into mean and peak."""
        now = self.entry_bytes()
        self._moments += 1
        self._bytes_sum += now
        self._bytes_peak = max(self._bytes_peak, now)

    def count_steps_by_kernel(self, steps: int) -> None:
        """Account for `steps` steps of one token that the kernels took. Each added an entry, until the
        `limit` was reached; then an entry was evicted for each that was added."""
        before = self.entry_bytes()
        added = steps if self.limit is None else min(steps, self.limit - self.store.length)
        self.store.length += added
        after = self.entry_bytes()
        bytes_of_entry = (after - before) // max(1, added)
        # After step i the cache held min(i, added) more entries than before; the sum of these numbers.
        added_after_steps = added * (added + 1) // 2 + (steps - added) * added
        self._moments += steps
        self._bytes_sum += steps * before + added_after_steps * bytes_of_entry
        self._bytes_peak = max(self._bytes_peak, after)

    def bytes_over_time(self) -> BytesOverTime:
        """See `LayerCache.bytes_over_time`."""
        return BytesOverTime(self._bytes_peak, self._bytes_sum / self._moments)

    def clone(self) -> GrowingCache:
        """See `LayerCache.clone`."""
        twin = copy.copy(self)
        twin.store = self.store.clone()
        return twin

    def prepare_steps(self, position: int, tokens: int) -> None:
        """Reserve room for `tokens` tokens that the kernels will add one by one, the first at
        `position`, and write their positions, which the kernels do not."""
        store = self.store
        store.reserve(store.length + tokens)
        following = torch.arange(position, position + tokens, device=store.positions.device)
        store.positions[:, store.length : store.length + tokens] = following

    def step(self, call: LayerCall, positions: Tensor) -> Tensor:
        """See `LayerCache.step`."""
        outputs = []
        for begin, end in itertools.pairwise([0, *self._cuts(len(positions))]):
            outputs.append(
                self._append_and_attend(call.of_row(0, begin, end), positions[begin:end])
            )
        self._note_bytes()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _cuts(self, tokens: int) -> Sequence[int]:
        """Cut a run of new tokens into pieces whose tokens are added together; see `Entries.cuts`."""
        return self.store.cuts(tokens)

    def _append_and_attend(self, call: LayerCall, positions: Tensor) -> Tensor:
        """Add all t tokens of a call and compute their attention: [heads, t, value_dim]."""
        store = self.store
        query, value = call.query[0], call.value[0]
        if self.window is not None and store.length >= self.window + GROWTH:
            # The entries of a sliding-window layer are in the order of their positions.
            store.keep_last(self.window)
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
            # The new tokens are the last entries; none of them sees a later one.
            order = torch.arange(tokens, device=query.device)
            is_later = (order[None] > order[:, None]).repeat(group, 1)
            logits[..., n - tokens :].masked_fill_(is_later, float("-inf"))
        if self.window is not None:
            has_left = store.positions[:, None, :n] <= (positions - self.window)[None, :, None]
            logits.masked_fill_(has_left.repeat(1, group, 1), float("-inf"))
        self._hide(logits)
        sinks = call.sinks
        if sinks is not None:
            sinks = sinks.view(stored_heads, group).repeat_interleave(tokens, dim=1)
        weights = softmax(logits, sinks)
        output = store.mix_values(weights)
        if store.denominators is not None:
            ranges, store.value_range = grown_range(store.value_range, value, group)
            output = signed_mean(
                output, weights, store.denominators[:, :n], ranges, sinks=sinks is not None
            )
        store.pack()
        self._after_attention(call, weights.view(stored_heads, group, tokens, n))
        return output.view(stored_heads, group, tokens, -1).reshape(heads, tokens, -1)

    def _hide(self, logits: Tensor) -> None:
        """Set logits [kv_heads, queries, n] to -inf where a query does not see an entry, in place.
        Nothing here: a subclass overrides this for a method that restricts attention."""

    def _after_attention(self, call: LayerCall, weights: Tensor) -> None:
        """Let the method act on the entries after the tokens of a call have attended to them. Nothing
        here: a subclass overrides this for a method that evicts or compresses again.

        Args:
            weights: [kv_heads, group, t, n], the softmax weights of the call.
        """


class EvictingCache(GrowingCache):
    """A layer whose method evicts an entry of every head for every token, once the cache is full.

    Args:
        method: a method that evicts (`Method.evicts`).
        granted: the entries per head that the budget grants it; beyond these it evicts.
        sink: how many of the prompt's first tokens are always kept.
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
        """See `GrowingCache.limit`: the entries that were granted, or those that compression left if
        these are more."""
        return max(self.granted, self.store.length)

    @property
    def steps_by_kernel(self) -> bool:
        """See `LayerCache`: the kernels evict by a rule, and need the scores that it reads."""
        if self.rule is None or not super().steps_by_kernel:
            return False
        return self.rule.leaves == "oldest" or self.store.scores is not None

    def allowed(self, after_prompt: int, appended: int) -> int:
        """See `LayerCache.allowed`: the cache may not grow beyond its limit."""
        return max(self.granted, after_prompt)

    def prepare_steps(self, position: int, tokens: int) -> None:
        """See `GrowingCache.prepare_steps`. Here the kernel that evicts writes the positions."""
        most = max(self.granted, self.store.length) + 1  # the new token is added before one leaves
        self.store.reserve(min(self.store.length + tokens, most))

    def _cuts(self, tokens: int) -> Sequence[int]:
        """See `GrowingCache._cuts`: one by one, since an entry may be evicted after each token."""
        return range(1, tokens + 1)

    def _after_attention(self, call: LayerCall, weights: Tensor) -> None:
        """Let the method evict one entry per head. The call has one token (`_cuts`)."""
        held = _held_entries(self.store, self.granted, self.sink)
        attention = weights[:, :, 0].mean(1)
        scores, evicted = self.method.evict(held, attention)
        # A method may update `held.scores`, which are the store's own, in place and return them.
        if scores is not None and scores is not held.scores:
            assert held.scores is not None
            held.scores.copy_(scores)
        if evicted is not None:
            self.store.remove(evicted)


class RestrictedCache(GrowingCache):
    """A layer that holds every entry, and whose method chooses those that a query sees.

    Args:
        method: a method that restricts attention (`Method.restricts`).
        granted: the entries per head that the budget lets a query see.
        sink: how many of the prompt's first tokens are always kept.
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
        """See `GrowingCache._hide`: hide the entries that the method chooses."""
        held = _held_entries(self.store, self.granted, self.sink)
        hidden = self.method.restrict(held, logits)
        logits.masked_fill_(hidden, float("-inf"))


def _held_entries(store: Entries, granted: int, sink: int) -> Held:
    """The entries of a store, as `Method.evict` and `Method.restrict` receive them."""
    n = store.length
    scores = None if store.scores is None else store.scores[:, :n]
    return Held(scores, store.positions[:, :n], granted, sink)


def store_of(
    compressed: CompressedKV,
    room: int,
    scheme: Scheme | None = None,
    *,
    layer: int = 0,
    seed: int = 0,
    keeps_scores: bool = False,
) -> Entries:
    """Store the entries of a prompt, packed if there is a scheme. The arguments are those of `Entries`
    and `PackedEntries`."""
    if scheme is None:
        return Entries(compressed, room, keeps_scores=keeps_scores)
    return PackedEntries(
        compressed, room, scheme, layer=layer, seed=seed, keeps_scores=keeps_scores
    )


def cache_of(
    compressed: CompressedKV,
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
    """Make the cache of a layer whose heads hold equally many entries. What its method does while
    decoding decides the class.

    Args:
        compressed: what the method keeps of the prompt, batch 1.
        room: how many tokens will be added, 0 if the caller does not know.
        capacity: the entries per head that the method may hold after prefill.
        granted: the entries per head that the budget grants while decoding; None for the capacity.
        sink: how many of the prompt's first tokens are always kept.
        active: False where the method does nothing while decoding, because the prompt was within its
            capacity and was not compressed.
        scheme: how entries are packed; None for the model's dtype.
        layer, seed: the numbers on which the scheme's random draws depend.

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
    if evicts:
        # The cache grows up to `granted`; one more entry, since a token is added before one leaves.
        room = min(room, max(0, granted - compressed.keys.shape[2]) + 1)
    keeps_scores = evicts or restricts
    store = store_of(compressed, room, scheme, layer=layer, seed=seed, keeps_scores=keeps_scores)
    if evicts:
        return EvictingCache(store, capacity=capacity, method=method, granted=granted, sink=sink)
    if restricts:
        return RestrictedCache(store, capacity=capacity, method=method, granted=granted, sink=sink)
    return GrowingCache(store, capacity=capacity)
