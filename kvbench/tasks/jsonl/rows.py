"""Where rows come from, and the questions that one row asks."""

from __future__ import annotations

import ast
import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import regex

from kvbench.errors import nearest
from kvbench.tasks.base import TaskError
from kvbench.tasks.files import file_rows, sha256
from kvbench.tasks.hub import commit_of, fetch, hub_rows
from kvbench.tasks.jsonl.template import PromptTemplate
from kvbench.tasks.metrics import REGEX_SECONDS

Row = Mapping[str, Any]
ROLES = ("context", "question", "answers", "questions", "choices", "id", "dataset")
"""What a field of a row may stand for."""


@dataclass(frozen=True)
class Source:
    """Where the rows of one data set are.

    Attributes:
        files: globs of local files.
        data: a folder or zip with `file` in it.
        dataset: a data repository on the Hub, read by `datasets` (config, split) or, if `file` is
            given, by fetching that.
        file: a path in `data` or in the repository; with `archive`, in that zip of theirs.
        local: in place of `file` where `data` is given, for a data set that `datasets` reads otherwise.
    """

    files: tuple[str, ...]
    data: str | None
    dataset: str | None
    config: str | None
    split: str
    revision: str | None
    file: str | None
    archive: str | None
    local: str | None

    @cached_property
    def paths(self) -> list[str]:
        """The files, as `file_rows` takes them; none where `datasets` reads the rows.

        Raises:
            TaskError: one is missing or cannot be fetched.
        """
        if self.files:
            found = []
            for pattern in self.files:
                matching = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
                if not matching:
                    raise TaskError(
                        f"jsonl: no file matches files={pattern!r}; allowed: a path or a glob"
                    )
                found += matching
            return found
        file = self.file if self.data is None else self.local or self.file
        if file is None:
            return []
        if self.data is not None:
            return [_inside(Path(self.data).expanduser(), file)]
        assert self.dataset is not None
        instead = f"task.data=<folder or zip with {file}>"
        path = fetch("jsonl", self.dataset, self.archive or file, self.revision, instead)
        return [_inside(path, file)] if self.archive else [str(path)]

    def rows(self) -> Iterator[tuple[str, str, Row]]:
        """Place ("file line 3"), stem of the file's name, and row.

        Raises:
            TaskError: one line naming the place that is wrong.
        """
        if self.paths:
            for path in self.paths:
                stem = Path(path.removeprefix("zip://").partition("::")[0]).stem
                for number, row in file_rows("jsonl", path):
                    yield f"{path} row {number}", stem, _object(f"{path} row {number}", row)
            return
        assert self.dataset is not None
        rows = hub_rows("jsonl", self.dataset, self.config, self.split, self.revision)
        for number, row in enumerate(rows, start=1):
            yield f"{self.dataset} row {number}", self.dataset.rpartition("/")[2], row

    def digests(self) -> dict[str, str]:
        """sha256 of each file by its name; of what `datasets` reads, its commit."""
        if self.paths:
            return {
                Path(path.partition("::")[0]).name: sha256("jsonl", [path]) for path in self.paths
            }
        assert self.dataset is not None
        return {self.dataset: commit_of("jsonl", self.dataset, self.revision)}


def _object(place: str, row: Any) -> Row:
    if not isinstance(row, Mapping):
        raise TaskError(f"jsonl: {place} is not an object with fields")
    return row


def _inside(root: Path, file: str) -> str:
    if root.is_dir() and (root / file).is_file():
        return str(root / file)
    if root.is_dir() and (root / Path(file).name).is_file():
        return str(root / Path(file).name)
    if root.is_file():
        with open_zip(root) as archive:
            names = archive.namelist()
        alike = [name for name in names if Path(name).name == Path(file).name]
        if file in names or len(alike) == 1:
            return f"zip://{file if file in names else alike[0]}::{root}"
    raise TaskError(f"jsonl: no {file} in {str(root)!r}; allowed: a folder or zip with it")


def open_zip(path: Path) -> Any:
    """The archive.

    Raises:
        TaskError: it is none.
    """
    import zipfile

    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as problem:
        raise TaskError(f"jsonl: {path} is no zip archive ({problem})") from problem


@dataclass(frozen=True)
class Asked:
    """One question of a row.

    Attributes:
        fields: of the row, those of the question's own object over them: what a template may print.
    """

    question: str
    answers: tuple[str, ...]
    choices: tuple[str, ...]
    fields: Row


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
        found = dict(row)
        for name, (source, pattern) in self.extract.items():
            text = str(self.field(source, row, place, f"extract.{name}"))
            match = regex.search(pattern, text, timeout=REGEX_SECONDS)
            if match is None:
                raise TaskError(
                    f"jsonl: {place}: field {source!r} is {_shown(text)}, without {pattern!r} "
                    f"(task.extract.{name}); allowed: text with it"
                )
            found[name] = match[1] if match.re.groups else match[0]
        return found

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
            raise TaskError(
                f"jsonl: {place}: field {self.fields[role]!r} is {_shown(value)}; allowed: text"
            )
        return str(value)

    def asked(self, row: Row, place: str) -> list[Asked]:
        """The questions of a row: one, or one for each of a list of questions (its answers a list of
        as many), or for each object of the field that stands for `questions`.

        Raises:
            TaskError: fields that are missing or of the wrong kind.
        """
        several = self.value("questions", row, place)
        if several is not None:
            items = _literal(several) if isinstance(several, str) else several
            if not isinstance(items, list) or not all(isinstance(i, Mapping) for i in items):
                name = self.fields["questions"]
                raise TaskError(
                    f"jsonl: {place}: field {name!r} is {_shown(several)}; allowed: a list of objects"
                )
            return [
                self._one({**row, **item}, f"{place}, question {number}")
                for number, item in enumerate(items, start=1)
            ]
        question, answers = (
            None if self.fields.get(role) is None else self.value(role, row, place)
            for role in ("question", "answers")
        )
        if not isinstance(question, list):
            return [self._one(row, place)]
        if not isinstance(answers, list) or len(answers) != len(question):
            raise TaskError(
                f"jsonl: {place}: field {self.fields['question']!r} has {len(question)} questions and "
                f"{self.fields['answers']!r} is {_shown(answers)}; allowed: a list of as many answers"
            )
        names = {role: str(self.fields[role]) for role in ("question", "answers")}
        return [
            self._one({**row, names["question"]: q, names["answers"]: a}, place)
            for q, a in zip(question, answers, strict=True)
        ]

    def _one(self, row: Row, place: str) -> Asked:
        choices = self.value("choices", row, place)
        return Asked(
            self.text("question", row, place),
            _texts(self.value("answers", row, place), f"{place}: field {self.fields['answers']!r}"),
            ()
            if choices is None
            else _texts(choices, f"{place}: field {self.fields['choices']!r}"),
            row,
        )


def _literal(text: str) -> Any:
    """What a text says as JSON, or as a Python literal."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def _texts(value: Any, place: str) -> tuple[str, ...]:
    """Answers as texts: one or a list of texts or numbers; an object as JSON.

    Raises:
        TaskError: there is none, or one is something else.
    """
    if isinstance(value, Mapping):
        return (json.dumps(value, ensure_ascii=False),)
    several = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not several or not all(isinstance(one, str | int | float) for one in several):
        raise TaskError(
            f"jsonl: {place} is {_shown(value)}; allowed: a text, a number, or a list of them"
        )
    return tuple(str(one) for one in several)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
