"""How well keys and values cluster, of which SubGen makes use (arXiv 2402.06082, Figure 1).

t-SNE of keys and of values with the centres of greedy k-centre, and as numbers the radius of k centres
against k. `kvbench.probes.clusters` counts what SubGen's online clustering makes of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvbench.engine.fork import layer_generator
from kvbench.engine.scoring import greedy_continuation, read
from kvbench.engine.stopping import Stopping
from kvbench.errors import needs_extra
from kvbench.errors.options import Distinct, Whole
from kvbench.kernels.kcentre import greedy_k_centre
from kvbench.kv import Budget, KVError, LayerKV
from kvbench.methods.base import SEED_STRIDE, Method
from kvbench.methods.exact import Exact
from kvbench.probes.base import Repeats, StandIn, Tokens, of_kind, scaling_figure
from kvbench.probes.clusters import key_distance
from kvbench.probes.layers import LayerSource
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session
from kvbench.tasks.base import TaskError


@dataclass(frozen=True, kw_only=True)
class Embedding(StandIn):
    """Keys or values of a layer; or Gaussian vectors with their mean and covariance, which have no
    clusters but what the covariance makes.
    """

    paper: ClassVar[str] = "arXiv 2402.06082, Figure 1"

    of: Literal["keys", "values"] = "keys"
    gaussian: bool = False

    def vectors(self, layer: LayerKV, first: int, generator: torch.Generator) -> Tensor:
        """[kv_heads, n - first, d] float64 on the CPU: those of the tokens from `first` on."""
        held = layer.keys if self.of == "keys" else layer.values
        x = held[0, :, first:].double().cpu()
        if not self.gaussian:
            return x
        mean = x.mean(1, keepdim=True)
        values, vectors = torch.linalg.eigh((x - mean).mT @ (x - mean) / x.shape[1])
        drawn = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return mean + drawn @ (vectors * values.clamp(min=0).sqrt()[:, None]).mT


def k_centre_radii(points: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Centres of greedy k-centre from the first of `points` [n, d] (float64), and the largest distance
    of a point to the nearest of the first k of them, k = 1 .. most: at most twice what the best k have.

    Returns:
        centres [most] int64, radii [most] float64.
    """
    start = torch.zeros(1, dtype=torch.int64)
    centres = greedy_k_centre(points[None], most, start)[0]
    apart = torch.cdist(points, points[centres], compute_mode="donot_use_mm_for_euclid_dist")
    return centres, apart.cummin(dim=1).values.amax(0)


def in_the_plane(points: Tensor, seed: int) -> list[list[float]]:
    """t-SNE of points [n, d]: n pairs, to three digits after the point.

    Raises:
        KVError: scikit-learn is not installed.
    """
    try:
        from sklearn.manifold import TSNE
    except ModuleNotFoundError as error:
        raise KVError(needs_extra("scikit-learn", "tsne")) from error
    perplexity = min(30.0, (len(points) - 1) / 3)
    flat = TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(
        points.numpy()
    )
    return [[round(float(x), 3), round(float(y), 3)] for x, y in flat]


@dataclass(frozen=True, kw_only=True)
class Clusterability(LayerSource):
    """Radius of k centres against k, of keys and values and of Gaussian vectors like them, by layer.

    The score is the radius over the root mean square distance of two vectors of the head, mean over
    the KV heads: the faster it falls with k, the better the vectors cluster. The first `drawn` prompts
    are also shown as t-SNE of one head, with `centres` centres.

    Attributes:
        generate: tokens that the exact model goes on with (greedily, past any end token), whose keys
            and values are taken; 0: the prompt's own.
        counts: the k's. centres: of them, how many are marked in the picture.
        head: from 1, the KV head that is shown.
    """

    name: ClassVar[str] = "clusterability"
    score_unit: ClassVar[str] = "radius"
    lower_is_better: ClassVar[bool] = True
    breakdown: ClassVar[tuple[str, ...]] = ("k",)
    kind: ClassVar[type[Method]] = Embedding

    generate: Whole = 1024
    counts: Distinct[Tokens] = (1, 2, 4, 8, 16, 32, 64, 128)
    centres: Tokens = 16
    head: Repeats = 1
    drawn: Annotated[int, Ge(0), Le(100)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.centres not in self.counts:
            raise TaskError(
                f"task.centres is {self.centres}; allowed: one of task.counts, {list(self.counts)}"
            )
        if self.generate and self.prompts is None:
            raise TaskError(
                f"task.generate is {self.generate} and task.prompts is null; allowed: 0"
            )

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        meta = super().meta()
        labels = ("centres, k", "radius over the distance of two vectors")
        law = scaling_figure("k", "radius", *labels, meta["unit"], finding="power_law")
        return {**meta, "figures": [law, {"kind": "scatter", "x": "dataset", "value": "plane"}]}

    def endings(self, session: Session) -> Sequence[str]:
        """See `LayerSource.endings`."""
        return [f"/k{k}" for k in self.counts]

    def check_prompt(self, name: str, n: int) -> None:
        """See `LayerSource.check_prompt`."""
        if (self.generate or n) < max(self.counts):
            raise KVError(
                f"task.counts has {max(self.counts)} and prompt {name!r} {self.generate or n} vectors; "
                "allowed: as many at most"
            )

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Keys, values and their Gaussian likes of the same tokens."""
        first, read_ids = 0, unit.payload
        if self.generate:
            first = len(unit.payload)
            read_ids = (*unit.payload, *self._continuation(unit, session))
        drawn = self.drawn and unit.id in self._drawn(session)
        for layer, kv in self.captured(replace(unit, payload=read_ids), session):
            for label, method in of_kind(self.name, methods, Embedding).items():
                seed = SEED_STRIDE * session.seed
                vectors = method.vectors(kv, first, layer_generator(seed, unit.id, layer))
                found = [k_centre_radii(head, max(self.counts)) for head in vectors]
                sizes = [key_distance(head) for head in vectors]
                plane = None
                if drawn and not method.gaussian and self.head <= len(vectors):
                    head = self.head - 1
                    marked = found[head][0][: self.centres].tolist()
                    plane = {"points": in_the_plane(vectors[head], session.seed), "marked": marked}
                for k in self.counts:
                    parts = [float(r[k - 1]) / s for (_, r), s in zip(found, sizes, strict=True)]
                    radius = sum(parts) / len(parts)
                    fields = {
                        "prompt": unit.id,
                        "layer": layer,
                        "dataset": f"layer {layer}",
                        "k": k,
                        "radius": radius,
                        "score": radius,
                        "plane": plane if k == self.centres else None,
                    }
                    yield Outcome(label, f"{unit.id}/layer{layer}/k{k}", fields)

    def _drawn(self, session: Session) -> list[str]:
        """The prompts that are shown."""
        if self.prompts is None:
            return ["synthetic"]
        return [example.id for example in self.prompts.examples(session.encoder)[: self.drawn]]

    def _continuation(self, unit: Unit, session: Session) -> list[int]:
        """What the exact model goes on with."""
        reading = read(
            session.model,
            unit.payload,
            {"exact": (Exact(), Budget())},
            seed=session.seed,
            example_id=unit.id,
            room=self.generate,
        )
        return greedy_continuation(
            session.model, reading, reading.forks[0], Stopping(self.generate)
        )
