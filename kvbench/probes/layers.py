"""Layers that a probe compresses one by one: of a model's prompts, or drawn at random."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from kvbench.engine import guard
from kvbench.engine.fork import layer_generator
from kvbench.engine.guard import check_finite
from kvbench.engine.loading import full_attention_layers
from kvbench.engine.prefill import capture_layers
from kvbench.errors import one_line
from kvbench.errors.options import Fraction, Several, Share, check_options
from kvbench.kernels.quantize import Scheme
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods.base import SEED_STRIDE, Method, allowed_entries
from kvbench.probes.base import (
    Layers,
    Probe,
    Repeats,
    Tokens,
    encoded_prompts,
    of_kind,
    origin,
)
from kvbench.run.plan import Methods, Unit, status_of
from kvbench.run.session import Session
from kvbench.tasks.base import Task, TaskError

Place = tuple[int, float, int]
"""Layer, rate and seed of a record."""
Look = Callable[[CompressedKV], Mapping[str, Any]]
"""Record fields measured of what a method holds of one layer."""


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
        if self.heads % self.kv_heads:
            raise TaskError(
                f"task.synthetic.kv_heads is {self.kv_heads}; allowed: a divisor of "
                f"task.synthetic.heads, {self.heads}"
            )

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


@dataclass(frozen=True, kw_only=True)
class LayerSource(Probe):
    """A probe of layers, which come from a task's prompts or are random tensors.

    Attributes:
        layers: 1-based; None: every one with full attention.
        most_layers: where `layers` is None, so many of them, evenly from the first to the last.
        prompts: a task whose first `num_prompts` prompts are used; None with `synthetic`.
    """

    kind: ClassVar[type[Method]] = Method
    """Of the methods that the probe takes."""

    layers: Layers | None = None
    most_layers: Repeats | None = None
    num_prompts: Repeats = 8
    prompts: Task | None = None
    synthetic: SyntheticLayers | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompts is None) == (self.synthetic is None):
            raise TaskError(
                "task.prompts and task.synthetic: exactly one of them must be given "
                f"(got {'both' if self.prompts is not None else 'neither'})"
            )

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`. The repetition is the prompt, whose draws say little about other prompts; of
        synthetic layers the layer, since each is a draw of its own."""
        unit = "layer" if self.prompts is None else "prompt"
        return {**super().meta(), **origin(self.prompts), "unit": unit}

    def layers_of(self, session: Session) -> Sequence[int]:
        """The layers asked for, 1-based. Loads no model."""
        if self.layers is not None:
            return self.layers
        every = full_attention_layers(session.spec) if self.synthetic is None else [1]
        return spread(every, self.most_layers)

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per prompt: its layers are computed once for all that is measured of them.

        Raises:
            KVError: a method that is not of the `kind` measured; see `check_prompt`.
        """
        of_kind(self.name, methods, self.kind)
        if self.synthetic is not None:
            return [self._unit("synthetic", self.synthetic.n, self.synthetic, session)]
        assert self.prompts is not None
        prompts = encoded_prompts(self.prompts, session, self.num_prompts)
        return [self._unit(name, len(ids), ids, session) for name, ids in prompts]

    def _unit(self, name: str, n: int, payload: Any, session: Session) -> Unit:
        self.check_prompt(name, n)
        return Unit(name, tuple(self.ids_at(name, session)), payload)

    def check_prompt(self, name: str, n: int) -> None:
        """Refuse a prompt of n tokens with which nothing can be measured.

        Raises:
            KVError: naming it.
        """

    def ids_at(self, prompt: str, session: Session) -> Iterator[str]:
        """The ids of the records that one prompt ends in, for each method."""
        for layer in self.layers_of(session):
            for ending in self.endings(session):
                yield f"{prompt}/layer{layer}{ending}"

    def endings(self, session: Session) -> Sequence[str]:
        """What the ids of one layer's records end in."""
        return [""]

    def captured(self, unit: Unit, session: Session) -> Iterator[tuple[int, LayerKV]]:
        """The unit's layers in the order asked for, each with its 1-based number."""
        layers = self.layers_of(session)
        if self.synthetic is not None:
            for layer in layers:
                made = self.synthetic.layer(layer - 1, max(layers))
                assert made.queries is not None
                q, k, v = (x.to(session.device) for x in (made.queries, made.keys, made.values))
                yield layer, replace(made, queries=q, keys=k, values=v)
            return
        captured = capture_layers(session.model, unit.payload, [layer - 1 for layer in layers])
        for layer in layers:
            yield layer, captured[layer - 1]


