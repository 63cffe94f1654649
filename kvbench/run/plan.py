"""Plans: the items of work of a job, and how an item becomes records.

The runner knows only `Plan`. A probe (a measurement of tensors or of time) is a plan itself; `TaskPlan`
makes one of a benchmark task (examples in, scores out).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any, ClassVar

from kvbench.engine.answer import Answer, Stopping
from kvbench.engine.ask import Question, answer, converse, read, room_of
from kvbench.engine.cost import Cost
from kvbench.engine.device import free_memory, is_out_of_memory, release_frames
from kvbench.engine.kept import strips_by_label
from kvbench.engine.prefill import Reading
from kvbench.engine.row import Row
from kvbench.errors import one_line, traceback_of
from kvbench.kv import Budget, BudgetExceeded, KVError
from kvbench.methods.base import Method
from kvbench.records.figures import Heatmap, as_json
from kvbench.records.schema import COMMON_FIELDS
from kvbench.run.encoding import EncodedExample, conversations_of, encode_examples, pieces_of
from kvbench.run.session import Session
from kvbench.tasks.base import Task

log = logging.getLogger(__name__)

EVERY_RECORD_HAS = frozenset(
    {
        *COMMON_FIELDS,
        *(field.name for field in fields(Cost)),
        "tokens",
        "failure",
        "kept",
        "context_id",
        "sample",
        "history",
        "evidence",
        "thought",
        "beyond_positions",
        "max_positions",
    }
)
"""The fields of a record that the engine and the runner write. Tasks and methods may not use these
names."""

ITEMS_WITH_KEPT = 2
"""The number of items, the first ones of a task, that record which entries every method kept. Two, since
one may be a special case."""

Methods = Mapping[str, tuple[Method, Budget]]
"""The methods of a job by label, each with its budget."""
Fields = dict[str, Any]
"""The fields of one record that a plan knows, method and example id among them; `Job.record` adds the
others."""


@dataclass(frozen=True)
class WorkItem:
    """The smallest piece of work. If it is interrupted, the methods without all its records run it
    again.

    Attributes:
        id: unique within the plan, and the same whatever the limit of the job is.
        record_ids: the example ids of its records; every method has one record of each.
        payload: whatever a probe needs to run it.
        fields: by record id, the fields that a record has even where its method fails (the dataset, a
            number of lines ...).
        context: the id of the context that it shares with other items, or None. The limit and the shard
            of a job take all items of a context, or none.
        answers: how many answers each method gives; `example_timeout` is the time of one.
        notes_kept: whether the first record of each method says which entries the method kept.
        examples: the benchmark's examples in this item, which share their context, in the order of
            `record_ids`, which has them once for each sample; none for a probe.
    """

    id: str
    record_ids: tuple[str, ...]
    payload: Any = None
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    context: str | None = None
    answers: int = 1
    notes_kept: bool = False
    examples: tuple[EncodedExample, ...] = ()


Work = tuple[WorkItem, Methods]
"""An item, and the methods that it is still to be run with."""


class Plan(ABC):
    """A task or a probe, as the runner sees it.

    Attributes:
        batches_items: whether `run` may be given several items, which it runs together.
        reads_whole_prompts: whether all of a prompt is compressed, whatever `compress_after` says: where
            seconds or layers are measured and no token is judged.
    """

    batches_items: ClassVar[bool] = False
    reads_whole_prompts: ClassVar[bool] = False

    @abstractmethod
    def meta(self) -> dict[str, Any]:
        """The facts of the task that a report needs (`kvbench.records.schema.TaskMeta`), and: version;
        data, the digests of the files that the examples come from; and subject, what the numbers are
        about where that is not the model."""

    @abstractmethod
    def items(self, session: Session, methods: Methods) -> Sequence[WorkItem]:
        """All items, in an order whose first items are a balanced sample, however many are taken. It
        must not load the model."""

    @abstractmethod
    def run(self, work: Sequence[Work], session: Session) -> Iterator[Fields]:
        """Run one item, or several (`batches_items`). Yields the fields of one record for each method
        and record id."""


def failure_fields(failure: Exception) -> dict[str, Any]:
    """The record fields of a failure: its status, and one line about it; the log has its traceback."""
    log.debug("%s", traceback_of(failure))
    status = "oom" if is_out_of_memory(failure) else "error"
    if isinstance(failure, BudgetExceeded):
        status = "over_budget"
    elif isinstance(failure, TimeoutError):
        status = "timeout"
    return {"status": status, "error": one_line(failure)}


@dataclass(frozen=True)
class TaskPlan(Plan):
    """A benchmark task as a plan. All methods share one prefill per example, or one per context where
    the question comes after compression.

    Attributes:
        limit: the number of contexts, the first ones, whose examples are encoded and run; None: all.
    """

    batches_items: ClassVar[bool] = True

    task: Task
    limit: int | None = None

    def meta(self) -> dict[str, Any]:
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

    def items(self, session: Session, methods: Methods) -> Sequence[WorkItem]:
        # One per prefill: per example or, where the question comes after compression, per context.
        examples, _ = self._examples(session)
        for encoded in examples:
            # RULER names the task of each example itself: the one field that a task may set.
            names = set(encoded.example.fields) - {"task"}
            refuse_taken(f"task {self.task.name}, example {encoded.example.id!r}: fields", names)
        for label, (method, budget) in methods.items():
            Row(label, method, budget, session.seed, "")  # refuses a method that cannot generate
        if examples:
            longest = max(encoded.n for encoded in examples)
            shortest = min(e.n - e.held_back(session.compress_after) for e in examples)
            whose = f"the longest prompt of task {self.task.name}"
            check_budgets(methods, longest, shortest, whose)
        self._check_order_of_compression(examples, session, methods)
        by_prefill: dict[str, list[EncodedExample]] = {}
        contexts_share_prefill = session.compress_after == "context"
        for encoded in examples:
            name = encoded.context if contexts_share_prefill else encoded.example.id
            by_prefill.setdefault(name, []).append(encoded)
        samples = session.sampling.samples
        return [
            _item(name, of_prefill, samples, notes_kept=number < ITEMS_WITH_KEPT)
            for number, (name, of_prefill) in enumerate(by_prefill.items())
        ]

    def _check_order_of_compression(
        self, examples: Sequence[EncodedExample], session: Session, methods: Methods
    ) -> None:
        """Refuse `compress_after` "context" where an example has no context or no question, and the
        others where an example follows the method's own answer. Refuse "prompt" where an answer has one
        token, the exact cache's, whatever a method keeps."""
        if session.compress_after == "context":
            for encoded in examples:
                check_context(encoded, session, "example")
        elif any(encoded.example.history == "own" for encoded in examples):
            raise KVError(
                f"compress_after is {session.compress_after!r} and task {self.task.name} goes on from "
                "the methods' own answers, which makes other prompts of each; allowed: context (or "
                "golden answers)"
            )
        if session.compress_after == "prompt" and not all(
            method.is_exact for method, _ in methods.values()
        ):
            for encoded in examples:
                if encoded.example.max_new_tokens == 1:
                    raise KVError(
                        f"compress_after is 'prompt' and example {encoded.example.id!r} has "
                        "max_new_tokens 1: that token is the exact cache's under every method; "
                        "allowed: all_but_last, context, or method=exact alone"
                    )

    def datasets(self, session: Session) -> list[str]:
        """All datasets of the task, whatever the limit is."""
        return self._examples(session)[1]

    def _examples(self, session: Session) -> tuple[list[EncodedExample], list[str]]:
        """The encoded examples of the first `limit` contexts, and all datasets of the task."""

        def make() -> tuple[list[EncodedExample], list[str]]:
            task = self.task if self.limit is None else self.task.first(self.limit)
            examples = task.examples(session.encoder)
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

    def run(self, work: Sequence[Work], session: Session) -> Iterator[Fields]:
        """Prefill the prompts, decode the answers of all methods together, and score them."""
        if session.device.type == "cuda":
            _warm_up(*work[0], session)
        talks, kept = [], list[dict[str, Any]]()
        for item, methods in work:
            asked = _conversations(item, session)
            first = item.examples[0]
            room = room_of(asked)
            reading = reading_of(first, methods, session, name=first.context, room=room)
            kept.append(strips_by_label(reading.rows, reading.n) if item.notes_kept else {})
            talks.append((reading, asked))
        answers = converse(
            session.model,
            talks,
            seed=session.seed,
            sampling=session.sampling,
            steps=session.steps,
        )
        for (item, _), by_label, strips in zip(work, answers, kept, strict=True):
            for label, own in by_label.items():
                for number, one in enumerate(own):
                    yield self._record(item, number, label, one, session, strips.get(label))

    def _record(
        self,
        item: WorkItem,
        number: int,
        label: str,
        result: Answer,
        session: Session,
        kept: dict[str, Any] | None,
    ) -> Fields:
        """The record, of this number in the item, of one method's answer. `kept`: see
        `strips_by_label`."""
        record_id = item.record_ids[number]
        encoded = item.examples[number % len(item.examples)]
        example = encoded.example
        if result.failure is None:
            others = {*item.fields[record_id], *self.task.measures}
            result = with_extras_checked(label, result, others)
        fields: Fields = {
            "method": label,
            "example_id": record_id,
            "prompt_tokens": encoded.n,
            "max_new_tokens": example.max_new_tokens,
            "answers": list(example.answers),
            "prompt_tail": (example.context + example.question)[-200:],
            **item.fields[record_id],
            **measured(result, long_answer=self.task.long_answers),
        }
        if result.cost.prompt_tokens:
            fields["held_back"] = encoded.n - result.cost.prompt_tokens
        if kept is not None and number == 0:
            fields["kept"] = kept | pieces_of(encoded, kept, session.encoder.tokenizer)
        positions = session.encoder.max_positions
        if positions is not None and encoded.n > positions:
            fields |= {"beyond_positions": True, "max_positions": positions}
        if result.failure is None:
            stopping = session.stopping(example)
            thought, fields["prediction"] = _text(result.tokens, stopping, session)
            if thought is not None:
                fields["thought"] = thought
            by_itself = replace(stopping, is_final=None)
            fields["ended_early"] = result.ended and not by_itself.reached(
                result.chosen, result.begins
            )
            scores = self.task.score(fields["prediction"], example)
            refuse_taken(f"task {self.task.name}: scores", {k for k in scores if k != "score"})
            fields.update(scores)
            if fields.get("held_back") == 0:  # the first token is the exact cache's
                _, first = _text(result.tokens[:1], stopping, session)
                fields["first_token_score"] = self.task.score(first, example)["score"]
        return fields


