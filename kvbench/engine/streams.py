"""Reading a text through a method's bounded cache: which way each method reads, and what it held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.estimate import shape_of
from kvbench.engine.estimated import EstimatedState
from kvbench.engine.fork import Fork
from kvbench.engine.streaming import (
    PlacedState,
    StreamState,
    recomputed,
    rotation_of,
    stream,
    stream_fork,
)
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Band, Method

POSITIONS = ("cache", "absolute")


@dataclass(frozen=True)
class Read:
    """A text that was read.

    Attributes:
        nll: [tokens - 1] float32, -log p of every token but the first.
        entries: per layer and KV head, at most, after a token.
        held_bytes: at the end; of what recomputes, those of a pass. exact_bytes: of all tokens' entries.
    """

    nll: Tensor
    entries: int
    held_bytes: int
    exact_bytes: int


def check_reads(label: str, method: Method, budget: Budget, positions: str) -> None:
    """Refuse methods that cannot keep a cache bounded while they read, or not with these positions.

    Raises:
        KVError: naming the method.
    """
    way = method.reading(budget)
    if isinstance(way, Band) or (way is not None and positions == "absolute"):
        return
    if method.evicts and (positions == "absolute" or budget.size is not None):
        return
    raise KVError(
        f"method {label!r} with positions={positions} and budget.size={budget.size} cannot read a "
        "stream; allowed: exact, and with a size streaming_llm, local and methods that evict while "
        "decoding (h2o); with absolute positions balancekv_streaming and subgen_streaming"
    )


@torch.inference_mode()
def read_text(
    model: PreTrainedModel,
    ids: Sequence[int],
    method: Method,
    budget: Budget,
    positions: str = "cache",
    seed: int = 0,
    *,
    name: str = "",
    label: str = "method",
) -> Read:
    """-log p of every token but the first, each from what is held when it comes.

    Args:
        positions: cache (counted inside the cache) | absolute (every entry keeps its own).
        name: of the text, for a method's draws.

    Raises:
        KVError: see `check_reads`. UnsupportedModel: see `stream`. Whatever stopped the method.
    """
    check_reads(label, method, budget, positions)
    way, n = method.reading(budget), len(ids)
    if isinstance(way, Band) and way.recomputed:
        assert budget.size is not None
        nll, entries = torch.cat(list(recomputed(model, ids, recent=budget.size))), budget.size
        return _read(model, nll, min(n, entries), None)
    if way is None and method.evicts and positions == "absolute":
        fork = Fork(label, method, budget, seed, name, room=1)
        nll = torch.cat(stream_fork(model, ids, fork))
        return _read(model, nll, min(n, budget.capacity(n)), fork.cache_bytes())
    rotation = rotation_of(model) if positions == "cache" else None
    state: StreamState | PlacedState | EstimatedState
    if isinstance(way, Band):
        state = StreamState(way.first, n if way.last is None else way.last, rotation)
    elif way is None:
        state = PlacedState(method, budget, rotation)
    else:
        state = EstimatedState(label, method, budget, n, seed, name)
    start, recent = state.start, state.recent
    parts = stream(model, ids, start=start, recent=recent, positions=positions, state=state)
    nll = torch.cat(list(parts))
    entries = state.most if isinstance(state, EstimatedState) else min(n, start + recent)
    return _read(model, nll, entries, state.held_bytes)


def _read(model: PreTrainedModel, nll: Tensor, entries: int, held: int | None) -> Read:
    """With the bytes of exact caches of as many tokens as were read, and as there are entries."""
    shape = shape_of(model.config.get_text_config(), model.dtype)
    assert shape is not None  # the models that kvbench supports say so
    n = len(nll) + 1
    return Read(nll, entries, shape.bytes(n, entries) if held is None else held, shape.bytes(n, n))
