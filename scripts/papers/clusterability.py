"""Radius of k centres against k, of keys, values and Gaussian vectors like them; t-SNE of one head.

SubGen (arXiv 2402.06082), Figure 1: 1,024 generated tokens on MT-Bench's questions, five layers, random
heads. ClusterGen (its later version), Figure 1: the prefill of four models on TriviaQA, a random layer
and head; C.2: more layers and heads. No numbers are printed.
The radius is over the root mean square distance of two vectors of the head, mean over the KV heads: the
faster it falls with k, the better the vectors cluster. Gaussian vectors have the covariance alone.

    kvbench reproduce subgen_figure1      Llama-2-7B, a GPU; also clustergen_figure1, clustergen_c2
    kvbench reproduce subgen_figure1 model=recall_mini limit=1

The pictures need scikit-learn (the extra `tsne`) and are PNG files beside the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _common import Run, chosen_layers, random_number, started
from matplotlib.figure import Figure
from subgen_clusters import key_distance
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvbench.engine.answer import Stopping
from kvbench.engine.ask import Question, answer_each, read
from kvbench.engine.model import local_path, prompt_encoder
from kvbench.engine.row import layer_generator
from kvbench.errors import UserError, needs_extra
from kvbench.kernels.kcentre import greedy_k_centre
from kvbench.kv import Budget, LayerKV
from kvbench.methods.base import SEED_STRIDE
from kvbench.methods.exact import Exact


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
    each layer with its number from 1; which layers: see `chosen_layers`."""
    inputs = torch.tensor([ids], device=model.device)
    cached = model(input_ids=inputs, use_cache=True).past_key_values.layers
    for number in chosen_layers(range(1, len(cached) + 1), layers, seed):
        layer = cached[number - 1]
        yield number, SimpleNamespace(keys=layer.keys, values=layer.values)


def vectors(
    layer: LayerKV, name: str, first: int, generator: torch.Generator, gaussian: bool
) -> Tensor:
    """The layer's `name` (keys or values) of the tokens from `first` on, or Gaussian vectors with their
    mean and covariance: [kv_heads, n - first, d] float64 on the CPU."""
    x = getattr(layer, name)[0, :, first:].double().cpu()
    if not gaussian:
        return x
    mean = x.mean(1, keepdim=True)
    variances, axes = torch.linalg.eigh((x - mean).mT @ (x - mean) / x.shape[1])
    drawn = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return mean + drawn @ (axes * variances.clamp(min=0).sqrt()[:, None]).mT


def k_centre_radii(points: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Centres [most] int64 of greedy k-centre from the first of `points` [n, d], and the largest
    distance of a point to the nearest of the first k of them, k = 1 .. most: [most] float64."""
    centres = greedy_k_centre(points[None], most, torch.zeros(1, dtype=torch.int64))[0]
    distances = torch.cdist(points, points[centres], compute_mode="donot_use_mm_for_euclid_dist")
    return centres, distances.cummin(dim=1).values.amax(0)


def generated_layers(
    run: Run, prompt: str, ids: Sequence[int]
) -> tuple[int, Iterator[tuple[int, LayerKV]]]:
    """The exact model goes on with a prompt, greedily: where its own tokens begin, and the layers of
    prompt and answer."""
    model = run.session.model
    exact = {"exact": (Exact(), Budget())}
    how: Any = {"seed": run.seed, "name": prompt, "held_back": 1, "room": run.generate}
    question = Question((), Stopping(run.generate))
    given = answer_each(model, read(model, ids, exact, **how), question)["exact"]
    if given.failure is not None:
        raise given.failure
    return len(ids), run.captured((*ids, *given.chosen), run.layers)


def radii_of_layer(
    run: Run, where: dict[str, Any], kv: LayerKV, first: int, picture: bool
) -> Iterator[dict[str, Any]]:
    """A row for each kind of vector and k, of the tokens from `first` on.

    Args:
        where: the columns `prompt` and `layer` of the rows.
        picture: draw t-SNE of a head's keys and of its values.
    """
    prompt, layer = where["prompt"], where["layer"]
    for kind in ("keys", "values", "keys_gaussian", "values_gaussian"):
        name, _, gaussian = kind.partition("_")
        generator = layer_generator(SEED_STRIDE * run.seed, prompt, layer)
        heads = vectors(kv, name, first, generator, bool(gaussian))
        centres_and_radii = [k_centre_radii(head, max(run.counts)) for head in heads]
        radii = torch.stack([radius for _, radius in centres_and_radii])
        radii = radii / key_distance(heads)[:, None]
        for k in run.counts:
            row = {**where, "kind": kind, "k": k}
            if run.by_head:
                for head, radius in enumerate(radii[:, k - 1].tolist(), start=1):
                    yield {**row, "head": head, "radius": radius}
            else:
                yield {**row, "radius": float(radii[:, k - 1].mean())}
        head = random_number(len(heads), run.seed + layer) if run.head == "random" else run.head
        if picture and head and not gaussian:
            marked = centres_and_radii[head - 1][0][: run.centres]
            draw_tsne(heads[head - 1], marked, run.seed, f"{run.place}-{kind}-{layer}.png")


def main(arguments: Sequence[str]) -> None:
    """Write a row for each prompt, layer, kind of vector and k: the radius.

    Keys of its own: generate (tokens that the exact model goes on with, whose vectors are taken; 0: the
    prompt's own vectors, of any model that transformers runs), counts (the k's), layers (a list, how
    many, or random: one), by_head (true: a row for each KV head in place of their mean); of the picture
    of the first prompt: head (a number from 1, random, or 0: no picture) and centres (how many of them
    are marked).
    """
    run = Run(
        __file__,
        arguments,
        "model=llama2_7b",
        "task=_mt_bench",
        generate=1024,
        counts=[1, 2, 4, 8, 16, 32, 64, 128],
        centres=16,
        head="random",
        layers=5,
        by_head=False,
    )
    rows: list[dict[str, Any]] = []
    model = None if run.generate else library_model(run)
    for number, (prompt, ids) in enumerate(run.prompts()):
        if run.generate:
            first, layers = generated_layers(run, prompt, ids)
        else:
            first, layers = 0, cached_layers(model, ids, run.layers, run.seed)
        for layer, kv in layers:
            where = {"prompt": prompt, "layer": layer}
            rows += radii_of_layer(run, where, kv, first, picture=number == 0)
    run.save(rows, y="radius", x="k", by="kind", panel="layer", fit=(1, max(run.counts)))


if __name__ == "__main__":
    started(main)
