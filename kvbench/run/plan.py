"""What the runner runs: units of work that end in records.

A benchmark task (examples in, scores out) and a probe (a tensor-level or timing experiment) look the
same to the runner: a `Plan`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any, ClassVar

from kvbench.engine.faults import free_memory, is_out_of_memory, release_frames
from kvbench.engine.fork import Fork
from kvbench.engine.generate import Generation, Prompt, Question, run_conversations
from kvbench.engine.stopping import Stopping
from kvbench.errors import one_line
from kvbench.kv import Budget, BudgetExceeded, KVError
from kvbench.methods.base import Method, asking
from kvbench.records.figures import Heatmap, as_json
from kvbench.records.schema import COMMON_FIELDS
from kvbench.run.encoding import EncodedExample, conversations_of, encode_examples, pieces_of
from kvbench.run.session import Session
from kvbench.tasks.base import Task

log = logging.getLogger(__name__)

TAKEN = frozenset(
    {
        *COMMON_FIELDS,
        *(field.name for field in fields(Generation)),
        "context_id",
        "sample",
        "history",
        "evidence",
        "beyond_positions",
        "max_positions",
    }
)
"""Fields of a record that the engine and the runner write: neither a task nor a method writes them."""
NOTED = 2
"""So many units of a task, the first, record which entries every method kept: two, since one may be a
special case."""
Methods = Mapping[str, tuple[Method, Budget]]
"""Methods of a job by label, each with its budget."""


@dataclass(frozen=True)
class Unit:
    """The smallest piece of work: done whole, or done again after an interruption.

    Attributes:
        id: unique within the plan, stable under `limit`.
        record_ids: the example ids of its records; every method has one record of each.
        payload: whatever the plan needs to run it.
        fields: by record id, the fields that a record has even where its method fails (the dataset, a
            number of lines ...).
        context: the id of what it shares with other units: a limit and a shard take all units of a
            context or none. None where it shares nothing.
        answers: how many times `example_timeout` it may take.
        notes_kept: whether the first record of each method says which entries the method kept.
        examples: a benchmark's examples in this unit, which share their context.
    """

    id: str
    record_ids: tuple[str, ...]
    payload: Any
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    context: str | None = None
    answers: int = 1
    notes_kept: bool = False
    examples: tuple[EncodedExample, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """One record in the making: the fields the plan knows; the runner adds the others."""

    method: str
    example_id: str
    fields: Mapping[str, Any]


class Plan(ABC):
    """A task or a probe, as the runner sees it.

    Attributes:
        batches_units: whether several units may be given to `run_batch` at once.
        decoders: whose decoding it can measure (`Method.decoded_by`).
    """

    batches_units: ClassVar[bool] = False
    decoders: ClassVar[tuple[str, ...]] = ("kvbench",)

    @abstractmethod
    def meta(self) -> dict[str, Any]:
        """Facts for reports: version, score_unit, lower_is_better, breakdown, figures, unit,
        measures; `data`, digests of the files the examples come from; and `subject`, the thing that
        the numbers are about where it is not the model (None: the model)."""

    @abstractmethod
    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """All units, in an order of which every prefix is a balanced sample. Loads no model."""

    @abstractmethod
    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """One record per (method, record id)."""

    def run_batch(
        self, work: Sequence[tuple[Unit, Methods]], session: Session
    ) -> Sequence[Sequence[Outcome]]:
        """Several units, each with the methods that it is still to be run with: the outcomes of each, as
        `run` gives them. A failure of the whole is raised."""
        return [list(self.run(unit, methods, session)) for unit, methods in work]


def status_of(error: BaseException) -> str:
    """The record status an exception stands for."""
    if isinstance(error, BudgetExceeded):
        return "over_budget"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "oom" if is_out_of_memory(error) else "error"


@dataclass(frozen=True)
class TaskPlan(Plan):
    """A benchmark task as a plan: one prefill per example, or per context where the question comes after
    compression, serves every method.

    Attributes:
        limit: contexts that are wanted at most: no others are turned into tokens.
    """

    batches_units: ClassVar[bool] = True

    task: Task
    limit: int | None = None

    def meta(self) -> dict[str, Any]:
        """See `Plan.meta`."""
        xy = self.task.heatmap
        return {
            "version": self.task.version,
            "data": dict(self.task.digests()),
            "score_unit": self.task.score_unit,
            "lower_is_better": False,
            "long_answers": self.task.long_answers,
            "breakdown": list(self.task.breakdown),
            "figures": as_json([Heatmap(x=xy[0], y=xy[1])] if xy else []),
            "unit": self.task.unit,
            "measures": list(self.task.measures),
        }

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per prefill: per example, or where the question comes after compression, per context.

        Raises:
            KVError: a budget that no prompt is long enough for, or a share that of the shortest is
                less than sink and window; context compression of a prompt whose question is empty;
                turns after the method's own answers where each turn is a prompt of its own; a field of
                the
            task's own that a record has for something else.
        """
        encoded, _ = self._examples(session)
        for example in (e.example for e in encoded):
            # A task of several may name each example's own (RULER's).
            names = set(example.fields) - {"task"}
            refuse_taken(f"task {self.task.name}, example {example.id!r}: fields", names)
        for label, (method, budget) in methods.items():
            with asking(label):
                Fork(
                    label, method, budget, session.seed, "", room=0
                )  # refuses what cannot generate
        after = session.compress_after == "context"
        longest = max((e.n for e in encoded), default=0)
        for label, (method, budget) in methods.items():
            with asking(label, "uses_budget"):
                uses_budget = method.uses_budget
            if not uses_budget or not encoded:
                continue
            ends = budget.sink + budget.window
            if ends > longest:
                raise KVError(
                    f"budget.sink + budget.window is {ends}; the longest prompt of task "
                    f"{self.task.name} has {longest} tokens, so {label!r} would compress nothing; "
                    f"allowed: at most {longest}"
                )
            budget.capacity(min(len(e.context_ids) if after else e.n for e in encoded))
        if after:
            for e in encoded:
                if not e.question_ids or not e.context_ids:
                    raise KVError(
                        f"compress_after is 'context' and example {e.example.id!r} has no "
                        f"{'context' if e.question_ids else 'question'}; allowed: prompt"
                    )
        elif any(e.example.history == "own" for e in encoded):
            raise KVError(
                f"compress_after is 'prompt' and task {self.task.name} goes on from the methods' own "
                "answers, which makes other prompts of each; allowed: context (or golden answers)"
            )
        together: dict[str, list[EncodedExample]] = {}
        for e in encoded:
            name = e.context if after else e.example.id
            together.setdefault(name, []).append(e)
        units, samples = [], session.sampling.samples
        for place, (name, each) in enumerate(together.items()):
            ids: list[str] = []
            by_record, fields = {}, {}
            for sample in range(samples):  # questions that follow on from each other stand together
                for e in each:
                    record_id = e.example.id + (f"/sample{sample}" if sample else "")
                    by_record[record_id], fields[record_id] = e, e.fields(sample, samples)
                    ids.append(record_id)
            context, noted = each[0].example.context_id, place < NOTED
            whole = (by_record, fields, context, len(ids), noted, tuple(each))
            units.append(Unit(name, tuple(ids), *whole))
        return units

    def datasets(self, session: Session) -> list[str]:
        """Every data set of the task, whatever the limit."""
        return self._examples(session)[1]

    def _examples(self, session: Session) -> tuple[list[EncodedExample], list[str]]:
        def make() -> tuple[list[EncodedExample], list[str]]:
            every = self.task.examples(session.encoder)
            names = dict.fromkeys(e.context_id or e.id for e in every)
            wanted = set(islice(names, self.limit))
            some = [e for e in every if (e.context_id or e.id) in wanted]
            return encode_examples(some, session.encoder), list(
                dict.fromkeys(e.dataset for e in every)
            )

        return session.once("examples", (self.task, self.limit), make)

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Generate with every method from one prefill, and score."""
        yield from self.run_batch([(unit, methods)], session)[0]

    def run_batch(
        self, work: Sequence[tuple[Unit, Methods]], session: Session
    ) -> list[list[Outcome]]:
        """Several units: prefilled, all decoded together, and scored."""
        prompts = [_prompt(unit, methods, session) for unit, methods in work]
        _warm_up(prompts[0], session)
        answers = _answers(prompts, session)
        return [
            [
                self._outcome(unit, record_id, label, result, session)
                for label, results in answer.items()
                for record_id, result in zip(unit.record_ids, results, strict=True)
            ]
            for (unit, _), answer in zip(work, answers, strict=True)
        ]

    def _outcome(
        self,
        unit: Unit,
        record_id: str,
        label: str,
        result: Generation,
        session: Session,
    ) -> Outcome:
        """The record of one method on one example, but for what the runner adds."""
        encoded: EncodedExample = unit.payload[record_id]
        example = encoded.example
        if result.failure is None:
            others = {*unit.fields[record_id], *self.task.measures}
            result = with_extras_checked(label, result, others)
        fields: dict[str, Any] = {
            "prompt_tokens": encoded.n,
            "answers": list(example.answers),
            "prompt_tail": (example.context + example.question)[-200:],
            **unit.fields[record_id],
            **measured(result, long_answer=self.task.long_answers),
        }
        if result.kept is not None and record_id == unit.record_ids[0]:
            fields["kept"] = result.kept | pieces_of(
                encoded, result.kept, session.encoder.tokenizer
            )
        positions = session.encoder.max_positions
        if positions is not None and encoded.n > positions:
            fields |= {"beyond_positions": True, "max_positions": positions}
        if result.failure is None:
            text = session.encoder.decode(result.tokens)
            fields["prediction"] = session.stopping(example).cut(text)
            scores = self.task.score(fields["prediction"], example)
            refuse_taken(f"task {self.task.name}: scores", {k for k in scores if k != "score"})
            fields.update(scores)
        return Outcome(label, record_id, fields)


def refuse_taken(whose: str, names: Iterable[str]) -> None:
    """Refuse a task's or a method's fields whose names every record has already.

    Raises:
        KVError: naming the field.
    """
    for name in names:
        if name in TAKEN:
            raise KVError(f"{whose} have {name!r}, which every record has; allowed: other names")


def with_extras_checked(label: str, result: Generation, others: Collection[str] = ()) -> Generation:
    """The generation; a failed one if `Method.extras` has names of fields that every record has or that
    are among `others`, the task's own."""
    try:
        whose = f"the extras of method {label!r}"
        refuse_taken(whose, result.extras)
        for name in result.extras:
            if name in others:
                raise KVError(f"{whose} have {name!r}; allowed: names that the task does not use")
    except KVError as failure:
        return replace(result, failure=failure, extras={})
    return result


