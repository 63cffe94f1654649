"""How methods act on the entries of a cache while decoding: they evict (`Evict`), restrict attention
(`Restrict`) or compress again (`PeriodicCompression`); else the cache grows."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.engine import check
from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import GROW, Cache, Hook
from kvbench.kv import Budget, BudgetExceeded, KVError, LayerKV
from kvbench.methods.base import Method, Schedule, rule_of


class Evict(Hook):
    """An entry of every head leaves for every token, once a head has more than `granted`."""

    one_by_one = True
    keeps_scores = True

    def __init__(self, method: Method, granted: int, sink: int) -> None:
        self.method, self.granted, self.sink = method, granted, sink
        self.rule = rule_of(method, granted, sink)
        self.by_kernel = self.rule is not None

    def after_token(self, cache: Cache, call: LayerCall, weights: Tensor) -> None:
        assert self.granted is not None
        held = cache.held(self.granted, self.sink)
        scores, evicted = self.method.evict(held, weights[:, :, 0].mean(1))
        # A method may update `held.scores`, which are the cache's own, in place and return them.
        if scores is not None and scores is not held.scores:
            assert held.scores is not None
            held.scores.copy_(scores)
        if evicted is not None:
            cache.remove(evicted)


class Restrict(Hook):
    """The method chooses the entries that each query sees, `seen` of them by the budget."""

    by_kernel = False
    keeps_scores = True

    def __init__(self, method: Method, seen: int, sink: int) -> None:
        self.method, self.seen, self.sink = method, seen, sink

    def hide(self, cache: Cache, logits: Tensor) -> None:
        hidden = self.method.restrict(cache.held(self.seen, self.sink), logits)
        logits.masked_fill_(hidden, float("-inf"))


class PeriodicCompression(Hook):
    """The method compresses the entries again from time to time.

    Args:
        budget: sink and window apply to every compression.
        prompt: the layer after the prefill, with the prompt's queries.
        generator: makes the random draws of all compressions, one after the other.
    """

    by_kernel = False
    one_by_one = True

    def __init__(
        self,
        method: Method,
        times: Schedule,
        label: str,
        budget: Budget,
        prompt: LayerKV,
        generator: torch.Generator,
    ) -> None:
        assert prompt.queries is not None
        self.method, self.times, self.label, self.budget = method, times, label, budget
        self.generator = generator
        self.prompt_tokens, self.fed_tokens = prompt.n, 0
        # Those of the last tokens; the method needs them, so their bytes are the cache's.
        self.queries = prompt.queries[0, :, -times.queries :].clone()
        self.nbytes = self.queries.nbytes
        if times.to is not None and times.to >= 1:
            self._budget_of(int(times.to))  # an impossible size is refused before decoding
        empty = prompt.keys[:, :, :0]  # a reference to the tensors would keep the prompt in memory
        self.layer = replace(prompt, keys=empty, values=empty, queries=None, shared={}, carried={})

    def clone(self) -> PeriodicCompression:
        twin = copy.copy(self)  # from here on both draw the same numbers
        twin.generator = torch.Generator()
        twin.generator.set_state(self.generator.get_state())
        return twin

    def _budget_of(self, entries: int) -> Budget:
        return Budget(sink=self.budget.sink, window=self.budget.window, size=entries)

    def after_token(self, cache: Cache, call: LayerCall, weights: Tensor) -> None:
        """Compress, if this is one of the times for it. The method is shown the entries as a prompt: the
        positions that it returns are places of entries, and its log-weights are added to theirs.

        Raises:
            BudgetExceeded: the method keeps more than it may. Whatever it raises is raised, too.
        """
        self.fed_tokens += 1
        self.queries = torch.cat([self.queries, call.query[0]], dim=1)
        self.queries = self.queries[:, -self.times.queries :]
        self.nbytes = self.queries.nbytes
        n = cache.length
        size = self.times.entries_to_keep(self.budget, self.prompt_tokens, self.fed_tokens, n)
        if size is None:
            return
        layer = replace(
            self.layer,
            keys=cache.keys[None, :, :n],
            values=cache.values[None, :, :n],
            queries=self.queries[None],
            log_weights=None if cache.log_weights is None else cache.log_weights[None, :, :n],
            shared={},
        )
        compressed, _, _ = check.compress(
            self.label, self.method, layer, self._budget_of(size), self.generator, {}
        )
        if compressed.charged > size + 1:
            raise BudgetExceeded(self.label, layer.layer_index, size, compressed.charged)
        cache.replace_with(compressed)


def hook_of(method: Method, granted: int, sink: int) -> Hook:
    """The hook of a method that never compresses again: it evicts, or restricts attention, to the
    `granted` entries per head, of which the prompt's first `sink` stay; or it does nothing.

    Raises:
        KVError: it does both.
    """
    if method.evicts and method.restricts:
        raise KVError(
            f"{type(method).__name__} evicts entries and restricts attention while decoding; allowed: "
            "one or the other"
        )
    if method.evicts:
        return Evict(method, granted, sink)
    return Restrict(method, granted, sink) if method.restricts else GROW
