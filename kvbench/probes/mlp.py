"""Heavy hitters among the neurons of MLPs (H2O, arXiv 2306.14048, appendix; Figures 11 to 13, Table 12).

A neuron is active at a token where its activation is above 0, and heavy where it is active at more
than a share of all tokens. How often neurons are active (Figure 11), whether those that are heavy are
the same on other texts and at other checkpoints of the training (Figures 12 and 13), what a model loses
without them (Table 12).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.engine.fork import layer_generator
from kvbench.engine.loading import full_attention_layers, load_model, quiet_unless_terminal
from kvbench.engine.neurons import activation_counts, mean_nll
from kvbench.errors.options import Fraction
from kvbench.kv import KVError
from kvbench.methods.base import SEED_STRIDE, Method
from kvbench.methods.exact import Exact
from kvbench.probes.base import Probe, Repeats, StandIn, encoded_prompts, of_kind
from kvbench.probes.layers import LayerSource
from kvbench.probes.ranked import Ranked
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session
from kvbench.tasks.base import Task, TaskError

PAPER = "arXiv 2306.14048, appendix"


@dataclass(frozen=True, kw_only=True)
class Heavy(StandIn):
    """Neurons that are active at more than the share `above` of all tokens; or as many of each layer,
    drawn at random.
    """

    paper: ClassVar[str] = PAPER

    above: Fraction = 0.2
    which: Literal["heavy", "random"] = "heavy"

    def chosen(
        self, counts: Mapping[int, Tensor], tokens: int, seed: int, name: str
    ) -> dict[int, Tensor]:
        """[neurons] bool by layer.

        Args:
            counts, tokens: see `activation_counts`.
            seed, name: of the draw, where there is one.
        """
        found = {layer: count > self.above * tokens for layer, count in counts.items()}
        if self.which == "heavy":
            return found
        drawn = {}
        for layer, heavy in found.items():
            generator = layer_generator(SEED_STRIDE * seed, name, layer)
            drawn[layer] = heavy[torch.randperm(len(heavy), generator=generator)]
        return drawn


@dataclass(frozen=True, kw_only=True)
class _OfPrompts(LayerSource):
    """Of a task's prompts: there are no neurons without a model."""

    kind: ClassVar[type[Method]] = Heavy

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts is None:
            raise TaskError(
                f"task {type(self).__name__} needs prompts; allowed: task.synthetic=null"
            )


@dataclass(frozen=True, kw_only=True)
class NeuronFrequency(Ranked, _OfPrompts):
    """How often the neuron of each rank is active, and the power law through it (Figure 11).

    The score is the share of a prompt's tokens at which the neuron of a rank is active, the most active
    first. `heavy` of each record is the share of the layer's neurons that are heavy by its variant.
    """

    name: ClassVar[str] = "neuron_frequency"
    score_unit: ClassVar[str] = "share of tokens"
    field: ClassVar[str] = "frequency"
    labels: ClassVar[tuple[str, str]] = (
        "rank of the neuron",
        "share of tokens at which it is active",
    )

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """One pass over the prompt.

        Raises:
            KVError: fewer neurons than ranks.
        """
        counts, tokens = activation_counts(session.model, [unit.payload])
        for layer in self.layers_of(session):
            count = counts[layer - 1]
            self.check_count(len(count), f"layer {layer} has {len(count)} neurons")
            often = (count.double() / tokens).sort(descending=True).values
            for label, method in of_kind(self.name, methods, Heavy).items():
                heavy = float((count > method.above * tokens).double().mean())
                about = {"prompt_tokens": tokens, "heavy": heavy}
                yield from self.outcomes(label, often, unit.id, layer, **about)


