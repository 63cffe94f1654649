"""What clusterability.py shows and reads: a t-SNE picture; keys and values of any model's prefill."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _common import Run, spread
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvbench.engine.model_spec import local_path
from kvbench.engine.tokenizer import prompt_encoder
from kvbench.errors import UserError, needs_extra


def draw(points: Tensor, centres: Tensor, seed: int, file: str) -> None:
    """t-SNE of points [n, d] with the centres marked, as PNG (needs scikit-learn)."""
    try:
        from sklearn.manifold import TSNE
    except ModuleNotFoundError as error:
        raise UserError(needs_extra("scikit-learn", "tsne")) from error
    tsne = TSNE(2, perplexity=min(30.0, (len(points) - 1) / 3), init="pca", random_state=seed)
    flat = tsne.fit_transform(points.numpy())
    figure = Figure(figsize=(4, 4), layout="constrained")
    ax = figure.subplots()
    ax.scatter(flat[:, 0], flat[:, 1], s=4)
    ax.scatter(flat[centres, 0], flat[centres, 1], s=40, marker="*", color="red")
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def number_of(asked: Any, count: int, seed: int) -> Any:
    """The number that was asked for; where that is "random", one from 1 to `count`, drawn with the
    seed."""
    return random.Random(seed).randint(1, count) if asked == "random" else asked


def library_model(run: Run) -> Any:
    """The run's model as transformers has it, of any architecture, and its tokens for `run.prompts`."""
    spec, session = run.session.spec, run.session
    session.__dict__["encoder"] = prompt_encoder(session.tokenizer, spec)
    model: Any = AutoModelForCausalLM.from_pretrained(
        local_path(spec.path),
        revision=spec.revision,
        dtype=session.dtype,
        use_safetensors=True,
        **(spec.config or {}),
    )
    return model.to(session.device).eval()


@torch.inference_mode()
def cached_layers(
    model: Any, ids: Sequence[int], layers: Any, seed: int
) -> Iterator[tuple[int, Any]]:
    """Keys and values of a prompt's layers, as the model caches them, each with its number from 1.

    Args:
        layers: a list of numbers from 1; how many, evenly spread; or "random": one.
    """
    inputs = torch.tensor([ids], device=model.device)
    cached = model(input_ids=inputs, use_cache=True).past_key_values.layers
    if layers == "random":
        numbers = [number_of(layers, len(cached), seed)]
    elif isinstance(layers, list):
        numbers = layers
    else:
        numbers = spread(range(1, len(cached) + 1), layers)
    for number in numbers:
        of_layer = cached[number - 1]
        yield number, SimpleNamespace(keys=of_layer.keys, values=of_layer.values)