@dataclass(frozen=True, kw_only=True)
class LayerProbe(LayerSource):
    """What the probes share that compress single layers.

    Attributes:
        rates: fractions of the middle that are kept.
        layers: 1-based, as in BalanceKV's paper (which shows 1, 2 and 5).
        seeds: how many draws of the methods per prompt.
        exact: tokens kept exactly at both ends.
    """

    rates: Several[Share] = (0.5, 0.25, 0.125, 0.0625)
    layers: Layers = (1, 2, 4)
    seeds: Repeats = 2
    exact: Tokens = 256

    def check_prompt(self, name: str, n: int) -> None:
        """See `LayerSource.check_prompt`."""
        if n <= 2 * self.exact:
            raise KVError(
                f"task.exact is {self.exact} and prompt {name!r} has {n} tokens; allowed: less than "
                "half of the prompt (sink + window may not be longer than the prompt)"
            )

    def endings(self, session: Session) -> Sequence[str]:
        """See `LayerSource.endings`."""
        seeds = range(self.seeds)
        return [f"/rate{rate:g}/seed{seed}" for rate in self.rates for seed in seeds]

    @staticmethod
    def record_id(prompt: str, layer: int, rate: float, seed: int) -> str:
        """The id of one draw at one layer and rate."""
        return f"{prompt}/layer{layer}/rate{rate:g}/seed{seed}"

    def draws(
        self,
        unit: Unit,
        methods: Methods,
        session: Session,
        show: Callable[[LayerKV], tuple[LayerKV, Look]],
    ) -> Iterator[tuple[Place, str, dict[str, Any]]]:
        """Every method at every layer, rate and seed, on one prompt's tensors.

        A method that draws nothing is run once for all seeds. What methods note at one layer for the
        next (`LayerKV.carried`) stays with the method, its rate and its draw.

        Args:
            show: for a layer, the layer as the methods see it, and a function that measures what
                they hold of it.

        Yields:
            (layer, rate, seed), the method's label, and record fields: where, what it cost, what was
            measured; or a failure, which stops no other method.
        """
        carried: dict[tuple[str, float, int], dict[str, Tensor]] = {}
        for layer, whole in self.captured(unit, session):
            check_finite(whole)
            kv, look = show(whole)
            for rate in self.rates:
                drew_nothing: dict[str, Mapping[str, Any]] = {}  # the same for every seed
                for seed in range(self.seeds):
                    for label, (method, _) in methods.items():
                        generator = layer_generator(
                            SEED_STRIDE * session.seed + seed, unit.id, layer
                        )
                        state = generator.get_state()
                        mine = replace(kv, carried=carried.setdefault((label, rate, seed), {}))
                        found = drew_nothing.get(label) or self._measured(
                            label, method, rate, generator, mine, look
                        )
                        if torch.equal(state, generator.get_state()):
                            drew_nothing[label] = found
                            carried[label, rate, seed] = carried[label, rate, 0]
                        where = {"prompt": unit.id, "layer": layer, "rate": rate, "draw": seed}
                        fields = {**where, "prompt_tokens": kv.n, **found}
                        yield (layer, rate, seed), label, fields

    def _measured(
        self,
        label: str,
        method: Method,
        rate: float,
        generator: torch.Generator,
        kv: LayerKV,
        look: Look,
    ) -> Mapping[str, Any]:
        """What compression cost and what was measured; or the failure as record fields."""
        try:
            budget = self.budget_of(method, rate, kv.n, kv.num_layers)
            held, fields = compress_measured(label, method, budget, generator, kv)
            return {**look(held), **fields}
        except Exception as failure:  # noqa: BLE001 - a record with its status
            return {"status": status_of(failure), "error": one_line(failure)}

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


def spread(layers: Sequence[int], most: int | None) -> list[int]:
    """So many of the layers, evenly from the first to the last; None: all."""
    count = min(most or len(layers), len(layers))
    return [layers[i * (len(layers) - 1) // max(1, count - 1)] for i in range(count)]


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
    held, capacity, clock = guard.compress(label, method, kv, budget, generator, kv.carried)
    _, preset = allowed_entries(method, budget, kv.n, kv.num_layers)
    most = int(held.entries.max())
    if held.charged > capacity + 1:
        raise BudgetExceeded(label, kv.layer_index, capacity, held.charged)
    cache_bytes, exact_bytes = held.nbytes, keep_all(kv).nbytes
    scheme = method.quantization()
    if scheme is not None:
        held, cache_bytes = stored(held, scheme, kv.layer_index)
    return held, {
        "capacity": capacity,
        "entries": {"mean": float(held.entries.float().mean()), "max": most},
        "cache_bytes": cache_bytes,
        "exact_bytes": exact_bytes,
        "ratio": cache_bytes / exact_bytes,
        "represented": float(held.represented.mean()) / kv.n,
        "compressed": method.saves_memory or scheme is not None,
        "compress_s": clock.seconds,
        **({} if preset is None else {"budget_preset": preset}),
    }


def stored(held: CompressedKV, scheme: Scheme, layer: int) -> tuple[CompressedKV, int]:
    """What a cache of such a scheme attends to instead of `held` (batch 1), and the bytes it holds.

    Raises:
        KVError: heads of different lengths, which are packed head by head while decoding.
    """
    if held.lengths is not None:
        raise KVError(
            "heads of different lengths are quantized while decoding; allowed: quantize=null"
        )
    sides = []
    packed = held.nbytes
    codecs = scheme.codecs(held.keys[0], held.values[0], layer=layer, seed=0)
    for codec, rows in zip(codecs, (held.keys[0], held.values[0]), strict=True):
        heads, _, dim = rows.shape
        exact = rows[:, codec.count :]
        packed += codec.nbytes + exact.nbytes - rows.nbytes
        if codec.count:  # a codec's inner products with the unit vectors are what it restores
            unit = torch.eye(dim, device=rows.device).expand(heads, dim, dim)
            exact = torch.cat([codec.dot(unit).mT.to(rows.dtype), exact], dim=1)
        sides.append(exact[None])
    return replace(held, keys=sides[0], values=sides[1]), packed
