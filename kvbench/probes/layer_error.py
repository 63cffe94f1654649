"""Relative error of single attention layers (BalanceKV, arXiv 2502.07861, sections 4.1 and B.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.engine.attention import capped, signed_mean
from kvbench.kv import CompressedKV, LayerKV, keep_all
from kvbench.probes.layers import LayerProbe, Look
from kvbench.records.figures import Bars, as_json
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session

METRICS = {
    "per_query": ("relative_error", "relative error"),
    "pooled": ("pooled_error", "pooled relative error"),
    "released": ("released_error", "relative error as in the released notebook"),
}
"""Record field and name of each metric (see `relative_errors`)."""

CLAMP = 1e-8
"""Least element of the exact output in the denominator of BalanceKV's released notebook."""


def estimate(held: CompressedKV, queries: Tensor, first: int, layer: LayerKV) -> Tensor:
    """z_j for the queries at positions first, first + 1, ...: attention over what is held, entries
    of later positions hidden. queries [1, heads, m, d] -> [1, heads, m, d], float64."""
    stored = held.keys.shape[1]
    batch, heads, m, dim = queries.shape
    grouped = queries.double().view(batch, stored, heads // stored, m, dim)
    logits = grouped @ held.keys.double()[:, :, None].transpose(-1, -2) * layer.scaling
    logits = capped(logits, layer.softcap)
    if held.log_weights is not None:
        logits = logits + held.log_weights.double()[:, :, None, None]
    at = torch.arange(first, first + m, device=queries.device)
    later = held.positions[:, :, None, None, :] > at[:, None]
    weights = logits.masked_fill(later, float("-inf")).softmax(-1)
    out = weights[..., held.keys_only :] @ held.values.double()[:, :, None]
    if held.denominators is not None:
        ends = None
        if held.value_range is not None:
            least, most = (x.double()[:, :, None, None] for x in held.value_range)
            ends = (least, most)
        out = signed_mean(out, weights, held.denominators.double()[:, :, None], ends)
    return out.view(batch, heads, m, -1)


def relative_errors(z: Tensor, exact: Tensor) -> dict[str, float]:
    """How far the estimates z are from the exact outputs a, both [1, heads, m, d] float64.

    Returns, as record fields:
        relative_error: ||z_j - a_j|| / ||a_j||, mean over queries and heads (the paper's B.1).
        pooled_error: ||z - a||_F / ||a||_F over all queries and heads; error_sq and norm_sq are its
            parts. Queries with small outputs count little in it.
        released_error: the first, as BalanceKV's released notebook has it: elements of a_j below
            1e-8, the negative ones among them, count as 1e-8 in its norm. Where the signs are even
            that makes the denominator smaller, and the error larger, by about sqrt(2).
    """
    distance, norm = (x.norm(dim=-1) for x in (z - exact, exact))
    each = torch.where(distance == 0, 0.0, distance / norm)  # an output of zero may be met exactly
    clamped = distance / exact.clamp(min=CLAMP).norm(dim=-1)
    error_sq, norm_sq = float(distance.square().sum()), float(norm.square().sum())
    return {
        "relative_error": float(each.mean()),
        "pooled_error": (error_sq / norm_sq) ** 0.5 if error_sq else 0.0,
        "released_error": float(clamped.mean()),
        "error_sq": error_sq,
        "norm_sq": norm_sq,
    }


@dataclass(frozen=True, kw_only=True)
class LayerError(LayerProbe):
    """Error of the attention output when a layer holds a compressed cache.

    The cache of n tokens is compressed with the first `exact` and the last `exact` tokens kept and
    the middle at each rate. For every j in [n - exact, n) the estimate z_j sees the compressed cache
    plus the exact tokens up to j, and is compared with exact attention (see `relative_errors`). A
    record is one draw at one prompt, layer and rate; draws within a prompt are averaged.

    The methods see the queries before those measured, and no others: what H2O sums up and what
    SnapKV's window observes ends at n - exact, while capacity and the tokens kept exactly stay as
    they are. A method that chose by the very queries it is judged on would be judged on its training
    data.

    Departure: where a method's capacity differs between layers it gets the budget with which it
    holds the same on average over `layers` (`LayerProbe.budget_of`).

    Attributes:
        held_out: False shows the methods the measured queries too, and the tables say so.
        metric: which of `METRICS` is the score; all three are recorded.
    """

    name: ClassVar[str] = "layer_error"
    version: ClassVar[int] = 2
    score_unit: ClassVar[str] = METRICS["per_query"][1]
    lower_is_better: ClassVar[bool] = True
    measures: ClassVar[tuple[str, ...]] = tuple(field for field, _ in METRICS.values())

    held_out: bool = True
    metric: Literal["per_query", "pooled", "released"] = "per_query"

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        unit = METRICS[self.metric][1]
        if not self.held_out:
            unit += ", measured on the queries that chose"
        meta = super().meta()
        by_layer = [] if self.prompts is None else ["layer"]
        bars = Bars(
            x="rate",
            facet="layer" if by_layer else None,
            repeat=meta["unit"],
            ylabel=f"{METRICS[self.metric][1]} of the attention output",
        )
        breakdown = ["rate", *by_layer]
        return {**meta, "score_unit": unit, "breakdown": breakdown, "figures": as_json([bars])}

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Every method at every layer, rate and seed, on one prompt's tensors."""
        for place, label, fields in self.draws(unit, methods, session, self._shown):
            yield Outcome(label, self.record_id(unit.id, *place), fields)

    def _shown(self, kv: LayerKV) -> tuple[LayerKV, Look]:
        """The layer as the methods see it, and what is measured of what they hold."""
        first = kv.n - self.exact
        assert kv.queries is not None
        queries = kv.queries[:, :, first:]
        exact = estimate(keep_all(kv), queries, first, kv)

        def errors(held: CompressedKV) -> dict[str, float]:
            found = relative_errors(estimate(held, queries, first, kv), exact)
            return {"score": found[METRICS[self.metric][0]], **found}

        if not self.held_out:
            return kv, errors
        return replace(kv, queries=kv.queries[:, :, :first], withheld=self.exact), errors
