"""Hybrid models: the recurrent states of layers that hold no keys (linear attention, state spaces,
convolutions).

A state has the same size however many tokens were read, so there is nothing to compress. Every row has
a copy of its own, whose bytes are counted for the row and for the exact cache alike. transformers'
layers update the states of all batch rows in place, as one tensor; a row's state is therefore a view of
its part of that tensor (`joined_cache`).
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
"""The class of transformers' cache layers that hold a state; None in versions without it (5.2)."""

States = Mapping[int, State]
"""The states of a model, by the layer's index."""

STATEFUL = ("linear_attention", "conv", "hybrid")
"""The types of layers that hold a state; `hybrid` layers also hold keys and values."""

EMPTY = ("moe", "mlp")
"""The types of layers that hold neither keys nor a state."""

_TENSORS = ("conv_states", "recurrent_states")
"""The attributes of a `State` that hold tensors: mappings from names to tensors or None."""

_FLAGS = (
    "has_previous_state",
    "is_conv_states_initialized",
    "conv_kernel_size",
    "is_recurrent_states_initialized",
)
"""The attributes of a `State` that describe these tensors: mappings by the same names."""

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
"""Model types whose layers can read several tokens at once after a state, with the result of reading
them one by one (tests/engine/test_hybrid.py). Jamba is not among them: its layers then start from an
empty state."""


def is_hybrid(config: PreTrainedConfig) -> bool:
    """Whether some layers of a model with this text config hold a state."""
    return any(kind in STATEFUL for kind in getattr(config, "layer_types", None) or ())


def check_hybrid(config: PreTrainedConfig) -> None:
    """Refuse hybrid models other than `HYBRIDS`, and all of them with a transformers without `State`.

    Raises:
        UnsupportedModel: the model type, and what is allowed.
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
    """The cache that transformers is given for one pass. It holds states only; keys and values are
    passed on to the attention function, which stores them."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged."""
        return key_states, value_states


def states_in(cache: Cache) -> dict[int, State]:
    """The recurrent states of a cache, those of all batch rows together, by the layer's index."""
    layers = [] if State is None else cache.layers
    return {i: layer for i, layer in enumerate(layers) if isinstance(layer, State)}


def row_of(states: States, row: int) -> dict[int, State]:
    """The states of one batch row, as views of the states of all rows."""
    return {
        index: _combined([state], lambda tensor: tensor[row : row + 1])
        for index, state in states.items()
    }


def clone_of(states: States) -> dict[int, State]:
    """Copies of the states, which another pass can update."""
    return {index: _combined([state], Tensor.clone) for index, state in states.items()}


def state_bytes(states: States) -> int:
    """The bytes of the tensors of all layers' states."""
    total = 0
    for state in states.values():
        for attribute in _TENSORS:
            tensors = getattr(state, attribute).values()
            total += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return total


def joined_cache(config: PreTrainedConfig, rows: Sequence[dict[int, State]]) -> PassingCache:
    """Make the cache of a pass whose batch rows continue from the states of `rows`.

    In `rows`, the states are replaced by views of the new cache. So a pass that updates the cache
    updates the states of every row.
    """
    cache = PassingCache(config)
    for index in states_in(cache):
        joined = _combined([row[index] for row in rows], lambda *tensors: torch.cat(tensors))
        for number, row in enumerate(rows):
            row[index] = row_of({index: joined}, number)[index]
        cache.layers[index] = joined
    return cache


def _combined(states: Sequence[State], combine: Callable[..., Tensor]) -> State:
    """A new state whose every tensor is ``combine(*tensors)``, where `tensors` are the tensors with the
    same name of all `states`."""
    result = copy.copy(states[0])
    for attribute in _TENSORS:
        tensors = dict(getattr(result, attribute))
        for name, tensor in tensors.items():
            if tensor is not None:
                tensors[name] = combine(*(getattr(state, attribute)[name] for state in states))
        setattr(result, attribute, tensors)
    for attribute in _FLAGS:
        # Copied, since transformers changes these mappings in place.
        setattr(result, attribute, dict(getattr(result, attribute)))
    return result
