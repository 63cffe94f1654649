"""Which entries of a prompt a compressed cache holds, and their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvbench.engine.cache import RaggedCache
from kvbench.engine.fork import Fork

BINS, MOST_LAYERS = 128, 16
"""The most pieces of the prompt and layers (evenly spread) in the result of `strips_of`."""


def entries_of(fork: Fork, layers: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Of each layer its number, and its entries' positions (-1 for entries that are no single token) and
    weights, both [kv_heads, entries]: exp(log-weight), times the weight in the denominator where that
    differs; 0 for padding."""
    for layer in layers:
        cache = fork.layers[layer]
        heads: list[tuple[Tensor, Tensor]] = []
        for one in cache.heads if isinstance(cache, RaggedCache) else [cache]:
            held = one.positions[:, : one.length].cpu()
            each = torch.ones(held.shape)
            if one.log_weights is not None:
                each = one.log_weights[:, : one.length].exp().cpu()
            if one.denominators is not None:
                each = each * one.denominators[:, : one.length].cpu()
            heads += zip(held, each, strict=True)
        every = (head for own in fork.ranks.gather(heads) for head in own)
        positions, weights = map(list, zip(*every, strict=True))
        yield layer, pad_sequence(positions, True, -1), pad_sequence(weights, True)


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
