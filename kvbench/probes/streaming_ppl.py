"""Perplexity of a text that is longer than the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.loading import Model
from kvbench.engine.streams import POSITIONS, BandState, rotation_of, stream
from kvbench.kv import KVError


def streaming_nll(
    model: Model, ids: Sequence[int], start: int = 4, recent: int = 2000, positions: str = "cache"
) -> list[float]:
    """-log p of every token but the first, read through a cache of `start` first and `recent` last ones.

    Token t sees the first `start`, the `recent` before it, and itself; eviction comes after the step.

    Args:
        positions: cache (StreamingLLM's: counted by the place in the cache) | absolute.

    Raises:
        KVError: other positions; sizes that hold nothing; absolute positions beyond the model's.
        UnsupportedModel: see `kvbench.engine.streams.stream`.
    """
    if positions not in POSITIONS:
        raise KVError(f"positions is {positions!r}; allowed: cache, absolute")
    if start < 0 or recent < 1:
        raise KVError(f"start is {start} and recent {recent}; allowed: start >= 0, recent >= 1")
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions == "absolute" and most is not None and len(ids) > most:
        raise KVError(
            f"positions is 'absolute' and the text has {len(ids)} tokens; allowed: at most {most}, the "
            "model's positions, or positions=cache"
        )
    with kvbench_attention_on(model):
        rotation = rotation_of(model) if positions == "cache" else None
        parts = list(stream(model, ids, BandState(start, recent, rotation), positions))
    return torch.cat(parts).tolist() if parts else []
