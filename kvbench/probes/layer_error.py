"""Relative error of single attention layers (BalanceKV, arXiv 2502.07861, sections 4.1 and B.1)."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvbench.engine import check
from kvbench.engine.attention import signed_mean
from kvbench.engine.cost import Cost
from kvbench.engine.prefill import capture_layers
from kvbench.engine.row import layer_generator
from kvbench.errors.options import Distinct, Fraction, Several, Share, check_options
from kvbench.kernels.logits import softcapped, softmax
from kvbench.kernels.quantize import Quantization, Scheme
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods.base import SEED_STRIDE, Method, allowed_entries
from kvbench.probes.base import Probe, encoded_prompts
from kvbench.records.figures import Bars, as_json
from kvbench.run.plan import Fields, Methods, Work, WorkItem, failure_fields
from kvbench.run.session import Session
from kvbench.tasks.base import Many, Task, TaskError, Tokens

DECODING_COSTS = ("cache_bytes_end", "cache_bytes_peak", "cache_bytes_mean", "exact_bytes_mean")
"""Fields of a `Cost` that are known only once something was decoded."""
RECORD_ID = "{}/layer{}/rate{:g}/seed{}"
"""The example id of a record: its prompt, layer and rate, and the number of the method's draw."""


@dataclass(frozen=True, kw_only=True)
class SyntheticLayers:
    """Random queries, keys and values of chosen norms and clusters, in place of a model's.

    Keys are cluster centres plus noise; the values of a cluster share a centre in the same way, so
    that near keys carry near values, as they do in trained layers. Norms are root mean squares;
    conf/task/layer_error_synthetic.yaml tells the rest.
    """

    n: Tokens = 4096
    heads: Many = 8
    kv_heads: Many = 2
    head_dim: Many = 64
    key_norm: float = 8.0
    value_norm: float = 4.0
    query_norm: float = 8.0
    clusters: Annotated[int, Ge(0), Le(100_000)] = 64
    spread: Fraction = 0.2

    def __post_init__(self) -> None:
        check_options(self, "task.synthetic.", TaskError)

    def layer(self, index: int, num_layers: int, device: torch.device | str = "cpu") -> LayerKV:
        """Draw layer `index` (from 0) of `num_layers`: the same tensors every time."""
        generator = layer_generator(0, "synthetic", index)

        def gaussian(heads: int, count: int) -> Tensor:
            shape = (1, heads, count, self.head_dim)
            return torch.randn(shape, generator=generator) / self.head_dim**0.5

        draw = partial(gaussian, self.kv_heads)
        keys, values = clustered(draw, self.n, self.clusters, self.spread, generator)
        queries = self.query_norm * gaussian(self.heads, self.n)
        return LayerKV(
            (self.key_norm * keys).to(device),
            (self.value_norm * values).to(device),
            queries.to(device),
            index,
            num_layers,
            scaling=self.head_dim**-0.5,
        )


