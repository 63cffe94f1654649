"""The entries of a prompt that a compressed cache holds, and their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvbench.engine.row import Row
from kvbench.kv import KVError

if TYPE_CHECKING:
    import pandas as pd

MOST_PIECES = 128
"""The largest number of pieces into which `strips_of` cuts a prompt."""

MOST_LAYERS = 16
"""The largest number of layers in the result of `strips_of`; they are evenly spread over the model's."""


class LayerEntries(NamedTuple):
    """The entries that a row holds at one layer, on the CPU.

    Attributes:
        layer: the layer's index in the model.
        positions: [kv_heads, entries] int64, the prompt position of each entry; -1 for padding and for
            entries that stand for no single token.
        weights: [kv_heads, entries] float32, exp(log-weight), times the factor in the softmax's
            denominator where there is one (`CompressedKV.denominators`); 0 for padding.
    """

    layer: int
    positions: Tensor
    weights: Tensor


def entries_of(row: Row, layers: Sequence[int]) -> Iterator[LayerEntries]:
    """Yield the entries that a row holds, layer by layer."""
    for layer in layers:
        heads: list[tuple[Tensor, Tensor]] = []
        for cache in row.caches[layer]:
            positions = cache.positions[:, : cache.length].cpu()
            weights = torch.ones(positions.shape)
            if cache.log_weights is not None:
                weights = cache.log_weights[:, : cache.length].exp().cpu()
            if cache.denominators is not None:
                weights = weights * cache.denominators[:, : cache.length].cpu()
            heads += zip(positions, weights, strict=True)
        yield LayerEntries(
            layer,
            pad_sequence([positions for positions, _ in heads], batch_first=True, padding_value=-1),
            pad_sequence([weights for _, weights in heads], batch_first=True),
        )


def frame_of(row: Row, words: Sequence[str | None]) -> pd.DataFrame:
    """The entries that a row holds, one per line of a frame (`kvbench.kept`).

    Args:
        words: the text of every token that was read.
    """
    import pandas as pd

    parts = []
    for layer, positions, weights in entries_of(row, list(row.entries)):
        # Padding has weight 0.
        head, entry = weights.nonzero(as_tuple=True)
        columns = {"position": positions[head, entry], "head": head, "weight": weights[head, entry]}
        parts.append(pd.DataFrame(columns).assign(layer=layer))
    frame = pd.concat(parts, ignore_index=True)
    frame["token"] = [words[position] if position >= 0 else None for position in frame["position"]]
    frame = frame[["position", "token", "layer", "head", "weight"]]
    frame.attrs |= {"method": row.label, "words": list(words)}
    return frame


def strips_by_label(rows: Sequence[Row], tokens: int) -> dict[str, dict[str, Any]]:
    """`strips_of` each of these rows that has not failed, by label."""
    strips = {}
    for row in rows:
        if row.failure is None:
            try:
                strips[row.label] = strips_of(row, tokens)
            except KVError as failure:  # the method holds positions that the prompt does not have
                row.fail(failure)
    return strips


def strips_of(row: Row, tokens: int) -> dict[str, Any]:
    """Summarise how much of each part of the prompt a row holds, as JSON values small enough for a
    record. A page shows them as strips, one per layer.

    The prompt is cut into at most `MOST_PIECES` pieces of equal length. The value of a piece is the sum
    of the weights of its entries divided by the number of its tokens, averaged over KV heads; for the
    exact cache it is 1.

    Args:
        tokens: the length of the prompt.

    Returns:
        ``tokens``: the length of the prompt; ``width``: the tokens of a piece; ``layers``: for each
        layer's index the hundredths of the pieces' values; ``unplaced``: the share of entries that stand
        for no single token.

    Raises:
        KVError: the method holds a position beyond the end of the prompt.
    """
    width = max(1, -(-tokens // MOST_PIECES))
    pieces = -(-tokens // width)
    sizes = torch.full((pieces,), float(width))
    sizes[-1] = tokens - width * (pieces - 1)
    layers = list(row.entries)
    step = max(1.0, len(layers) / MOST_LAYERS)
    chosen = [layers[int(i * step)] for i in range(min(len(layers), MOST_LAYERS))]
    hundredths: dict[str, list[int]] = {}
    entries = 0
    unplaced = 0
    for layer, positions, weights in entries_of(row, chosen):
        is_entry = weights != 0
        is_token = positions >= 0
        if int(positions.max()) >= tokens:
            raise KVError(
                f"method {row.label!r} holds position {int(positions.max())} of a prompt of {tokens} "
                f"tokens; allowed: -1 to {tokens - 1}"
            )
        entries += int(is_entry.sum())
        unplaced += int((is_entry & ~is_token).sum())
        piece = torch.where(is_token, positions, 0).flatten() // width
        sums = torch.zeros(pieces).index_add_(0, piece, (weights * is_token).flatten().float())
        values = (100 * sums / (sizes * positions.shape[0])).round().long()
        # Weights of weighted entries may be huge or negative; a record needs small numbers >= 0.
        hundredths[str(layer)] = values.clamp(0, 10**6).tolist()
    return {
        "tokens": tokens,
        "width": width,
        "layers": hundredths,
        "unplaced": round(unplaced / max(1, entries), 4),
    }
