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

EVERY_RECORD_HAS = frozenset(
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

UNITS_WITH_KEPT = 2
"""The first units of a task record which entries every method kept; two, since one may be a special
case."""

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
        axes = self.task.heatmap
        figures = [Heatmap(x=axes[0], y=axes[1])] if axes else []
        return {
            "version": self.task.version,
            "data": dict(self.task.digests()),
            "score_unit": self.task.score_unit,
            "lower_is_better": False,
            "long_answers": self.task.long_answers,
            "breakdown": list(self.task.breakdown),
            "figures": as_json(figures),
            "unit": self.task.unit,
            "measures": list(self.task.measures),
            "metric": self.task.metric_name(),
        }

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per prefill: per example, or where the question comes after compression, per context.

        Raises:
            KVError: see `_check_budgets` and `_check_order_of_compression`; a method that cannot
                generate; a field of the task that every record has for something else.
        """
        examples, _ = self._examples(session)
        for encoded in examples:
            # RULER names the task of each example itself: the one field that a task may set.
            names = set(encoded.example.fields) - {"task"}
            refuse_taken(f"task {self.task.name}, example {encoded.example.id!r}: fields", names)
        for label, (method, budget) in methods.items():
            with asking(label):
                Fork(
                    label, method, budget, session.seed, "", room=0
                )  # refuses what cannot generate
        if examples:
            self._check_budgets(examples, session, methods)
        self._check_order_of_compression(examples, session)
        by_prefill: dict[str, list[EncodedExample]] = {}
        for encoded in examples:
            shares_prefill = session.compress_after == "context"
            name = encoded.context if shares_prefill else encoded.example.id
            by_prefill.setdefault(name, []).append(encoded)
        return [
            _unit(name, sharing, session.sampling.samples, notes_kept=place < UNITS_WITH_KEPT)
            for place, (name, sharing) in enumerate(by_prefill.items())
        ]

    def _check_budgets(
        self, examples: Sequence[EncodedExample], session: Session, methods: Methods
    ) -> None:
        """Refuse budgets that leave nothing to compress, or whose share of the shortest prompt is less
        than sink and window.

        Raises:
            KVError: naming the method or the budget.
        """
        if session.compress_after == "context":
            compressed = [len(encoded.context_ids) for encoded in examples]
        else:
            compressed = [encoded.n for encoded in examples]
        longest = max(encoded.n for encoded in examples)
        for label, (method, budget) in methods.items():
            with asking(label, "uses_budget"):
                uses_budget = method.uses_budget
            if not uses_budget:
                continue
            ends = budget.sink + budget.window
            if ends > longest:
                raise KVError(
                    f"budget.sink + budget.window is {ends}; the longest prompt of task "
                    f"{self.task.name} has {longest} tokens, so {label!r} would compress nothing; "
                    f"allowed: at most {longest}"
                )
            budget.capacity(min(compressed))  # refuses a share of too few tokens

    def _check_order_of_compression(
        self, examples: Sequence[EncodedExample], session: Session
    ) -> None:
        """Refuse `compress_after` "context" without a context or a question, and "prompt" where a turn
        follows the method's own answer.

        Raises:
            KVError: naming the example or the task.
        """
        if session.compress_after == "context":
            for encoded in examples:
                if not encoded.question_ids or not encoded.context_ids:
                    raise KVError(
                        f"compress_after is 'context' and example {encoded.example.id!r} has no "
                        f"{'context' if encoded.question_ids else 'question'}; allowed: prompt"
                    )
        elif any(encoded.example.history == "own" for encoded in examples):
            raise KVError(
                f"compress_after is 'prompt' and task {self.task.name} goes on from the methods' own "
                "answers, which makes other prompts of each; allowed: context (or golden answers)"
            )

    def datasets(self, session: Session) -> list[str]:
        """Every data set of the task, whatever the limit."""
        return self._examples(session)[1]

    def _examples(self, session: Session) -> tuple[list[EncodedExample], list[str]]:
        """The examples of the first `limit` contexts as token ids, and every data set of the task."""

        def make() -> tuple[list[EncodedExample], list[str]]:
            examples = self.task.examples(session.encoder)
            contexts = dict.fromkeys(example.context_id or example.id for example in examples)
            first_contexts = set(islice(contexts, self.limit))
            chosen = [
                example
                for example in examples
                if (example.context_id or example.id) in first_contexts
            ]
            datasets = dict.fromkeys(example.dataset for example in examples)
            return encode_examples(chosen, session.encoder), list(datasets)

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
        outcomes_by_unit: list[list[Outcome]] = []
        for (unit, _), answers in zip(work, _answers(prompts, session), strict=True):
            outcomes: list[Outcome] = []
            for label, results in answers.items():
                for record_id, result in zip(unit.record_ids, results, strict=True):
                    outcomes.append(self._outcome(unit, record_id, label, result, session))
            outcomes_by_unit.append(outcomes)
        return outcomes_by_unit

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


def _unit(name: str, examples: Sequence[EncodedExample], samples: int, *, notes_kept: bool) -> Unit:
    """The unit of the examples that share one prefill, each answered `samples` times.

    Records of one sample stand together, so that questions which follow on from each other do.
    """
    record_ids: list[str] = []  # with those that occur twice, which the job refuses
    by_record: dict[str, EncodedExample] = {}
    fields: dict[str, dict[str, Any]] = {}
    for sample in range(samples):
        for encoded in examples:
            record_id = encoded.example.id
            if sample:
                record_id = f"{record_id}/sample{sample}"
            record_ids.append(record_id)
            by_record[record_id] = encoded
            fields[record_id] = encoded.fields(sample, samples)
    return Unit(
        name,
        record_ids=tuple(record_ids),
        payload=by_record,
        fields=fields,
        context=examples[0].example.context_id,
        answers=len(record_ids),
        notes_kept=notes_kept,
        examples=tuple(examples),
    )


def refuse_taken(whose: str, names: Iterable[str]) -> None:
    """Refuse a task's or a method's fields whose names every record has already.

    Raises:
        KVError: naming the field.
    """
    for name in names:
        if name in EVERY_RECORD_HAS:
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
    """What every method answers to each prompt's questions, by label."""
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
