"""Compression while decoding: a layer's entries are compressed again every so many tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import LayerCache
from kvbench.engine.guard import compress
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, LayerKV
from kvbench.methods.base import Method, Recompression


class RecompressedCache(LayerCache):
    """A layer that its method compresses again while decoding, by its `Method.recompression`.

    Args:
        rule: when, and to how many entries. label, budget: those of the fork.
        prompt: the prompt's layer, with queries.
        generator: draws of all compressions, in order.

    Attributes:
        tokens: fed so far; with ``phase=tokens``, the prompt's included.
        queries: the last ones fed, [heads, at most rule.queries, head_dim], whose bytes are counted.
        times: how often the layer was compressed.
    """

    is_fixed = is_plain = False

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
        super().__init__(held, room, method, **options)
        assert prompt.queries is not None
        self.recompression, self.label, self.generator = rule, label, generator
        self.to = Budget(sink=budget.sink, window=budget.window, size=rule.to)
        self.queries = prompt.queries[0, :, -rule.queries :].clone()
        self.tokens = prompt.n if rule.phase == "tokens" else 0
        self.times = 0
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

    def step(self, call: LayerCall, positions: Tensor) -> Tensor:
        """See `LayerCache.step`.

        Raises:
            BudgetExceeded: the method holds more than it may; and whatever the method raises.
        """
        outputs = []
        for i in range(len(positions)):
            one = call.of_row(0, i, i + 1)
            outputs.append(super().step(one, positions[i : i + 1]))
            before, self.tokens = self.tokens, self.tokens + 1
            self.queries = torch.cat([self.queries, one.query[0]], dim=1)
            self.queries = self.queries[:, -self.recompression.queries :]
            counted = before if self.recompression.phase == "tokens" else self.tokens
            if counted % self.recompression.every == 0 and self.length > self.recompression.to:
                self._recompress()
        return torch.cat(outputs, dim=1)

    def _recompress(self) -> None:
        """Hold what the method keeps of the entries: its positions are places among them, and its
        log-weights add to theirs."""
        n = self.length
        layer = replace(
            self.shape,
            keys=self.keys[None, :, :n],
            values=self.values[None, :, :n],
            queries=self.queries[None],
            shared={},
        )
        held, _, _ = compress(self.label, self.method, layer, self.to, self.generator, {})
        if held.charged > self.recompression.to + 1:
            raise BudgetExceeded(self.label, layer.layer_index, self.recompression.to, held.charged)
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
        self.times += 1
