"""Relative error of single attention layers (BalanceKV, arXiv 2502.07861, sections 4.1 and B.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.engine.attention import capped
from kvbench.engine.cache import layer_generator
from kvbench.engine.guard import Guard
from kvbench.engine.prefill import capture_layers
from kvbench.engine.session import Session
from kvbench.kv import (
    Budget,
    BudgetExceeded,
    CompressedKV,
    KVError,
    LayerKV,
    check_finite,
    keep_all,
)
from kvbench.messages import one_line
from kvbench.methods.base import Method, allowed_entries
from kvbench.plan import Methods, Outcome, Unit, encode_example, status_of
from kvbench.probes._checks import MOST_LAYERS, MOST_TOKENS, check_counts, check_list
from kvbench.tasks.base import Task, TaskError


@dataclass(frozen=True, kw_only=True)
class SyntheticLayers:
    """Random q, k, v of chosen norms and clusters, where no model is wanted.

    Keys are cluster centres plus noise; the values of a cluster share a centre in the same way, so
    that near keys carry near values, as they do in trained layers.

    Attributes:
        n: tokens. heads, kv_heads, head_dim: shape of the layer.
        key_norm, value_norm, query_norm: root mean square l2 norms.
        clusters: centres that keys and values are drawn around; 0: independent Gaussians.
        spread: share of a key's and value's squared norm that is noise around the centre.
    """

    n: int = 4096
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    key_norm: float = 8.0
    value_norm: float = 4.0
    query_norm: float = 8.0
    clusters: int = 64
    spread: float = 0.2

    def __post_init__(self) -> None:
        of = "task.synthetic."
        check_counts(self, "n", most=MOST_TOKENS, of=of)
        check_counts(self, "heads", "kv_heads", "head_dim", of=of)
        check_counts(self, "clusters", least=0, of=of)
        if self.heads % self.kv_heads:
            raise TaskError(
                f"{of}kv_heads is {self.kv_heads}; allowed: a divisor of {of}heads, {self.heads}"
            )
        if not 0 <= self.spread <= 1:
            raise TaskError(f"{of}spread is {self.spread}; allowed: a number in [0, 1]")

    def layer(self, index: int, num_layers: int) -> LayerKV:
        """Layer `index` of `num_layers`: the same tensors every time."""
        generator = layer_generator(0, "synthetic", index)

        def gaussian(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) / self.head_dim**0.5

        keys = gaussian(1, self.kv_heads, self.n, self.head_dim)
        values = gaussian(1, self.kv_heads, self.n, self.head_dim)
        if self.clusters:
            of = torch.randint(self.clusters, (self.n,), generator=generator)
            near, far = (1 - self.spread) ** 0.5, self.spread**0.5
            keys = (
                near * gaussian(1, self.kv_heads, self.clusters, self.head_dim)[:, :, of]
                + far * keys
            )
            values = (
                near * gaussian(1, self.kv_heads, self.clusters, self.head_dim)[:, :, of]
                + far * values
            )
        queries = self.query_norm * gaussian(1, self.heads, self.n, self.head_dim)
        return LayerKV(
            self.key_norm * keys,
            self.value_norm * values,
            queries,
            index,
            num_layers,
            self.head_dim**-0.5,
        )


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
    out = logits.masked_fill(later, float("-inf")).softmax(-1) @ held.values.double()[:, :, None]
    return out.view(batch, heads, m, -1)


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """Error of the attention output when a layer holds a compressed cache.

    The cache of n tokens is compressed with the first `exact` and the last `exact` tokens kept and
    the middle at each rate. For every j in [n - exact, n) the estimate z_j sees the compressed cache
    plus the exact tokens up to j; the score is ||z - Attn||_F / ||Attn||_F over those queries and
    all heads of one prompt. Means and standard deviations over seeds are the report's.

    Departure: the paper pools prompts inside the norms; here each (prompt, seed) is a record (with
    error_sq and norm_sq, from which the pooled number follows) and prompts are averaged.

    Attributes:
        rates: fractions of the middle that are kept.
        layers: 1-based, as in the paper (which shows 1, 2 and 5).
        seeds: how many draws of the methods per prompt.
        prompts: a task whose first `num_prompts` prompts are used; None with `synthetic`.
        exact: tokens kept exactly at both ends, and the number of queries.
    """

    name: ClassVar[str] = "layer_error"
    version: ClassVar[int] = 1

    rates: Sequence[float] = (0.5, 0.25, 0.125, 0.0625)
    layers: Sequence[int] = (1, 2, 4)
    seeds: int = 10
    num_prompts: int = 4
    exact: int = 256
    prompts: Task | None = None
    synthetic: SyntheticLayers | None = None

    def __post_init__(self) -> None:
        if (self.prompts is None) == (self.synthetic is None):
            raise TaskError(
                "task.prompts and task.synthetic: exactly one of them must be given "
                f"(got {'both' if self.prompts is not None else 'neither'})"
            )
        for name, kind in (("prompts", Task), ("synthetic", SyntheticLayers)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TaskError(f"task.{name} is {value!r}; allowed: a {kind.__name__}, or null")
        check_counts(self, "seeds", "num_prompts")
        check_counts(self, "exact", most=MOST_TOKENS)
        check_list(self, "layers", MOST_LAYERS, "1-based layer numbers")
        for rate in self.rates:
            Budget(rate=rate)

    def meta(self) -> dict[str, Any]:
        """See `kvbench.plan.Plan.meta`."""
        return {
            "version": self.version,
            "data": dict(self.prompts.digests()) if self.prompts is not None else {},
            "subject": "synthetic tensors" if self.prompts is None else None,
            "score_unit": "relative error",
            "lower_is_better": True,
            "breakdown": ["rate", "layer"],
            "unit": "draw",
            "figures": [
                {
                    "kind": "bars",
                    "x": "rate",
                    "facet": "layer",
                    "value": "relative_error",
                    "ylabel": "relative error of the attention output",
                }
            ],
        }

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per prompt: its layers are computed once for all methods, rates and seeds."""
        if self.synthetic is not None:
            return [self._unit("synthetic", self.synthetic.n, self.synthetic)]
        assert self.prompts is not None
        examples = list(self.prompts.examples(session.encoder))[: self.num_prompts]
        units = []
        for example in examples:
            encoded = encode_example(example, session.encoder)
            units.append(
                self._unit(example.id, encoded.n, (*encoded.context_ids, *encoded.question_ids))
            )
        return units

    def _unit(self, name: str, n: int, payload: Any) -> Unit:
        if n <= 2 * self.exact:
            raise KVError(
                f"task.exact is {self.exact} and prompt {name!r} has {n} tokens; allowed: less than "
                "half of the prompt (sink + window may not be longer than the prompt)"
            )
        ids = (self._record_id(name, layer, rate, seed) for layer, rate, seed in self._grid())
        return Unit(name, tuple(ids), payload)

    def _grid(self) -> Iterator[tuple[int, float, int]]:
        for layer in self.layers:
            for rate in self.rates:
                for seed in range(self.seeds):
                    yield layer, rate, seed

    @staticmethod
    def _record_id(name: str, layer: int, rate: float, seed: int) -> str:
        return f"{name}/layer{layer}/rate{rate:g}/seed{seed}"

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Every method at every layer, rate and seed, on one prompt's tensors."""
        for layer, kv in self._captured(unit, session):
            check_finite(kv)
            first = kv.n - self.exact
            assert kv.queries is not None
            queries = kv.queries[:, :, first:]
            truth = estimate(keep_all(kv), queries, first, kv)
            for rate in self.rates:
                budget = Budget(rate=rate, sink=self.exact, window=self.exact)
                drew_nothing: dict[str, Mapping[str, Any]] = {}  # the same for every seed
                for seed in range(self.seeds):
                    for label, (method, _) in methods.items():
                        generator = layer_generator(session.seed * 1_000_003 + seed, unit.id, layer)
                        state = generator.get_state()
                        found = drew_nothing.get(label) or self._measured(
                            label, method, budget, generator, kv, queries, first, truth
                        )
                        if torch.equal(state, generator.get_state()):
                            drew_nothing[label] = found
                        record_id = self._record_id(unit.id, layer, rate, seed)
                        where = {"layer": layer, "rate": rate, "draw": seed, "prompt_tokens": kv.n}
                        yield Outcome(label, record_id, {**where, **found})

    @staticmethod
    def _measured(label: str, method: Method, *arguments: Any) -> Mapping[str, Any]:
        """`_measure`, or the failure as record fields: one method's failure stops no other."""
        try:
            return _measure(label, method, *arguments)
        except Exception as failure:  # noqa: BLE001 - a record with its status
            return {"status": status_of(failure), "error": one_line(failure)}

    def _captured(self, unit: Unit, session: Session) -> Iterator[tuple[int, LayerKV]]:
        if self.synthetic is not None:
            for layer in self.layers:
                yield layer, self.synthetic.layer(layer - 1, max(self.layers))
            return
        captured = capture_layers(session.model, unit.payload, [layer - 1 for layer in self.layers])
        for layer in self.layers:
            yield layer, captured[layer - 1]


