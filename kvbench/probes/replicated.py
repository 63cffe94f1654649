"""Layers of one length, again and again: random ones of bounded norms, or prompts' first tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.engine.fork import layer_generator
from kvbench.engine.prefill import capture_layers
from kvbench.errors.options import Fraction, Positive, Whole, check_options
from kvbench.kv import KVError, LayerKV
from kvbench.methods.base import SEED_STRIDE
from kvbench.probes.base import Layers, Probe, Repeats, encoded_prompts, origin
from kvbench.run.plan import Methods, Unit
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


@dataclass(frozen=True, kw_only=True)
class Replicated(Probe):
    """A probe of layers of one length at several levels (entries kept, tokens read).

    With `data`, every draw has new tensors and is a repetition; with `prompts`, layers of the model
    hold the first tokens of each prompt that is long enough.

    Attributes:
        draws: repetitions of each data set.
        data: named synthetic data sets; empty with `prompts`.
        prompts: a task whose first `num_prompts` prompts that are long enough are used.
        layers: 1-based, with `prompts`.
    """

    repetition: ClassVar[str] = "replicate"

    draws: Repeats = 4
    data: Mapping[str, BoundedData] = field(default_factory=dict)
    prompts: Task | None = None
    num_prompts: Repeats = 2
    layers: Layers = (1, 2, 3, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.data) == (self.prompts is not None):
            raise TaskError("task.data and task.prompts: exactly one of them must be given")

    @property
    @abstractmethod
    def length(self) -> tuple[str, int]:
        """Tokens that a layer needs, and the options that say so, with their verb."""

    @property
    @abstractmethod
    def levels(self) -> Sequence[str]:
        """What is measured of each layer, as record ids name it."""

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        return {**super().meta(), **origin(self.prompts)}

    def replicates(self, prompt: str) -> Sequence[str]:
        """What the repetitions on one prompt are called."""
        return [prompt]

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per draw of every data set, or per prompt.

        Raises:
            KVError: prompts that are too short.
        """
        if self.prompts is None:
            return [
                Unit(f"{name}/draw{draw}", self._ids([name], [f"draw{draw}"]), (name, draw))
                for draw in range(self.draws)
                for name in self.data
            ]
        option, need = self.length
        found: list[Unit] = []
        longest = 0
        layers = [f"layer {layer}" for layer in self.layers]
        for name, ids in encoded_prompts(self.prompts, session):
            longest = max(longest, len(ids))
            if len(ids) >= need:
                found.append(Unit(name, self._ids(layers, self.replicates(name)), ids[:need]))
            if len(found) == self.num_prompts:
                return found
        raise KVError(
            f"{option} {need} and {len(found)} of the {self.num_prompts} prompts wanted are that long; "
            f"the longest has {longest} tokens"
        )

    def _ids(self, datasets: Sequence[str], replicates: Sequence[str]) -> tuple[str, ...]:
        every = product(replicates, datasets, self.levels)
        return tuple(f"{name}/{level}/{replicate}" for replicate, name, level in every)

    def drawn(self, unit: Unit, n: int, session: Session) -> tuple[str, LayerKV, Tensor, int]:
        """Of a unit with `data`: its name, a layer of n entries, the queries after them, and the seed
        of the draw."""
        name, draw = unit.payload
        seed = SEED_STRIDE * session.seed + draw
        return name, *self.data[name].layer(n, self.length[1] - n, name, seed), seed

    def captured(
        self, unit: Unit, n: int, session: Session
    ) -> Iterator[tuple[str, LayerKV, Tensor]]:
        """Of a unit with `prompts`: each layer's name, the layer as its first n tokens leave it, and the
        queries after them."""
        captured = capture_layers(session.model, unit.payload, [i - 1 for i in self.layers])
        for number in self.layers:
            whole = captured[number - 1]
            assert whole.queries is not None
            layer = replace(
                whole,
                keys=whole.keys[:, :, :n],
                values=whole.values[:, :, :n],
                queries=whole.queries[:, :, :n],
                shared={},
            )
            yield f"layer {number}", layer, whole.queries[:, :, n:]
