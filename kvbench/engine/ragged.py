"""A layer whose heads hold different numbers of entries, and no padding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import LayerCache
from kvbench.kv import CompressedKV, KVError


class RaggedCache(LayerCache):
    """One cache of one head for each head, so that what is held and counted is the sum of the heads.

    A token joins every head and attends in each to what that head holds. Rows go alone, not through
    `kvbench.kernels.decode_attention`.

    Args:
        held: the compressed prompt, batch 1, with `CompressedKV.lengths`.
        make: makes the cache of what one head holds.
    """

    def __init__(self, held: CompressedKV, make: Callable[[CompressedKV], LayerCache]) -> None:
        assert held.lengths is not None
        if held.keys_only or held.scores is not None or held.denominators is not None:
            raise KVError(
                "heads of different lengths hold scores, signed weights or keys without values; "
                "allowed: keys, values and log_weights"
            )
        self.heads: list[LayerCache] = []
        for head, length in enumerate(held.lengths[0].tolist()):
            here = (slice(None), slice(head, head + 1), slice(length))
            weights = None if held.log_weights is None else held.log_weights[here]
            if weights is not None and not weights.any():
                weights = None
            one = CompressedKV(held.keys[here], held.values[here], weights, held.positions[here])
            cache = make(one)
            self.heads.append(cache)
        first = self.heads[0]
        self.method, self.capacity, self.granted = first.method, first.capacity, first.granted
        self.sink, self.window, self.base, self.packed = first.sink, first.window, None, None
        self.evicts, self.restricts, self.keys_only = first.evicts, first.restricts, 0
        self.denominators, self.value_range, self.again = None, None, None
        self.rule = None
        if self.evicts or self.restricts:
            raise KVError(
                f"{type(self.method).__name__} holds heads of different lengths and acts while "
                "decoding; allowed: one or the other"
            )
        self.prompt_entries = held.lengths[0].cpu()

    @property
    def charged(self) -> int:
        """See `LayerCache.charged`: the mean of the heads, rounded up."""
        return -int(-self.entries().sum() // len(self.heads))

    @property
    def prompt_charged(self) -> int:
        """See `LayerCache.prompt_charged`: the mean of the heads, rounded up."""
        return -int(-self.prompt_entries.sum() // len(self.heads))

    @property
    def takes_one_by_kernel(self) -> bool:
        """Never: see the class."""
        return False

    @property
    def packs_as_it_grows(self) -> bool:
        """See `LayerCache.packs_as_it_grows`."""
        return any(head.packs_as_it_grows for head in self.heads)

    def padded(self) -> LayerCache:
        """One cache of all heads, to be looked at: positions, length and log-weights, with padding."""
        twin, counts = copy.copy(self.heads[0]), self.entries()
        twin.length, heads = int(counts.max()), len(self.heads)
        twin.positions = torch.full((heads, twin.length), -1)
        twin.log_weights = torch.full((heads, twin.length), float("-inf"))
        for i, (head, count) in enumerate(zip(self.heads, counts.tolist(), strict=True)):
            twin.positions[i, :count] = head.positions[0, :count]
            weights = head.log_weights
            twin.log_weights[i, :count] = 0.0 if weights is None else weights[0, :count]
        return twin

    def entries(self) -> Tensor:
        """Entries held per head: [kv_heads] int64."""
        return torch.cat([head.entries() for head in self.heads])

    def entry_bytes(self) -> int:
        """The sum of the heads'."""
        return sum(head.entry_bytes() for head in self.heads)

    def reserved_bytes(self) -> int:
        """The sum of the heads'."""
        return sum(head.reserved_bytes() for head in self.heads)

    def clone(self) -> RaggedCache:
        """A copy that shares nothing with this one that either of them writes to."""
        twin = copy.copy(self)
        twin.heads = [head.clone() for head in self.heads]
        return twin

    def step(self, call: LayerCall, positions: Tensor) -> Tensor:
        """See `LayerCache.step`."""
        of_heads = (
            x.split(x.shape[1] // len(self.heads), 1) for x in (call.query, call.key, call.value)
        )
        return torch.cat(
            [
                head.step(replace(call, query=query, key=key, value=value), positions)
                for head, query, key, value in zip(self.heads, *of_heads, strict=True)
            ]
        )
