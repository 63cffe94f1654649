"""The fields of a row of the user's data: which of them is the context, the question, the answers; and
templates over fields. These are Jinja in its own sandbox, which keeps a template from Python's objects
and from changing a row."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvbench.errors import first_line, nearest
from kvbench.tasks.base import TaskError
from kvbench.tasks.data import NUMPY_ARRAY, parsed_literal
from kvbench.tasks.metrics import OF_LETTERS
from kvbench.tasks.metrics_text import option_letter

ROLES = ("context", "question", "answers", "questions", "choices", "id", "dataset")
"""The roles that a field of a row may have."""
OF_OBJECTS = ("loogle_cloze",)
"""The metrics by which an answer is an object."""


# templates

MOST_EXACT = 2**53
"""Below this a float holds every whole number."""


def whole(value: str | float) -> str | float:
    """A float as the whole number that it is, since a column with gaps makes 4711.0 of 4711. Raises
    ValueError where a float cannot hold all digits."""
    if isinstance(value, float) and value.is_integer():
        if abs(value) > MOST_EXACT:
            raise ValueError(f"{value!r} has lost digits; allowed: the number as text")
        return int(value)
    return value


def as_text(value: str | float) -> str:
    """A text, number or boolean as a person writes it; see `whole`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(whole(value))


def lettered(options: Sequence[str | float]) -> str:
    """The options on lines of their own, each behind its letter (the filter ``choices | lettered``)."""
    lines = zip(string.ascii_uppercase, options, strict=False)
    return "\n".join(f"{letter}. {as_text(option)}" for letter, option in lines)


def _printed(value: Any) -> Any:
    """The text of a printed value, which must not be Python's form of a list, of None or of a
    function."""
    if isinstance(value, Undefined):
        return value  # which is an error of its own
    if isinstance(value, str | int | float):
        return as_text(value)
    if isinstance(value, date | Decimal):
        return str(value)
    kind = "a list" if isinstance(value, list | tuple) else f"{type(value).__name__}"
    raise ValueError(f"{{{{ ... }}}} is {kind}; allowed: text, e.g. {{{{ x[0] }}}}, x | join(', ')")


_SANDBOX = ImmutableSandboxedEnvironment(
    undefined=StrictUndefined, keep_trailing_newline=True, finalize=_printed
)
_SANDBOX.filters["lettered"] = lettered


