"""Data of one's own as a task, and published benchmarks that need nothing else.

Rows are JSON lines (or a JSON list, or parquet) or come from the Hub; `fields` says which of a row's
fields is the context, the question and the answers, `template` makes the prompt of them, `metric`
scores the answer. A benchmark is several such data sets (`subsets`), each with what differs.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice, zip_longest
from typing import Annotated, Any, ClassVar, Literal

import regex
from annotated_types import Ge

from kvbench.errors import nearest
from kvbench.errors.options import Count, Distinct
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, NewTokens, Task, TaskError
from kvbench.tasks.data import Source
from kvbench.tasks.encoding import encode_context, encode_question, split_template
from kvbench.tasks.metrics import METRICS, REGEX_SECONDS, Key, stands
from kvbench.tasks.template import PromptTemplate

Row = Mapping[str, Any]
MARK = "\ue000\ue001"
"""Stands behind the context while a template is rendered, to tell where the question begins."""
ROLES = ("context", "question", "answers", "questions", "choices", "id", "dataset")
"""What a field of a row may stand for."""
USUAL = {"context": "context", "question": "question", "answers": "answers"}
"""Fields that stand for what they are called."""
OF_SUBSETS = (
    "file",
    "local",
    "archive",
    "config",
    "split",
    "dataset",
    "revision",
    "fields",
    "extract",
    "template",
    "answer_prefix",
    "metric",
    "pattern",
    "chat",
    "max_new_tokens",
    "stop",
    "merge_answers",
)
HISTORIES: Mapping[bool | None, Any] = {None: "none", True: "golden", False: "own"}
"""What `golden_turns` says of an example's history."""


# rows


@dataclass(frozen=True)
class Reader:
    """What the fields of a row stand for.

    Attributes:
        fields: by role, a field's name, a template (``{{ text[:100] }}``), or None for nothing.
        extract: further fields by name: a field, and a regular expression on it.
    """

    fields: Mapping[str, str | None]
    extract: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def extended(self, row: Row, place: str) -> Row:
        """The row with the fields that are extracted from others.

        Raises:
            TaskError: a pattern that is not found.
        """
        row_with_parts = dict(row)
        for name, (source, pattern) in self.extract.items():
            text = str(self.field(source, row, place, f"extract.{name}"))
            match = regex.search(pattern, text, timeout=REGEX_SECONDS)
            if match is None:
                raise TaskError(
                    f"jsonl: {place}: field {source!r} is {_shown(text)}, without {pattern!r} "
                    f"(task.extract.{name}); allowed: text with it"
                )
            row_with_parts[name] = match[1] if match.re.groups else match[0]
        return row_with_parts

    def value(self, role: str, row: Row, place: str) -> Any:
        """What a row has for a role; None where no field stands for it.

        Raises:
            TaskError: the row has no such field: one line with those there are.
        """
        name = self.fields.get(role)
        if name is None:
            return None
        if "{{" in name:
            return PromptTemplate(f"fields.{role}", name).render(row)
        return self.field(name, row, place, f"fields.{role}")

    @staticmethod
    def field(name: str, row: Row, place: str, option: str = "breakdowns") -> Any:
        """What a row has in a field.

        Raises:
            TaskError: the row has no such field: one line with those there are.
        """
        if name not in row:
            there = [str(key) for key in row]
            raise TaskError(
                f"jsonl: {place} has no field {name!r} (task.{option}){nearest(name, there)}; fields "
                f"there are: {', '.join(there)}"
            )
        return row[name]

    def text(self, role: str, row: Row, place: str) -> str:
        """Text of a role, empty where no field stands for it."""
        value = self.value(role, row, place)
        if value is None and self.fields.get(role) is None:
            return ""
        if not isinstance(value, str | int | float):
            raise self._wrong(role, value, place, "text")
        return str(value)

    def asked(self, row: Row, place: str) -> list[Row]:
        """A row with one question for each that a row has: one, or one for each of a list of questions
        (its answers a list of as many), or for each object of the field that stands for `questions`.

        Raises:
            TaskError: fields that are missing or of the wrong kind.
        """
        several = self.value("questions", row, place)
        if several is not None:
            items = _literal(several) if isinstance(several, str) else several
            if not isinstance(items, list) or not all(isinstance(i, Mapping) for i in items):
                raise self._wrong("questions", several, place, "a list of objects")
            return [{**row, **item} for item in items]
        question, answers = (self.value(role, row, place) for role in ("question", "answers"))
        if not isinstance(question, list):
            return [row]
        if not isinstance(answers, list) or len(answers) != len(question):
            raise TaskError(
                f"jsonl: {place}: field {self.fields['question']!r} has {len(question)} questions and "
                f"{self.fields['answers']!r} is {_shown(answers)}; allowed: a list of as many answers"
            )
        names = [str(self.fields[role]) for role in ("question", "answers")]
        return [
            {**row, **dict(zip(names, pair, strict=True))}
            for pair in zip(question, answers, strict=True)
        ]

    def texts(self, role: str, row: Row, place: str) -> tuple[str, ...]:
        """Texts of a role: one or a list of texts or numbers; an object as JSON. None where no field
        stands for it.

        Raises:
            TaskError: there is none, or one is something else.
        """
        value = self.value(role, row, place)
        if value is None and self.fields.get(role) is None:
            return ()
        if isinstance(value, Mapping):
            return (json.dumps(value, ensure_ascii=False),)
        is_single = isinstance(value, str) or not isinstance(value, Sequence)
        several = [value] if is_single else list(value)
        if not several or not all(isinstance(text, str | int | float) for text in several):
            raise self._wrong(role, value, place, "a text, a number, or a list of them")
        return tuple(map(str, several))

    def _wrong(self, role: str, value: Any, place: str, allowed: str) -> TaskError:
        name = self.fields[role]
        return TaskError(f"jsonl: {place}: field {name!r} is {_shown(value)}; allowed: {allowed}")


