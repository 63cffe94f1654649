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

from kvbench.engine import guard
from kvbench.engine.attention import signed_mean
from kvbench.engine.costs import Cost
from kvbench.engine.fork import layer_generator
from kvbench.errors.options import Fraction, Several, Share, check_options
from kvbench.kernels.quantize import Quantization, Scheme
from kvbench.kernels.softcap import capped
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods.base import SEED_STRIDE, Method, allowed_entries
from kvbench.probes.base import (
    LayerProbe,
    Repeats,
    encoded_prompts,
    failed,
)
from kvbench.records.figures import Bars, as_json
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session
from kvbench.tasks.base import TaskError, Tokens

RECORD_ID = "{}/layer{}/rate{:g}/seed{}"
"""The example id of a record: its prompt, layer and rate, and the number of the method's draw."""


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

    n: Tokens = 4096
    heads: Repeats = 8
    kv_heads: Repeats = 2
    head_dim: Repeats = 64
    key_norm: float = 8.0
    value_norm: float = 4.0
    query_norm: float = 8.0
    clusters: Annotated[int, Ge(0), Le(100_000)] = 64
    spread: Fraction = 0.2

    def __post_init__(self) -> None:
        check_options(self, "task.synthetic.", TaskError)

    def layer(self, index: int, num_layers: int, device: torch.device | str = "cpu") -> LayerKV:
        """Layer `index` of `num_layers`: the same tensors every time."""
        generator = layer_generator(0, "synthetic", index)

        def gaussian(heads: int, count: int) -> Tensor:
            shape = (1, heads, count, self.head_dim)
            return torch.randn(shape, generator=generator) / self.head_dim**0.5

        draw = partial(gaussian, self.kv_heads)
        keys, values = clustered(draw, self.n, self.clusters, self.spread, generator)
        queries = self.query_norm * gaussian(self.heads, self.n)
        made = self.key_norm * keys, self.value_norm * values, queries
        k, v, q = (x.to(device) for x in made)
        return LayerKV(k, v, q, index, num_layers, self.head_dim**-0.5)


