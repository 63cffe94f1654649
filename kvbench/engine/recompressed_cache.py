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
    """A layer whose entries its method compresses again while decoding.

    Args:
        recompression: the times at which the method compresses, and the number of entries that it keeps
            (`Method.recompression`).
        label: what messages call the method.
        budget: the fork's budget, whose sink and window apply to every compression.
        prompt: the layer after the prefill, with the prompt's queries.
        generator: makes the random draws of all compressions, one after the other.

    Attributes:
        prompt_tokens: the number of tokens of the prompt.
        fed_tokens: the number of tokens fed since the prompt.
        queries: [heads, at most recompression.queries, head_dim], those of the last tokens. The method
            needs them, so their bytes are counted as the cache's.
        layer_without_tensors: the layer that the method is shown, before keys, values and queries are
            filled in.
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
        self.method = method
        self.recompression = recompression
        self.label = label
        self.budget = budget
        self.generator = generator
        self.prompt_tokens = prompt.n
        self.fed_tokens = 0
        self.queries = prompt.queries[0, :, -recompression.queries :].clone()
        if recompression.to is not None and recompression.to >= 1:
            self._budget_of(int(recompression.to))  # an impossible size is refused before decoding
        no_entries = prompt.keys[
            :, :, :0
        ]  # a reference to the tensors would keep the prompt in memory
        self.layer_without_tensors = replace(
            prompt, keys=no_entries, values=no_entries, queries=None, shared={}, carried={}
        )
        super().__init__(store, capacity=capacity)

    def entry_bytes(self) -> int:
        """See `LayerCache.entry_bytes`; the bytes of the queries are included."""
        return super().entry_bytes() + self.queries.nbytes

    def clone(self) -> RecompressedCache:
        """See `LayerCache.clone`; from here on both draw the same random numbers."""
        twin = super().clone()
        assert isinstance(twin, RecompressedCache)
        twin.generator = torch.Generator()
        twin.generator.set_state(self.generator.get_state())
        return twin

    def _cuts(self, tokens: int) -> Sequence[int]:
        """See `GrowingCache._cuts`: one by one, since a compression may follow each token."""
        return range(1, tokens + 1)

    def _after_attention(self, call: LayerCall, weights: Tensor) -> None:
        """Let the method compress, if this is one of the times for it.

        Raises:
            BudgetExceeded: the method keeps more entries than it may. Whatever the method raises is
                raised, too.
        """
        self.fed_tokens += 1
        self.queries = torch.cat([self.queries, call.query[0]], dim=1)
        self.queries = self.queries[:, -self.recompression.queries :]
        size = self.recompression.entries_to_keep(
            self.budget, self.prompt_tokens, self.fed_tokens, self.store.length
        )
        if size is not None:
            self._recompress(size)

    def _budget_of(self, entries: int) -> Budget:
        """A budget that grants `entries` entries, sink and window included."""
        return Budget(sink=self.budget.sink, window=self.budget.window, size=entries)

    def _recompress(self, size: int) -> None:
        """Let the method keep `size` of the entries that are held now.

        The method is shown the entries as a prompt. The positions that it returns are therefore indices
        of entries, and its log-weights are added to those that the entries have.
        """
        store = self.store
        n = store.length
        layer = replace(
            self.layer_without_tensors,
            keys=store.keys[None, :, :n],
            values=store.values[None, :, :n],
            queries=self.queries[None],
            log_weights=None if store.log_weights is None else store.log_weights[None, :, :n],
            shared={},
        )
        kept = guard.compress(
            self.label, self.method, layer, self._budget_of(size), self.generator, {}
        ).kept
        if kept.charged > size + 1:
            raise BudgetExceeded(self.label, layer.layer_index, size, kept.charged)
        indices = kept.positions[0]
        count = kept.positions.shape[2]
        store.positions[:, :count] = store.positions.gather(1, indices)
        if store.log_weights is not None:
            store.log_weights[:, :count] = store.log_weights.gather(1, indices)
        if kept.log_weights is not None:
            if store.log_weights is None:
                store.log_weights = kept.log_weights.new_zeros(store.positions.shape)
            store.log_weights[:, :count] += kept.log_weights[0]
        store.keys[:, :count] = kept.keys[0]
        store.values[:, :count] = kept.values[0]
        store.length = count
