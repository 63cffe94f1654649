"""Error against memory: the bound that BalanceKV and SubGen prove, measured.

Both papers bound the error of a single query (BalanceKV, arXiv 2502.07861, equation (2); SubGen,
arXiv 2402.06082, in its main theorem):

    ||z - Attn(q, K, V)||_2  <=  eps * ||softmax(K q / sqrt(d))||_2 * ||V||_F

with memory proportional to 1 / eps^2 (SubGen, as for independent samples) or 1 / eps (BalanceKV,
up to logarithms and a factor exponential in the norms). So eps against the entries
kept has slope -1/2 or -1 on logarithmic axes: that is what this probe measures.

What to expect of BalanceKV's block form: the signed sums of different blocks add up like independent
errors, so that after T halvings of n entries in blocks of b the error is about
2^T / n * sqrt(n / (2^T b)) = 1 / sqrt(kept * b): slope -1 only while one block is kept, then -1/2.
Blocks that grow with what is kept (MergeAndReduce's batches) keep the slope at -1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.engine.attention import capped
from kvbench.engine.fork import layer_generator
from kvbench.engine.guard import check_finite
from kvbench.errors import nearest, one_line
from kvbench.errors.options import Count, Distinct
from kvbench.kv import Budget, BudgetExceeded, KVError, LayerKV, keep_all
from kvbench.methods.base import SEED_STRIDE, Method, allowed_entries
from kvbench.probes.base import Tokens
from kvbench.probes.layer_error import estimate
from kvbench.probes.layers import compress_measured
from kvbench.probes.replicated import BoundedData, Replicated
from kvbench.records.figures import Curve, as_json
from kvbench.run.plan import Methods, Outcome, Unit, status_of
from kvbench.run.session import Session
from kvbench.tasks.base import TaskError

__all__ = ["BoundedData", "ErrorScaling", "bound_scale", "check_total", "key_exponent"]


def bound_scale(layer: LayerKV, queries: Tensor) -> Tensor:
    """||softmax(K q * scaling)||_2 * ||V||_F of every query: [1, heads, m] float64.

    The Frobenius norm is of the values of the query's own KV head.
    """
    batch, heads, m, dim = queries.shape
    stored = layer.keys.shape[1]
    grouped = queries.double().view(batch, stored, heads // stored, m, dim)
    logits = grouped @ layer.keys.double()[:, :, None].transpose(-1, -2) * layer.scaling
    spread = torch.linalg.vector_norm(capped(logits, layer.softcap).softmax(-1), dim=-1)
    size = torch.linalg.vector_norm(layer.values.double().flatten(2), dim=-1)
    return (spread * size[:, :, None, None]).view(batch, heads, m)


def key_exponent(layer: LayerKV) -> float:
    """Largest ||k - mean k||^2 * scaling over entries and heads: the walk's largest exponent."""
    keys = layer.keys.double()
    return float((keys - keys.mean(2, keepdim=True)).square().sum(-1).max()) * layer.scaling


def check_total(label: str, method: Method, budget: Budget, n: int, num_layers: int) -> None:
    """Refuse a method whose layers may together hold more than the budget of n tokens allows.

    Raises:
        BudgetExceeded: they may.
    """
    allowed, _ = allowed_entries(method, budget, n, num_layers)
    granted = sum(
        method.layer_capacity(replace(budget), n, layer, num_layers) for layer in range(num_layers)
    )
    if granted > allowed:
        raise BudgetExceeded(label, -1, allowed, granted)


