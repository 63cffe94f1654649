"""The cache of a layer whose heads hold different numbers of entries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import EvictingCache, GrowingCache, LayerCache, RestrictedCache
from kvbench.engine.entries import Entries
from kvbench.kv import CompressedKV, KVError


class RaggedCache(LayerCache):
    """A layer whose heads hold different numbers of entries, without padding: one cache of one head for
    each head, so that what is held and counted is the sum of the heads.

    A token joins every head and attends in each to what that head holds.

    Args:
        held: the compressed prompt, batch 1, with `CompressedKV.lengths`.
        make: makes the cache of what one head holds.
    """

    def __init__(self, held: CompressedKV, make: Callable[[CompressedKV], GrowingCache]) -> None:
        assert held.lengths is not None
        if held.keys_only or held.scores is not None or held.denominators is not None:
            raise KVError(
                "heads of different lengths hold scores, signed weights or keys without values; "
                "allowed: keys, values and log_weights"
            )
        self.heads: list[GrowingCache] = []
        for head, length in enumerate(held.lengths[0].tolist()):
            here = (slice(None), slice(head, head + 1), slice(length))
            weights = None if held.log_weights is None else held.log_weights[here]
            if weights is not None and not weights.any():
                weights = None
            of_head = CompressedKV(
                held.keys[here], held.values[here], weights, held.positions[here]
            )
            self.heads.append(make(of_head))
        first = self.heads[0]
        if isinstance(first, EvictingCache | RestrictedCache):
            raise KVError(
                f"{type(first.method).__name__} holds heads of different lengths and acts while "
                "decoding; allowed: one or the other"
            )
        self.capacity = first.capacity
        self.prompt_entries = held.lengths[0].cpu()

    @property
    def steps_by_kernel(self) -> bool:
        """See `LayerCache`: where every head can."""
        return all(head.steps_by_kernel for head in self.heads)

    @property
    def stores(self) -> Sequence[Entries]:
        """See `LayerCache.stores`."""
        return [head.store for head in self.heads]

    def charged(self, entries: Tensor) -> int:
        """See `LayerCache.charged`: the mean of the heads, rounded up."""
        return -int(-entries.sum() // len(self.heads))

    def entry_bytes(self) -> int:
        """The sum of the heads'."""
        return sum(head.entry_bytes() for head in self.heads)

    def held_bytes(self) -> tuple[int, float]:
        """The sums of the heads'."""
        peaks, means = zip(*(head.held_bytes() for head in self.heads), strict=True)
        return sum(peaks), sum(means)

    def clone(self) -> RaggedCache:
        """See `LayerCache.clone`."""
        twin = copy.copy(self)
        twin.heads = [head.clone() for head in self.heads]
        return twin

    def step(self, call: LayerCall, positions: Tensor) -> Tensor:
        """See `LayerCache.step`."""
        count = len(self.heads)
        queries = call.query.split(call.query.shape[1] // count, 1)
        keys = call.key.split(call.key.shape[1] // count, 1)
        values = call.value.split(call.value.shape[1] // count, 1)
        outs = []
        for head, query, key, value in zip(self.heads, queries, keys, values, strict=True):
            outs.append(head.step(replace(call, query=query, key=key, value=value), positions))
        return torch.cat(outs)
