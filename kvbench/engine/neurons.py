"""Observing and dropping the neurons of a model's MLPs through forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from kvbench.engine.attention import UnsupportedModel
from kvbench.engine.prefill import CaptureState, forward_rows, input_device

ActivationHook = Callable[[int, Tensor], Tensor | None]
"""Called with a layer's number from 0 and its activations [..., neurons]; may return a replacement, or
None."""


_KINDS = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()})
"""The classes of all activations that a config of transformers can name."""


def activations_of(model: PreTrainedModel) -> dict[int, nn.Module]:
    """By layer, from 0, the module whose output is the activations of the MLP's neurons: after ReLU in
    OPT, the gate after SiLU in Llama.

    Raises:
        UnsupportedModel: a layer has none or several (mixtures of experts), or layers share one.
    """
    found: dict[int, list[nn.Module]] = {
        i: [] for i in range(model.config.get_text_config().num_hidden_layers)
    }
    for name, module in model.named_modules():
        layer = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        if layer is not None and type(module) in _KINDS:
            found.setdefault(layer, []).append(module)
    alone = {layer: modules[0] for layer, modules in found.items() if len(modules) == 1}
    if len(alone) < len(found) or len({id(module) for module in alone.values()}) < len(alone):
        raise UnsupportedModel(
            f"{type(model).__name__} has not one activation of its own in every layer; allowed: models "
            "with one MLP per layer (OPT, Llama, Qwen, GPT-NeoX ...)"
        )
    return alone


@contextmanager
def watched(model: PreTrainedModel, hook: ActivationHook) -> Iterator[None]:
    """Within the context, every forward pass calls `hook` with the activations of every layer."""

    def shown(layer: int, module: nn.Module, given: Any, out: Tensor) -> Tensor | None:
        return hook(layer, out)

    with ExitStack() as stack:
        for layer, module in activations_of(model).items():
            stack.callback(module.register_forward_hook(partial(shown, layer)).remove)
        yield


def activation_counts(
    model: PreTrainedModel, texts: Sequence[Sequence[int]]
) -> tuple[dict[int, Tensor], int]:
    """Count the tokens for which each neuron is active (its activation is above 0).

    Returns:
        By layer, from 0, counts [neurons] int64 on the CPU; and the number of tokens.
    """
    counts: dict[int, Tensor] = {}

    def count(layer: int, out: Tensor) -> None:
        active = (out.flatten(0, -2) > 0).sum(0)
        counts[layer] = counts[layer] + active if layer in counts else active

    with watched(model, count):
        for ids in texts:
            _logits(model, ids, keep=1)
    return {layer: total.cpu() for layer, total in counts.items()}, sum(map(len, texts))


def mean_nll(model: PreTrainedModel, ids: Sequence[int], dropped: dict[int, Tensor]) -> float:
    """Mean negative log-likelihood in nats of every token but the first, with exact attention.

    Args:
        dropped: by layer, [neurons] bool; True sets the neuron's activation to 0.
    """

    def drop(layer: int, out: Tensor) -> Tensor | None:
        if layer not in dropped:
            return None
        return out.masked_fill(dropped[layer].to(out.device), 0.0)

    with watched(model, drop):
        logits = _logits(model, ids, keep=None)
    at = torch.tensor(list(ids[1:]), device=logits.device)
    return float(nn.functional.cross_entropy(logits[:-1].float(), at).double())


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Sequence[int], *, keep: int | None) -> Tensor:
    """Logits [tokens, vocab] of one exact pass."""
    device = input_device(model)
    state = CaptureState({}, model.config.get_text_config().num_hidden_layers)
    positions = torch.arange(len(ids), device=device)
    return forward_rows(model, torch.tensor([list(ids)], device=device), positions, state, keep)[0]