def _prompt(unit: Unit, methods: Methods, session: Session) -> Prompt:
    """The prompt of a unit: its conversations, in the order of its records."""
    first = unit.examples[0]
    after = session.compress_after == "context"

    def question(encoded: EncodedExample, sample: int) -> Question:
        ids = encoded.question_ids if after else ()
        stopping = session.stopping(encoded.example, unit.answers)
        return Question(ids, stopping, encoded.example.id, sample)

    return Prompt(
        first.context_ids,
        () if after else first.question_ids,
        methods,
        session.stopping(first.example, unit.answers),
        first.context,
        note_kept=unit.notes_kept,
        encoder=session.encoder,
        conversations=[
            [question(encoded, sample) for encoded in conversation]
            for sample in range(session.sampling.samples)
            for conversation in conversations_of(unit.examples)
        ],
    )


def _answers(prompts: Sequence[Prompt], session: Session) -> list[dict[str, list[Generation]]]:
    return run_conversations(
        session.model,
        prompts,
        seed=session.seed,
        sampling=session.sampling,
        graphs=session.graphs,
    )


def _warm_up(prompt: Prompt, session: Session) -> None:
    """Generate two tokens with the methods that have not run yet, and record nothing. On a GPU a kernel
    is compiled at its first launch, which must not count in an example's seconds."""
    methods = {
        label: method for label, method in prompt.methods.items() if label not in session.warmed
    }
    if session.device.type != "cuda" or not methods:
        return
    session.warmed.update(methods)
    question = replace(prompt.conversations[0][0], stopping=Stopping(2))
    try:
        _answers([replace(prompt, methods=methods, conversations=[[question]])], session)
    except Exception as failure:  # noqa: BLE001 - the example fails in the same way, and its record says so
        release_frames(failure)
    free_memory(session.device)


def measured(result: Generation, *, long_answer: bool = False) -> dict[str, Any]:
    """The fields of a record that were measured while generating; None where a failure left none.

    Args:
        long_answer: see `Cost.record`.
    """
    failure = result.failure
    return {
        "status": "ok" if failure is None else status_of(failure),
        "error": None if failure is None else one_line(failure),
        "new_tokens": result.new_tokens,
        "prefill_s": result.prefill_s,
        "decode_s": result.decode_s,
        "batch": result.batch,
        **result.record(long_answer=long_answer),
    }
