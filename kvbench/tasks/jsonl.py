"""The user's own data as a task, and published benchmarks that need nothing else.

Rows come from files (see `file_rows`) or from the Hub. `fields` says which of a row's fields are the
context, the question and the answers, `template` makes the prompt from them, and `metric` scores the
answer. A benchmark is several such data sets (`subsets`), each with its own options.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from typing import Annotated, Any, ClassVar, Literal

import regex
from annotated_types import Ge

from kvbench.errors import check_known
from kvbench.errors.options import Count, Distinct
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import (
    Example,
    NewTokens,
    Task,
    TaskError,
    by_digest,
    in_turn,
    with_newlines,
)
from kvbench.tasks.data import Source
from kvbench.tasks.encoding import encode_shared, split_template
from kvbench.tasks.jsonl_fields import ROLES, FieldReader, as_text, template
from kvbench.tasks.metrics import OF_LETTERS, check_metric, metric_named, own_function
from kvbench.tasks.metrics_text import Key, contains_for_good

log = logging.getLogger(__name__)

CONTEXT_END = "\ue000\ue001"
"""Two private characters that follow the context while a template is rendered, so that the end of the
context can be found in the text. They are removed from it."""
DEFAULT_FIELDS = {"context": "context", "question": "question", "answers": "answers"}
"""The fields that are read where `Jsonl.fields` does not name others."""
USUAL_FIELDS = {
    "context": ("document", "text", "passage", "article"),
    "question": ("query", "input", "q"),
    "answers": ("answer", "target", "gold", "reference"),
}
"""Other names of a field, by role. A row without the default one has one of these, in any case."""

OF_ALL = ("subsets", "datasets", "order", "per_dataset", "breakdowns", "long_answers")
"""The options that no data set of `Jsonl.subsets` has of its own."""


@dataclass(frozen=True, kw_only=True)
class RowExample(Example):
    metric: str
    key: Key


@dataclass(frozen=True)
class _Prompt:
    """The prompt of one question: `head` up to the end of the context, and `tail`, the rest."""

    id: str
    dataset: str
    head: str
    tail: str
    answers: tuple[str, ...]
    choices: tuple[str, ...]
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Jsonl(Task):
    """Questions about contexts, from data files or the Hub.

    conf/task/jsonl.yaml tells the options of a user's own data. Benchmarks also have these.

    Attributes:
        data, file, archive, local: see `Source`.
        subsets: by the name of a data set, the options in which it differs.
        datasets: the names of `subsets` that are run; None for all.
        order: the order of the contexts of a data set, of which a limit takes the first. "shuffled": by
            the digests of their ids (`by_digest`). "file": as the files have them.
    """

    name: ClassVar[str] = "jsonl"
    version: ClassVar[int] = 4
    unhashed: ClassVar[tuple[str, ...]] = ("files", "data", "revision", "order", "per_dataset")

    files: Sequence[str] = ()
    dataset: str | None = None
    config: str | None = None
    split: str = "test"
    revision: str | None = None
    data: str | None = None
    file: str | None = None
    archive: str | None = None
    local: str | None = None
    fields: Mapping[str, str | None] = field(default_factory=dict)
    template: str = "{{ context }}\n\n{{ question }}\n"
    answer_prefix: str = "Answer:"
    metric: str = "contains"
    pattern: str | None = None
    chat: bool | None = None
    max_new_tokens: NewTokens = 64
    long_answers: bool = False  # type: ignore[misc]
    stop: Sequence[str] = ()
    max_input: Annotated[int, Ge(2)] | Literal["model"] | None = None
    merge_answers: bool = False
    golden_turns: bool | None = None
    breakdowns: Sequence[str] = ()
    subsets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    datasets: Distinct[str] | None = None
    order: Literal["shuffled", "file"] = "shuffled"
    per_dataset: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "breakdown", self.breakdowns)
        named = {role: name and with_newlines(name) for role, name in self.fields.items()}
        object.__setattr__(self, "fields", {**DEFAULT_FIELDS, **named})
        for role in self.fields:
            check_known(f"jsonl: fields.{role} stands for nothing", str(role), ROLES, TaskError)
        if self.fields.get("answers") is None:
            raise TaskError("jsonl: fields.answers is null; allowed: the field with the answers")
        own_function(self.metric)
        try:
            regex.compile(self.pattern or "")
        except regex.error as problem:
            raise TaskError(
                f"task.pattern is {self.pattern!r}, which is no regular expression: {problem}"
            ) from problem
        if self.subsets and self.files:
            raise TaskError(
                f"task.files is {list(self.files)!r} and the task has {len(self.subsets)} data sets; "
                "allowed: task.data=<folder or zip> with their files"
            )
        if not self.subsets and not self.files and self.dataset is None and self.data is None:
            raise TaskError(
                "jsonl: no data; allowed: task.files=[my.jsonl], or task.dataset=<owner>/<name>"
            )
        for name in self.datasets or ():
            check_known(f"task.datasets is {name!r}", name, [*self.subsets], TaskError)
        # Made here so that a wrong template or subset is refused when the task is made.
        assert template("task.template", self.template)
        assert self._parts

    @cached_property
    def _parts(self) -> Mapping[str, Jsonl]:
        """A task for each data set that is run, by name; without `subsets` the task itself, under an
        empty name."""
        parts: dict[str, Jsonl] = {}
        known = [option.name for option in fields(self) if option.name not in OF_ALL]
        for name in self.subsets if self.datasets is None else self.datasets:
            options = dict(self.subsets[name])
            for option in options:
                check_known(f"task.subsets.{name} is {option!r}", option, known, TaskError)
            options["fields"] = {**self.fields, **options.get("fields", {})}
            parts[name] = replace(self, subsets={}, datasets=None, **options)
        return parts or {"": self}

    @cached_property
    def _source(self) -> Source:
        return Source(
            "jsonl",
            tuple(self.files),
            data=self.data,
            dataset=self.dataset,
            config=self.config,
            split=self.split,
            revision=self.revision,
            file=self.file,
            archive=self.archive,
            local=self.local,
        )

    def check_files(self) -> None:
        for part in self._parts.values():
            part._source.check_files()

    def digests(self) -> Mapping[str, str]:
        return {
            f"{name}/{file}" if name else file: digest
            for name, part in self._parts.items()
            for file, digest in part._source.digests().items()
        }

    def metric_name(self) -> str:
        return self.metric.rpartition(".")[2]

    def code(self) -> Sequence[object]:
        functions = (own_function(part.metric) for part in self._parts.values())
        return [function for function in functions if function is not None]

    def examples(self, encoder: PromptEncoder) -> Sequence[RowExample]:
        """One context of each data set in turn, with all its questions; see `order`."""
        # By data set and context. A prompt without a context is a context of its own.
        groups: dict[str, dict[tuple[str, str], tuple[Jsonl, list[_Prompt]]]] = {}
        for name, part in self._parts.items():
            check_metric(part.metric)
            for prompt in part._prompts(name):
                of_dataset = groups.setdefault(prompt.dataset, {})
                context = (prompt.head, "" if prompt.head else prompt.id)
                of_dataset.setdefault(context, (part, []))[1].append(prompt)
        queues = []
        for dataset in groups if self.subsets or self.order == "file" else sorted(groups):
            contexts = list(groups[dataset].values())
            if self.order == "shuffled":
                contexts.sort(key=lambda one: by_digest(prompt.id for prompt in one[1]))
            wanted = contexts[: self.per_dataset]
            queues.append([part._examples(prompts, encoder) for part, prompts in wanted])
        examples = [example for group in in_turn(queues) for example in group]
        if not examples:
            raise TaskError("jsonl: the data hold no question")
        for example in examples:
            text = example.context + example.question
            hidden = [option for option in example.key.choices if option.strip() not in text]
            if example.metric in OF_LETTERS and hidden:
                _say_hidden(hidden[0])
                break
        return examples

    def first(self, contexts: int) -> Task:
        if type(self).examples is not Jsonl.examples:  # which may have another order
            return self
        return replace(self, per_dataset=min(contexts, self.per_dataset or contexts))

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        assert isinstance(example, RowExample)
        return metric_named(example.metric)(prediction, example.key)

    def _prompts(self, name: str) -> Iterable[_Prompt]:
        prompts: list[_Prompt] = []
        for number, (place, file, row) in enumerate(self._source.rows(), start=1):
            prompts += self._prompts_of_row(name, file, number, row, place)
        if not self.merge_answers:
            return prompts
        merged: dict[str, _Prompt] = {}
        for prompt in prompts:
            answers_so_far = merged[prompt.id].answers if prompt.id in merged else ()
            merged[prompt.id] = replace(prompt, answers=(*answers_so_far, *prompt.answers))
        return merged.values()

    def _prompts_of_row(
        self, name: str, file: str, number: int, row: Mapping[str, Any], place: str
    ) -> Iterator[_Prompt]:
        """The prompts of row `number`, from 1. Their data set is `name`, or where the config names none
        the row's own, or else its `file`."""
        reader = FieldReader(self._fields_in(row, place), row, place)
        dataset_of_row = reader.value("dataset")
        dataset = name or str(file if dataset_of_row is None else dataset_of_row)
        id_of_row = reader.value("id")
        row_id = f"{dataset}-{number:05d}" if id_of_row is None else f"{dataset}-{id_of_row}"
        context = reader.text("context")
        breakdowns = {name: reader.field(name) for name in self.breakdowns}
        questions = reader.questions()
        for question_number, question in enumerate(questions, start=1):
            choices = tuple(map(as_text, question.choices()))
            texts = {
                "context": context + CONTEXT_END,
                "question": question.text("question"),
                **({"choices": choices} if choices else {}),
            }
            answers = question.answers(self.metric)
            head, tail = self._rendered({**question.row, **texts}, place)
            question_id = row_id if len(questions) == 1 else f"{row_id}-q{question_number}"
            yield _Prompt(question_id, dataset, head, tail, answers, choices, breakdowns)

    def _fields_in(self, row: Mapping[str, Any], place: str) -> Mapping[str, str | None]:
        """The fields by role, usual names in place of defaults that the row lacks."""
        found: dict[str, str] = {}
        for role, usual in USUAL_FIELDS.items():
            default = DEFAULT_FIELDS[role]
            if self.fields.get(role) != default or default in row or self.fields.get("questions"):
                continue
            names = [str(name) for name in row if str(name).lower() in (default, *usual)]
            if len(names) > 1:
                raise TaskError(
                    f"jsonl: {place} has no field {default!r} and may mean {' or '.join(names)}; "
                    f"allowed: task.fields.{role}=<one of them>"
                )
            if names:
                found[role] = names[0]
        if found:
            _say_fields(", ".join(f"{role}: {name}" for role, name in found.items()))
        return {**self.fields, **found}

    def _rendered(self, fields: Mapping[str, Any], place: str) -> tuple[str, str]:
        """The prompt up to the question, white space included, and the rest."""
        text = template("task.template", self.template).render(fields, place)
        if self.fields.get("context") is None:
            return "", text.replace(CONTEXT_END, "")
        printed = text.count(CONTEXT_END)
        if printed != 1:
            raise TaskError(
                f"jsonl: task.template prints the context {printed} times; allowed: once, as "
                "{{ context }}"
            )
        before, white, question = split_template(text, CONTEXT_END)
        return before + white, question

    def _examples(self, group: Sequence[_Prompt], encoder: PromptEncoder) -> list[RowExample]:
        """The examples of one context. They share its token ids."""
        encoder = self._with_or_without_chat(encoder)
        tails = [(prompt.tail, self.answer_prefix) for prompt in group]
        full_context, questions = encode_shared(encoder, group[0].head, tails)
        context = self._fitted(encoder, full_context, max(map(len, questions)), group[0].id)
        # An answer that later prompts quote is not cut.
        may_end_early = self.metric == "contains" and self.golden_turns is not False
        history: Any = {None: "none", True: "golden", False: "own"}[self.golden_turns]
        return [
            RowExample(
                id=prompt.id,
                context=prompt.head,
                question=prompt.tail + self.answer_prefix,
                answers=prompt.answers,
                max_new_tokens=self.max_new_tokens,
                dataset=prompt.dataset,
                stop=tuple(self.stop),
                context_ids=context,
                question_ids=question,
                context_id=None if len(group) == 1 else group[0].id,
                history=history,
                golden=", ".join(prompt.answers) if self.metric == "contains_all" else None,
                is_final=self.if_scored_by(Jsonl, partial(contains_for_good, prompt.answers))
                if may_end_early
                else None,
                fields={**prompt.fields, "truncated_tokens": len(full_context) - len(context)},
                metric=self.metric,
                key=Key(prompt.answers, prompt.choices, self.pattern),
            )
            for prompt, question in zip(group, questions, strict=True)
        ]

    def _with_or_without_chat(self, encoder: PromptEncoder) -> PromptEncoder:
        if self.chat and not encoder.suffix_ids:
            raise TaskError(
                "jsonl: chat is true and the model has no chat template, or is told not to use it; "
                "allowed: null, false, model.chat_template=auto"
            )
        if self.chat is False and encoder.suffix_ids:
            begin = tuple(encoder.begin_ids)
            return replace(encoder, prefix_ids=begin, suffix_ids=(), before="", after="")
        return encoder

    def _fitted(
        self, encoder: PromptEncoder, context: tuple[int, ...], question_tokens: int, label: str
    ) -> tuple[int, ...]:
        """The context, without its middle where it is too long beside its longest question; `label`
        names the example."""
        most_tokens: int | None
        if self.max_input == "model":
            limits = [] if encoder.max_input is None else [encoder.max_input]
            if encoder.max_positions is not None:
                limits.append(encoder.max_positions - self.max_new_tokens)
            most_tokens = min(limits, default=None)
        else:
            most_tokens = self.max_input
        if most_tokens is None or len(context) + question_tokens <= most_tokens:
            return context
        room = most_tokens - question_tokens
        half = room // 2
        if half < 1:
            raise TaskError(
                f"jsonl: max_input={self.max_input!r} leaves {room} tokens to the context of {label}; "
                "allowed: more"
            )
        return (*context[:half], *context[-half:])


@cache
def _say_hidden(option: str) -> None:
    log.warning(
        "prompts do not show the option %r, whose letter is asked for: task.template shows all by "
        "{{ choices | lettered }}",
        option,
    )


@cache
def _say_fields(fields: str) -> None:
    log.warning("fields found by their names: task.fields={%s}", fields)
