"""Facts about a model's architecture."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvbench.kv import Rotary


def kv_heads(config: PreTrainedConfig) -> int:
    """KV heads of a model with this text config."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def rotary_of(model: PreTrainedModel) -> Rotary | None:
    """The model's rotary table (`LayerKV.rotary`); None where it has none, several, or turns other
    pairs of channels than the two halves."""
    table = getattr(model.base_model, "rotary_emb", None)
    turn = getattr(sys.modules[type(model).__module__], "rotate_half", None)
    if table is None or turn is None or hasattr(model.base_model, "rotary_emb_local"):
        return None
    if turn(torch.arange(4.0)).tolist() != [-2.0, -3.0, 0.0, 1.0]:
        return None

    def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = table(torch.empty(1, device=positions.device), positions[None])
        return cos[0], sin[0]

    return rotary