def _literal(text: str) -> Any:
    """What a text says as JSON, or as a Python literal."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# the task


@dataclass(frozen=True, kw_only=True)
class RowExample(Example):
    """An example with what its score needs."""

    metric: str
    key: Key


@dataclass(frozen=True, kw_only=True)
class Jsonl(Task):
    """Questions about contexts, from data files or the Hub.

    Attributes:
        files: globs of JSON-lines files (``.json``: one list; ``.parquet``).
        dataset, config, split, revision: a data repository on the Hub, in place of files.
        data, file, archive: of benchmarks: a folder or zip that holds `file`; None: `file` (in the
            zip `archive`) of the repository. local: in `data`, of a data set that is read from the Hub
            without a file.
        fields: by role (`ROLES`), the field of a row, or a template over them; over `USUAL`. No field:
            null. ``questions``: a list of objects, each a question of the same context.
        extract: further fields: name, and field and regular expression whose first group (or all) it is.
        template: the prompt, a Jinja template over a row's fields and ``context`` and ``question``; what
            follows the context belongs to the question.
        answer_prefix: how the answer begins; with a chat template it follows the assistant's header.
        metric: one of `METRICS`. pattern: the regular expression of ``regex``.
        chat: whether the model's chat template goes around the prompt; None: if there is one.
        max_new_tokens, stop: generation limits. long_answers: see `Task.long_answers`.
        max_input: tokens of a prompt; longer contexts lose their middle. "model": as many as the model
            has positions for; None: nothing is cut.
        merge_answers: rows of one id are one question with several answers.
        golden_turns: what stands before a question that is not its context's first: the questions
            before it with their first answers (true), or with what the method answered (false, under
            ``compress_after=context`` only); None: nothing, each is asked of the context alone.
        breakdowns: fields of a row that tables split by.
        subsets: options by data set, over those above. datasets: those that are run, None for all.
        per_dataset: contexts of each data set.
    """

    name: ClassVar[str] = "jsonl"
    unhashed: ClassVar[tuple[str, ...]] = ("files", "data", "revision", "per_dataset")

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
    extract: Mapping[str, Sequence[str]] = field(default_factory=dict)
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
    per_dataset: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "breakdown", self.breakdowns)
        object.__setattr__(self, "fields", {**USUAL, **self.fields})
        for role in self.fields:
            if role not in ROLES:
                raise TaskError(
                    f"jsonl: fields.{role} stands for nothing{nearest(str(role), ROLES)}; allowed: "
                    f"{', '.join(ROLES)}"
                )
        if self.fields.get("answers") is None:
            raise TaskError("jsonl: fields.answers is null; allowed: the field with the answers")
        _one_of("metric", self.metric, tuple(METRICS))
        _check_pattern("pattern", self.pattern)
        for name, given in self.extract.items():
            if len(given) != 2:
                raise TaskError(
                    f"task.extract.{name} is {list(given)!r}; allowed: a field and a regular expression"
                )
            _check_pattern(f"extract.{name}", given[1])
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
            _one_of("datasets", name, tuple(self.subsets))
        assert self._template  # refuses a wrong one
        assert self._parts

    @cached_property
    def _template(self) -> PromptTemplate:
        return PromptTemplate("task.template", self.template)

    @cached_property
    def _parts(self) -> Mapping[str, Jsonl]:
        """The data sets that are run, by name; of one's own data there is one, without a name."""
        parts: dict[str, Jsonl] = {}
        for name in self.subsets if self.datasets is None else self.datasets:
            given = dict(self.subsets[name])
            for option in given:
                _one_of(f"subsets.{name}", option, OF_SUBSETS)
            given["fields"] = {**self.fields, **given.get("fields", {})}
            parts[name] = replace(self, subsets={}, datasets=None, **given)
        return parts or {"": self}

    @cached_property
    def _source(self) -> Source:
        where = ("data", "dataset", "config", "split", "revision", "file", "archive", "local")
        options = {option: getattr(self, option) for option in where}
        return Source("jsonl", tuple(self.files), **options)

    def check_files(self) -> None:
        """See `Task.check_files`."""
        for part in self._parts.values():
            part._source.check_files()

    def digests(self) -> Mapping[str, str]:
        """sha256 of each file; of what `datasets` reads from the Hub, its commit."""
        return {
            f"{name}/{file}" if name else file: sha
            for name, part in self._parts.items()
            for file, sha in part._source.digests().items()
        }

    def metric_name(self) -> str:
        """See `Task.metric_name`."""
        return self.metric

    def examples(self, encoder: PromptEncoder) -> Sequence[RowExample]:
        """A context of each data set in turn, with all its questions, in the order of the files.

        Raises:
            TaskError: data that are missing or wrong, a field that is not there, a template that does
                not print the context once.
        """
        queues = []
        for name, part in self._parts.items():
            groups = islice(_grouped(part._prompts(name)), self.per_dataset)
            queues.append([part._examples(group, encoder) for group in groups])
        turns = chain.from_iterable(zip_longest(*queues))
        examples = [example for group in turns for example in group or ()]
        if not examples:
            raise TaskError("jsonl: the data hold no question")
        return examples

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """The metric's score of a prediction, and those that it gives beside it."""
        assert isinstance(example, RowExample)
        return METRICS[example.metric](prediction, example.key)

    def _prompts(self, name: str) -> list[_Prompt]:
        """Every question of the data with its prompt."""
        reader = Reader(self.fields, self.extract)
        prompts: list[_Prompt] = []
        for number, (place, stem, row) in enumerate(self._source.rows(), start=1):
            row = reader.extended(row, place)
            given = reader.value("dataset", row, place)
            dataset = name or (stem if given is None else str(given))
            own = reader.value("id", row, place)
            label = f"{dataset}-{number:05d}" if own is None else f"{dataset}-{own}"
            context = reader.text("context", row, place)
            kept = {field: reader.field(field, row, place) for field in self.breakdowns}
            asked = reader.asked(row, place)
            for j, row_of_question in enumerate(asked, start=1):
                where = label if len(asked) == 1 else f"{label}-q{j}"
                choices = reader.texts("choices", row_of_question, place)
                question = reader.text("question", row_of_question, place)
                answers = reader.texts("answers", row_of_question, place)
                texts = {"context": context + MARK, "question": question, "choices": choices}
                head, tail = self._rendered({**row_of_question, **texts})
                prompts.append(_Prompt(where, dataset, head, tail, answers, choices, kept))
        if not self.merge_answers:
            return prompts
        merged: dict[str, _Prompt] = {}
        for prompt in prompts:
            before = merged[prompt.id].answers if prompt.id in merged else ()
            merged[prompt.id] = replace(prompt, answers=(*before, *prompt.answers))
        return list(merged.values())

    def _rendered(self, fields: Row) -> tuple[str, str]:
        """The prompt up to the end of the context and of the white space after it, and the rest."""
        text = self._template.render({str(name): value for name, value in fields.items()})
        if self.fields.get("context") is None:
            return "", text.replace(MARK, "")
        if text.count(MARK) != 1:
            raise TaskError(
                f"jsonl: task.template prints the context {text.count(MARK)} times; allowed: once, as "
                "{{ context }}"
            )
        before, white, question = split_template(text, MARK)
        return before + white, question

    def _examples(self, group: Sequence[_Prompt], encoder: PromptEncoder) -> list[RowExample]:
        """The examples of one context, which is tokenised by itself and so the same in all of them."""
        around = self._around(encoder)
        context = encode_context(around, group[0].head)
        questions = [encode_question(around, prompt.tail, self.answer_prefix) for prompt in group]
        room = self._room(encoder, max(map(len, questions)))
        cut = 0
        if room is not None and len(context) > room:
            if room < 2:
                raise TaskError(
                    f"jsonl: max_input={self.max_input!r} leaves {room} tokens to the context of "
                    f"{group[0].id}; allowed: more"
                )
            cut = len(context) - 2 * (room // 2)
            context = (*context[: room // 2], *context[len(context) - room // 2 :])
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
                complete=True,
                context_id=None if len(group) == 1 else group[0].id,
                history=HISTORIES[self.golden_turns],
                golden=", ".join(prompt.answers) if self.metric == "contains_all" else None,
                settled=partial(stands, prompt.answers) if self.metric == "contains" else None,
                fields={**prompt.fields, "truncated_tokens": cut},
                metric=self.metric,
                key=Key(prompt.answers, prompt.choices, self.pattern),
            )
            for prompt, question in zip(group, questions, strict=True)
        ]

    def _around(self, encoder: PromptEncoder) -> PromptEncoder:
        """The encoder, with a chat template or without one as `chat` says."""
        if self.chat and not encoder.suffix_ids:
            raise TaskError(
                "jsonl: chat is true and the model has no chat template, or is told not to use it; "
                "allowed: null, false, model.chat_template=auto"
            )
        if self.chat is False and encoder.suffix_ids:
            return replace(encoder, prefix_ids=tuple(encoder.begin_ids), suffix_ids=())
        return encoder

    def _room(self, encoder: PromptEncoder, question: int) -> int | None:
        """Tokens that a context may have; None for any number."""
        most = self.max_input
        if most == "model":
            known = [] if encoder.max_input is None else [encoder.max_input]
            if encoder.max_positions is not None:
                known.append(encoder.max_positions - self.max_new_tokens)
            most = min(known, default=None)
        return None if most is None else int(most) - question


@dataclass(frozen=True)
class _Prompt:
    """One question's text, `head` up to the end of the context and `tail` the rest, and its key."""

    id: str
    dataset: str
    head: str
    tail: str
    answers: tuple[str, ...]
    choices: tuple[str, ...]
    fields: Row


def _grouped(prompts: Iterable[_Prompt]) -> Iterable[list[_Prompt]]:
    """The questions of each context together, contexts in the order in which they come first; a question
    without a context stands alone."""
    groups: dict[tuple[str, str, str], list[_Prompt]] = {}
    for prompt in prompts:
        own = "" if prompt.head else prompt.id
        groups.setdefault((prompt.dataset, prompt.head, own), []).append(prompt)
    return groups.values()


def _one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        hint = nearest(value, allowed)
        raise TaskError(f"task.{option} is {value!r}{hint}; allowed: {', '.join(allowed)}")


def _check_pattern(option: str, pattern: str | None) -> None:
    try:
        regex.compile(pattern or "")
    except regex.error as problem:
        raise TaskError(
            f"task.{option} is {pattern!r}, which is no regular expression: {problem}"
        ) from problem
