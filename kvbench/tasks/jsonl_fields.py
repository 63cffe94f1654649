"""The fields of a row of the user's data: which of them is the context, the question, the answers."""

from __future__ import annotations

import ast
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from kvbench.errors import nearest
from kvbench.tasks.base import TaskError
from kvbench.tasks.metrics_text import REGEX_SECONDS, option_letter
from kvbench.tasks.template import PromptTemplate

Row = Mapping[str, Any]
ROLES = ("context", "question", "answers", "questions", "choices", "id", "dataset")
"""The roles that a field of a row may have."""


@dataclass(frozen=True)
class FieldReader:
    """Reads the values that a row has for each role.

    The argument `place` of its methods is the file and the number of a row, for messages.

    Attributes:
        fields: by role, the name of a field, a template over the fields (``{{ text[:100] }}``), or None
            where no field has the role.
        extract: by the name of a new field, the field from which it is extracted and a regular
            expression. The new field is the first group of the first match, or all of the match.
    """

    fields: Mapping[str, str | None]
    extract: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def with_extracted(self, row: Row, place: str) -> Row:
        """The row and the fields that are extracted from others.

        Raises:
            TaskError: a field is missing, or its pattern does not match.
        """
        extended = dict(row)
        for name, (source, pattern) in self.extract.items():
            text = str(self.field(source, row, place, f"extract.{name}"))
            match = regex.search(pattern, text, timeout=REGEX_SECONDS)
            if match is None:
                raise TaskError(
                    f"jsonl: {place}: field {source!r} is {_shown(text)}, without {pattern!r} "
                    f"(task.extract.{name}); allowed: text with it"
                )
            extended[name] = match[1] if match.re.groups else match[0]
        return extended

    def value(self, role: str, row: Row, place: str) -> Any:
        """The value that a row has for a role; None where no field has the role.

        Raises:
            TaskError: the row lacks the field; the message names the fields that it has.
        """
        name = self.fields.get(role)
        if name is None:
            return None
        if "{{" in name:
            return PromptTemplate(f"fields.{role}", name).render(row)
        return self.field(name, row, place, f"fields.{role}")

    @staticmethod
    def field(name: str, row: Row, place: str, option: str = "breakdowns") -> Any:
        """The value of a row's field.

        Args:
            option: the option of the task that names the field, for messages.

        Raises:
            TaskError: the row lacks the field; the message names the fields that it has.
        """
        if name not in row:
            fields_of_row = [str(key) for key in row]
            hint = nearest(name, fields_of_row)
            raise TaskError(
                f"jsonl: {place} has no field {name!r} (task.{option}){hint}; fields there are: "
                f"{', '.join(fields_of_row)}"
            )
        return row[name]

    def text(self, role: str, row: Row, place: str) -> str:
        """The text that a row has for a role; empty where no field has the role.

        Raises:
            TaskError: the row lacks the field, or its value is neither a text nor a number.
        """
        value = self.value(role, row, place)
        if value is None and self.fields.get(role) is None:
            return ""
        if not isinstance(value, str | int | float):
            raise self._wrong(role, value, place, "text")
        return str(value)

    def texts(self, role: str, row: Row, place: str) -> tuple[str, ...]:
        """The texts that a row has for a role: of one text or number, of a list of these, or of an
        object, which becomes its JSON. Empty where no field has the role.

        Raises:
            TaskError: the row lacks the field, or its value is empty or of another kind.
        """
        value = self.value(role, row, place)
        if value is None and self.fields.get(role) is None:
            return ()
        if isinstance(value, Mapping):
            return (json.dumps(value, ensure_ascii=False),)
        values = _listed(value)
        if not values or not all(isinstance(text, str | int | float) for text in values):
            raise self._wrong(role, value, place, "a text, a number, or a list of them")
        return tuple(map(str, values))

    def answers(self, row: Row, place: str, *, letters: bool) -> tuple[str, ...]:
        """The acceptable answers of a row.

        Args:
            letters: whether each must be an option: its letter, its text, or its index from 0, which
                becomes its letter.

        Raises:
            TaskError: as `texts`; an answer that is blank, or is no option where it must be one.
        """
        answers = self.texts("answers", row, place)
        if not all(map(str.strip, answers)):
            value = self.value("answers", row, place)
            raise self._wrong("answers", value, place, "text that is not blank")
        if not letters:
            return answers
        value = self.value("answers", row, place)
        options = _listed(self.value("choices", row, place) or ())
        keys = [option_key(answer, options) for answer in _listed(value)]
        allowed = "a letter; with task.fields.choices also an option's text or its index from 0"
        if options:
            last = string.ascii_uppercase[min(len(options), 26) - 1]
            allowed = f"a letter A to {last}, an option's text, or its index from 0"
        if None in keys:
            raise self._wrong("answers", value, place, allowed)
        return tuple(key for key in keys if key is not None)

    def questions(self, row: Row, place: str) -> list[Row]:
        """Split a row into rows of one question each.

        A row has several questions where a field has the role ``questions`` (a list of objects, whose
        fields are added to those of the row), or where ``question`` is a list of texts and ``answers`` a
        list of as many answers. Any other row has one question.

        Raises:
            TaskError: fields are missing or of the wrong kind.
        """
        objects = self.value("questions", row, place)
        if objects is not None:
            parsed = _parsed(objects) if isinstance(objects, str) else objects
            if not isinstance(parsed, list) or not all(isinstance(o, Mapping) for o in parsed):
                raise self._wrong("questions", objects, place, "a list of objects")
            return [{**row, **fields} for fields in parsed]
        question = self.value("question", row, place)
        answers = self.value("answers", row, place)
        if not isinstance(question, list):
            return [row]
        question_field, answers_field = self.fields["question"], self.fields["answers"]
        if not isinstance(answers, list) or len(answers) != len(question):
            raise TaskError(
                f"jsonl: {place}: field {question_field!r} has {len(question)} questions and "
                f"{answers_field!r} is {_shown(answers)}; allowed: a list of as many answers"
            )
        return [
            {**row, str(question_field): one_question, str(answers_field): its_answers}
            for one_question, its_answers in zip(question, answers, strict=True)
        ]

    def _wrong(self, role: str, value: Any, place: str, allowed: str) -> TaskError:
        name = self.fields[role]
        return TaskError(f"jsonl: {place}: field {name!r} is {_shown(value)}; allowed: {allowed}")


def option_key(answer: Any, options: Sequence[Any]) -> str | None:
    """An answer that is an option's text or letter, as text; one that is an option's index from 0, as
    its letter; None for any other. A whole number is an index (as in MMLU) unless the options are
    numbers and one of them is this."""
    choices = [str(option) for option in options]
    text = str(answer)
    is_option = option_letter(text, choices) is not None
    may_be_index = not is_option or (isinstance(answer, int) and answer not in options)
    if may_be_index and text.isdecimal() and int(text) < min(len(choices), 26):
        letter = string.ascii_uppercase[int(text)]
        return choices[int(text)] if letter in choices else letter
    return text if is_option else None


def _listed(value: Any) -> Sequence[Any]:
    """A value that is a list, or a list of the single value."""
    return value if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _parsed(text: str) -> Any:
    """Parse a text as JSON or as a Python literal; None where it is neither."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _shown(value: Any) -> str:
    """A value for a message, at most 60 characters long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
