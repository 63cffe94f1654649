"""Which entries of a prompt a compressed cache holds, and their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.cache import LayerCache, RaggedCache
from kvbench.engine.fork import Fork

BINS, MOST_LAYERS = 128, 16
"""The most pieces of the prompt and layers (evenly spread) in the result of `strips_of`."""


def weights_of(cache: LayerCache) -> Tensor:
    """The weight of each entry, [kv_heads, entries] float32: exp(log-weight), times the weight in the
    denominator where that differs; 0 for padding."""
    weights = torch.ones(cache.positions.shape[0], cache.length)
    if cache.log_weights is not None:
        weights = cache.log_weights[:, : cache.length].exp().cpu()
    if cache.denominators is not None:
        weights = weights * cache.denominators[:, : cache.length].cpu()
    return weights


def entries_of(fork: Fork, layers: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of each layer its number, and its entries' positions (-1 for entries that are no single token) and
    weights, both [kv_heads, entries]."""
    for layer in layers:
        cache = fork.layers[layer]
        whole = cache.padded() if isinstance(cache, RaggedCache) else cache
        yield layer, whole.positions[:, : whole.length].cpu(), weights_of(whole)


def strips_of(fork: Fork, tokens: int, layers: Sequence[int]) -> dict[str, Any]:
    """The weight held of each piece of the prompt, as JSON values small enough for a record.

    The prompt is cut into at most `BINS` pieces of equal length. A piece's value is the weight held of
    it per token, averaged over KV heads; the exact cache has 1 everywhere.

    Returns:
        tokens (of the prompt), width (tokens of a piece), layers (by layer, hundredths of the values),
        unplaced (share of the entries that are no single token).
    """
    width = max(1, -(-tokens // BINS))
    pieces = -(-tokens // width)
    sizes = torch.full((pieces,), float(width))
    sizes[-1] = tokens - width * (pieces - 1)
    step = max(1.0, len(layers) / MOST_LAYERS)
    chosen = [layers[int(i * step)] for i in range(min(len(layers), MOST_LAYERS))]
    found, entries, unplaced = {}, 0, 0
    for layer, positions, weights in entries_of(fork, chosen):
        held, placed = weights != 0, positions >= 0
        entries += int(held.sum())
        unplaced += int((held & ~placed).sum())
        here = torch.where(placed, positions, 0).flatten() // width
        sums = torch.zeros(pieces).index_add_(0, here, (weights * placed).flatten().float())
        each = (100 * sums / (sizes * positions.shape[0])).round().long()
        found[str(layer)] = each.clamp(0, 10**6).tolist()
    return {
        "tokens": tokens,
        "width": width,
        "layers": found,
        "unplaced": round(unplaced / max(1, entries), 4),
    }