@dataclass(frozen=True, kw_only=True)
class ErrorScaling(Replicated):
    """Relative error of equation (2) as more and more entries are kept.

    A layer of n entries is compressed without sink or window to each number in `kept`; `queries`
    further queries, which see all n entries, are answered from what is held. The score is the mean
    over queries and heads of ||z - Attn||_2 / (||softmax||_2 ||V||_F), in float64. What a method
    really holds is recorded beside what it was asked to hold: streaming forms hold more.

    With `data`, every draw has new tensors and new draws of the methods, and is a repetition; with
    `prompts`, only the methods' draws vary, and the repetition is the prompt.

    Attributes:
        n: entries of the layer.
        kept: entries asked for, each at most n.
        queries: queries measured, m.
        per_kept: options that grow with the memory: {label: {option: factor}} sets the option of
            that method to max(2, round(factor * kept)).
        expected: slopes the papers predict, {beginning of a label: slope}, for the report.
        compare: label of the method that the report divides the others' errors by.
        fit_rate: slopes are fitted up to this kept / n; nearer to n, sampling without replacement
            gains by exhausting what there is to sample.
    """

    name: ClassVar[str] = "error_scaling"
    score_unit: ClassVar[str] = "scaled error"
    lower_is_better: ClassVar[bool] = True
    breakdown: ClassVar[tuple[str, ...]] = ("kept",)

    n: Tokens = 16384
    kept: Distinct[Count] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    queries: Tokens = 64
    per_kept: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    expected: Mapping[str, float] = field(default_factory=dict)
    compare: str = "uniform"
    fit_rate: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.kept) > self.n:
            raise TaskError(f"task.kept is {list(self.kept)}; allowed: at most task.n, {self.n}")

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        unit = "replicate" if self.prompts is None else "prompt"
        figure = Curve(
            x="held",
            y="scaled_error",
            level="kept",
            unit=unit,
            xlabel="entries held",
            ylabel="error / (||softmax|| ||V||)",
            guides=(-0.5, -1.0),
            fit_most=self.fit_rate * self.n,
            expected=dict(self.expected),
            compare=self.compare,
        )
        return {**super().meta(), "unit": unit, "figures": as_json([figure])}

    @property
    def length(self) -> tuple[str, int]:
        """See `Replicated.length`."""
        return "task.n + task.queries is", self.n + self.queries

    @property
    def levels(self) -> Sequence[str]:
        """See `Replicated.levels`."""
        return [f"kept{kept}" for kept in self.kept]

    def replicates(self, prompt: str) -> Sequence[str]:
        """See `Replicated.replicates`: the draws of the methods."""
        return [f"{prompt}-draw{draw}" for draw in range(self.draws)]

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """See `Replicated.units`.

        Raises:
            KVError: `per_kept` names no method or no option of it; prompts that are too short.
        """
        for label, options in self.per_kept.items():
            if label not in methods:
                raise KVError(
                    f"task.per_kept names {label!r}{nearest(label, list(methods))}; allowed: "
                    f"{', '.join(methods)}"
                )
            known = [f.name for f in fields(methods[label][0])]
            for option in options:
                if option not in known:
                    raise KVError(
                        f"task.per_kept.{label} has {option!r}{nearest(option, known)}; allowed: "
                        f"{', '.join(known)}"
                    )
        return super().units(session, methods)

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Every method at every number of entries."""
        if self.prompts is None:
            name, layer, queries, seed = self.drawn(unit, self.n, session)
            draw = unit.payload[1]
            named = {"replicate": f"seed{session.seed}-draw{draw}"}
            yield from self._measured(methods, layer, queries, name, f"draw{draw}", seed, named)
            return
        for name, layer, queries in self.captured(unit, self.n, session):
            check_finite(layer)
            for draw, replicate in enumerate(self.replicates(unit.id)):
                seed = SEED_STRIDE * session.seed + draw
                named = {"replicate": replicate, "prompt": unit.id}
                yield from self._measured(methods, layer, queries, name, replicate, seed, named)

    def _measured(
        self,
        methods: Methods,
        layer: LayerKV,
        queries: Tensor,
        dataset: str,
        replicate: str,
        seed: int,
        named: Mapping[str, str],
    ) -> Iterator[Outcome]:
        """Records of one repetition; `replicate` seeds the draws, `named` are its record fields."""
        truth = estimate(keep_all(layer), queries, layer.n, layer)
        scale = bound_scale(layer, queries)
        exponent = key_exponent(layer)
        for kept in self.kept:
            budget = Budget(rate=kept / self.n, sink=0, window=0)
            for label, (method, _) in methods.items():
                record: dict[str, Any] = {
                    "dataset": dataset,
                    "kept": kept,
                    **named,
                    "prompt_tokens": layer.n,
                    "key_exponent": exponent,
                }
                generator = layer_generator(seed, f"{dataset}/{replicate}/{kept}", 0)
                try:
                    sized = self._sized(label, method, kept)
                    check_total(label, sized, budget, layer.n, layer.num_layers)
                    held, cost = compress_measured(label, sized, budget, generator, layer)
                    z = estimate(held, queries, layer.n, layer)
                    error = torch.linalg.vector_norm(z - truth, dim=-1) / scale
                    record |= cost
                    record["held"] = cost["entries"]["mean"]
                    record["scaled_error"] = record["score"] = float(error.mean())
                except Exception as failure:  # noqa: BLE001 - a record with its status
                    record |= {"status": status_of(failure), "error": one_line(failure)}
                yield Outcome(label, f"{dataset}/kept{kept}/{replicate}", record)

    def _sized(self, label: str, method: Method, kept: int) -> Method:
        """The method with the options that grow with the memory."""
        options: dict[str, Any] = {
            option: max(2, round(factor * kept))
            for option, factor in self.per_kept.get(label, {}).items()
        }
        return replace(method, **options) if options else method
