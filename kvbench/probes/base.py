"""What probes share: what they tell reports, a task's prompts as tokens, types of their options (whose
limits lie far above what a run could finish)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from kvbench.engine.fork import Cost
from kvbench.engine.loading import Model
from kvbench.engine.prefill import capture_layers
from kvbench.engine.scoring import CompressedPrompt, masked_pass_cache
from kvbench.errors import one_line
from kvbench.errors.options import Distinct, check_options
from kvbench.kv import LayerKV
from kvbench.records.figures import Figure, TaskKind, as_json
from kvbench.run.encoding import EncodedExample, encode_example
from kvbench.run.plan import Plan, status_of
from kvbench.run.session import Session
from kvbench.tasks.base import Task, TaskError

Repeats = Annotated[int, Ge(1), Le(100_000)]
"""Repetitions, each of which is a record of its own."""
Layers = Distinct[Annotated[int, Ge(1), Le(10_000)]]
"""Numbers of layers, counted from 1."""


def encoded_prompts(task: Task, session: Session, most: int | None = None) -> list[EncodedExample]:
    """A task's prompts, or its first `most`, as tokens."""
    return [encode_example(e, session.encoder) for e in task.examples(session.encoder)[:most]]


def failed(failure: Exception) -> dict[str, Any]:
    """Record fields of what could not be measured."""
    return {"status": status_of(failure), "error": one_line(failure)}


def places(tokens: int, most: int) -> dict[str, slice]:
    """Slices of the places 0 .. tokens - 1 of a text, from the second on each twice as long as the one
    before, by names that count from 1: token 1, token 2, tokens 3-4, tokens 5-8 ... The names are the
    same for all texts of at most `most` tokens."""
    runs: dict[str, slice] = {}
    begin = 0
    end = 1
    while begin < tokens:
        last = min(most, end)
        several = f"tokens {begin + 1}\N{EN DASH}{last}"
        runs[f"token {last}" if last == begin + 1 else several] = slice(begin, min(end, tokens))
        begin = end
        end = 2 * end
    return runs


@dataclass(frozen=True, kw_only=True)
class ReadCost(Cost):
    """What a method costs on a prompt that was read to be judged.

    Attributes:
        prefill_s: seconds of the prefill, which all methods share.
        imagined: a mask of a whole pass: entries and bytes are those of a cache that nobody holds.
    """

    prefill_s: float = 0.0
    imagined: bool = False

    def record(self, *, long_answer: bool = False) -> dict[str, Any]:
        """See `Cost.record`; `imagined` only where it is."""
        fields_of_cost = {**super().record(long_answer=long_answer), "prefill_s": self.prefill_s}
        return fields_of_cost | ({"imagined": True} if self.imagined else {})


def costs_of(model: Model, reading: CompressedPrompt, tokens: int) -> dict[str, ReadCost]:
    """What every method of a reading costs by now; of one that masks a whole pass, what a cache would
    cost at the end of `tokens`."""
    n, exact, seconds = reading.start.n, reading.start.exact_bytes, reading.start.prefill_s
    costs = {f.label: ReadCost(**vars(f.cost()), prefill_s=seconds) for f in reading.forks}
    for label, (method, budget) in reading.whole.items():
        entries, ratio = masked_pass_cache(model, (method, budget), tokens)
        costs[label] = ReadCost(
            prompt_tokens=n,
            capacity=budget.capacity(n) if method.saves_memory else n,
            entries={"mean": entries, "max": entries},
            cache_bytes=round(ratio * exact),
            exact_bytes=exact,
            compressed=True,
            prefill_s=seconds,
            imagined=True,
        )
    return costs


@dataclass(frozen=True, kw_only=True)
class Probe(Plan):
    """A plan that measures tensors or times: a frozen dataclass whose fields are its
    options. The class attributes are what reports are told of its scores."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Raised whenever scores change; part of the config hash."""
    score_unit: ClassVar[str]
    lower_is_better: ClassVar[bool] = False
    breakdown: ClassVar[tuple[str, ...]] = ()
    """Record fields that tables split by."""
    measures: ClassVar[tuple[str, ...]] = ()
    """Record fields that a table shows beside the score."""
    figures: ClassVar[tuple[Figure, ...]] = ()
    kind: ClassVar[TaskKind] = "scores"
    """What the probe measures, which decides the report's tables."""
    repetition: ClassVar[str] = "example_id"
    """Record field of the independent repetitions, which intervals resample."""

    def __post_init__(self) -> None:
        """Check the options by their hints; a subclass with more to check calls this first.

        Raises:
            TaskError: one line that names the option, its value and what is allowed.
        """
        check_options(self, "task.", TaskError)

    def meta(self) -> dict[str, Any]:
        """See `kvbench.run.plan.Plan.meta`; a subclass changes what depends on its options."""
        return {
            "version": self.version,
            "data": None,
            "subject": None,
            "score_unit": self.score_unit,
            "lower_is_better": self.lower_is_better,
            "breakdown": list(self.breakdown),
            "measures": list(self.measures),
            "figures": as_json(self.figures),
            "kind": self.kind,
            "unit": self.repetition,
        }


@dataclass(frozen=True, kw_only=True)
class LayerProbe(Probe):
    """A probe of single layers: of a task's prompts, or of tensors that it draws.

    Attributes:
        prompts: a task whose first `num_prompts` prompts are used; None: tensors are drawn.
        layers: numbers from 1.
    """

    lower_is_better: ClassVar[bool] = True
    drawn: ClassVar[str]
    """The option that says which tensors are drawn."""

    prompts: Task | None = None
    num_prompts: Repeats = 8
    layers: Layers = (1, 2, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.prompts) == bool(getattr(self, self.drawn)):
            both = "both" if self.prompts else "neither"
            raise TaskError(
                f"task.{self.drawn} and task.prompts: exactly one of them must be given (got {both})"
            )

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        if self.prompts is None:
            return super().meta() | {"data": {}, "subject": "synthetic tensors"}
        return super().meta() | {"data": dict(self.prompts.digests())}

    def captured(
        self, session: Session, prompt: EncodedExample, tokens: int | None = None
    ) -> Iterator[tuple[int, LayerKV]]:
        """The layers of a prompt, or of its first `tokens`, by number, in the order asked for."""
        ids = (*prompt.context_ids, *prompt.question_ids)[:tokens]
        layers = capture_layers(session.model, ids, [layer - 1 for layer in self.layers])
        return ((layer, layers[layer - 1]) for layer in self.layers)
