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
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.engine.check import check_finite
from kvbench.engine.row import layer_generator
from kvbench.errors import check_known
from kvbench.errors.options import Count, Distinct, Fraction, Positive, Whole, check_options
from kvbench.kv import Budget, BudgetExceeded, KVError, LayerKV, keep_all
from kvbench.methods.base import SEED_STRIDE, Method, allowed_entries
from kvbench.probes.base import LayerProbe, Layers, Repeats, encoded_prompts, failed
from kvbench.probes.layer_error import clustered, compress_measured, estimate, logits_of
from kvbench.records.figures import Curve, as_json
from kvbench.run.plan import Fields, Methods, WorkItem
from kvbench.run.session import Session
from kvbench.tasks.base import TaskError, Tokens


@dataclass(frozen=True, kw_only=True)
class BoundedData:
    """Random keys, values and queries on spheres: every norm is its bound exactly.

    Directions are uniform, or with `clusters` a uniform centre plus noise (keys and values of a
    cluster share theirs; queries stay uniform).

    Attributes:
        key_norm, query_norm, value_norm: l2 norms. The logits q.k / sqrt(d) lie within
            +- key_norm * query_norm / sqrt(d), whose exponential the bounds carry as a factor.
            The default value_norm is no power of two: those part the buckets of BalanceKV's
            Algorithm 1, and rounding would spread equal norms over two of them.
        heads: KV heads, each with a query head of its own and data of its own.
        spread: share of the squared norm that is noise around the centre (before rescaling).
    """

    head_dim: Repeats = 64
    key_norm: Positive = 4.0
    query_norm: Positive = 4.0
    value_norm: Positive = 1.5
    heads: Repeats = 1
    clusters: Whole = 0
    spread: Fraction = 0.1

    def __post_init__(self) -> None:
        check_options(self, "", TaskError)

    def layer(self, n: int, queries: int, name: str, draw: int) -> tuple[LayerKV, Tensor]:
        """A layer of n entries, and the queries [1, heads, queries, head_dim] after them; name and draw
        seed the generator."""
        generator = layer_generator(draw, f"bounded/{name}", 0)

        def directions(count: int) -> Tensor:
            return _item(torch.randn(1, self.heads, count, self.head_dim, generator=generator))

        keys, values = clustered(directions, n, self.clusters, self.spread, generator)
        if self.clusters:
            keys, values = _item(keys), _item(values)
        all_queries = self.query_norm * directions(n + queries)
        layer = LayerKV(
            self.key_norm * keys,
            self.value_norm * values,
            all_queries[:, :, :n],
            layer_index=0,
            num_layers=1,
            scaling=self.head_dim**-0.5,
        )
        return layer, all_queries[:, :, n:]