def check_context(encoded: EncodedExample, session: Session, what: str) -> None:
    """Refuse an example without a context or a question, under ``compress_after=context``. Tokens that
    the model has before every prompt, such as a chat template's, are no context."""
    context, question = encoded.context_ids, encoded.question_ids
    if not question or context == session.encoder.prefix_ids[: len(context)]:
        raise KVError(
            f"compress_after is 'context' and {what} {encoded.example.id!r} has no "
            f"{'context' if question else 'question'}; allowed: all_but_last"
        )


def check_budgets(methods: Methods, longest: int, shortest: int, whose: str) -> None:
    """Refuse a budget whose sink and window hold the longest prompt, so that nothing is compressed, and
    one whose share of the shortest is less than sink and window; `whose` names the longest in the
    message."""
    for label, (method, budget) in methods.items():
        if not method.uses_budget:
            continue
        ends = budget.sink + budget.window
        if ends > longest:
            raise KVError(
                f"budget.sink + budget.window is {ends}; {whose} has {longest} tokens, so {label!r} "
                f"would compress nothing; allowed: at most {longest}"
            )
        budget.capacity(shortest)  # refuses a share of too few tokens


def _text(tokens: Sequence[int], stopping: Stopping, session: Session) -> tuple[str | None, str]:
    """The thought in an answer (None for a model that does not think), and the text after it."""
    thought, text = None, session.encoder.decode(tokens)
    if session.encoder.thought is not None:
        thought, text = session.encoder.thought.split(text)
    return thought, stopping.cut(text)


