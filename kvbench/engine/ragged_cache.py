"""The cache of a layer whose heads hold different numbers of entries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import (
    BytesOverTime,
    EvictingCache,
    GrowingCache,
    LayerCache,
    RestrictedCache,
)
from kvbench.engine.entries import Entries
from kvbench.kv import CompressedKV, KVError


class RaggedCache(LayerCache):
    """A layer whose heads hold different numbers of entries, without padding: each head has a cache of
    its own, to which every token is added. Bytes are the sums over the heads.

    Args:
        compressed: what the method keeps of the prompt, batch 1, with `CompressedKV.lengths`.
        make: makes the cache of the entries of one head.

    Attributes:
        heads: the cache of each KV head.

    Raises:
        KVError: the entries have scores, signed weights or no values, or the method evicts or restricts
            attention while decoding.
    """

    def __init__(
        self, compressed: CompressedKV, make: Callable[[CompressedKV], GrowingCache]
    ) -> None:
        assert compressed.lengths is not None
        has_scores = compressed.scores is not None
        if compressed.keys_only or has_scores or compressed.denominators is not None:
            raise KVError(
                "heads of different lengths hold scores, signed weights or keys without values; "
                "allowed: keys, values and log_weights"
            )
        self.heads: list[GrowingCache] = []
        for head, length in enumerate(compressed.lengths[0].tolist()):
            own_entries = (slice(None), slice(head, head + 1), slice(length))
            weights = None
            if compressed.log_weights is not None:
                weights = compressed.log_weights[own_entries]
                if not weights.any():
                    weights = None  # zeros are not stored, as `CompressedKV.nbytes` counts
            head_entries = CompressedKV(
                compressed.keys[own_entries],
                compressed.values[own_entries],
                weights,
                compressed.positions[own_entries],
            )
            self.heads.append(make(head_entries))
        first = self.heads[0]
        if isinstance(first, EvictingCache | RestrictedCache):
            raise KVError(
                f"{type(first.method).__name__} holds heads of different lengths and acts while "
                "decoding; allowed: one or the other"
            )
        self.capacity = first.capacity
        self.prompt_entries = compressed.lengths[0].cpu()

    @property
    def steps_by_kernel(self) -> bool:
        """See `LayerCache`: whether the steps of every head can go through the kernels."""
        return all(head.steps_by_kernel for head in self.heads)

    @property
    def stores(self) -> Sequence[Entries]:
        """See `LayerCache.stores`."""
        return [head.store for head in self.heads]

    def charged(self, entries: Tensor) -> int:
        """See `LayerCache.charged`: the mean over the heads, rounded up."""
        return -int(-entries.sum() // len(self.heads))

    def entry_bytes(self) -> int:
        """See `LayerCache.entry_bytes`: the sum over the heads."""
        return sum(head.entry_bytes() for head in self.heads)

    def bytes_over_time(self) -> BytesOverTime:
        """See `LayerCache.bytes_over_time`: the sums over the heads."""
        heads = [head.bytes_over_time() for head in self.heads]
        return BytesOverTime(sum(head.peak for head in heads), sum(head.mean for head in heads))

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
        sinks = [None] * count if call.sinks is None else call.sinks.chunk(count)
        outputs = []
        for head, query, key, value, own_sinks in zip(
            self.heads, queries, keys, values, sinks, strict=True
        ):
            head_call = replace(call, query=query, key=key, value=value, sinks=own_sinks)
            outputs.append(head.step(head_call, positions))
        return torch.cat(outputs)