def _item(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def bound_scale(layer: LayerKV, queries: Tensor) -> Tensor:
    """||softmax(K q * scaling)||_2 * ||V||_F of every query: [1, heads, m] float64.

    The Frobenius norm is of the values of the query's own KV head.
    """
    weights = logits_of(layer.keys, queries, layer).softmax(-1)
    values_norm = torch.linalg.vector_norm(layer.values.double().flatten(2), dim=-1)
    scale = torch.linalg.vector_norm(weights, dim=-1) * values_norm[:, :, None, None]
    return scale.view(queries.shape[:3])


def check_total(label: str, method: Method, budget: Budget, n: int, num_layers: int) -> None:
    allowed, _ = allowed_entries(method, budget, n, num_layers)
    capacities = [method.layer_capacity(budget, n, i, num_layers) for i in range(num_layers)]
    if sum(capacities) > allowed:
        raise BudgetExceeded(label, -1, allowed, sum(capacities))


@dataclass(frozen=True, kw_only=True)
class ErrorScaling(LayerProbe):
    """Relative error of equation (2) as more and more entries are kept.

    A layer of n entries is compressed without sink or window to each number in `kept`; `queries`
    further queries, which see all n entries, are answered from what is held. The score is the mean
    over queries and heads of ||z - Attn||_2 / (||softmax||_2 ||V||_F), in float64. What a method
    really holds is recorded beside what it was asked to hold: streaming forms hold more.

    With `data`, every draw has new tensors and new draws of the methods, and is a repetition; with
    `prompts`, only the methods' draws vary, and the repetition is the prompt.

    conf/papers/task/error_scaling*.yaml tell the options. `per_kept` sets an option
    of the method to max(2, round(factor * kept)). Slopes are fitted up to `fit_rate`, since nearer to n
    sampling without replacement gains by exhausting what there is to sample. `expected` and `compare`
    are for the report: slopes that the papers predict, and the method that divides the others' errors.
    """

    name: ClassVar[str] = "error_scaling"
    version: ClassVar[int] = 2
    score_unit: ClassVar[str] = "scaled error"
    breakdown: ClassVar[tuple[str, ...]] = ("kept",)
    drawn: ClassVar[str] = "data"

    draws: Repeats = 4
    data: Mapping[str, BoundedData] = field(default_factory=dict)
    num_prompts: Repeats = 2
    layers: Layers = (1, 2, 3, 4)
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
        return super().meta() | {"unit": unit, "figures": as_json([figure])}

    def items(self, session: Session, methods: Methods) -> Sequence[WorkItem]:
        for label, options in self.per_kept.items():
            check_known(f"task.per_kept names {label!r}", label, [*methods], KVError)
            known_options = [option.name for option in fields(methods[label][0])]
            for option in options:
                what = f"task.per_kept.{label} names {option!r}"
                check_known(what, option, known_options, KVError)
        if self.prompts is None:
            return [
                self._item(f"{name}/draw{draw}", [name], [f"draw{draw}"], (name, draw))
                for draw, name in product(range(self.draws), self.data)
            ]
        needed = self.n + self.queries
        prompts = encoded_prompts(self.prompts, session)
        long_enough = [prompt for prompt in prompts if prompt.n >= needed][: self.num_prompts]
        if len(long_enough) < self.num_prompts:
            raise KVError(
                f"task.n + task.queries is {needed} and {len(long_enough)} of the {self.num_prompts} "
                f"prompts wanted are that long; the longest has {max(p.n for p in prompts)} tokens"
            )
        datasets = [f"layer {layer}" for layer in self.layers]
        items = []
        for prompt in long_enough:
            name = prompt.example.id
            replicates = [f"{name}-draw{draw}" for draw in range(self.draws)]
            items.append(self._item(name, datasets, replicates, prompt))
        return items

    def _item(
        self, name: str, datasets: Sequence[str], replicates: Sequence[str], payload: Any
    ) -> WorkItem:
        ids = tuple(
            f"{dataset}/kept{kept}/{replicate}"
            for replicate, dataset, kept in product(replicates, datasets, self.kept)
        )
        return WorkItem(name, ids, payload)

    def _layers(
        self, item: WorkItem, session: Session
    ) -> Iterator[tuple[str, str, int, dict[str, Any], LayerKV, Tensor]]:
        """For each repetition data set and repetition as record ids name them, the number of the draw,
        record fields, the layer of n entries, and the queries after them."""
        if self.prompts is None:
            name, draw = item.payload
            fields_of_draw = {"replicate": f"seed{session.seed}-draw{draw}"}
            seed = SEED_STRIDE * session.seed + draw
            layer, after = self.data[name].layer(self.n, self.queries, name, seed)
            yield name, f"draw{draw}", draw, fields_of_draw, layer, after
            return
        for number, prompt_layer in self.captured(session, item.payload, self.n + self.queries):
            queries = prompt_layer.queries
            assert queries is not None
            layer = replace(
                prompt_layer,
                keys=prompt_layer.keys[:, :, : self.n],
                values=prompt_layer.values[:, :, : self.n],
                queries=queries[:, :, : self.n],
                shared={},
            )
            check_finite(layer)
            after = queries[:, :, self.n :]
            for draw in range(self.draws):
                replicate = f"{item.id}-draw{draw}"
                fields_of_draw = {"replicate": replicate, "prompt": item.id}
                yield f"layer {number}", replicate, draw, fields_of_draw, layer, after

    def run(self, item: WorkItem, methods: Methods, session: Session) -> Iterator[Fields]:
        for dataset, replicate, draw, fields_of_draw, layer, queries in self._layers(item, session):
            seed = SEED_STRIDE * session.seed + draw
            exact = estimate(keep_all(layer), queries, layer.n, layer)
            scale = bound_scale(layer, queries)
            for kept, label in product(self.kept, methods):
                record: dict[str, Any] = {
                    "dataset": dataset,
                    "kept": kept,
                    **fields_of_draw,
                    "prompt_tokens": layer.n,
                }
                generator = layer_generator(seed, f"{dataset}/{replicate}/{kept}", 0)
                budget = Budget(rate=kept / self.n, sink=0, window=0)
                try:
                    method = self._sized(label, methods[label][0], kept)
                    check_total(label, method, budget, layer.n, layer.num_layers)
                    compressed, cost = compress_measured(label, method, budget, generator, layer)
                    z = estimate(compressed, queries, layer.n, layer)
                    error = float((torch.linalg.vector_norm(z - exact, dim=-1) / scale).mean())
                    record |= {
                        **cost,
                        "held": cost["entries"]["mean"],
                        "scaled_error": error,
                        "score": error,
                    }
                except Exception as failure:  # noqa: BLE001 - a record with its status
                    record |= failed(failure)
                yield {"method": label, "example_id": f"{dataset}/kept{kept}/{replicate}", **record}

    def _sized(self, label: str, method: Method, kept: int) -> Method:
        factors = self.per_kept.get(label, {})
        sized: dict[str, Any] = {
            option: max(2, round(factor * kept)) for option, factor in factors.items()
        }
        return replace(method, **sized)