def _measure(
    label: str,
    method: Method,
    budget: Budget,
    generator: torch.Generator,
    kv: LayerKV,
    queries: Tensor,
    first: int,
    truth: Tensor,
) -> Mapping[str, Any]:
    held, fields = compress_measured(label, method, budget, generator, kv)
    error = estimate(held, queries, first, kv) - truth
    error_sq, norm_sq = float(error.square().sum()), float(truth.square().sum())
    relative = (error_sq / norm_sq) ** 0.5
    return {
        "score": relative,
        "relative_error": relative,
        "error_sq": error_sq,
        "norm_sq": norm_sq,
        **fields,
    }


def compress_measured(
    label: str, method: Method, budget: Budget, generator: torch.Generator, kv: LayerKV
) -> tuple[CompressedKV, dict[str, Any]]:
    """What `method` holds instead of `kv`, and the record fields that say what it costs.

    Raises:
        BudgetExceeded: more entries than the method may hold.
        KVError: what the method does to attention or to stored entries happens while decoding only,
            so that the error of what `compress` returns would not be the method's.
    """
    if method.restricts or method.quantize is not None:
        what = "restricts attention" if method.restricts else "quantizes entries"
        raise KVError(f"method {label!r} {what} while decoding; allowed: methods that do neither")
    guard = Guard(kv, restores=True)  # other methods and draws go on with the same layer
    held, capacity, seconds = guard.compress(label, method, budget, generator, dict(kv.carried))
    allowed, preset = allowed_entries(method, budget, kv.n, kv.num_layers)
    granted = sum(
        method.layer_capacity(replace(budget), kv.n, layer, kv.num_layers)
        for layer in range(kv.num_layers)
    )
    if granted > allowed:
        raise BudgetExceeded(label, -1, allowed, granted)
    most = int(held.entries.max())
    if most > capacity + 1:
        raise BudgetExceeded(label, kv.layer_index, capacity, most)
    parts = [held.keys, held.values, *([held.log_weights] if held.log_weights is not None else [])]
    cache_bytes = sum(part.numel() * part.element_size() for part in parts)
    exact_bytes = sum(part.numel() * part.element_size() for part in (kv.keys, kv.values))
    return held, {
        "capacity": capacity,
        "entries": {"mean": float(held.entries.float().mean()), "max": most},
        "cache_bytes": cache_bytes,
        "exact_bytes": exact_bytes,
        "ratio": cache_bytes / exact_bytes,
        "compressed": method.saves_memory,
        "compress_s": seconds,
        **({} if preset is None else {"budget_preset": preset}),
    }
