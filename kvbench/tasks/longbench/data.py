"""LongBench's examples: the hub's archive, a local folder or zip, or a parquet mirror; checked.

The Hub repository's loading script no longer runs with current `datasets`; its archive ``data.zip``
holds one JSON-lines file per dataset, which is read here.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from kvbench.errors.options import Several, Text, Whole, allowed, fits
from kvbench.tasks.base import TaskError
from kvbench.tasks.files import file_rows, sha256
from kvbench.tasks.hub import commit_of, fetch, hub_rows
from kvbench.tasks.longbench.metrics import ANSWER_PATTERNS, CLASSIFIED

REPOSITORY = "THUDM/LongBench"
ARCHIVE = "data.zip"
HUB = "hf://datasets/"
TEXTS = Several[str]
HINTS: Mapping[str, Any] = {
    "_id": Text,
    "context": Text,
    "input": str,
    "length": Whole,
    "answers": TEXTS,
    "all_classes": TEXTS,
}
"""What a row's fields must be."""


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
        return sha256("longbench", self.files(stem))

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
            sources: list[tuple[str, Iterator[Any]]] = [(name, iter(enumerate(raw, start=1)))]
        else:
            sources = [(file, file_rows("longbench", file)) for file in self.files(stem)]
        rows = [_row(r, dataset, f"{file} line {n}") for file, found in sources for n, r in found]
        if not rows:
            raise TaskError(f"longbench: {name} holds no example")
        rows.sort(key=lambda row: row.id)
        for row, following in pairwise(rows):
            if row.id == following.id:
                raise TaskError(f"longbench: {name} has _id {row.id!r} twice; allowed: once")
        return rows


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
    pattern = ANSWER_PATTERNS.get(dataset)
    hints = HINTS if dataset in CLASSIFIED else {**HINTS, "all_classes": Any}
    for name, hint in hints.items():
        value = fields.get(name)
        fitting = fits(hint, value) and not (hint is TEXTS and isinstance(value, str))
        if fitting and name == "answers" and pattern is not None:
            fitting = all(pattern.search(answer) for answer in fields[name])
            hint = Annotated[str, f"text with {pattern.pattern}"]
        if not fitting:
            shown = repr(value)[:60] if name in fields else "missing"
            raise TaskError(
                f"longbench: {place}: field {name} is {shown}; allowed: {allowed(hint)}"
            )
    classes = tuple(fields["all_classes"]) if dataset in CLASSIFIED else ()
    answers = tuple(fields["answers"])
    return Row(
        fields["_id"], fields["context"], fields["input"], answers, fields["length"], classes
    )
