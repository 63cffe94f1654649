"""H2O's released evaluation on lm-eval tasks: one pass over prompt and answer, in which every layer
masks its attention (`kvbench.methods.h2o.released_mask`). No cache is held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engine.architecture import head_shapes
from kvbench.engine.attention import LayerCall, Pass, exact_attention
from kvbench.engine.cost import Cost
from kvbench.engine.device import input_device
from kvbench.engine.loading import Model
from kvbench.engine.prefill import Reading, forward_rows, layer_kv
from kvbench.engine.scoring import (
    Scored,
    chunks,
    log_probabilities,
    scored_of,
    vocabulary,
)
from kvbench.kv import Budget
from kvbench.methods.h2o import H2O


@dataclass
class MaskedPass(Pass):
    """Sliding-window layers are not masked."""

    method: H2O
    budget: Budget
    num_layers: int

    def attend(self, call: LayerCall) -> Tensor:
        if call.sliding_window is not None:
            return call.exact()
        layer = layer_kv(call, call.layer, self.num_layers)
        return exact_attention(
            call.query,
            call.key.repeat_interleave(layer.group, dim=1),
            call.value.repeat_interleave(layer.group, dim=1),
            scaling=call.scaling,
            softcap=call.softcap,
            seen=self.method.mask(layer, self.budget),
            sinks=call.sinks,
        )


@torch.inference_mode()
def masked_scores(
    model: Model,
    prompt_ids: Sequence[int],
    continuations: Sequence[Sequence[int]],
    method: H2O,
    budget: Budget,
) -> list[Scored]:
    """Score every continuation in a masked pass of its own (one for every chunk of logits)."""
    device = input_device(model)
    layers = model.config.get_text_config().num_hidden_layers

    def logits_of(continuation: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        ids = torch.tensor([[*prompt_ids, *continuation]], device=device)
        positions = torch.arange(ids.shape[1], device=device)
        first = len(prompt_ids) - 1
        for part in chunks(1, len(continuation), vocabulary(model)):
            wanted = torch.arange(first + part.start, first + part.stop, device=device)
            state = MaskedPass(method, budget, layers)
            yield part.start, forward_rows(model, ids, positions, state, keep=wanted)

    return [
        scored_of(log_probabilities([tokens], logits_of(tokens))[0], None)
        for tokens in continuations
    ]


def imagined_cost(model: Model, reading: Reading, tokens: int, method: H2O, budget: Budget) -> Cost:
    """The cost of the cache that a masked pass of `tokens` tokens would need. Each query head chooses
    its own entries, so that keys would be repeated to query heads."""
    shapes = head_shapes(model.config.get_text_config())
    entries = method.masked_entries(budget, tokens)
    repeated = sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    exact = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    return Cost(
        prompt_tokens=reading.n,
        capacity=budget.capacity(reading.n),
        entries={"mean": entries, "max": entries},
        cache_bytes=round(entries * repeated / (tokens * exact) * reading.exact_bytes),
        exact_bytes=reading.exact_bytes,
        compressed=True,
        prefill_s=reading.prefill_s,
        extras={"imagined": True},
    )