def clustered(
    draw: Callable[[int], Tensor], n: int, clusters: int, spread: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Keys and values [1, heads, n, d] around centres that those of one cluster share.

    Args:
        draw: returns `count` vectors, [1, heads, count, d].
        clusters: how many centres; 0: keys and values are the vectors as they are drawn.
        spread: share of the squared norm that is noise around the centre.
    """
    keys, values = draw(n), draw(n)
    if clusters:
        of = torch.randint(clusters, (n,), generator=generator)
        near, far = (1 - spread) ** 0.5, spread**0.5
        keys = near * draw(clusters)[:, :, of] + far * keys
        values = near * draw(clusters)[:, :, of] + far * values
    return keys, values


def logits_of(keys: Tensor, queries: Tensor, layer: LayerKV) -> Tensor:
    """Scaled and capped logits of queries [1, heads, m, d] against keys [1, kv_heads, n, d]:
    [1, kv_heads, group, m, n] float64."""
    (batch, heads, m, dim), stored = queries.shape, keys.shape[1]
    grouped = queries.double().view(batch, stored, heads // stored, m, dim)
    logits = grouped @ keys.double()[:, :, None].transpose(-1, -2) * layer.scaling
    return capped(logits, layer.softcap)


def estimate(compressed: CompressedKV, queries: Tensor, first: int, layer: LayerKV) -> Tensor:
    """z_j for the queries at positions first, first + 1, ...: attention over what is held, entries
    of later positions hidden. queries [1, heads, m, d] -> [1, heads, m, d], float64."""
    batch, heads, m, _ = queries.shape
    logits = logits_of(compressed.keys, queries, layer)
    if compressed.log_weights is not None:
        logits = logits + compressed.log_weights.double()[:, :, None, None]
    at = torch.arange(first, first + m, device=queries.device)
    later = compressed.positions[:, :, None, None, :] > at[:, None]
    weights = logits.masked_fill(later, float("-inf")).softmax(-1)
    out = weights[..., compressed.keys_only :] @ compressed.values.double()[:, :, None]
    if compressed.denominators is not None:
        ends = None
        if compressed.value_range is not None:
            least, most = compressed.value_range
            ends = least.double()[:, :, None, None], most.double()[:, :, None, None]
        out = signed_mean(out, weights, compressed.denominators.double()[:, :, None], ends)
    return out.view(batch, heads, m, -1)


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
    distance, norm = (x.norm(dim=-1) for x in (z - exact, exact))
    error = torch.where(distance == 0, 0.0, distance / norm)  # an output of zero may be met exactly
    clamped = distance / exact.clamp(min=1e-8).norm(dim=-1)
    whole = distance.square().sum()
    return {
        "relative_error": float(error.mean()),
        "pooled_error": float((whole / norm.square().sum()).sqrt()) if whole else 0.0,
        "released_error": float(clamped.mean()),
    }


def compress_measured(
    label: str, method: Method, budget: Budget, generator: torch.Generator, kv: LayerKV
) -> tuple[CompressedKV, dict[str, Any]]:
    """What `method` holds instead of `kv`, and the record fields that say what it costs.

    Raises:
        BudgetExceeded: more entries than the method may hold.
        KVError: what the method does to attention happens while decoding only, so that the error of
            what `compress` returns would not be the method's; or it needs more than one layer.
    """
    if method.restricts:
        raise KVError(
            f"method {label!r} restricts attention while decoding; allowed: methods that do not"
        )
    if method.rescoring is not None:
        raise KVError(
            f"method {label!r} has the model repeat its prompt; allowed: methods that see one layer"
        )
    compressed, capacity, clock = guard.compress(label, method, kv, budget, generator, kv.carried)
    entries = {
        "mean": float(compressed.entries.float().mean()),
        "max": int(compressed.entries.max()),
    }
    if compressed.charged > capacity + 1:
        raise BudgetExceeded(label, kv.layer_index, capacity, compressed.charged)
    cache_bytes, scheme = compressed.nbytes, method.quantization()
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
    later = ("cache_bytes_end", "cache_bytes_peak", "cache_bytes_mean", "exact_bytes_mean")
    fields = {key: value for key, value in cost.record().items() if key not in later}
    return compressed, fields


def stored(
    compressed: CompressedKV, scheme: Scheme, layer: int, generator: torch.Generator
) -> tuple[CompressedKV, int]:
    """What a cache that packs entries by `scheme` attends to instead of `compressed` (batch 1), and the
    bytes that it holds.

    Sketches and rotations are drawn anew from the generator, so that the errors of several draws and
    prompts vary with them; a model that decodes draws them once.

    Raises:
        KVError: heads of different lengths, which are packed head by head while decoding.
    """
    if compressed.lengths is not None:
        raise KVError(
            "heads of different lengths are quantized while decoding; allowed: quantize=null"
        )
    sides = []
    packed = compressed.nbytes
    seed = 0
    if not isinstance(scheme, Quantization):  # which draws nothing
        seed = int(torch.randint(2**31, (), generator=generator))
    codecs = scheme.codecs(compressed.keys[0], compressed.values[0], layer=layer, seed=seed)
    for codec, rows in zip(codecs, (compressed.keys[0], compressed.values[0]), strict=True):
        heads, _, dim = rows.shape
        exact = rows[:, codec.count :]
        packed += codec.nbytes + exact.nbytes - rows.nbytes
        if codec.count:  # a codec's inner products with the unit vectors are what it restores
            unit = torch.eye(dim, device=rows.device).expand(heads, dim, dim)
            exact = torch.cat([codec.dot(unit).mT.to(rows.dtype), exact], dim=1)
        sides.append(exact[None])
    return replace(compressed, keys=sides[0], values=sides[1]), packed


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
    holds the same on average over `layers` (`LayerError.budget_of`).

    Attributes:
        rates: fractions of the middle that are kept.
        seeds: how many draws of the methods per prompt.
        exact: tokens kept exactly at both ends.
        synthetic: the tensors, without prompts.
        held_out: False shows the methods the measured queries too, and the tables say so.
        metric: which error is the score.
    """

    name: ClassVar[str] = "layer_error"
    version: ClassVar[int] = 3
    measures: ClassVar[tuple[str, ...]] = ("relative_error", "pooled_error", "released_error")
    score_unit: ClassVar[str] = "relative error"
    drawn: ClassVar[str] = "synthetic"

    rates: Several[Share] = (0.5, 0.25, 0.125, 0.0625)
    seeds: Repeats = 2
    exact: Tokens = 256
    synthetic: SyntheticLayers | None = None
    held_out: bool = True
    metric: Literal["per_query", "pooled", "released"] = "per_query"

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`. The repetition is the prompt, whose draws say little about other prompts; of
        synthetic layers the layer, since each is a draw of its own."""
        drawn = self.prompts is None
        unseen = "" if self.held_out else ", measured on the queries that chose"
        unit = "layer" if drawn else "prompt"
        ylabel = f"{self.score_unit} of the attention output"
        bars = Bars(x="rate", facet=None if drawn else "layer", repeat=unit, ylabel=ylabel)
        return super().meta() | {
            "score_unit": self.score_unit + unseen,
            "breakdown": ["rate"] if drawn else ["rate", "layer"],
            "figures": as_json([bars]),
            "unit": unit,
        }

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per prompt: its layers are computed once for all that is measured of them.

        Raises:
            KVError: a prompt of which no query can be measured.
        """
        draws = list(product(self.layers, self.rates, range(self.seeds)))
        sources: list[tuple[str, int, Any]] = []
        if self.synthetic is not None:
            sources = [("synthetic", self.synthetic.n, None)]
        if self.prompts is not None:
            prompts = encoded_prompts(self.prompts, session, self.num_prompts)
            sources = [(each.example.id, each.n, each) for each in prompts]
        for name, n, _ in sources:
            if n <= 2 * self.exact:
                raise KVError(
                    f"task.exact is {self.exact} and prompt {name!r} has {n} tokens; allowed: "
                    "less than half of the prompt (sink + window may not be longer than the prompt)"
                )
        return [
            Unit(name, tuple(RECORD_ID.format(name, *draw) for draw in draws), prompt)
            for name, _, prompt in sources
        ]

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Every method at every layer, rate and seed, on one prompt's tensors.

        A method that draws nothing is run once for all seeds; what one notes for the next layer
        (`LayerKV.carried`) stays with its rate and its draw. A failure stops no other method.
        """
        carried: dict[tuple[str, float, int], dict[str, Tensor]] = {}
        drawn, last = self.synthetic, max(self.layers)
        layers = (
            self.captured(session, unit.payload)
            if drawn is None
            else ((i, drawn.layer(i - 1, last, session.device)) for i in self.layers)
        )
        for layer, kv in layers:
            guard.check_finite(kv)
            first = kv.n - self.exact
            assert kv.queries is not None
            before, queries = kv.queries[:, :, :first], kv.queries[:, :, first:]
            exact = estimate(keep_all(kv), queries, first, kv)
            seen = replace(kv, queries=before, withheld=self.exact) if self.held_out else kv
            same: dict[tuple[str, float], Mapping[str, Any]] = {}  # for every seed
            which = f"{self.metric}_error".replace("per_query", "relative")
            for rate, seed, label in product(self.rates, range(self.seeds), methods):
                method = methods[label][0]
                generator = layer_generator(SEED_STRIDE * session.seed + seed, unit.id, layer)
                state = generator.get_state()
                mine = replace(seen, carried=carried.setdefault((label, rate, seed), {}))
                measurement = same.get((label, rate))
                if measurement is None:
                    try:
                        budget = self.budget_of(method, rate, kv.n, kv.num_layers)
                        compressed, cost = compress_measured(label, method, budget, generator, mine)
                        errors = relative_errors(estimate(compressed, queries, first, kv), exact)
                        measurement = {"score": errors[which], **errors, **cost}
                    except Exception as failure:  # noqa: BLE001 - a record with its status
                        measurement = failed(failure)
                if torch.equal(state, generator.get_state()):
                    same[label, rate] = measurement
                    carried[label, rate, seed] = carried[label, rate, 0]
                where = {"prompt": unit.id, "layer": layer, "rate": rate, "draw": seed}
                fields = {**where, "prompt_tokens": kv.n, **measurement}
                yield Outcome(label, RECORD_ID.format(unit.id, layer, rate, seed), fields)

    def budget_of(self, method: Method, rate: float, n: int, num_layers: int) -> Budget:
        """The budget with which `method` holds, on average over the layers probed, what the rate
        leaves of n tokens.

        A method that shares a budget out among all layers of a model (PyramidKV) would hold more
        than the others at some layers and less at others; probing a few of them would not compare
        equals. Its budget is made smaller or larger, in whole entries and never above the average
        asked for; the sink gives way where it must.

        Raises:
            KVError: even its smallest budget is more.
        """
        even = Budget(rate=rate, sink=self.exact, window=self.exact)
        wanted = len(self.layers) * even.capacity(n)

        def held(budget: Budget) -> int:
            return sum(method.layer_capacity(budget, n, i - 1, num_layers) for i in self.layers)

        if not method.saves_memory or method.rescoring is not None or held(even) == wanted:
            return even

        def sized(size: int) -> Budget:
            sink = max(0, min(self.exact, size - self.exact - 1))
            return Budget(size=size, sink=sink, window=self.exact)

        sizes = range(self.exact + 1, n)
        # The place found is always one where one entry more would be too many, even if a method's
        # share of these layers does not grow steadily with the budget.
        fitting = bisect.bisect_right(sizes, wanted, key=lambda size: held(sized(size)))
        if not fitting:
            raise KVError(
                f"task.layers is {list(self.layers)} and {type(method).__name__} holds "
                f"{held(sized(sizes[0]))} entries there at the least; allowed: layers at which it "
                f"can hold {wanted}, as the others do at rate {rate:g}"
            )
        return sized(sizes[fitting - 1])
