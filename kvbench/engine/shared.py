"""Caches that go on from the same entries, which are neither copied nor read more than once a step."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvbench.engine.attention import QUERY_BLOCK, LayerCall, capped
from kvbench.engine.cache import PER_ENTRY, LayerCache


def is_shareable(cache: LayerCache) -> bool:
    """Whether a branch can read this cache's entries where they are."""
    return cache.is_fixed and cache.window is None


def branch_of(base: LayerCache) -> LayerCache:
    """A cache that goes on from `base` and reads its entries where they are, so that nothing may be
    appended to `base` any more. A cache whose entries change while decoding is copied; so is a sliding
    window, which is short."""
    if not is_shareable(base):
        return base.clone()
    twin, n = copy.copy(base), base.length
    twin.before, twin.first, twin.first_value = base, n, n
    twin.keys, twin.values = base.keys[:, :0], base.values[:, :0]
    _copy_numbers(twin)
    return twin


def merged(cache: LayerCache) -> LayerCache:
    """The cache itself, or, of a branch, one like it that holds all its entries itself."""
    if not isinstance(cache.before, LayerCache):
        return cache
    base, twin, n = merged(cache.before), copy.copy(cache), cache.length
    twin.before, twin.first, twin.first_value = base.before, base.first, base.first_value
    before = base.keys[:, : base.length - base.first]
    twin.keys = torch.cat([before, cache.keys[:, : n - cache.first]], dim=1)
    before = base.values[:, : base.length - base.first_value]
    twin.values = torch.cat([before, cache.values[:, : n - cache.first_value]], dim=1)
    _copy_numbers(twin)
    return twin


def _copy_numbers(cache: LayerCache) -> None:
    for name in PER_ENTRY:
        part = getattr(cache, name)
        if part is not None:
            setattr(cache, name, part[:, : cache.length].clone())


def rows_by_base(caches: Sequence[LayerCache | None]) -> list[list[int]]:
    """Places of the caches that are branches of one base, two or more, and attend by an ordinary
    softmax over all they hold."""
    found: dict[int, list[int]] = {}
    for place, cache in enumerate(caches):
        if cache is None or not isinstance(cache.before, LayerCache):
            continue
        if not cache.restricts and cache.denominators is None:
            found.setdefault(id(cache.before), []).append(place)
    return [places for places in found.values() if len(places) > 1]


def attend_branches(caches: Sequence[LayerCache], call: LayerCall, positions: Tensor) -> Tensor:
    """Append t tokens to each branch of one base, and attend: [rows, heads, t, value_dim].

    The softmax over a row's entries is taken in two parts, the base's entries for the queries of all
    rows at once and each row's own after it, which are joined by their normalisers (log-sum-exp):
    the same sum in another order.

    Args:
        caches: one per row of `call`; they neither evict nor restrict, and have no sliding window.
        positions: [rows, t].
    """
    base = caches[0].before
    assert isinstance(base, LayerCache)
    rows, heads, tokens, dim = call.query.shape
    stored = base.keys.shape[0]
    group = heads // stored
    queries = call.query.reshape(rows, stored, group * tokens, dim)
    together = queries.transpose(0, 1).reshape(stored, -1, dim)
    parts = [_attend_base(base, block, call) for block in together.split(QUERY_BLOCK, dim=1)]
    mixed, total, top = (
        torch.cat(part, dim=1).unflatten(1, (rows, -1)).transpose(0, 1)
        for part in zip(*parts, strict=True)
    )
    for row, cache in enumerate(caches):
        cache.append(call.key[row], call.value[row], positions[row])
    keys = _side_by_side([cache.keys[:, : cache.length - cache.first] for cache in caches])
    values = _side_by_side(
        [cache.values[:, : cache.length - cache.first_value] for cache in caches]
    )
    logits = capped((queries @ keys.mT).float().mul_(call.scaling), call.softcap)
    device = logits.device
    ends = torch.tensor([cache.length - cache.first for cache in caches], device=device)
    seen = ends[:, None] - tokens + torch.arange(tokens, device=device)  # the last entry of a query
    hidden = torch.arange(keys.shape[2], device=device) > seen[..., None]
    logits.masked_fill_(hidden[:, None].repeat(1, 1, group, 1), float("-inf"))
    limit = torch.maximum(top, logits.amax(-1, keepdim=True))
    weights = logits.sub_(limit).exp_()
    before = torch.exp(top - limit)
    normaliser = total * before + weights.sum(-1, keepdim=True)
    out = (mixed * before + (weights.to(values.dtype) @ values).float()) / normaliser
    return out.to(call.value.dtype).reshape(rows, heads, tokens, -1)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """[kv_heads, entries, dim] of each row as [rows, kv_heads, most entries, dim]."""
    return pad_sequence([part.transpose(0, 1) for part in parts], batch_first=True).transpose(1, 2)


def _attend_base(base: LayerCache, query: Tensor, call: LayerCall) -> tuple[Tensor, Tensor, Tensor]:
    """Of query [kv_heads, q, d] over all entries of the base: the values' weighted sum [.., value_dim],
    the sum of the weights and the largest logit [.., 1], float32."""
    logits = capped(base.dot_keys(query).float().mul_(call.scaling), call.softcap)
    if base.log_weights is not None:
        logits += base.log_weights[:, None, : base.length]
    top = logits.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    mixed = base.mix_values(weights.to(base.values.dtype)).float()
    return mixed, total, top