@dataclass(frozen=True, kw_only=True)
class NeuronDropping(_OfPrompts):
    """Likelihood of prompts without the heavy neurons (Table 12), or without as many others.

    Which neurons are heavy is counted on the first `calibration` prompts; the others are judged. The
    score is the mean negative log-likelihood in nats per token, with exact attention; perplexity is its
    exponential. Departure: the paper trains a GPT-2 and tunes it again after pruning; here nothing is
    trained, so what tuning recovers is not shown.

    Attributes:
        num_prompts: calibration included.
    """

    name: ClassVar[str] = "neuron_dropping"
    score_unit: ClassVar[str] = "nats per token"
    lower_is_better: ClassVar[bool] = True

    calibration: Repeats = 4
    _known: dict[int, tuple[dict[int, Tensor], int]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def ids_at(self, prompt: str, session: Session) -> Iterator[str]:
        """See `LayerSource.ids_at`: the prompt's alone."""
        return iter([prompt])

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """See `LayerSource.units`.

        Raises:
            KVError: a method that is neither `Heavy` nor exact; no prompts beside the calibration's.
        """
        heavy = {label: pair for label, pair in methods.items() if not isinstance(pair[0], Exact)}
        units = super().units(session, heavy)
        if len(units) <= self.calibration:
            raise KVError(
                f"task.calibration is {self.calibration} and there are {len(units)} prompts; allowed: "
                "fewer (task.num_prompts)"
            )
        texts = tuple(unit.payload for unit in units[: self.calibration])
        return [replace(unit, payload=(unit.payload, texts)) for unit in units[self.calibration :]]

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """The prompt once with every set of neurons."""
        ids, texts = unit.payload
        layers = self.layers_of(session)
        if not self._known:
            self._known[0] = activation_counts(session.model, texts)
        counts, tokens = self._known[0]
        counts = {layer - 1: counts[layer - 1] for layer in layers}
        for label, (method, _) in methods.items():
            dropped: dict[int, Tensor] = {}
            if isinstance(method, Heavy):
                dropped = method.chosen(counts, tokens, session.seed, "neurons")
            nll = mean_nll(session.model, ids, dropped)
            share = [float(part.double().mean()) for part in dropped.values()]
            fields = {
                "prompt": unit.id,
                "prompt_tokens": len(ids),
                "new_tokens": len(ids) - 1,
                "dropped": sum(share) / max(1, len(share)),
                "perplexity": float(torch.tensor(nll).double().clamp(max=700).exp()),
                "score": nll,
            }
            yield Outcome(label, unit.id, fields)


def overlap(one: Tensor, other: Tensor) -> dict[str, float | None]:
    """Record fields about two sets of a layer's neurons, [neurons] bool each: their Jaccard index as the
    score, their shares, and what such shares have by chance; None where neither has any neuron."""
    p, q = (float(part.double().mean()) for part in (one, other))
    either = int((one | other).sum())
    return {
        "heavy": p,
        "heavy_other": q,
        "chance": p * q / (p + q - p * q) if either else None,
        "score": int((one & other).sum()) / either if either else None,
    }


@dataclass(frozen=True, kw_only=True)
class NeuronOverlap(Probe):
    """Whether the heavy neurons are the same on other texts (Figure 12) or at other checkpoints of the
    training (Figure 13).

    The score is the Jaccard index of two sets, a layer at a time: neurons heavy in both over neurons
    heavy in either. Two sets of shares p and q that have nothing to do with each other have p q / (p +
    q - p q), which is recorded as `chance` (see `overlap`).

    Attributes:
        contents: kinds of text by name, each the first `num_prompts` prompts of a task.
        checkpoints: in place of several kinds of text, what changes in the model by name: ``{"step
            1000": {revision: step1000}}``.
    """

    name: ClassVar[str] = "neuron_overlap"
    score_unit: ClassVar[str] = "Jaccard index"
    repetition: ClassVar[str] = "layer"
    figures: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"kind": "measured"},
        {"kind": "heatmap", "x": "one", "y": "other"},
    )

    contents: Mapping[str, Task] = field(default_factory=dict)
    checkpoints: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_prompts: Repeats = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        several = len(self.contents) > 1
        if several == bool(self.checkpoints) or not self.contents:
            raise TaskError(
                f"task.contents has {len(self.contents)} kinds of text and task.checkpoints "
                f"{len(self.checkpoints)}; allowed: several kinds and no checkpoints, or one and some"
            )

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        data = {k: v for task in self.contents.values() for k, v in task.digests().items()}
        return {**super().meta(), "data": data}

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit: every pair needs all of them.

        Raises:
            KVError: a method that is no `Heavy`.
        """
        of_kind(self.name, methods, Heavy)
        texts = {
            name: tuple(ids for _, ids in encoded_prompts(task, session, self.num_prompts))
            for name, task in self.contents.items()
        }
        names = list(self.checkpoints or self.contents)
        layers = full_attention_layers(session.spec)
        ids = (f"{a}/{b}/layer{layer}" for a, b in permutations(names, 2) for layer in layers)
        return [Unit("all", tuple(ids), texts)]

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Count everywhere, then compare."""
        layers = full_attention_layers(session.spec)
        counted = dict(self._counted(unit.payload, session))
        for label, method in of_kind(self.name, methods, Heavy).items():
            sets = {
                name: method.chosen(counts, tokens, session.seed, name)
                for name, (counts, tokens) in counted.items()
            }
            for a, b in permutations(sets, 2):
                for layer in layers:
                    found = overlap(sets[a][layer - 1], sets[b][layer - 1])
                    fields = {"one": a, "other": b, "layer": layer, **found}
                    yield Outcome(label, f"{a}/{b}/layer{layer}", fields)

    def _counted(
        self, texts: Mapping[str, Sequence[Sequence[int]]], session: Session
    ) -> Iterator[tuple[str, tuple[dict[int, Tensor], int]]]:
        """By name, in how many of how many tokens each neuron is active."""
        if not self.checkpoints:
            for name, prompts in texts.items():
                yield name, activation_counts(session.model, prompts)
            return
        (prompts,) = texts.values()
        for name, changed in self.checkpoints.items():
            spec = replace(session.spec, **changed)
            device, dtype = session.device, session.dtype
            with quiet_unless_terminal():
                model = load_model(spec, device=device, dtype=dtype, seed=session.seed)
            yield name, activation_counts(model, prompts)
