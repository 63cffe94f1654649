"""Clusters that SubGen's online clustering finds (arXiv 2402.06082, Algorithm 1) against n."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.errors.options import Distinct, NonNegative
from kvbench.probes.base import Repeats, StandIn, Tokens, of_kind, scaling_figure
from kvbench.probes.replicated import Replicated
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session

_CHUNK = 256
"""Keys compared with the representatives found so far at once."""


@dataclass(frozen=True, kw_only=True)
class Clustering(StandIn):
    """An online clustering: a key farther than delta from every representative becomes one.

    Args:
        delta: in units of the root mean square distance between two keys of the layer, so that it
            means the same for keys of any norm.
    """

    saves_memory: ClassVar[bool] = True  # as records have always said
    paper: ClassVar[str] = "arXiv 2402.06082, Algorithm 1"

    delta: NonNegative = 0.5


def online_clusters(keys: Tensor, delta: float, steps: Sequence[int]) -> dict[int, int]:
    """Representatives after each n of `steps`, keys [n, d] read in order (float64).

    A chunk of keys is compared with all earlier representatives in one product; only the keys that
    are far from those are then walked one by one.
    """
    x = keys.double()
    square = x.square().sum(-1)
    found = torch.empty_like(x)
    norms = torch.empty_like(square)
    count, counts, stops = 0, {}, sorted(set(steps))
    start = 0
    while start < len(x) and stops:
        stop = min(start + _CHUNK, stops[0], len(x))
        chunk, size = x[start:stop], square[start:stop]
        far = torch.ones(stop - start, dtype=torch.bool)
        if count:
            apart = size[:, None] - 2 * chunk @ found[:count].T + norms[:count]
            far = apart.amin(-1) > delta**2
        new = chunk[far]
        distance = torch.cdist(new, new, compute_mode="donot_use_mm_for_euclid_dist")
        mine: list[int] = []
        for i in range(len(new)):
            if not mine or float(distance[i, mine].min()) > delta:
                mine.append(i)
        found[count : count + len(mine)] = new[mine]
        norms[count : count + len(mine)] = size[far][mine]
        count += len(mine)
        start = stop
        if stop == stops[0]:
            counts[stop] = count
            stops.pop(0)
    return counts


def key_distance(keys: Tensor) -> float:
    """Root mean square distance between two keys of [n, d], drawn with replacement."""
    x = keys.double()
    return float((2 * (x - x.mean(0)).square().sum(-1).mean()).sqrt())


@dataclass(frozen=True, kw_only=True)
class SubGenClusters(Replicated):
    """How many clusters m SubGen's clustering opens in the first n keys, for several delta.

    The paper's memory is m t + s entries: it is sublinear in n only where m is. The score is m,
    averaged over the KV heads.

    Attributes:
        steps: the n's; the longest is the length of the layers.
    """

    name: ClassVar[str] = "subgen_clusters"
    score_unit: ClassVar[str] = "clusters"
    lower_is_better: ClassVar[bool] = True
    breakdown: ClassVar[tuple[str, ...]] = ("n",)

    steps: Distinct[Tokens] = (64, 256, 1024, 4096, 16384)
    draws: Repeats = 3
    num_prompts: Repeats = 3

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        labels = ("keys read, n", "clusters, m")
        fit: dict[str, Any] = {
            "guides": [1.0],
            "fit_least": max(self.steps) / 16,
            "finding": "clusters",
        }
        curve = scaling_figure("n", "clusters", *labels, self.repetition, **fit)
        return {**super().meta(), "figures": [curve]}

    @property
    def length(self) -> tuple[str, int]:
        """See `Replicated.length`."""
        return "task.steps has", max(self.steps)

    @property
    def levels(self) -> Sequence[str]:
        """See `Replicated.levels`."""
        return [f"n{n}" for n in sorted(self.steps)]

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """See `Replicated.units`.

        Raises:
            KVError: a method that is no `Clustering`; prompts that are too short.
        """
        of_kind(self.name, methods, Clustering)
        return super().units(session, methods)

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Every delta over the same keys."""
        another = "" if self.prompts is not None else f"seed{session.seed}-"  # seeds draw new keys
        for dataset, replicate, keys in self._keys(unit, session):
            for label, method in of_kind(self.name, methods, Clustering).items():
                counts = [
                    online_clusters(head, method.delta * key_distance(head), self.steps)
                    for head in keys
                ]
                for n in sorted(self.steps):
                    clusters = sum(count[n] for count in counts) / len(counts)
                    fields = {
                        "dataset": dataset,
                        "n": n,
                        "replicate": another + replicate,
                        "clusters": clusters,
                        "score": clusters,
                    }
                    yield Outcome(label, f"{dataset}/n{n}/{replicate}", fields)

    def _keys(self, unit: Unit, session: Session) -> Iterator[tuple[str, str, Tensor]]:
        """(data set, replicate, keys [kv_heads, n, d])."""
        n = max(self.steps)
        if self.prompts is None:
            name, layer, _, _ = self.drawn(unit, n, session)
            yield name, f"draw{unit.payload[1]}", layer.keys[0]
            return
        for name, layer, _ in self.captured(unit, n, session):
            yield name, unit.id, layer.keys[0].cpu()
