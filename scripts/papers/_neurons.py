"""Activations of the neurons of MLPs, through plain forward hooks: counted, or set to zero.

A neuron is active at a token where its activation is above 0, and heavy where it is active at more than
a share of all tokens (H2O, arXiv 2306.14048, appendix).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from kvbench.engine.row import layer_generator
from kvbench.errors import UserError
from kvbench.methods.base import SEED_STRIDE

ACTIVATIONS = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()})
"""The classes of all activations that a config of transformers can name."""


def activations_of(model: Any) -> dict[int, nn.Module]:
    """The modules whose outputs are the activations of the MLPs' neurons, by layer from 0: after ReLU in
    OPT, the gate after SiLU in Llama."""
    count = model.config.get_text_config().num_hidden_layers
    modules: dict[int, list[nn.Module]] = {layer: [] for layer in range(count)}
    for path, module in model.named_modules():
        layer = next((int(part) for part in path.split(".") if part.isdecimal()), None)
        if layer is not None and type(module) in ACTIVATIONS:
            modules.setdefault(layer, []).append(module)
    single = {layer: group[0] for layer, group in modules.items() if len(group) == 1}
    different = {id(module) for module in single.values()}
    if len(different) < len(modules):
        raise UserError(
            f"{type(model).__name__} has not one activation of its own in every layer; allowed: models "
            "with one MLP per layer (OPT, Llama, Qwen, GPT-NeoX ...)"
        )
    return single


@contextmanager
def watched(model: Any, hook: Callable[[int, Tensor], Tensor | None]) -> Iterator[None]:
    """Within the context `hook` is called with each layer's number from 0 and its activations
    [..., neurons]; what it returns, unless None, takes their place."""
    with ExitStack() as stack:
        for layer, module in activations_of(model).items():
            handle = module.register_forward_hook(lambda _, __, out, layer=layer: hook(layer, out))
            stack.callback(handle.remove)
        yield


@torch.no_grad()
def logits_of(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits [tokens, vocab] of one pass with the library's own attention."""
    model.set_attn_implementation("sdpa")
    inputs = torch.tensor([list(ids)], device=model.device)
    return model(input_ids=inputs, use_cache=False).logits[0]


def counts_of(model: Any, texts: Sequence[Sequence[int]]) -> dict[int, Tensor]:
    """Number of tokens of the texts for which each neuron is active: [neurons] int64, by layer from
    1."""
    counts: dict[int, Tensor] = {}

    def count(layer: int, out: Tensor) -> None:
        active = (out.flatten(0, -2) > 0).sum(0).cpu()
        counts[layer + 1] = counts.get(layer + 1, 0) + active

    with watched(model, count):
        for ids in texts:
            logits_of(model, ids)
    return counts


def heavy_of(counts: Mapping[int, Tensor], least: float) -> dict[int, Tensor]:
    """Neurons that are active at more than `least` tokens, [neurons] bool by layer, of the numbers of
    tokens that `counts_of` returns."""
    return {layer: count > least for layer, count in counts.items()}


def as_many_others(neurons: Mapping[int, Tensor], seed: int, name: str) -> dict[int, Tensor]:
    """In every layer as many neurons as are in the set `neurons` ([neurons] bool by layer from 1), drawn
    at random with the seed and a name."""
    drawn = {}
    for layer, chosen in neurons.items():
        generator = layer_generator(SEED_STRIDE * seed, name, layer - 1)
        drawn[layer] = chosen[torch.randperm(len(chosen), generator=generator)]
    return drawn
