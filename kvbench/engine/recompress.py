"""Compression while decoding: a layer's entries are compressed again every so many tokens."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.engine import guard
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, LayerKV
from kvbench.methods.base import Method, Recompression

if TYPE_CHECKING:
    from kvbench.engine.cache import LayerCache


@dataclass
class Recompressor:
    """One layer's state between two compressions.

    Attributes:
        rule: when, and to how many entries. method, budget, label: those of the fork.
        layer: the prompt's layer, for its index, scaling, and softcap.
        generator: draws of all compressions, in order.
        tokens: fed so far; with ``phase=tokens``, the prompt's included.
        queries: the last ones fed, [heads, at most rule.queries, head_dim].
        times: how often the layer was compressed.
    """

    rule: Recompression
    method: Method
    budget: Budget
    label: str
    layer: LayerKV
    generator: torch.Generator
    tokens: int
    queries: Tensor
    times: int = 0

    @classmethod
    def begin(
        cls, label: str, method: Method, budget: Budget, layer: LayerKV, generator: torch.Generator
    ) -> Recompressor | None:
        """The state after the prefill of `layer`; None for a method that does not recompress."""
        rule = method.recompression
        if rule is None or layer.queries is None:
            return None
        to = Budget(sink=budget.sink, window=budget.window, size=rule.to)
        last = layer.queries[0, :, -rule.queries :].clone()
        none = layer.keys[:, :, :0]  # does not keep the prompt in memory
        shape = replace(layer, keys=none, values=none, queries=None, shared={}, carried={})
        tokens = layer.n if rule.phase == "tokens" else 0
        return cls(rule, method, to, label, shape, generator, tokens, last)

    @property
    def nbytes(self) -> int:
        """Bytes of the queries."""
        return self.queries.nbytes

    def clone(self) -> Recompressor:
        """An independent copy."""
        twin = copy.copy(self)
        twin.generator = torch.Generator()
        twin.generator.set_state(self.generator.get_state())
        return twin

    def after(self, cache: LayerCache, query: Tensor) -> None:
        """Note that a token with this query [heads, 1, head_dim] was fed to `cache`; compress if due.

        Raises:
            BudgetExceeded: the method holds more than it may; and whatever the method raises.
        """
        before, self.tokens = self.tokens, self.tokens + 1
        self.queries = torch.cat([self.queries, query], dim=1)[:, -self.rule.queries :]
        counted = before if self.rule.phase == "tokens" else self.tokens
        if counted % self.rule.every or cache.length <= self.rule.to:
            return
        n = cache.length
        kv = replace(
            self.layer,
            keys=cache.keys[None, :, :n],
            values=cache.values[None, :, :n],
            queries=self.queries[None],
            shared={},
        )
        held, _, _ = guard.compress(self.label, self.method, kv, self.budget, self.generator, {})
        if held.charged > self.rule.to + 1:
            raise BudgetExceeded(self.label, kv.layer_index, self.rule.to, held.charged)
        _replace_entries(cache, held)
        self.times += 1


def _replace_entries(cache: LayerCache, held: CompressedKV) -> None:
    """Replace the entries of `cache` by `held`, whose positions are places among these entries and whose
    log-weights add to theirs."""
    places, count = held.positions[0], held.positions.shape[2]
    cache.positions[:, :count] = cache.positions.gather(1, places)
    if cache.log_weights is not None:
        cache.log_weights[:, :count] = cache.log_weights.gather(1, places)
    if held.log_weights is not None:
        if cache.log_weights is None:
            cache.log_weights = held.log_weights.new_zeros(cache.positions.shape)
        cache.log_weights[:, :count] += held.log_weights[0]
    cache.keys[:, :count], cache.values[:, :count] = held.keys[0], held.values[0]
    cache.length = count
