"""The bytes of a model's cache, computed from the model's config alone."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from kvbench.engine.architecture import head_shapes, layer_kinds
from kvbench.kernels.quantize import Scheme


def cache_bytes(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    tokens: int,
    entries: int,
    quantization: Scheme | None = None,
) -> int:
    """The bytes of the cache of a prompt.

    Args:
        config: the model's text config.
        tokens: the length of the prompt.
        entries: the entries per head of layers with full attention.
        quantization: how these entries are packed; None for `dtype`. Sliding-window layers are never
            packed.
    """
    total = 0
    number = 0  # of the layer among those with full attention
    for (_, kv_heads, key_dim, value_dim), kind in zip(
        head_shapes(config), layer_kinds(config), strict=True
    ):
        entry = kv_heads * (key_dim + value_dim) * dtype.itemsize
        if kind == "sliding_attention":
            total += entry * min(config.sliding_window, tokens)
        elif kind in ("full_attention", "hybrid"):
            if quantization is None:
                total += entry * entries
            else:
                # A scheme counts keys and values of one size; of two sizes this is the mean.
                of_each = [
                    quantization.nbytes(kv_heads, entries, dim, dtype.itemsize, number)
                    for dim in (key_dim, value_dim)
                ]
                total += sum(of_each) // 2
            number += 1
    return total
