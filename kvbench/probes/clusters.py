"""Clusters that SubGen's online clustering finds (arXiv 2402.06082, Algorithm 1) against n."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.engine.capture import capture_layers
from kvbench.errors.options import Distinct, NonNegative, check_options
from kvbench.kv import KVError
from kvbench.methods.base import SEED_STRIDE, Method
from kvbench.probes._options import Layers, Repeats, Tokens, check_kind
from kvbench.probes.error_scaling import BoundedData
from kvbench.run.encoding import encode_example
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session
from kvbench.tasks.base import Task, TaskError

_CHUNK = 256
"""Keys compared with the representatives found so far at once."""


@dataclass(frozen=True, kw_only=True)
class Clustering(Method):
    """An online clustering: a key farther than delta from every representative becomes one.

    It stands where a method stands in other experiments, but compresses nothing.

    Args:
        delta: in units of the root mean square distance between two keys of the layer, so that it
            means the same for keys of any norm.
    """

    uses_budget: ClassVar[bool] = False
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
class SubGenClusters:
    """How many clusters m SubGen's clustering opens in the first n keys, for several delta.

    The paper's memory is m t + s entries: it is sublinear in n only where m is. The score is m,
    averaged over the KV heads.

    Attributes:
        steps: the n's; the longest is the length of the layers.
        draws: repetitions, with `data`.
        data: named synthetic data sets; empty with `prompts`.
        prompts: a task whose first `num_prompts` prompts of at least max(steps) tokens are used.
        layers: 1-based, with `prompts`.
    """

    name: ClassVar[str] = "subgen_clusters"
    version: ClassVar[int] = 1

    steps: Distinct[Tokens] = (64, 256, 1024, 4096, 16384)
    draws: Repeats = 3
    data: Mapping[str, BoundedData] = field(default_factory=dict)
    prompts: Task | None = None
    num_prompts: Repeats = 3
    layers: Layers = (1, 2, 3, 4)

    def __post_init__(self) -> None:
        check_options(self, "task.", TaskError)
        if bool(self.data) == (self.prompts is not None):
            raise TaskError("task.data and task.prompts: exactly one of them must be given")

    def meta(self) -> dict[str, Any]:
        """See `kvbench.run.plan.Plan.meta`."""
        return {
            "version": self.version,
            "data": dict(self.prompts.digests()) if self.prompts is not None else {},
            "subject": "synthetic tensors" if self.prompts is None else None,
            "score_unit": "clusters",
            "lower_is_better": True,
            "breakdown": ["n"],
            "unit": "replicate",
            "figures": [
                {
                    "kind": "scaling",
                    "x": "n",
                    "level": "n",
                    "y": "clusters",
                    "facet": "dataset",
                    "unit": "replicate",
                    "xlabel": "keys read, n",
                    "ylabel": "clusters, m",
                    "guides": [1.0],
                    "fit_least": max(self.steps) / 16,
                    "finding": "clusters",
                }
            ],
        }

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per draw of every data set, or per prompt.

        Raises:
            KVError: a method that is no `Clustering`; prompts that are too short.
        """
        check_kind(self.name, methods, Clustering)
        if self.prompts is None:
            return [
                self._unit([name], f"draw{draw}", (name, draw))
                for draw in range(self.draws)
                for name in self.data
            ]
        found, longest = [], 0
        names = [f"layer {layer}" for layer in self.layers]
        for example in self.prompts.examples(session.encoder):
            encoded = encode_example(example, session.encoder)
            longest = max(longest, encoded.n)
            if encoded.n >= max(self.steps):
                ids = (*encoded.context_ids, *encoded.question_ids)[: max(self.steps)]
                found.append(self._unit(names, example.id, ids))
            if len(found) == self.num_prompts:
                return found
        raise KVError(
            f"task.steps has {max(self.steps)} and {len(found)} of the {self.num_prompts} prompts "
            f"wanted are that long; the longest has {longest} tokens"
        )

    def _unit(self, datasets: Sequence[str], replicate: str, payload: Any) -> Unit:
        ids = (f"{name}/n{n}/{replicate}" for name in datasets for n in sorted(self.steps))
        return Unit(
            replicate if self.prompts else f"{datasets[0]}/{replicate}", tuple(ids), payload
        )

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Every delta over the same keys."""
        another = "" if self.prompts is not None else f"seed{session.seed}-"  # seeds draw new keys
        for dataset, replicate, keys in self._keys(unit, session):
            for label, (method, _) in methods.items():
                assert isinstance(method, Clustering)
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
        if self.prompts is None:
            name, draw = unit.payload
            seed = SEED_STRIDE * session.seed + draw
            yield (
                name,
                f"draw{draw}",
                self.data[name].layer(max(self.steps), 1, name, seed)[0].keys[0],
            )
            return
        captured = capture_layers(session.model, unit.payload, [i - 1 for i in self.layers])
        for number in self.layers:
            yield f"layer {number}", unit.id, captured[number - 1].keys[0].cpu()