class PromptTemplate:
    """A template; `name` is the option that holds it, for messages."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        only = re.fullmatch(r"\{\{((?:(?!\{\{|\}\}|\{%).)*)\}\}", text, re.DOTALL)
        try:
            self._template = _SANDBOX.from_string(text)
            self._only = _SANDBOX.compile_expression(only[1], False) if only else None
        except (TemplateError, RecursionError, MemoryError) as problem:
            raise TaskError(
                f"{name} is no template: {first_line(problem)}; allowed: Jinja over a row's fields"
            ) from problem

    def render(self, fields: Mapping[str, Any], place: str) -> str:
        return str(self._made(self._template.render, fields, place))

    def value(self, fields: Mapping[str, Any], place: str) -> Any:
        """The value of the expression where the template is one alone, ``{{ x }}``, else the text."""
        value = self._made(self._only or self._template.render, fields, place)
        if isinstance(value, Undefined):
            return self.render(fields, place)  # and its error
        return value

    def _made(self, make: Any, fields: Mapping[str, Any], place: str) -> Any:
        try:
            return make({str(name): value for name, value in fields.items()})
        except Exception as problem:  # a filter or a comparison may raise anything
            raise TaskError(
                f"{self.name}: {place}: {first_line(problem)}; fields there are: "
                f"{', '.join(map(str, fields))}"
            ) from problem


@cache
def template(name: str, text: str) -> PromptTemplate:
    return PromptTemplate(name, text)


# fields


@dataclass(frozen=True)
class FieldReader:
    """The values that a row has for each role.

    Attributes:
        fields: by role, the name of a field, a template over the fields (``{{ text[:100] }}``), or None
            where no field has the role.
        place: the row's file and number, for messages.
    """

    fields: Mapping[str, str | None]
    row: Mapping[str, Any]
    place: str

    def value(self, role: str) -> Any:
        """None where no field has the role."""
        name = self.fields.get(role)
        if name is None:
            return None
        if "{{" in name or "{%" in name:
            return template(f"task.fields.{role}", name).value(self.row, self.place)
        return self.field(name, f"fields.{role}")

    def field(self, name: str, option: str = "breakdowns") -> Any:
        if name not in self.row:
            fields_of_row = [str(key) for key in self.row]
            hint = nearest(name, fields_of_row)
            raise TaskError(
                f"jsonl: {self.place} has no field {name!r} (task.{option}){hint}; fields there are: "
                f"{', '.join(fields_of_row)}"
            )
        return self.row[name]

    def text(self, role: str) -> str:
        """The text of a role; empty where no field has it."""
        value = self.value(role)
        if value is None and self.fields.get(role) is None:
            return ""
        if not _is_text(value):
            raise self._wrong(role, value, "text")
        return as_text(self._listed(role, value)[0])

    def choices(self) -> Sequence[str | float]:
        """Read the options of the question. A row gives them as a list of texts or numbers, as one of
        these, or as an object with the list ``text`` (ARC) or with a text by letter (MedQA)."""
        value = self.value("choices")
        if value is None and self.fields.get("choices") is None:
            return ()
        if isinstance(value, Mapping) and [*value] == [*string.ascii_uppercase[: len(value)]]:
            value = list(value.values())
        return self._listed("choices", value)

    def answers(self, metric: str) -> tuple[str, ...]:
        """Read the acceptable answers. A row gives them as a text, number or boolean, a list of these,
        or an object with the list ``text`` (SQuAD). An answer that is the index from 0 of one of the
        `choices` (MMLU), or its ``label`` (ARC), becomes the option's letter under a metric of
        `OF_LETTERS`, else the option's text. True becomes yes or true, and False no or false."""
        value = self.value("answers")
        if isinstance(value, Mapping) and metric in OF_OBJECTS:
            return (json.dumps(value, ensure_ascii=False),)
        answers = self._listed("answers", value)
        if not all(str(answer).strip() for answer in answers):
            raise self._wrong("answers", value, "text that is not blank")
        options = self.choices()
        answers = [said for answer in answers for said in _as_said(answer, options)]
        choices = self.value("choices")
        if isinstance(choices, Mapping) and isinstance(labels := choices.get("label"), list):
            answers = [labels.index(a) if a in labels else a for a in answers]
        if metric in OF_LETTERS:
            keys = [option_key(answer, options) for answer in answers]
        elif options:
            keys = [_option_text(answer, options) for answer in answers]
        else:
            self._check_no_index(answers)
            return tuple(map(as_text, answers))
        if None in keys:
            allowed = "a letter; with task.fields.choices also an option's text or its index from 0"
            if options:
                last = string.ascii_uppercase[min(len(options), 26) - 1]
                allowed = f"a letter A to {last}, an option's text, or its index from 0"
            raise self._wrong("answers", value, allowed)
        return tuple(key for key in keys if key is not None)

    def _check_no_index(self, answers: Sequence[str | float]) -> None:
        """Refuse a number that may be the index of an option that no role tells of."""
        name = str(self.fields["answers"])
        options = next((name for name in ("choices", "options") if self.row.get(name)), None)
        if options and "{{" not in name and any(_index(answer) < 26 for answer in answers):
            raise TaskError(
                f"jsonl: {self.place}: field {name!r} is {_shown(self.row[name])} and there is a field "
                f"{options!r}; allowed: task.fields.choices={options} if it is the index of one, else "
                f"task.fields.answers='{{{{ {name} }}}}'"
            )

    def questions(self) -> list[FieldReader]:
        """A reader for each question: by the role ``questions`` (a list of objects, whose fields are
        added to those of the row), or where ``question`` and ``answers`` are lists of one length."""
        objects = self.value("questions")
        if objects is not None:
            parsed = parsed_literal(objects) if isinstance(objects, str) else objects
            if not isinstance(parsed, list) or not all(isinstance(o, Mapping) for o in parsed):
                raise self._wrong("questions", objects, "a list of objects")
            return [replace(self, row={**self.row, **fields}) for fields in parsed]
        question = self.value("question")
        answers = self.value("answers")
        if not isinstance(question, list):
            return [self]
        question_field, answers_field = self.fields["question"], self.fields["answers"]
        if not isinstance(answers, list) or len(answers) != len(question):
            raise TaskError(
                f"jsonl: {self.place}: field {question_field!r} has {len(question)} questions and "
                f"{answers_field!r} is {_shown(answers)}; allowed: a list of as many answers"
            )
        pairs = zip(question, answers, strict=True)
        own = ({str(question_field): q, str(answers_field): a} for q, a in pairs)
        return [replace(self, row={**self.row, **fields}) for fields in own]

    def _listed(self, role: str, value: Any) -> list[str | float]:
        """The texts and numbers of one, of a list, or of an object with the list ``text``."""
        inner: Any = value.get("text") if isinstance(value, Mapping) else value
        values = list(inner) if isinstance(inner, list | tuple) else [inner]
        if not values or not all(map(_is_text, values)):
            allowed = "a text, a number, or a list of them"
            if isinstance(value, Mapping):
                allowed += f", e.g. task.fields.{role}='{{{{ {self.fields[role]}.<name> }}}}'"
            raise self._wrong(role, value, allowed)
        if (
            role in ("answers", "choices")
            and isinstance(value, str)
            and NUMPY_ARRAY.fullmatch(value)
        ):
            raise self._wrong(role, value, "a list, as JSON writes it")
        try:
            return list(map(whole, values))
        except ValueError as problem:
            raise TaskError(
                f"jsonl: {self.place}: field {self.fields[role]!r}: {problem}"
            ) from problem

    def _wrong(self, role: str, value: Any, allowed: str) -> TaskError:
        name = self.fields[role]
        return TaskError(
            f"jsonl: {self.place}: field {name!r} is {_shown(value)}; allowed: {allowed}"
        )


