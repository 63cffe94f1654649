"""Clusters m that SubGen's online clustering opens in the first n keys, for several delta.

SubGen (arXiv 2402.06082), Algorithm 1: its memory is m t + s entries, sublinear in n only where m is.
delta is in units of the root mean square distance between two keys of the layer, so that it means the
same for keys of any norm. On random keys, or with synthetic=false on a model's. No paper shows it.

    kvbench reproduce subgen_clusters      random keys, and those of recall_mini
    kvbench reproduce subgen_clusters model=recall_mini limit=1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from _bounded import BoundedData
from _common import Run, started
from torch import Tensor

from kvbench.errors import UserError
from kvbench.kernels.online_clusters import OnlineClusters
from kvbench.methods.base import SEED_STRIDE

DATA = {
    "d 4": {"head_dim": 4},
    "d 16": {"head_dim": 16},
    "d 64": {"head_dim": 64},
    "d 64, 64 clusters": {"head_dim": 64, "clusters": 64, "spread": 0.1},
}
"""Options of `_bounded.BoundedData`."""


def key_distance(keys: Tensor) -> Tensor:
    """Root mean square distance between two keys of [heads, n, d], drawn with replacement: [heads]."""
    x = keys.double()
    return (2 * (x - x.mean(1, keepdim=True)).square().sum(-1).mean(-1)).sqrt()


def clusters(keys: Tensor, delta: float, steps: Sequence[int]) -> dict[int, float]:
    """Representatives after each n of `steps`, of keys [heads, n, d] read in order, mean over heads."""
    distance = (delta * key_distance(keys)).float()
    online = OnlineClusters(keys.shape[0], keys.shape[2], distance)
    counts: dict[int, float] = {}
    start = 0
    for stop in sorted(steps):
        for block in keys[:, start:stop].float().split(256, dim=1):
            online.count(block)
        counts[stop] = float(online.clusters.double().mean())
        start = stop
    return counts


def layers(run: Run, n: int) -> Iterator[tuple[str, str, Tensor]]:
    """Data set, repetition and keys [heads, n, d]."""
    if run.synthetic:
        for draw in range(run.draws):
            for name, options in run.data.items():
                seed = SEED_STRIDE * run.seed + draw
                layer, _ = BoundedData(**options).layer(n, 0, name, seed)
                yield name, f"draw{draw}", layer.keys[0]
        return
    for prompt, ids in run.prompts():
        if len(ids) < n:
            raise UserError(
                f"prompt {prompt!r} has {len(ids)} tokens; allowed: {n} (steps) or more"
            )
        for number, layer in run.captured(ids[:n], run.layers):
            yield f"layer {number}", prompt, layer.keys[0]


def main(arguments: Sequence[str]) -> None:
    """Write a row for each data set or layer, n, repetition and delta: the number of clusters.

    Keys of its own: steps (the n's), deltas; data (options by name) and draws of random keys; layers of
    a model.
    """
    run = Run(
        __file__,
        arguments,
        "",
        "",
        steps=[64, 256, 1024, 4096, 16384],
        deltas=[0.25, 0.5, 0.75, 1.0],
        data=DATA,
        draws=3,
        layers=None,
    )
    longest = max(run.steps)
    rows = []
    with torch.no_grad():
        for name, repetition, keys in layers(run, longest):
            for delta in run.deltas:
                for n, count in clusters(keys, delta, run.steps).items():
                    rows.append(
                        {
                            "data": name,
                            "n": n,
                            "repetition": repetition,
                            "delta": delta,
                            "clusters": count,
                        }
                    )
    run.save(rows, y="clusters", x="n", by="delta", panel="data", fit=(longest / 16, longest))


if __name__ == "__main__":
    started(main)
