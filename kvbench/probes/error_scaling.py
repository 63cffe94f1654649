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
from kvbench.engine.capture import capture_layers
from kvbench.engine.fork import layer_generator
from kvbench.engine.guard import check_finite
from kvbench.errors import nearest, one_line
from kvbench.errors.options import Count, Distinct, Fraction, Positive, Whole, check_options
from kvbench.kv import Budget, KVError, LayerKV, keep_all
from kvbench.methods.base import SEED_STRIDE, Method
from kvbench.probes._options import Layers, Repeats, Tokens
from kvbench.probes.layer_error import estimate
from kvbench.probes.layers import check_total, compress_measured
from kvbench.run.encoding import encode_example
from kvbench.run.plan import Methods, Outcome, Unit, status_of
from kvbench.run.session import Session
from kvbench.tasks.base import Task, TaskError


@dataclass(frozen=True, kw_only=True)
class BoundedData:
    """Random keys, values and queries on spheres: every norm is its bound exactly.

    Directions are uniform, or with `clusters` a uniform centre plus noise (keys and values of a
    cluster share theirs; queries stay uniform).

    Attributes:
        head_dim: d, of keys and values alike.
        key_norm, query_norm, value_norm: l2 norms. The logits q.k / sqrt(d) lie within
            +- key_norm * query_norm / sqrt(d), whose exponential the bounds carry as a factor.
            The default value_norm is no power of two: those part the buckets of BalanceKV's
            Algorithm 1, and rounding would spread equal norms over two of them.
        heads: KV heads, each with a query head of its own and data of its own.
        clusters: directions that keys and values are drawn around; 0 for none.
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
        """One draw: n entries with their queries, and the queries that come after them.

        Returns:
            the layer, keys and values [1, heads, n, head_dim], and queries
            [1, heads, queries, head_dim].
        """
        generator = layer_generator(draw, f"bounded/{name}", 0)

        def directions(count: int) -> Tensor:
            return _unit(torch.randn(1, self.heads, count, self.head_dim, generator=generator))

        keys, values = directions(n), directions(n)
        if self.clusters:
            of = torch.randint(self.clusters, (n,), generator=generator)
            near, far = (1 - self.spread) ** 0.5, self.spread**0.5
            keys = _unit(near * directions(self.clusters)[:, :, of] + far * keys)
            values = _unit(near * directions(self.clusters)[:, :, of] + far * values)
        asked = self.query_norm * directions(n + queries)
        layer = LayerKV(
            self.key_norm * keys,
            self.value_norm * values,
            asked[:, :, :n],
            0,
            1,
            self.head_dim**-0.5,
        )
        return layer, asked[:, :, n:]


def _unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


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


@dataclass(frozen=True, kw_only=True)
class ErrorScaling:
    """Relative error of equation (2) as more and more entries are kept.

    A layer of n entries is compressed without sink or window to each number in `kept`; `queries`
    further queries, which see all n entries, are answered from what is held. The score is the mean
    over queries and heads of ||z - Attn||_2 / (||softmax||_2 ||V||_F), in float64. What a method
    really holds is recorded beside what it was asked to hold: streaming forms hold more.

    With `data`, every draw has new tensors and new draws of the methods, and is a repetition; with
    `prompts`, layers of the model hold the first n tokens of each prompt, the queries are those of
    the tokens after them, only the methods' draws vary, and the repetition is the prompt.

    Attributes:
        n: entries of the layer.
        kept: entries asked for, each at most n.
        queries: queries measured, m.
        draws: repetitions.
        data: named synthetic data sets; empty with `prompts`.
        prompts: a task whose first `num_prompts` prompts of at least n + queries tokens are used.
        layers: 1-based, with `prompts`.
        per_kept: options that grow with the memory: {label: {option: factor}} sets the option of
            that method to max(2, round(factor * kept)).
        expected: slopes the papers predict, {beginning of a label: slope}, for the report.
        compare: label of the method that the report divides the others' errors by.
        fit_rate: slopes are fitted up to this kept / n; nearer to n, sampling without replacement
            gains by exhausting what there is to sample.
    """

    name: ClassVar[str] = "error_scaling"
    version: ClassVar[int] = 1

    n: Tokens = 16384
    kept: Distinct[Count] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    queries: Tokens = 64
    draws: Repeats = 4
    data: Mapping[str, BoundedData] = field(default_factory=dict)
    prompts: Task | None = None
    num_prompts: Repeats = 2
    layers: Layers = (1, 2, 3, 4)
    per_kept: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    expected: Mapping[str, float] = field(default_factory=dict)
    compare: str = "uniform"
    fit_rate: float = 0.25

    def __post_init__(self) -> None:
        check_options(self, "task.", TaskError)
        if bool(self.data) == (self.prompts is not None):
            raise TaskError("task.data and task.prompts: exactly one of them must be given")
        if max(self.kept) > self.n:
            raise TaskError(f"task.kept is {list(self.kept)}; allowed: at most task.n, {self.n}")

    def meta(self) -> dict[str, Any]:
        """See `kvbench.run.plan.Plan.meta`."""
        return {
            "version": self.version,
            "data": dict(self.prompts.digests()) if self.prompts is not None else {},
            "subject": "synthetic tensors" if self.prompts is None else None,
            "score_unit": "scaled error",
            "lower_is_better": True,
            "breakdown": ["kept"],
            "unit": self._unit,
            "figures": [
                {
                    "kind": "scaling",
                    "x": "held",
                    "level": "kept",
                    "y": "scaled_error",
                    "facet": "dataset",
                    "unit": self._unit,
                    "xlabel": "entries held",
                    "ylabel": "error / (||softmax|| ||V||)",
                    "guides": [-0.5, -1.0],
                    "fit_most": self.fit_rate * self.n,
                    "expected": dict(self.expected),
                    "compare": self.compare,
                    "finding": "error_scaling",
                }
            ],
        }

    @property
    def _unit(self) -> str:
        """The record field that names the independent repetition."""
        return "replicate" if self.prompts is None else "prompt"

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per data set and draw, or per prompt and draw.

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
        if self.prompts is None:
            return [
                Unit(f"{name}/draw{draw}", self._record_ids([name], f"draw{draw}"), (name, draw))
                for draw in range(self.draws)
                for name in self.data
            ]
        found, longest = [], 0
        names = [f"layer {layer}" for layer in self.layers]
        for example in self.prompts.examples(session.encoder):
            encoded = encode_example(example, session.encoder)
            longest = max(longest, encoded.n)
            if encoded.n >= self.n + self.queries:
                ids = (*encoded.context_ids, *encoded.question_ids)[: self.n + self.queries]
                found.append(
                    Unit(
                        example.id,
                        tuple(
                            record
                            for draw in range(self.draws)
                            for record in self._record_ids(names, f"{example.id}-draw{draw}")
                        ),
                        ids,
                    )
                )
            if len(found) == self.num_prompts:
                return found
        raise KVError(
            f"task.n + task.queries is {self.n + self.queries} and {len(found)} of the "
            f"{self.num_prompts} prompts wanted are that long; the longest has {longest} tokens"
        )

    def _record_ids(self, datasets: Sequence[str], replicate: str) -> tuple[str, ...]:
        return tuple(f"{name}/kept{m}/{replicate}" for name in datasets for m in self.kept)

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Every method at every number of entries."""
        if self.prompts is None:
            name, draw = unit.payload
            seed = SEED_STRIDE * session.seed + draw
            layer, queries = self.data[name].layer(self.n, self.queries, name, seed)
            named = {"replicate": f"seed{session.seed}-draw{draw}"}
            yield from self._measured(methods, layer, queries, name, f"draw{draw}", seed, named)
            return
        captured = capture_layers(session.model, unit.payload, [i - 1 for i in self.layers])
        for number in self.layers:
            whole = captured[number - 1]
            assert whole.queries is not None
            layer = replace(
                whole,
                keys=whole.keys[:, :, : self.n],
                values=whole.values[:, :, : self.n],
                queries=whole.queries[:, :, : self.n],
                shared={},
            )
            check_finite(layer)
            queries = whole.queries[:, :, self.n :]
            for draw in range(self.draws):
                seed = SEED_STRIDE * session.seed + draw
                replicate = f"{unit.id}-draw{draw}"
                named = {"replicate": replicate, "prompt": unit.id}
                yield from self._measured(
                    methods, layer, queries, f"layer {number}", replicate, seed, named
                )

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
