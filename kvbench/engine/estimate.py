"""What a model's cache weighs, and whether trying it out is cheap: from its config, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvbench.engine.loading import ModelError, ModelSpec, load_config, local_path

CHEAP_BYTES = 512 * 2**20
"""Weights up to this size are loaded for a quick measurement."""


@dataclass(frozen=True)
class CacheShape:
    """The cache of one model.

    Attributes:
        entry_bytes: of one key and value, all KV heads of one layer.
        full_layers: layers with full attention.
        windows: window length of each sliding-window layer.
    """

    entry_bytes: int
    full_layers: int
    windows: tuple[int, ...]

    def bytes(self, tokens: int, entries: int) -> int:
        """Held for a prompt of `tokens` when full-attention layers hold `entries` per head."""
        whole = sum(min(window, tokens) for window in self.windows)
        return self.entry_bytes * (self.full_layers * entries + whole)


def cache_shape(spec: ModelSpec, dtype: torch.dtype) -> CacheShape | None:
    """The shape of the model's cache, None where its config is not at hand or says too little."""
    try:
        config = load_config(spec).get_text_config()
    except ModelError:  # not on this machine, and no way to the Hub
        return None
    try:
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        count = config.num_hidden_layers
    except AttributeError:
        return None
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    sliding = sum(kind == "sliding_attention" for kind in kinds[:count])
    window = getattr(config, "sliding_window", None) or 0
    return CacheShape(
        2 * kv_heads * head_dim * dtype.itemsize, count - sliding, (window,) * sliding
    )


def is_cheap(spec: ModelSpec) -> bool:
    """Whether the weights are on this machine and small."""
    if spec.random_weights:
        fields = dict(spec.architecture or {})
        hidden, layers = fields.get("hidden_size"), fields.get("num_hidden_layers")
        if not isinstance(hidden, int) or not isinstance(layers, int):
            return False
        weights = 12 * hidden * hidden * layers + 2 * hidden * int(fields.get("vocab_size") or 0)
        return 4 * weights <= CHEAP_BYTES
    try:
        folder = Path(local_path(spec.path))
    except ModelError:
        return False
    sizes = (
        [path.stat().st_size for path in folder.glob("*.safetensors")] if folder.is_dir() else []
    )
    return bool(sizes) and sum(sizes) <= CHEAP_BYTES
