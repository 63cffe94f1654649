"""Hybrid models: the states of layers that hold no keys (linear attention, state spaces, convolutions).

Such a state has one size, whatever was read, so that there is nothing to compress: every fork goes on
from a copy of its own, whose bytes count on both sides of the ratio. transformers' layers update a state
in place; the rows of a pass therefore lie side by side, and each fork's state is a view of its row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, __version__, cache_utils

from kvbench.engine.attention import UnsupportedModel

State: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
"""The layer of transformers' caches that holds a state; None in versions (5.2) that have none."""

States = Mapping[int, State]
"""By layer index."""

STATEFUL = ("linear_attention", "conv", "hybrid")
"""Layer types that carry a state; `hybrid` ones have keys and values beside it."""

EMPTY = ("moe", "mlp")
"""Layer types that attend to nothing and carry nothing."""

_KINDS = ("conv_states", "recurrent_states")
"""Attributes of transformers' state layers that hold tensors."""

HYBRIDS = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_next",
)
"""Model types whose layers go on from a state by several tokens at once as by one after the other
(tests/engine/test_hybrid.py); Jamba's begin anew."""


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether some layers carry a state."""
    return any(kind in STATEFUL for kind in getattr(config, "layer_types", None) or ())


def check_hybrid(config: PreTrainedConfig) -> None:
    """Refuse hybrids that are not known to go on from a state.

    Raises:
        UnsupportedModel: naming the type, or the transformers that has no states in its caches.
    """
    if is_hybrid(config) and State is None:
        raise UnsupportedModel(
            f"model type {config.model_type!r} has layers that carry a state (linear attention), and "
            f"transformers {__version__} has no cache for it; allowed: a later one"
        )
    if is_hybrid(config) and config.model_type not in HYBRIDS:
        raise UnsupportedModel(
            f"model type {config.model_type!r} has layers that carry a state (linear attention); "
            f"allowed of these: {', '.join(HYBRIDS)}"
        )


class PassingCache(DynamicCache):
    """transformers' cache of one pass: it holds states only, keys and values go through to the attention
    function, which stores them."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are."""
        return key_states, value_states


def states_in(cache: Cache) -> dict[int, State]:
    """The recurrent states of a cache, each of all rows, by layer index."""
    layers = [] if State is None else cache.layers
    return {i: layer for i, layer in enumerate(layers) if isinstance(layer, State)}


def row_of(states: States, row: int) -> dict[int, State]:
    """The states of one batch row, as views of the states of all rows."""
    return {index: _made_of([state], lambda x: x[row : row + 1]) for index, state in states.items()}


def clone_of(states: States) -> dict[int, State]:
    """Copies of the states, to which another pass may write."""
    return {index: _made_of([state], Tensor.clone) for index, state in states.items()}


def state_bytes(states: States) -> int:
    """Bytes of the tensors of all layers' states."""
    total = 0
    for state in states.values():
        for kind in _KINDS:
            tensors = getattr(state, kind).values()
            total += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return total


def joined_cache(config: PreTrainedConfig, rows: Sequence[dict[int, State]]) -> PassingCache:
    """The cache of a pass whose batch rows go on from these states, layer by layer. Each row's states
    are replaced by views of the cache, so that the pass updates them."""
    cache = PassingCache(config)
    for index in states_in(cache):
        joined = _made_of([row[index] for row in rows], lambda *parts: torch.cat(parts))
        for number, row in enumerate(rows):
            row[index] = row_of({index: joined}, number)[index]
        cache.layers[index] = joined
    return cache


def _made_of(states: Sequence[State], change: Callable[..., Tensor]) -> State:
    """A state each of whose tensors is `change` of the same tensor of all these states."""
    twin = copy.copy(states[0])
    for kind in _KINDS:
        made = dict(getattr(twin, kind))
        for name, part in made.items():
            if part is not None:
                made[name] = change(*(getattr(state, kind)[name] for state in states))
        setattr(twin, kind, made)
    for flags in ("has_previous_state", "is_conv_states_initialized", "conv_kernel_size"):
        setattr(twin, flags, dict(getattr(twin, flags)))
    twin.is_recurrent_states_initialized = dict(twin.is_recurrent_states_initialized)
    return twin
