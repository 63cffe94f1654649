"""How sparse attention is, and how unevenly it is shared out (H2O, arXiv 2306.14048, section 3.1).

Figures 2a and 10: the share of a row's attention weights below a threshold relative to the row's
largest. Figure 2b: the attention that each key accumulates over all queries, sorted, against a power
law.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.engine.attention import capped
from kvbench.errors.options import Share
from kvbench.kv import LayerKV
from kvbench.methods.base import Method
from kvbench.probes.base import StandIn, Tokens, of_kind
from kvbench.probes.layers import LayerSource
from kvbench.probes.ranked import Ranked
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session

_BLOCK = 1 << 22
"""Logits of a block of queries: 32 MiB in float64."""
PAPER = "arXiv 2306.14048, section 3.1"


@dataclass(frozen=True, kw_only=True)
class Threshold(StandIn):
    """A weight counts as none where it is below `share` of the largest of its row."""

    paper: ClassVar[str] = PAPER

    share: Share = 0.01


@dataclass(frozen=True, kw_only=True)
class Accumulated(StandIn):
    """Attention that a key received from all queries: of every query head (`head`, as the paper shows
    it), or the mean over the query heads that share the key (`group`, what `h2o` here goes by).

    """

    paper: ClassVar[str] = PAPER

    per: Literal["head", "group"] = "head"


def sparsity(layer: LayerKV, shares: Sequence[float]) -> Tensor:
    """The share of causal attention weights below each of `shares` of their row's maximum.

    A weight is exp(logit - row maximum) times the row's maximum, so logits are compared and no softmax
    is taken; in float64, a block of queries at a time.

    Returns:
        [len(shares), heads] float64: of the n (n + 1) / 2 weights that a head may use.
    """
    assert layer.queries is not None
    kv_heads, n = layer.keys.shape[1], layer.n
    queries = layer.queries[0].double().unflatten(0, (kv_heads, layer.group))
    keys = layer.keys[0].double()[:, None].mT
    logs = torch.tensor([math.log(share) for share in shares], device=keys.device)
    below = torch.zeros(len(shares), kv_heads, layer.group, dtype=torch.int64, device=keys.device)
    rows = max(1, _BLOCK // (kv_heads * layer.group * n))
    at = torch.arange(n, device=keys.device)
    for start in range(0, n, rows):
        block = at[start : start + rows]
        logits = capped(queries[:, :, block] @ keys * layer.scaling, layer.softcap)
        seen = at[None] <= block[:, None]
        top = logits.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
        for i, log in enumerate(logs):
            below[i] += ((logits - top < log) & seen).sum((-2, -1))
    return below.flatten(1).double() / (n * (n + 1) / 2)


def sorted_mass(layer: LayerKV, *, per_group: bool) -> Tensor:
    """Shares of all attention that keys accumulate, the largest first, mean over heads: [n] float64."""
    mass = layer.attention_mass()[0].double()
    if per_group:
        mass = mass.unflatten(0, (layer.keys.shape[1], layer.group)).mean(1)
    return (mass / mass.sum(-1, keepdim=True)).sort(dim=-1, descending=True).values.mean(0)


@dataclass(frozen=True, kw_only=True)
class AttentionSparsity(LayerSource):
    """Share of attention weights below a threshold relative to their row's largest (Figures 2a, 10).

    Only weights of keys that a query may see are counted. The score is the mean over heads;
    `sparsity_least` and `sparsity_most` are the extreme heads'.
    """

    name: ClassVar[str] = "attention_sparsity"
    score_unit: ClassVar[str] = "share of weights"
    breakdown: ClassVar[tuple[str, ...]] = ("layer",)
    kind: ClassVar[type[Method]] = Threshold
    figures: ClassVar[tuple[Mapping[str, Any], ...]] = ({"kind": "measured"},)

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Every threshold over the same logits."""
        shares = [method.share for method in of_kind(self.name, methods, Threshold).values()]
        for layer, kv in self.captured(unit, session):
            for label, heads in zip(methods, sparsity(kv, shares), strict=True):
                yield Outcome(
                    label,
                    f"{unit.id}/layer{layer}",
                    {
                        "prompt": unit.id,
                        "layer": layer,
                        "prompt_tokens": kv.n,
                        "score": float(heads.mean()),
                        "sparsity_least": float(heads.min()),
                        "sparsity_most": float(heads.max()),
                    },
                )


@dataclass(frozen=True, kw_only=True)
class AttentionMass(Ranked):
    """Accumulated attention of the key of each rank, and the power law through it (Figure 2b).

    The score is the share of all attention that the key of a rank accumulates. The report fits
    log(share) against log(rank) by least squares.

    Attributes:
        fit_most: the last rank that is fitted; keys that come late are seen by few queries, so the
            end of the curve falls for that reason alone. None: all.
    """

    name: ClassVar[str] = "attention_mass"
    score_unit: ClassVar[str] = "share of attention"
    kind: ClassVar[type[Method]] = Accumulated
    field: ClassVar[str] = "attention"
    labels: ClassVar[tuple[str, str]] = ("rank of the key", "share of accumulated attention")

    fit_most: Tokens | None = None

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        meta = super().meta()
        meta["figures"][0] |= {"guides": [-1.0], "fit_most": self.fit_most}
        return meta

    def check_prompt(self, name: str, n: int) -> None:
        """See `LayerSource.check_prompt`."""
        self.check_count(n, f"prompt {name!r} has {n} tokens")

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Both ways to accumulate, on the same attention."""
        for layer, kv in self.captured(unit, session):
            for label, method in of_kind(self.name, methods, Accumulated).items():
                shares = sorted_mass(kv, per_group=method.per == "group")
                yield from self.outcomes(label, shares, unit.id, layer, prompt_tokens=kv.n)
