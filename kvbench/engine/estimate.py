"""The bytes of a model's cache, computed from the model's config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from kvbench.engine.architecture import HeadShape, head_shapes, layer_kinds
from kvbench.engine.attention import UnsupportedModel
from kvbench.engine.loading import load_config
from kvbench.engine.model_spec import ModelError, ModelSpec
from kvbench.kernels.quantize import Scheme


class LayerShape(NamedTuple):
    """The numbers that determine the bytes of a layer that holds keys.

    Attributes:
        heads: the layer's heads.
        window: the length of its sliding window in tokens; None for full attention.
    """

    heads: HeadShape
    window: int | None


@dataclass(frozen=True)
class CacheShape:
    """The numbers that determine the bytes of a model's cache.

    Attributes:
        layers: the layers that hold keys.
        itemsize: the bytes of a number.
    """

    layers: tuple[LayerShape, ...]
    itemsize: int

    def bytes(self, tokens: int, entries: int, quantization: Scheme | None = None) -> int:
        """The bytes of the cache of a prompt.

        Args:
            tokens: the length of the prompt.
            entries: the entries per head of layers with full attention.
            quantization: how these entries are packed; None for the model's dtype. Sliding-window layers
                are never packed.
        """
        total = 0
        number = 0  # of the layer among those with full attention
        for (_, kv_heads, key_dim, value_dim), window in self.layers:
            entry = kv_heads * (key_dim + value_dim) * self.itemsize
            if window is not None:
                total += entry * min(window, tokens)
            elif quantization is None:
                total += entry * entries
            else:
                # A scheme counts keys and values of one size; of two sizes this is the mean.
                of_each = [
                    quantization.nbytes(kv_heads, entries, dim, self.itemsize, number)
                    for dim in (key_dim, value_dim)
                ]
                total += sum(of_each) // 2
            number += window is None
        return total


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
    window = getattr(config, "sliding_window", None) or 0
    windows = {"full_attention": None, "hybrid": None, "sliding_attention": window}
    layers = zip(head_shapes(config), layer_kinds(config), strict=True)
    return CacheShape(
        tuple(LayerShape(heads, windows[kind]) for heads, kind in layers if kind in windows),
        dtype.itemsize,
    )