def option_key(answer: str | float, options: Sequence[str | float]) -> str | None:
    """The key that an answer gives: itself where it is an option's text or letter, the option's letter
    where it is an index from 0, None otherwise. A whole number is an index (as in MMLU) unless the
    options are numbers and one of them is this."""
    choices = [as_text(option) for option in options]
    text = as_text(answer)
    is_option = option_letter(text, choices) is not None
    may_be_index = not is_option or (isinstance(answer, int) and answer not in options)
    if may_be_index and _index(answer) < min(len(choices), 26):
        letter = string.ascii_uppercase[_index(answer)]
        return choices[_index(answer)] if letter in choices else letter
    return text if is_option else None


def _option_text(answer: str | float, options: Sequence[str | float]) -> str | None:
    """The text of the option whose index an answer is (None if that is too large), else the answer."""
    if _index(answer) == math.inf:
        return as_text(answer)
    key = option_key(answer, options)
    choices = [as_text(option) for option in options]
    letter = None if key is None else option_letter(key, choices)
    return None if letter is None else choices[string.ascii_uppercase.index(letter)]


def _as_said(answer: str | float, options: Sequence[str | float]) -> list[str | float]:
    """The words for an answer that is a boolean, or the options that are one of them."""
    if not isinstance(answer, bool):
        return [answer]
    words = ["yes", "true"] if answer else ["no", "false"]
    return [said for said in options if as_text(said).strip().lower() in words] or [*words]


def _index(answer: str | float) -> Any:
    """Infinity where an answer is no whole number from 0."""
    return int(answer) if str(answer).isdecimal() else math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str | int | float) and value == value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