def _item(
    name: str, examples: Sequence[EncodedExample], samples: int, *, notes_kept: bool
) -> WorkItem:
    """The item of the examples that share one prefill, each answered `samples` times.

    The records of one sample follow each other, since a question may follow on from the answer before.
    """
    record_ids: list[str] = []  # `Job.items` refuses ids that occur twice
    fields: dict[str, dict[str, Any]] = {}
    for sample in range(samples):
        for encoded in examples:
            record_ids.append(encoded.example.id + (f"/sample{sample}" if sample else ""))
            fields[record_ids[-1]] = encoded.fields(sample, samples)
    return WorkItem(
        name,
        record_ids=tuple(record_ids),
        fields=fields,
        context=examples[0].example.context_id,
        answers=len(record_ids),
        notes_kept=notes_kept,
        examples=tuple(examples),
    )


def refuse_taken(whose: str, names: Iterable[str]) -> None:
    """Refuse field names of a task or a method that are in `EVERY_RECORD_HAS`.

    Args:
        whose: the subject of the message, e.g. "task x: scores".
    """
    for name in names:
        if name in EVERY_RECORD_HAS:
            raise KVError(f"{whose} have {name!r}, which every record has; allowed: other names")


def with_extras_checked(label: str, result: Answer, others: Collection[str]) -> Answer:
    """The answer as it is, or as a failed one if `Method.extras` has a name that is in
    `EVERY_RECORD_HAS` or among `others`, the fields of the task, or a value that is no number."""
    try:
        whose = f"the extras of method {label!r}"
        refuse_taken(whose, result.cost.extras)
        for name, value in result.cost.extras.items():
            if name in others:
                raise KVError(f"{whose} have {name!r}; allowed: names that the task does not use")
            if not isinstance(value, int | float):
                raise KVError(f"{whose} have {name} = {value!r:.40}; allowed: numbers")
    except KVError as failure:
        return replace(result, failure=failure, cost=replace(result.cost, extras={}))
    return result


