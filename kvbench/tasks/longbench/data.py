"""LongBench's examples: the hub's archive, a local folder or zip, or a parquet mirror; checked.

The Hub repository's loading script no longer runs with current `datasets`; its archive ``data.zip``
holds one JSON-lines file per dataset, which is read here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbench.errors import is_integer
from kvbench.tasks.base import TaskError
from kvbench.tasks.hub import hub_answers
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
            return _fetch_archive(self.revision)
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
            return _mirror_commit(str(self.location), self.revision)
        digest = hashlib.sha256()
        for file in self.files(stem):
            with _open(file) as stream:
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
            with _readable(name):
                raw = _load_mirror(str(self.location).removeprefix(HUB), stem, self.revision)
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


def _fetch_archive(revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        with _silent(logging.getLogger("huggingface_hub")):  # five retries, a paragraph each
            return Path(
                hf_hub_download(
                    REPOSITORY,
                    ARCHIVE,
                    repo_type="dataset",
                    revision=revision,
                    local_files_only=not hub_answers(),
                )
            )
    except Exception as problem:
        raise TaskError(
            f"longbench: {ARCHIVE} of {REPOSITORY} (revision {revision or 'main'}) cannot be fetched "
            f"({type(problem).__name__}); allowed: a network, or task.data=<folder or zip> with it"
        ) from problem


def _mirror_commit(location: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    try:
        if not hub_answers():
            raise ConnectionError("the Hub cannot be reached")
        with _silent(logging.getLogger("huggingface_hub")):
            return str(HfApi().dataset_info(location.removeprefix(HUB), revision=revision).sha)
    except Exception as problem:
        raise TaskError(
            f"longbench: task.data is {location!r}, which cannot be read "
            f"({type(problem).__name__}); allowed: a dataset on the Hub, and a network"
        ) from problem


def _load_mirror(repository: str, name: str, revision: str | None) -> list[dict[str, Any]]:
    """Rows of a configuration of a Hub repository; mirrors name their only split "test"."""
    from datasets import load_dataset

    if not hub_answers():
        raise ConnectionError(
            "the Hub cannot be reached; allowed: a network, or task.data=<folder>"
        )
    rows = load_dataset(repository, name=name, split="test", streaming=True, revision=revision)
    return [dict(row) for row in rows]


def _load_parquet(file: str) -> list[dict[str, Any]]:
    """Rows as `datasets`' parquet loader reads them, without its own copy on disk.

    The loader is asked by itself: `load_dataset` reports every use to a server, which a job without
    a network waits for.
    """
    from datasets.packaged_modules.parquet.parquet import Parquet

    rows = Parquet(data_files={"train": [file]}).as_streaming_dataset(split="train")
    return [dict(row) for row in rows]


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        text = str(problem).strip().splitlines()
        raise TaskError(
            f"longbench: cannot read {name}: {text[0] if text else type(problem).__name__}"
        ) from problem


def _rows_of(file: str, dataset: str) -> list[Row]:
    """The rows of one file.

    JSON lines are parsed one by one and not by `datasets`' JSON loader: that guesses types (text like
    2009-01-02 becomes a date), names no line, and broken files have crashed its process.
    """
    if file.endswith(".parquet"):
        with _readable(file):
            raw = _load_parquet(file)
        return _checked(enumerate(raw, start=1), dataset, file)
    return _checked(_json_lines(file), dataset, file)


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _open(file: str) -> Any:
    """A binary stream of a local file, or of ``zip://<name>::<archive>``."""
    if not file.startswith("zip://"):
        return Path(file).open("rb")
    name, _, archive = file.removeprefix("zip://").partition("::")
    return zipfile.ZipFile(archive).open(name)


def _json_lines(file: str) -> Iterator[tuple[int, Any]]:
    """Line numbers from 1, and what is on each line."""
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as problem:
                raise TaskError(
                    f"longbench: {file} line {number} is not UTF-8 (byte {problem.start})"
                ) from problem
            except (ValueError, RecursionError) as problem:
                raise TaskError(
                    f"longbench: {file} line {number} is not complete JSON ({problem})"
                ) from problem


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