def clustered(
    draw: Callable[[int], Tensor], n: int, clusters: int, spread: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Keys and values [1, heads, n, d] around so many centres, which those of one cluster share; `draw`
    makes a number of vectors, and `spread` of the squared norm is noise. Without clusters they are the
    vectors as they are drawn."""
    keys, values = draw(n), draw(n)
    if clusters:
        cluster = torch.randint(clusters, (n,), generator=generator)
        near, far = (1 - spread) ** 0.5, spread**0.5
        keys = near * draw(clusters)[:, :, cluster] + far * keys
        values = near * draw(clusters)[:, :, cluster] + far * values
    return keys, values


def logits_of(keys: Tensor, queries: Tensor, layer: LayerKV) -> Tensor:
    """Scaled and capped logits of queries [1, heads, m, d] against keys [1, kv_heads, n, d]:
    [1, kv_heads, group, m, n] float64."""
    batch, heads, m, dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.double().view(batch, kv_heads, heads // kv_heads, m, dim)
    logits = grouped @ keys.double()[:, :, None].transpose(-1, -2) * layer.scaling
    return softcapped(logits, layer.softcap)


def seen_logits(compressed: CompressedKV, queries: Tensor, first: int, layer: LayerKV) -> Tensor:
    """`logits_of` queries at the positions first, first + 1, ... against compressed entries, weights
    included; -inf for an entry of a later position."""
    logits = logits_of(compressed.keys, queries, layer)
    if compressed.log_weights is not None:
        logits = logits + compressed.log_weights.double()[:, :, None, None]
    positions = torch.arange(first, first + queries.shape[2], device=queries.device)
    later = compressed.positions[:, :, None, None, :] > positions[:, None]
    return logits.masked_fill(later, -torch.inf)


def estimate(compressed: CompressedKV, queries: Tensor, first: int, layer: LayerKV) -> Tensor:
    """The attention outputs z_j, [1, heads, m, d] float64, of queries [1, heads, m, d] at the positions
    first, first + 1, ... over the compressed entries; a query does not see entries of later positions.

    `layer` is the layer that was compressed: of its scaling, softcap and sinks.
    """
    batch, heads, m, _ = queries.shape
    logits = seen_logits(compressed, queries, first, layer)
    sinks = None if layer.sinks is None else layer.sinks.view(logits.shape[1], -1, 1)
    weights = softmax(logits, sinks)
    out = weights[..., compressed.keys_only :] @ compressed.values.double()[:, :, None]
    if compressed.denominators is not None:
        value_range = None
        if compressed.value_range is not None:
            least, most = compressed.value_range
            value_range = least.double()[:, :, None, None], most.double()[:, :, None, None]
        denominators = compressed.denominators.double()[:, :, None]
        out = signed_mean(out, weights, denominators, value_range, sinks=sinks is not None)
    return out.view(batch, heads, m, -1)


def hold_out(kv: LayerKV, asked: int) -> tuple[LayerKV, Tensor, int]:
    """The layer without its last `asked` queries, these queries, and the position of the first."""
    assert kv.queries is not None
    first = kv.n - asked
    shown = replace(kv, queries=kv.queries[:, :, :first], withheld=asked, shared={})
    return shown, kv.queries[:, :, first:], first


def relative_errors(z: Tensor, exact: Tensor) -> dict[str, float]:
    """How far the estimates z are from the exact outputs a, both [1, heads, m, d] float64.

    Returns, as record fields:
        relative_error: ||z_j - a_j|| / ||a_j||, mean over queries and heads (the paper's B.1).
        pooled_error: ||z - a||_F / ||a||_F over all queries and heads; queries with small
            outputs count little in it.
        released_error: the first, as BalanceKV's released notebook has it: elements of a_j below
            1e-8, the negative ones among them, count as 1e-8 in its norm. Where the signs are even
            that makes the denominator smaller, and the error larger, by about sqrt(2).
    """
    distance, norm = (z - exact).norm(dim=-1), exact.norm(dim=-1)
    error = torch.where(distance == 0, 0.0, distance / norm)  # an output of zero may be met exactly
    released = distance / exact.clamp(min=1e-8).norm(dim=-1)
    squares = distance.square().sum()
    return {
        "relative_error": float(error.mean()),
        "pooled_error": float((squares / norm.square().sum()).sqrt()) if squares else 0.0,
        "released_error": float(released.mean()),
    }


def check_total(label: str, method: Method, budget: Budget, n: int, num_layers: int) -> None:
    """Refuse a method that says of itself that its layers hold more than the budget allows."""
    allowed, _ = allowed_entries(method, budget, n, num_layers)
    held = sum(method.layer_capacity(budget, n, i, num_layers) for i in range(num_layers))
    if held > allowed:
        raise BudgetExceeded(label, -1, allowed, held)


def compress_measured(
    label: str, method: Method, budget: Budget, generator: torch.Generator, kv: LayerKV
) -> tuple[CompressedKV, dict[str, Any]]:
    """Compress the layer `kv` by a method; returns its entries and record fields of their cost. Entries
    that the method's cache would pack are returned as they are read back from it."""
    if method.restricts:
        raise KVError(
            f"method {label!r} restricts attention while decoding; allowed: methods that do not"
        )
    if method.second_pass is not None:
        raise KVError(
            f"method {label!r} has the model repeat its prompt; allowed: methods that see one layer"
        )
    check_total(label, method, budget, kv.n, kv.num_layers)
    compressed, capacity, clock = check.compress(label, method, kv, budget, generator, kv.carried)
    if compressed.charged > capacity + 1:
        raise BudgetExceeded(label, kv.layer_index, capacity, compressed.charged)
    entries = {
        "mean": float(compressed.entries.float().mean()),
        "max": int(compressed.entries.max()),
    }
    cache_bytes = compressed.nbytes
    scheme = method.quantization()
    if scheme is not None:
        compressed, cache_bytes = stored(compressed, scheme, kv.layer_index, generator)
    cost = Cost(
        prompt_tokens=kv.n,
        capacity=capacity,
        entries=entries,
        cache_bytes=cache_bytes,
        exact_bytes=keep_all(kv).nbytes,
        compressed=method.saves_memory or scheme is not None,
        compress_s=clock.seconds,
        budget_preset=allowed_entries(method, budget, kv.n, kv.num_layers)[1],
    )
    record = cost.record()
    for field_of_decoding in DECODING_COSTS:
        record.pop(field_of_decoding, None)
    return compressed, record


def stored(
    compressed: CompressedKV, scheme: Scheme, layer: int, generator: torch.Generator
) -> tuple[CompressedKV, int]:
    """Entries (batch 1) as attention reads them once a scheme has packed them, and their bytes.

    Sketches and rotations are drawn anew from the generator, so that the errors of several draws and
    prompts vary with them; a model that decodes draws them once.
    """
    if compressed.lengths is not None:
        raise KVError(
            "heads of different lengths are quantized while decoding; allowed: quantize=null"
        )
    seed = 0
    if not isinstance(scheme, Quantization):  # rounding to integers draws nothing
        seed = int(torch.randint(2**31, (), generator=generator))
    restored = []
    packed_bytes = compressed.nbytes
    codecs = scheme.codecs(compressed.keys[0], compressed.values[0], layer=layer, seed=seed)
    for codec, rows in zip(codecs, (compressed.keys[0], compressed.values[0]), strict=True):
        heads, _, dim = rows.shape
        unpacked = rows[:, codec.count :]
        packed_bytes += codec.nbytes + unpacked.nbytes - rows.nbytes
        if codec.count:  # a codec's inner products with the unit vectors are what it restores
            unit_vectors = torch.eye(dim, device=rows.device).expand(heads, dim, dim)
            packed = codec.dot(unit_vectors).mT.to(rows.dtype)
            restored.append(torch.cat([packed, unpacked], dim=1)[None])
        else:
            restored.append(unpacked[None])
    return replace(compressed, keys=restored[0], values=restored[1]), packed_bytes


@dataclass(frozen=True, kw_only=True)
class LayerError(Probe):
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
    holds the same on average over `layers` (`LayerError.budget_of`).

    conf/task/layer_error.yaml tells the options.
    """

    name: ClassVar[str] = "layer_error"
    version: ClassVar[int] = 3
    measures: ClassVar[tuple[str, ...]] = ("relative_error", "pooled_error", "released_error")
    score_unit: ClassVar[str] = "relative error"
    lower_is_better: ClassVar[bool] = True
    reads_whole_prompts: ClassVar[bool] = True

    prompts: Task | None = None
    num_prompts: Many = 8
    layers: Distinct[Annotated[int, Ge(1), Le(10_000)]] = (1, 2, 4)
    rates: Several[Share] = (0.5, 0.25, 0.125, 0.0625)
    seeds: Many = 2
    exact: Tokens = 256
    synthetic: SyntheticLayers | None = None
    held_out: bool = True
    metric: Literal["per_query", "pooled", "released"] = "per_query"

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.prompts) == bool(self.synthetic):
            both = "both" if self.prompts else "neither"
            raise TaskError(
                f"task.synthetic and task.prompts: exactly one of them must be given (got {both})"
            )

    def meta(self) -> dict[str, Any]:
        # The repetition is the prompt, whose draws say little about other prompts; of synthetic layers
        # the layer, since each is a draw of its own.
        synthetic = self.prompts is None
        unit = "layer" if synthetic else "prompt"
        bars = Bars(
            x="rate",
            facet=None if synthetic else "layer",
            repeat=unit,
            ylabel=f"{self.score_unit} of the attention output",
        )
        score_unit = self.score_unit
        if not self.held_out:
            score_unit += ", measured on the queries that chose"
        return super().meta() | {
            "data": {} if self.prompts is None else dict(self.prompts.digests()),
            "subject": "synthetic tensors" if synthetic else None,
            "score_unit": score_unit,
            "breakdown": ["rate"] if synthetic else ["rate", "layer"],
            "figures": as_json([bars]),
            "unit": unit,
        }

    def items(self, session: Session, methods: Methods) -> Sequence[WorkItem]:
        draws = list(product(self.layers, self.rates, range(self.seeds)))
        sources: list[tuple[str, int, Any]] = []
        if self.synthetic is not None:
            sources = [("synthetic", self.synthetic.n, None)]
        if self.prompts is not None:
            prompts = encoded_prompts(self.prompts, session, self.num_prompts)
            sources = [(prompt.example.id, prompt.n, prompt) for prompt in prompts]
        for name, n, _ in sources:
            if n <= 2 * self.exact:
                raise KVError(
                    f"task.exact is {self.exact} and prompt {name!r} has {n} tokens; allowed: "
                    "less than half of the prompt (sink + window may not be longer than the prompt)"
                )
        items = []
        for name, _, prompt in sources:
            fields = {
                RECORD_ID.format(name, layer, rate, draw): {
                    "prompt": name,
                    "layer": layer,
                    "rate": rate,
                    "draw": draw,
                }
                for layer, rate, draw in draws
            }
            items.append(WorkItem(name, tuple(fields), prompt, fields))
        return items

    def run(self, work: Sequence[Work], session: Session) -> Iterator[Fields]:
        """After a method that wrote to the tensors the others are measured on new ones."""
        ((item, methods),) = work
        damage: dict[str, check.LayerDamaged] = {}
        while True:
            sound = {label: pair for label, pair in methods.items() if label not in damage}
            try:
                records = list(self._measured(item, sound, session))
            except check.LayerDamaged as failure:
                damage[failure.label] = failure
                continue
            break
        yield from records
        for label, record_id in product(damage, item.record_ids):
            fields = {**item.fields[record_id], **failure_fields(damage[label])}
            yield {"method": label, "example_id": record_id, **fields}

    def _measured(self, item: WorkItem, methods: Methods, session: Session) -> Iterator[Fields]:
        """A method that draws nothing is run once for all seeds. What a method notes for its next layers
        (`LayerKV.carried`) stays with its rate and its draw."""
        carried: dict[tuple[str, float, int], dict[str, Tensor]] = {}
        score = "relative_error" if self.metric == "per_query" else f"{self.metric}_error"
        for layer, kv in self._layers(item, session):
            check.check_finite(kv)
            shown, queries, first = hold_out(kv, self.exact)
            exact = estimate(keep_all(kv), queries, first, kv)
            if not self.held_out:
                shown = kv
            without_draws: dict[tuple[str, float], Mapping[str, Any]] = {}
            for rate, seed, label in product(self.rates, range(self.seeds), methods):
                method = methods[label][0]
                generator = layer_generator(SEED_STRIDE * session.seed + seed, item.id, layer)
                state = generator.get_state()
                own = replace(shown, carried=carried.setdefault((label, rate, seed), {}))
                measurement = without_draws.get((label, rate))
                if measurement is None:
                    try:
                        budget = self.budget_of(method, rate, kv.n, kv.num_layers)
                        compressed, cost = compress_measured(label, method, budget, generator, own)
                        errors = relative_errors(estimate(compressed, queries, first, kv), exact)
                        measurement = {"score": errors[score], **errors, **cost}
                    except check.LayerDamaged:
                        raise
                    except Exception as failure:  # noqa: BLE001 - a record with its status
                        measurement = failure_fields(failure)
                if torch.equal(state, generator.get_state()):  # the other seeds would draw nothing
                    without_draws[label, rate] = measurement
                    carried[label, rate, seed] = carried[label, rate, 0]
                record_id = RECORD_ID.format(item.id, layer, rate, seed)
                fields = {**item.fields[record_id], "prompt_tokens": kv.n, **measurement}
                yield {"method": label, "example_id": record_id, **fields}

    def _layers(self, item: WorkItem, session: Session) -> Iterator[tuple[int, LayerKV]]:
        """Number and tensors of each of `layers`, in this order."""
        if self.synthetic is None:
            layers = [layer - 1 for layer in self.layers]
            found = capture_layers(session.model, item.payload.ids, layers)
            yield from ((layer, found[layer - 1]) for layer in self.layers)
            return
        count = max(self.layers)
        for layer in self.layers:
            yield layer, self.synthetic.layer(layer - 1, count, session.device)

    def budget_of(self, method: Method, rate: float, n: int, num_layers: int) -> Budget:
        """The budget with which `method` holds, on average over the layers probed, as many of n tokens
        as the rate leaves.

        A method that shares a budget out among all layers of a model (PyramidKV) would hold more
        than the others at some layers and less at others; probing a few of them would not compare
        equals. Its budget is made smaller or larger, in whole entries and never above the average
        asked for; the sink gives way where it must.
        """
        even = Budget(rate=rate, sink=self.exact, window=self.exact)
        entries_of_others = len(self.layers) * even.capacity(n)

        def entries(budget: Budget) -> int:
            return sum(method.layer_capacity(budget, n, i - 1, num_layers) for i in self.layers)

        if not method.saves_memory or method.second_pass is not None:
            return even
        if entries(even) == entries_of_others:
            return even

        def budget_of_size(size: int) -> Budget:
            sink = max(0, min(self.exact, size - self.exact - 1))
            return Budget(size=size, sink=sink, window=self.exact)

        sizes = range(self.exact + 1, n)
        # bisect_right ends where one entry more would be too many, even if a method's share of these
        # layers does not grow steadily with the budget.
        fitting = bisect.bisect_right(
            sizes, entries_of_others, key=lambda size: entries(budget_of_size(size))
        )
        if not fitting:
            raise KVError(
                f"task.layers is {list(self.layers)} and {type(method).__name__} holds "
                f"{entries(budget_of_size(sizes[0]))} entries there at the least; allowed: layers at "
                f"which it can hold {entries_of_others}, as the others do at rate {rate:g}"
            )
        return budget_of_size(sizes[fitting - 1])
