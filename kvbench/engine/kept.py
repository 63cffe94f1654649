"""Which entries of a prompt a compressed cache holds, and their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvbench.engine.fork import Fork
from kvbench.kv import KVError

MOST_PIECES = 128
"""The most pieces that `strips_of` cuts a prompt into."""

MOST_LAYERS = 16
"""The most layers in the result of `strips_of`, evenly spread over the model's."""


def entries_of(fork: Fork, layers: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The entries that a fork holds, layer by layer.

    Yields:
        the layer's index; positions [kv_heads, entries] int64, -1 for entries that are no single token;
        weights [kv_heads, entries] float32: exp(log-weight), times the weight in the denominator where
        that differs, 0 for padding.
    """
    for layer in layers:
        own_heads: list[tuple[Tensor, Tensor]] = []
        for store in fork.layers[layer].stores:
            positions = store.positions[:, : store.length].cpu()
            weights = torch.ones(positions.shape)
            if store.log_weights is not None:
                weights = store.log_weights[:, : store.length].exp().cpu()
            if store.denominators is not None:
                weights = weights * store.denominators[:, : store.length].cpu()
            own_heads += zip(positions, weights, strict=True)
        heads = [head for of_rank in fork.ranks.gather(own_heads) for head in of_rank]
        yield (
            layer,
            pad_sequence([positions for positions, _ in heads], batch_first=True, padding_value=-1),
            pad_sequence([weights for _, weights in heads], batch_first=True),
        )


def strips_of(fork: Fork, tokens: int, layers: Sequence[int]) -> dict[str, Any]:
    """How much of each piece of the prompt a fork holds, as JSON values small enough for a record.

    The prompt is cut into at most `MOST_PIECES` pieces of equal length. A piece's value is the sum of
    its entries' weights over its tokens, averaged over KV heads; the exact cache has 1 everywhere.

    Returns:
        tokens (of the prompt), width (tokens of a piece), layers (by layer, hundredths of the values),
        unplaced (share of the entries that are no single token).

    Raises:
        KVError: a position that the prompt has not.
    """
    width = max(1, -(-tokens // MOST_PIECES))
    pieces = -(-tokens // width)
    sizes = torch.full((pieces,), float(width))
    sizes[-1] = tokens - width * (pieces - 1)
    step = max(1.0, len(layers) / MOST_LAYERS)
    chosen = [layers[int(i * step)] for i in range(min(len(layers), MOST_LAYERS))]
    hundredths: dict[str, list[int]] = {}
    entries = 0
    unplaced = 0
    for layer, positions, weights in entries_of(fork, chosen):
        is_entry, has_place = weights != 0, positions >= 0
        if int(positions.max()) >= tokens:
            raise KVError(
                f"method {fork.label!r} holds position {int(positions.max())} of a prompt of {tokens} "
                f"tokens; allowed: -1 to {tokens - 1}"
            )
        entries += int(is_entry.sum())
        unplaced += int((is_entry & ~has_place).sum())
        piece = torch.where(has_place, positions, 0).flatten() // width
        sums = torch.zeros(pieces).index_add_(0, piece, (weights * has_place).flatten().float())
        by_token = (100 * sums / (sizes * positions.shape[0])).round().long()
        hundredths[str(layer)] = by_token.clamp(0, 10**6).tolist()
    return {
        "tokens": tokens,
        "width": width,
        "layers": hundredths,
        "unplaced": round(unplaced / max(1, entries), 4),
    }
