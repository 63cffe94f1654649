"""LongBench's examples: the hub's archive, a local folder or zip, or a parquet mirror; checked.

The Hub repository's loading script no longer runs with current `datasets`; its archive ``data.zip``
holds one JSON-lines file per dataset, which is read here.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbench.errors import is_integer
from kvbench.tasks.base import TaskError
from kvbench.tasks.files import file_rows, open_file
from kvbench.tasks.hub import commit_of, fetch, hub_rows
from kvbench.tasks.longbench.metrics import ANSWER_PATTERNS, CLASSIFIED

REPOSITORY = "THUDM/LongBench"
ARCHIVE = "data.zip"
HUB = "hf://datasets/"


@dataclass(frozen=True)
class Row:
    """One example as LongBench stores it.

    Attributes:
        id: ``_id``.
        context, input: fields of the prompt template; `input` may be empty.
        answers: acceptable answers.
        length: in words (characters for Chinese), for the buckets.
        all_classes: class names (trec, lsht), else empty.
    """

    id: str
    context: str
    input: str
    answers: tuple[str, ...]
    length: int
    all_classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """Where the files are.

    Attributes:
        location: None for the Hub's archive; a folder or ``.zip`` with the JSON-lines (or parquet)
            files; ``hf://datasets/<owner>/<name>`` for a mirror whose configurations are datasets.
        revision: of the Hub repository; None: its main branch as it is now.
    """

    location: str | None = None
    revision: str | None = None

    @property
    def is_mirror(self) -> bool:
        """Whether the rows come from a Hub repository that `datasets` reads by itself."""
        return self.location is not None and self.location.startswith(HUB)

    @cached_property
    def root(self) -> Path:
        """The folder or archive on this machine; the Hub's archive is fetched when first needed.

        Raises:
            TaskError: it is not there, or cannot be fetched.
        """
        if self.location is None:
            return fetch(
                "longbench", REPOSITORY, ARCHIVE, self.revision, "task.data=<folder or zip> with it"
            )
        path = Path(self.location).expanduser()
        if not path.exists():
            raise TaskError(f"longbench: task.data is {self.location!r}, which does not exist")
        if path.is_file() and not zipfile.is_zipfile(path):
            raise TaskError(
                f"longbench: task.data is {self.location!r}; allowed: a folder, a zip archive, "
                f"{HUB}<owner>/<name>, or null for {REPOSITORY}"
            )
        return path

    def files(self, stem: str) -> list[str]:
        """The files of one dataset (``qasper_e``), as `datasets` takes them.

        Raises:
            TaskError: there is none.
        """
        root = self.root
        if root.is_dir():
            for folder in (root, root / "data"):
                for pattern in (f"{stem}.jsonl", f"{stem}.parquet", f"{stem}/*.parquet"):
                    found = sorted(folder.glob(pattern))
                    if found:
                        return [str(path) for path in found]
        else:
            with zipfile.ZipFile(root) as archive:
                names = set(archive.namelist())
            for name in (f"data/{stem}.jsonl", f"{stem}.jsonl"):
                if name in names:
                    return [f"zip://{name}::{root}"]
        raise TaskError(
            f"longbench: no {stem}.jsonl (or parquet) in {root}; the files come with {ARCHIVE} of "
            f"{REPOSITORY} on the Hub: hf download {REPOSITORY} {ARCHIVE} --repo-type dataset"
        )

    def digest(self, stem: str) -> str:
        """sha256 of the dataset's files; of a mirror, its commit.

        Raises:
            TaskError: there is none, or the Hub cannot be reached.
        """
        if self.is_mirror:
            return commit_of("longbench", str(self.location).removeprefix(HUB), self.revision)
        digest = hashlib.sha256()
        for file in self.files(stem):
            with open_file(file) as stream:
                digest.update(stream.read())
        return digest.hexdigest()

    def rows(self, stem: str) -> list[Row]:
        """The examples of one dataset, checked, sorted by id.

        Raises:
            TaskError: one line naming the file, the line and the field that is wrong.
        """
        dataset = stem.removesuffix("_e")
        name = f"{self.location or REPOSITORY} {stem}"
        if self.is_mirror:
            repository = str(self.location).removeprefix(HUB)
            raw = hub_rows("longbench", repository, stem, "test", self.revision)
            rows = _checked(enumerate(raw, start=1), dataset, name)
        else:
            rows = [row for file in self.files(stem) for row in _rows_of(file, dataset)]
        if not rows:
            raise TaskError(f"longbench: {name} holds no example")
        rows.sort(key=lambda row: row.id)
        for row, following in pairwise(rows):
            if row.id == following.id:
                raise TaskError(f"longbench: {name} has _id {row.id!r} twice; allowed: once")
        return rows


def _rows_of(file: str, dataset: str) -> list[Row]:
    return _checked(file_rows("longbench", file), dataset, file)


def _checked(rows: Iterable[tuple[int, Any]], dataset: str, file: str) -> list[Row]:
    return [_row(raw, dataset, f"{file} line {number}") for number, raw in rows]


def _row(raw: Any, dataset: str, place: str) -> Row:
    """One row with every field checked.

    Raises:
        TaskError: naming the place and the field.
    """
    if not isinstance(raw, Mapping):
        raise TaskError(f"longbench: {place} is not an object with fields")
    fields = dict(raw)
    if "input" not in fields and "question" in fields:  # as parquet mirrors call it
        fields["input"] = fields["question"]
    for name in ("_id", "context", "input"):
        _expect(isinstance(fields.get(name), str), fields, name, place, "text")
    for name in ("_id", "context"):
        _expect(fields[name].strip() != "", fields, name, place, "text that is not empty")
    length: Any = fields.get("length")
    whole = is_integer(length, 0)
    _expect(whole, fields, "length", place, "a number of words")
    answers = _texts(fields, "answers", place)
    pattern = ANSWER_PATTERNS.get(dataset)
    if pattern is not None:
        found = all(pattern.search(answer) for answer in answers)
        _expect(found, fields, "answers", place, f"text with {pattern.pattern}")
    classes: tuple[str, ...] = ()
    if dataset in CLASSIFIED:
        classes = _texts(fields, "all_classes", place)
    return Row(fields["_id"], fields["context"], fields["input"], answers, int(length), classes)


def _texts(fields: Mapping[str, Any], name: str, place: str) -> tuple[str, ...]:
    value = fields.get(name)
    good = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    _expect(
        good and all(isinstance(text, str) for text in value or ()),
        fields,
        name,
        place,
        "a list of at least one text",
    )
    return tuple(value or ())


def _expect(good: bool, fields: Mapping[str, Any], name: str, place: str, allowed: str) -> None:
    if good:
        return
    value = repr(fields[name])[:60] if name in fields else "missing"
    raise TaskError(f"longbench: {place}: field {name} is {value}; allowed: {allowed}")
