"""Radius of k centres against k, of keys, values and Gaussian vectors like them; t-SNE of one head.

SubGen (arXiv 2402.06082), Figure 1: 1,024 generated tokens on MT-Bench's questions, five layers, random
heads. ClusterGen (its later version), Figure 1: the prefill of four models on TriviaQA, a random layer
and head; C.2: more layers and heads. No numbers are printed.
The radius is over the root mean square distance of two vectors of the head, mean over the KV heads: the
faster it falls with k, the better the vectors cluster. Gaussian vectors have the covariance alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _clusters import cached_layers, draw, library_model, number_of
from _common import Run, started
from subgen_clusters import key_distance
from torch import Tensor

from kvbench.engine.fork import layer_generator
from kvbench.engine.scoring import greedy_continuation, read
from kvbench.engine.stopping import Stopping
from kvbench.kernels.kcentre import greedy_k_centre
from kvbench.kv import Budget, LayerKV
from kvbench.methods.base import SEED_STRIDE
from kvbench.methods.exact import Exact


def vectors(
    layer: LayerKV, of: str, first: int, generator: torch.Generator, gaussian: bool
) -> Tensor:
    """Keys or values of the tokens from `first` on, or Gaussian vectors with their mean and covariance:
    [kv_heads, n - first, d] float64 on the CPU."""
    x = getattr(layer, of)[0, :, first:].double().cpu()
    if not gaussian:
        return x
    mean = x.mean(1, keepdim=True)
    values, axes = torch.linalg.eigh((x - mean).mT @ (x - mean) / x.shape[1])
    drawn = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return mean + drawn @ (axes * values.clamp(min=0).sqrt()[:, None]).mT


def k_centre_radii(points: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Centres [most] int64 of greedy k-centre from the first of `points` [n, d], and the largest
    distance of a point to the nearest of the first k of them, k = 1 .. most: [most] float64."""
    centres = greedy_k_centre(points[None], most, torch.zeros(1, dtype=torch.int64))[0]
    apart = torch.cdist(points, points[centres], compute_mode="donot_use_mm_for_euclid_dist")
    return centres, apart.cummin(dim=1).values.amax(0)


def main(given: Sequence[str]) -> None:
    """A row for each prompt, layer, kind of vector and k. Own keys: generate (tokens that the exact
    model goes on with, greedily, whose vectors are taken; 0: the prompt's own, of any model that
    transformers runs), counts (the k's), centres and head (of the picture, of the first prompt; 0:
    none; random), layers (random: one), by_head (a row for each KV head in place of their mean)."""
    counts = [1, 2, 4, 8, 16, 32, 64, 128]
    own = {"generate": 1024, "counts": counts, "centres": 16, "head": "random", "layers": 5}
    run = Run(__file__, given, "model=llama2_7b", "task=_mt_bench", **own, by_head=False)
    rows = []
    model = run.session.model if run.generate else library_model(run)
    for number, (prompt, ids) in enumerate(run.prompts()):
        first = 0
        if run.generate:
            exact = {"exact": (Exact(), Budget())}
            read_once = read(model, ids, exact, seed=run.seed, example_id=prompt, room=run.generate)
            first = len(ids)
            stopping = Stopping(run.generate)
            ids = (*ids, *greedy_continuation(model, read_once, read_once.forks[0], stopping))
            layers = run.captured(ids, run.layers)
        else:
            layers = cached_layers(model, ids, run.layers, run.seed)
        for layer, kv in layers:
            for kind in ("keys", "values", "keys_gaussian", "values_gaussian"):
                of, _, gaussian = kind.partition("_")
                generator = layer_generator(SEED_STRIDE * run.seed, prompt, layer)
                heads = vectors(kv, of, first, generator, bool(gaussian))
                centres = [k_centre_radii(head, max(run.counts)) for head in heads]
                radii = torch.stack([r for _, r in centres]) / key_distance(heads)[:, None]
                for k in run.counts:
                    where = {"prompt": prompt, "layer": layer, "kind": kind, "k": k}
                    radii_of_k = radii[:, k - 1]
                    if run.by_head:
                        by_head = enumerate(radii_of_k.tolist(), start=1)
                        rows += [where | {"head": i, "radius": radius} for i, radius in by_head]
                    else:
                        rows.append(where | {"radius": float(radii_of_k.mean())})
                head = number_of(run.head, len(heads), run.seed + layer)
                if number == 0 and head and not gaussian:
                    marked = centres[head - 1][0][: run.centres]
                    draw(heads[head - 1], marked, run.seed, f"{run.place}-{kind}-{layer}.png")
    run.save(rows, y="radius", x="k", by="kind", panel="layer", fit=(1, max(run.counts)))


if __name__ == "__main__":
    started(main)