def _conversations(item: WorkItem, session: Session) -> list[list[Question]]:
    """The questions about the prompt of an item, in the order of its records; those of one conversation
    follow on from each other."""

    def question(encoded: EncodedExample, sample: int) -> Question:
        ids = encoded.question_ids if session.compress_after == "context" else ()
        stopping = session.stopping(encoded.example, item.answers)
        return Question(ids, stopping, encoded.example.id, sample)

    return [
        [question(encoded, sample) for encoded in conversation]
        for sample in range(session.sampling.samples)
        for conversation in conversations_of(item.examples)
    ]


def reading_of(
    encoded: EncodedExample, methods: Methods, session: Session, *, name: str, room: int
) -> Reading:
    """Prefill a prompt, or its context, and compress it by every method; `name` seeds their draws."""
    return read(
        session.model,
        encoded.context_ids if session.compress_after == "context" else encoded.ids,
        methods,
        seed=session.seed,
        name=name,
        held_back=int(session.compress_after == "all_but_last"),
        room=room,
        encoder=session.encoder,
    )


def _warm_up(item: WorkItem, methods: Methods, session: Session) -> None:
    """Generate two tokens, without a record, with the methods that have not run yet. On a GPU a kernel
    is compiled at its first launch, whose time must not count in the seconds of an example."""
    new = {label: pair for label, pair in methods.items() if label not in session.warmed}
    if not new:
        return
    session.warmed.update(new)
    question = replace(_conversations(item, session)[0][0], stopping=Stopping(2))
    try:
        first, room = item.examples[0], room_of([[question]])
        reading = reading_of(first, new, session, name=first.context, room=room)
        asked = [(reading, row, question) for row in reading.rows]
        answer(session.model, asked, sampling=session.sampling, steps=session.steps)
    except Exception as failure:  # noqa: BLE001 - the example's own run will fail so, and record it
        release_frames(failure)
    free_memory(session.device)


def measured(result: Answer, *, long_answer: bool = False) -> dict[str, Any]:
    """The record fields that were measured while an answer was generated; None where it failed before.

    Args:
        long_answer: see `Cost.record`.
    """
    failure = result.failure
    status = {"status": "ok", "error": None} if failure is None else failure_fields(failure)
    return {**status, **result.cost.record(long_answer=long_answer)}
