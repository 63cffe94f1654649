"""The cache of a layer whose method compresses again while decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.engine import guard
from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import GrowingCache
from kvbench.engine.entries import Entries
from kvbench.kv import Budget, BudgetExceeded, LayerKV
from kvbench.methods.base import Method, Recompression


class RecompressedCache(GrowingCache):
    """A layer that its method compresses again while decoding, by its `Method.recompression`.

    Args:
        rule: when, and to how many entries.
        label, budget: those of the fork.
        prompt: the prompt's layer, with queries.
        generator: draws of all compressions, in order.

    Attributes:
        fed: tokens so far, behind the prompt's.
        queries: the last ones fed, [heads, at most rule.queries, head_dim], whose bytes are counted.
    """

    steps_by_kernel = False

    def __init__(
        self,
        store: Entries,
        *,
        capacity: int,
        method: Method,
        recompression: Recompression,
        label: str,
        budget: Budget,
        prompt: LayerKV,
        generator: torch.Generator,
    ) -> None:
        assert prompt.queries is not None
        self.method, self.recompression = method, recompression
        self.label, self.budget, self.generator = label, budget, generator
        self.prompt, self.fed = prompt.n, 0
        self.queries = prompt.queries[0, :, -recompression.queries :].clone()
        if recompression.to is not None and recompression.to >= 1:
            self._size(int(recompression.to))  # refuses now, rather than while decoding
        # The layer's facts without its tensors, which would keep the prompt in memory.
        nothing = prompt.keys[:, :, :0]
        self.facts = replace(
            prompt, keys=nothing, values=nothing, queries=None, shared={}, carried={}
        )
        super().__init__(store, capacity=capacity)

    def entry_bytes(self) -> int:
        """See `LayerCache.entry_bytes`; with those of the queries."""
        return super().entry_bytes() + self.queries.nbytes

    def clone(self) -> RecompressedCache:
        """See `LayerCache.clone`; the copy draws the same numbers."""
        twin = super().clone()
        assert isinstance(twin, RecompressedCache)
        twin.generator = torch.Generator()
        twin.generator.set_state(self.generator.get_state())
        return twin

    def _cuts(self, tokens: int) -> Sequence[int]:
        return range(1, tokens + 1)

    def _after_attention(self, call: LayerCall, weights: Tensor) -> None:
        """Let the method compress, if it is due.

        Raises:
            BudgetExceeded: the method holds more than it may; and whatever the method raises.
        """
        self.fed += 1
        self.queries = torch.cat([self.queries, call.query[0]], dim=1)
        self.queries = self.queries[:, -self.recompression.queries :]
        size = self.recompression.entries_to_keep(
            self.budget, self.prompt, self.fed, self.store.length
        )
        if size is not None:
            self._recompress(size)

    def _size(self, entries: int) -> Budget:
        return Budget(sink=self.budget.sink, window=self.budget.window, size=entries)

    def _recompress(self, size: int) -> None:
        """Hold the entries that the method keeps, `size` of them: its positions are places among them,
        and its log-weights add to theirs."""
        store, n = self.store, self.store.length
        layer = replace(
            self.facts,
            keys=store.keys[None, :, :n],
            values=store.values[None, :, :n],
            queries=self.queries[None],
            log_weights=None if store.log_weights is None else store.log_weights[None, :, :n],
            shared={},
        )
        kept, _, _ = guard.compress(
            self.label, self.method, layer, self._size(size), self.generator, {}
        )
        if kept.charged > size + 1:
            raise BudgetExceeded(self.label, layer.layer_index, size, kept.charged)
        places, count = kept.positions[0], kept.positions.shape[2]
        store.positions[:, :count] = store.positions.gather(1, places)
        if store.log_weights is not None:
            store.log_weights[:, :count] = store.log_weights.gather(1, places)
        if kept.log_weights is not None:
            if store.log_weights is None:
                store.log_weights = kept.log_weights.new_zeros(store.positions.shape)
            store.log_weights[:, :count] += kept.log_weights[0]
        store.keys[:, :count] = kept.keys[0]
        store.values[:, :count] = kept.values[0]
        store.length = count
