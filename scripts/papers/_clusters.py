"""What clusterability.py draws and reads: a t-SNE picture; keys and values of any model's prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _common import Run, chosen_layers
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvbench.engine.model_spec import local_path
from kvbench.engine.tokenizer import prompt_encoder
from kvbench.errors import UserError, needs_extra


def draw_tsne(points: Tensor, centres: Tensor, seed: int, file: str) -> None:
    """Write t-SNE of points [n, d] as PNG, the points with the indices `centres` marked."""
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


def library_model(run: Run) -> Any:
    """The run's model as transformers loads it, of architectures that kvbench does not know, too.

    The session's tokenizer is then used without kvbench's model, which `Session.encoder` would load.
    """
    session = run.session
    spec = session.spec
    session.__dict__["encoder"] = prompt_encoder(session.tokenizer, spec)  # a cached property
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
    """Keys and values [1, kv_heads, n, d] of a prompt's layers as the model caches them, as attributes,
    each layer with its number from 1; which layers: see `_common.chosen_layers`."""
    inputs = torch.tensor([ids], device=model.device)
    cached = model(input_ids=inputs, use_cache=True).past_key_values.layers
    for number in chosen_layers(range(1, len(cached) + 1), layers, seed):
        layer = cached[number - 1]
        yield number, SimpleNamespace(keys=layer.keys, values=layer.values)
