"""Queries, keys and values of chosen layers, as methods see them: for probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.architecture import rotary_of
from kvbench.engine.attention import LayerCall, UnsupportedModel
from kvbench.engine.prefill import compressible_layers, forward, input_device, layer_kv
from kvbench.engine.states import is_hybrid
from kvbench.kv import LayerKV, Rotary


@dataclass
class CaptureState:
    """Attention state that runs exact attention and keeps chosen layers' q, k, v (for probes)."""

    layers: dict[int, LayerKV | None]
    num_layers: int
    rotary: Rotary | None = None

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention; queries, keys and values of the chosen layers are kept."""
        if call.layer in self.layers:
            if call.sliding_window is not None:
                raise UnsupportedModel(
                    f"layer {call.layer} has a sliding window of {call.sliding_window}; "
                    "allowed: full-attention layers"
                )
            out, normalisers = call.exact_with_normalisers()
            self.layers[call.layer] = layer_kv(
                call, call.layer, self.num_layers, self.rotary, normalisers
            )
            return out
        return call.exact()


@torch.inference_mode(False)  # as `kvbench.engine.prefill.prefill`
@torch.no_grad()
def capture_layers(
    model: PreTrainedModel, ids: Sequence[int], layers: Sequence[int]
) -> dict[int, LayerKV]:
    """q, k, v after position encoding of the given layers (0-based) for one prompt.

    Raises:
        UnsupportedModel: a layer that does not exist or has a sliding window.
    """
    config = model.config.get_text_config()
    count = config.num_hidden_layers
    for layer in layers:
        if not 0 <= layer < count:
            raise UnsupportedModel(
                f"layer {layer} does not exist; allowed: 0..{count - 1} (0-based)"
            )
    if is_hybrid(config) and not set(layers) <= set(full := compressible_layers(model)):
        raise UnsupportedModel(f"layers {list(layers)} hold no keys; allowed here, from 0: {full}")
    state = CaptureState(dict.fromkeys(layers), count, rotary_of(model))
    device = input_device(model)
    tokens = torch.tensor([list(ids)], device=device)
    forward(model, tokens, torch.arange(len(ids), device=device), state)
    return {layer: kv for layer, kv in state.layers.items() if kv is not None}
