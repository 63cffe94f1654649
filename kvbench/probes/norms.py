"""Norms of queries, keys and values, and the bound that BalanceKV's theorems ask for.

BalanceKV (arXiv 2502.07861) measures them in Table 3; its Theorem 3.1 holds for queries and keys of
norm r at most, with memory in proportion to exp(2 r^2 / sqrt(d)). ClusterGen's appendix C.1 shows norms
of queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.engine.architecture import kv_heads
from kvbench.engine.loading import checked_config
from kvbench.kv import LayerKV
from kvbench.methods.base import Method
from kvbench.probes.base import StandIn, of_kind
from kvbench.probes.layers import LayerSource
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session


@dataclass(frozen=True, kw_only=True)
class Norm(StandIn):
    """The l2 norms of one kind of vector.


    Attributes:
        of: ``queries``, ``keys`` (both after position encoding), ``keys_shifted`` (the same less the
            mean of their head over the prompt, which changes no attention weight), ``values``; or
            ``bound``, for each KV head the largest norm of its queries and of its shifted keys: the
            theorems' r.
    """

    paper: ClassVar[str] = "arXiv 2502.07861, Table 3"

    of: Literal["queries", "keys", "keys_shifted", "values", "bound"] = "queries"


def norms_of(layer: LayerKV, kind: str) -> Tensor:
    """Norms of the vectors of a kind (see `Norm.of`) by KV head: [kv_heads, n] float64, of queries
    [kv_heads, group * n], of ``bound`` [kv_heads, 1]."""
    assert layer.queries is not None
    keys = layer.keys[0].double()
    queries = layer.queries[0].double().norm(dim=-1).view(keys.shape[0], -1)
    shifted = (keys - keys.mean(1, keepdim=True)).norm(dim=-1)
    found = {
        "queries": queries,
        "keys": keys.norm(dim=-1),
        "keys_shifted": shifted,
        "values": layer.values[0].double().norm(dim=-1),
        "bound": torch.cat([queries, shifted], dim=-1).amax(-1, keepdim=True),
    }
    return found[kind]


_SAID = (
    "Theorem 3.1 of BalanceKV multiplies its memory by exp(2 r^2 / sqrt(d)), r being the bound here: by"
    " ten to the power of $least to $most over heads, layers and prompts ($mean on average)."
)


@dataclass(frozen=True, kw_only=True)
class Norms(LayerSource):
    """Mean and largest norm of every layer and head of a task's prompts.

    A record is one KV head of one layer on one prompt, with the queries of its group. The score is the
    mean over tokens, so that the means of a report are over tokens, heads and layers, as in Table 3;
    `norm_max` is the largest. `log10_factor`, of the bound r alone, is the power of ten of
    exp(2 r^2 s), s the factor on q.k (1 / sqrt(d) in the paper): what Theorem 3.1 multiplies the memory
    by.
    """

    name: ClassVar[str] = "norms"
    score_unit: ClassVar[str] = "l2 norm"
    breakdown: ClassVar[tuple[str, ...]] = ("layer",)
    measures: ClassVar[tuple[str, ...]] = ("norm_mean", "norm_max")
    kind: ClassVar[type[Method]] = Norm
    figures: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"kind": "measured", "say": {"log10_factor": _SAID}},
        {"kind": "heatmap", "x": "head", "y": "layer"},
    )

    def endings(self, session: Session) -> Sequence[str]:
        """See `LayerSource.endings`: one for each KV head."""
        if self.synthetic is not None:
            heads = self.synthetic.kv_heads
        else:
            heads = kv_heads(checked_config(session.spec).get_text_config())
        return [f"/head{head}" for head in range(1, heads + 1)]

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Every kind of vector, head by head."""
        for layer, kv in self.captured(unit, session):
            for label, method in of_kind(self.name, methods, Norm).items():
                for head, norms in enumerate(norms_of(kv, method.of), start=1):
                    mean, largest = float(norms.mean()), float(norms.max())
                    fields = {
                        "prompt": unit.id,
                        "layer": layer,
                        "head": head,
                        "dataset": "all",
                        "prompt_tokens": kv.n,
                        "score": mean,
                        "norm_mean": mean,
                        "norm_max": largest,
                    }
                    if method.of == "bound":
                        fields["log10_factor"] = 2 * largest**2 * kv.scaling / math.log(10)
                    yield Outcome(label, f"{unit.id}/layer{layer}/head{head}", fields)
