"""Many tokens at once through a full cache that evicts an entry for each."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.engine.attention import LayerCall, capped
from kvbench.engine.cache import LayerCache
from kvbench.kernels.chunk_eviction import attention_in_turn, oldest_in_turn, stays, take_turns
from kvbench.kernels.eviction import Eviction
from kvbench.methods.base import Method

LOGITS = 1 << 24
"""Logits that exist at once: 64 MiB of float32."""


def rule_in_turn(cache: LayerCache) -> Eviction | None:
    """The rule by which `read_chunk` evicts; None where every token has to be walked: nothing is evicted
    yet, the method has an `evict` of its own, or entries do not lie in plain buffers."""
    own = type(cache.method).evict is not Method.evict
    if own or not cache.evicts or not cache.takes_one_by_kernel:
        return None
    return cache.method.eviction(cache.granted, cache.sink)


def read_chunk(cache: LayerCache, rule: Eviction, call: LayerCall, positions: Tensor) -> Tensor:
    """`LayerCache.step`, in effect one token after the other."""
    most = max(1, LOGITS // (call.query.shape[1] * (cache.length + 1)))
    begins = range(0, len(positions), most)
    return torch.cat(
        [_read(cache, rule, call.of_row(0, i, i + most), positions[i : i + most]) for i in begins],
        dim=1,
    )


def _read(cache: LayerCache, rule: Eviction, call: LayerCall, positions: Tensor) -> Tensor:
    query, key, value = call.query[0], call.key[0], call.value[0]
    heads, tokens, dim = query.shape
    stored, count = cache.keys.shape[0], cache.length
    cache.expect(0, 1)  # room for the token that is being read
    queries = query.reshape(stored, -1, dim)
    weighs = rule.leaves != "oldest"
    sides = []
    for keys in (cache.keys[:, : count + weighs], key):
        logits = capped((queries @ keys.mT).float().mul_(call.scaling), call.softcap)
        sides.append(logits.view(stored, -1, tokens, keys.shape[1]))
    logits, among = sides
    if cache.log_weights is not None:
        logits[..., :count] += cache.log_weights[:, None, None, :count]
    if weighs:
        assert cache.scores is not None
        held = torch.cat([cache.positions[:, :count], positions.expand(stored, -1)], dim=-1)
        leaving = take_turns(
            logits,
            among,
            cache.scores[:, : count + 1],
            held,
            rule.choose,
            heaviest=rule.leaves == "heaviest",
            sink=rule.sink,
            recent=rule.recent,
        )
    else:
        leaving = oldest_in_turn(cache.positions[:, :count], tokens, rule.sink)
    before, new = attention_in_turn(logits, among, leaving, count)
    out = _mix(before, cache.values[:, :count]) + _mix(new, value)
    _settle(cache, leaving, key, value, positions)
    return out.reshape(heads, tokens, -1)


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """weights [kv_heads, group, t, c] . v -> [kv_heads, group * t, d]."""
    return weights.flatten(1, 2).to(values.dtype) @ values


def _settle(
    cache: LayerCache, leaving: Tensor, key: Tensor, value: Tensor, positions: Tensor
) -> None:
    """Put the tokens that stay into the slots that became free; the others into the one after the last
    entry, which nothing reads."""
    stored, tokens = leaving.shape
    count = cache.length
    slots = leaving.masked_fill(stays(leaving, count)[1] < tokens, count)
    row = torch.arange(stored, device=slots.device)[:, None]
    cache.keys[row, slots] = key
    cache.values[row, slots] = value
    cache.positions[row, slots] = positions.expand(stored, -1)
    if cache.log_weights is not None:
        cache.log_weights[row, slots] = 0.0
