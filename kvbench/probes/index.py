"""The INDEX instance behind BalanceKV's lower bound (arXiv 2502.07861, Theorem 3.2 and appendix C):
what any method of a given size must lose.

Alice has n times d bits and writes them as values, v_i in {-1, +1}^d, behind keys that everybody
knows: random corners of a cube, all of norm r and nearly orthogonal. Bob wants bit j of row i and asks
with the query k_i: exp(r^2 / sqrt(d)) lifts row i above the rest, and the sign of coordinate j of the
attention is the bit. What answers within equation (2) for every i tells the bits, so that it has to be
as large as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from scipy.optimize import brentq
from torch import Tensor

from kvbench.engine.fork import layer_generator
from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods.base import Method
from kvbench.probes.base import StandIn
from kvbench.probes.layer_error import estimate
from kvbench.probes.layers import LayerProbe, Look, SyntheticLayers
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session
from kvbench.tasks.base import TaskError


@dataclass(frozen=True, kw_only=True)
class IndexLayers(SyntheticLayers):
    """Alice's rows as a layer; `key_norm` is r.

    The queries that methods see are of the same kind as the keys, and none of them: which row Bob wants
    is not known. Of the other options of `SyntheticLayers` none has an effect.
    """

    n: int = 1024
    heads: int = 1
    kv_heads: int = 1

    def layer(self, index: int, num_layers: int) -> LayerKV:
        """Layer `index` of `num_layers`: the same tensors every time."""
        generator = layer_generator(0, "index", index)

        def corners(heads: int) -> Tensor:
            shape = (1, heads, self.n, self.head_dim)
            return torch.randint(2, shape, generator=generator).float() * 2 - 1

        scale = self.key_norm / self.head_dim**0.5
        keys, queries = scale * corners(self.kv_heads), scale * corners(self.heads)
        values = corners(self.kv_heads)
        return LayerKV(keys, values, queries, index, num_layers, self.head_dim**-0.5)


@dataclass(frozen=True, kw_only=True)
class Limit(StandIn):
    """The share of bits that no method of a size can exceed on average.


    Attributes:
        of: ``entries``: c of n rows are kept as they are, chosen without looking at the values, so
            that of the others each bit is a coin flip: (1 + c / n) / 2; a choice that looks at the
            values, as BalanceKV's, tells a little by itself. ``bits``: any method whatever in as
            many bits as c entries of the cache take: with N bits to know and M to hold them, the
            share p has N (1 - H(p)) <= M, H the binary entropy (Fano).
    """

    paper: ClassVar[str] = "arXiv 2502.07861, Theorem 3.2"

    of: Literal["entries", "bits"] = "entries"


def most_recovered(of: str, entries: int, layer: LayerKV) -> float:
    """See `Limit`; `entries` per KV head."""
    n, dim = layer.keys.shape[2:]
    if of == "entries":
        return (1 + entries / n) / 2
    held = entries * 2 * dim * layer.keys.element_size() * 8
    known = held / (n * dim)

    def lacking(p: float) -> float:
        return 1 + p * math.log2(p) + (1 - p) * math.log2(1 - p) - known

    return 1.0 if known >= 1 else float(brentq(lacking, 0.5, 1 - 1e-15))


_SAID = (
    "Equation (2) of BalanceKV holds with an epsilon for which memory in bits times epsilon^2 is $least"
    " to $most ($mean on average); Theorem 3.2 says that no method gets below a constant."
)


@dataclass(frozen=True, kw_only=True)
class Index(LayerProbe):
    """Share of Alice's bits that Bob reads from what a method holds, all rows and bits asked for.

    A record is one draw at one layer and rate. `epsilon` is the least for which equation (2) of the
    paper holds for all queries: ||z - a|| <= epsilon ||softmax|| ||V||_F. Theorem 3.2 says that memory
    is at least of the order of 1 / epsilon^2 bits (or d exp(2 r^2 / sqrt(d)), where that is less);
    `bits_epsilon_sq` is the memory held in bits times epsilon^2.
    """

    name: ClassVar[str] = "index"
    score_unit: ClassVar[str] = "share of bits"
    breakdown: ClassVar[tuple[str, ...]] = ("rate",)
    figures: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"kind": "measured", "say": {"bits_epsilon_sq": _SAID}},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.synthetic, IndexLayers):
            raise TaskError(
                f"task.synthetic is a {type(self.synthetic).__name__}; allowed: IndexLayers"
            )

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """The methods as `LayerProbe.draws` has it, the limits for as many entries."""
        real = {label: pair for label, pair in methods.items() if not isinstance(pair[0], Limit)}
        for place, label, fields in self.draws(unit, real, session, self._shown):
            yield Outcome(label, self.record_id(unit.id, *place), fields)
        for layer, kv in self.captured(unit, session):
            for label in methods.keys() - real.keys():
                yield from self._limits(unit, label, methods[label][0], layer, kv)

    def _limits(
        self, unit: Unit, label: str, limit: Method, layer: int, kv: LayerKV
    ) -> Iterator[Outcome]:
        assert isinstance(limit, Limit)
        for rate in self.rates:
            entries = Budget(rate=rate, sink=self.exact, window=self.exact).capacity(kv.n)
            score = most_recovered(limit.of, entries, kv)
            for seed in range(self.seeds):
                fields = {
                    "prompt": unit.id,
                    "layer": layer,
                    "rate": rate,
                    "draw": seed,
                    "score": score,
                }
                yield Outcome(label, self.record_id(unit.id, layer, rate, seed), fields)

    def _shown(self, kv: LayerKV) -> tuple[LayerKV, Look]:
        """The layer as the methods see it, and what Bob reads of what they hold."""
        queries = kv.keys.repeat_interleave(kv.group, 1)
        bits = kv.values.double().repeat_interleave(kv.group, 1)
        whole = keep_all(kv)
        exact = estimate(whole, queries, kv.n, kv)
        logits = queries.double() @ queries.double().mT * kv.scaling
        scale = logits.softmax(-1).norm(dim=-1) * bits.norm(dim=(-2, -1))[..., None]

        def read(held: CompressedKV) -> dict[str, float]:
            z = estimate(held, queries, kv.n, kv)
            epsilon = float(((z - exact).norm(dim=-1) / scale).max())
            return {
                "score": float(((z >= 0) == (bits > 0)).double().mean()),
                "epsilon": epsilon,
                "bits_epsilon_sq": 8 * held.nbytes * epsilon**2,
            }

        return replace(kv), read
