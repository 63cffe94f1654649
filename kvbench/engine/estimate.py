"""The bytes of a model's cache, computed from the model's config alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from kvbench.engine.architecture import kv_heads
from kvbench.engine.attention import UnsupportedModel
from kvbench.engine.loading import load_config
from kvbench.engine.model_spec import ModelError, ModelSpec
from kvbench.kernels.quantize import Scheme


@dataclass(frozen=True)
class CacheShape:
    """The numbers that determine the bytes of a model's cache.

    Attributes:
        kv_heads: the KV heads of a layer.
        head_dim: the numbers in a key, and in a value.
        itemsize: the bytes of a number.
        full_layers: the number of layers with full attention.
        windows: for each sliding-window layer the length of its window in tokens.
    """

    kv_heads: int
    head_dim: int
    itemsize: int
    full_layers: int
    windows: tuple[int, ...]

    def bytes(self, tokens: int, entries: int, quantization: Scheme | None = None) -> int:
        """The bytes of the cache of a prompt.

        Args:
            tokens: the length of the prompt.
            entries: the entries per head of layers with full attention.
            quantization: how these entries are packed; None for the model's dtype. Sliding-window layers
                are never packed.
        """
        entry = 2 * self.kv_heads * self.head_dim * self.itemsize
        layers = self.full_layers * entry * entries
        if quantization is not None:
            layers = sum(
                quantization.nbytes(self.kv_heads, entries, self.head_dim, self.itemsize, layer)
                for layer in range(self.full_layers)
            )
        return layers + entry * sum(min(window, tokens) for window in self.windows)


def cache_shape(spec: ModelSpec, dtype: torch.dtype) -> CacheShape | None:
    """The shape of the model's cache; None if its config cannot be loaded or lacks a field."""
    try:
        return shape_of(load_config(spec).get_text_config(), dtype)
    except (
        ModelError,
        UnsupportedModel,
        AttributeError,
    ):  # for example where the Hub cannot be reached
        return None


def shape_of(config: PreTrainedConfig, dtype: torch.dtype) -> CacheShape:
    """The shape of the cache of a model with this text config; see `cache_shape`."""
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    sliding = sum(kind == "sliding_attention" for kind in kinds[:count])
    full = sum(kind in ("full_attention", "hybrid") for kind in kinds[:count])
    window = getattr(config, "sliding_window", None) or 0
    return CacheShape(kv_heads(config), head_dim, dtype.itemsize, full, (window,) * sliding)
