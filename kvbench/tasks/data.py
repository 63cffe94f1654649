"""Data of tasks: text and rows of files, of archives and of the Hub.

The Hub is asked once whether it answers, before its library tries for half a minute.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import socket
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from kvbench.errors import first_line
from kvbench.tasks.base import TaskError

# files


def matching(patterns: Iterable[str]) -> list[str]:
    """The files that paths and globs name, each once, by path."""
    files: set[str] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        files |= {str(path)} if path.is_file() else set(glob.glob(str(path), recursive=True))
    return sorted(files)


def file_digests(patterns: Iterable[str]) -> dict[str, str]:
    """sha256 of each file that is there, by file name."""
    return {Path(file).name: _sha256("data", [file]) for file in matching(patterns)}


def read_text(task: str, path: str | Path) -> str:
    """A text file.

    Raises:
        TaskError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise TaskError(f"{task}: cannot read {path}: {problem}") from problem


def texts_of_files(patterns: Sequence[str]) -> list[tuple[str, str]]:
    """Name and text of each file that matches, by path.

    Raises:
        TaskError: there is none, or one cannot be read.
    """
    paths = matching(patterns)
    if not paths:
        raise TaskError(
            f"needle: no file matches haystack_files={list(patterns)}; the protocol's essays come "
            "with: git clone https://github.com/gkamradt/LLMTest_NeedleInAHaystack"
        )
    return [(Path(path).name, read_text("needle", path)) for path in paths]


def _open(file: str) -> Any:
    """A binary stream of a local file, or of ``zip://<name>::<archive>``."""
    if not file.startswith("zip://"):
        return Path(file).open("rb")
    name, _, archive = file.removeprefix("zip://").partition("::")
    return zipfile.ZipFile(archive).open(name)


def _sha256(task: str, files: Iterable[str]) -> str:
    """The SHA-256 of files, read one after the other; each as `_open` takes it.

    Raises:
        TaskError: one cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        try:
            with _open(file) as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        except OSError as problem:
            raise _unreadable(task, file, problem) from problem
    return digest.hexdigest()


def _unreadable(task: str, file: str, problem: OSError) -> TaskError:
    return TaskError(f"{task}: cannot read {file}: {problem.strerror or problem}")


def file_rows(task: str, file: str) -> Iterator[tuple[int, Any]]:
    """Numbers from 1 (of JSON lines, the lines') and rows of a file, by its ending: ``.parquet``,
    ``.json`` (one list) or JSON lines.

    JSON lines are parsed one by one and not by `datasets`' JSON loader: that guesses types (text like
    2009-01-02 becomes a date), names no line, and broken files have crashed its process. Its parquet
    loader is asked by itself: `load_dataset` reports every use to a server, which a job without a
    network waits for.

    Raises:
        TaskError: one line naming the file and the line that is wrong.
    """
    try:
        if file.endswith(".parquet"):
            from datasets.packaged_modules.parquet.parquet import Parquet

            try:
                rows = Parquet(data_files={"train": [file]}).as_streaming_dataset(split="train")
                yield from enumerate([dict(row) for row in rows], start=1)
            except Exception as problem:
                raise TaskError(f"{task}: cannot read {file}: {first_line(problem)}") from problem
        elif file.endswith(".json"):
            with _open(file) as stream:
                rows = parsed_json(task, file, stream.read())
            if not isinstance(rows, list):
                raise TaskError(
                    f"{task}: {file} holds no list; allowed: a list of objects, or JSON lines"
                )
            yield from enumerate(rows, start=1)
        else:
            with _open(file) as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield number, parsed_json(task, f"{file} line {number}", line)
    except OSError as problem:
        raise _unreadable(task, file, problem) from problem


def parsed_json(task: str, place: str, text: bytes) -> Any:
    """What a JSON text says.

    Raises:
        TaskError: it is not complete JSON, or not UTF-8.
    """
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as problem:
        raise TaskError(f"{task}: {place} is not UTF-8 (byte {problem.start})") from problem
    except (ValueError, RecursionError) as problem:
        raise TaskError(f"{task}: {place} is not complete JSON ({problem})") from problem


# the Hub

ANSWER_S = 5.0
"""Seconds within which the Hub must answer at all."""


def hub_answers() -> bool:
    """Whether the Hub accepts a connection. True too behind a proxy and where the library was told to
    stay offline: there it decides itself, at once."""
    from huggingface_hub import constants

    if constants.is_offline_mode() or getproxies():
        return True
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or {"http": 80}.get(hub.scheme, 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Without the warnings of the Hub's libraries, a paragraph for each attempt and file while they ask
    again; errors are raised as ever."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "datasets")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def hub_rows(
    task: str,
    repository: str,
    name: str | None,
    split: str,
    revision: str | None = None,
    limit: int | None = None,
    instead: str = "task.files=[<file>]",
) -> list[dict[str, Any]]:
    """Rows of a configuration of a data repository that `datasets` reads by itself, the first `limit`.

    Args:
        instead: what takes local files in place of the repository, for the error.

    Raises:
        TaskError: it cannot be read.
    """
    from datasets import load_dataset

    where = " ".join(part for part in (repository, name, split) if part)
    try:
        if not hub_answers():
            raise ConnectionError("the Hub cannot be reached")
        with quiet_hub():
            rows = load_dataset(
                repository, name=name, split=split, streaming=True, revision=revision
            )
            return [dict(row) for row in islice(rows, limit)]
    except Exception as problem:
        raise TaskError(
            f"{task}: cannot read {where}: {first_line(problem)}; allowed: a network, or {instead}"
        ) from problem


def texts_of_dataset(
    name: str, config: str | None, split: str, column: str, limit: int = 200
) -> list[tuple[str, str]]:
    """Number and text of each of the first `limit` rows of a Hugging Face dataset.

    Raises:
        TaskError: it cannot be loaded, or has no such column.
    """
    local = "task.haystack_files=[<file>]"
    rows = hub_rows("needle", name, config, split, limit=limit, instead=local)
    for row in rows:
        if column not in row:
            raise TaskError(
                f"needle: dataset {name} has no column {column!r}; one of {', '.join(row)}"
            )
    return [(f"row {number}", str(row[column])) for number, row in enumerate(rows)]


@dataclass(frozen=True)
class Source:
    """The place of the rows of one data set.

    Attributes:
        task: its name, for errors.
        files: globs of local files.
        data: a folder or zip with `file` in it.
        dataset: a data repository on the Hub, read by `datasets` (config, split) or, if `file` is
            given, by fetching that.
        file: a path in `data` or in the repository; with `archive`, in that zip of theirs. In a folder
            parquet files of that name do as well.
        local: in place of `file` where `data` is given, for a data set that `datasets` reads otherwise.
    """

    task: str
    files: tuple[str, ...] = ()
    data: str | None = None
    dataset: str | None = None
    config: str | None = None
    split: str = "test"
    revision: str | None = None
    file: str | None = None
    archive: str | None = None
    local: str | None = None

    @cached_property
    def paths(self) -> list[str]:
        """The files, as `file_rows` takes them; none where `datasets` reads the rows.

        Raises:
            TaskError: one is missing or cannot be fetched.
        """
        files = []
        for pattern in self.files:
            if not matching([pattern]):
                raise TaskError(
                    f"{self.task}: no file matches files={pattern!r}; allowed: a path or a glob"
                )
            files += matching([pattern])
        file = self.file if self.data is None else self.local or self.file
        if files or file is None:
            return files
        if self.data is not None:
            return self._inside(Path(self.data).expanduser(), file)
        path = self._fetched(self.archive or file)
        return self._inside(path, file) if self.archive else [str(path)]

    def _inside(self, root: Path, file: str) -> list[str]:
        """A file of a folder or zip, wherever in the zip if no other there has its name."""
        name = Path(file)
        if root.is_dir():
            parquet = [name.with_suffix(".parquet").name, f"{name.stem}/*.parquet"]
            for pattern in (file, name.name, *parquet, *(f"data/{shard}" for shard in parquet)):
                if files := sorted(root.glob(pattern)):
                    return [str(path) for path in files]
        elif root.is_file():
            try:
                with zipfile.ZipFile(root) as archive:
                    names = archive.namelist()
            except (OSError, zipfile.BadZipFile) as problem:
                raise TaskError(
                    f"{self.task}: {root} is no zip archive ({problem}); allowed: a folder or zip"
                ) from problem
            alike = [path for path in names if Path(path).name == name.name]
            if file in names or len(alike) == 1:
                return [f"zip://{file if file in names else alike[0]}::{root}"]
        elif not root.exists():
            raise TaskError(
                f"{self.task}: task.data is {self.data!r}, which does not exist; allowed: a folder or "
                f"zip with {file}"
            )
        fetched = f"; it comes with: hf download {self.dataset} {self.archive or self.file}"
        raise TaskError(
            f"{self.task}: no {file} in {str(root)!r}; allowed: a folder or zip with it"
            + (f"{fetched} --repo-type dataset" if self.dataset and self.file else "")
        )

    def _fetched(self, file: str) -> Path:
        """A file of the repository, on this machine."""
        from huggingface_hub import hf_hub_download

        assert self.dataset is not None
        try:
            with quiet_hub():
                path = hf_hub_download(
                    self.dataset,
                    file,
                    repo_type="dataset",
                    revision=self.revision,
                    local_files_only=not hub_answers(),
                )
        except Exception as problem:
            raise TaskError(
                f"{self.task}: {file} of {self.dataset} (revision {self.revision or 'main'}) cannot be "
                f"fetched ({type(problem).__name__}); allowed: a network, or task.data=<folder or zip "
                f"with {self.file}>"
            ) from problem
        return Path(path)

    def rows(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Place ("file row 3"), stem of the file's name, and row.

        Raises:
            TaskError: one line naming the place that is wrong.
        """
        for path in self.paths:
            stem = Path(path.removeprefix("zip://").partition("::")[0]).stem
            for number, row in file_rows(self.task, path):
                if not isinstance(row, Mapping):
                    raise TaskError(
                        f"{self.task}: {path} row {number} is not an object with fields"
                    )
                yield f"{path} row {number}", stem, row
        if not self.paths:
            assert self.dataset is not None
            stem = self.dataset.rpartition("/")[2]
            where = (self.dataset, self.config, self.split, self.revision)
            local = "task.files=[<file>]" if self.local is None else "task.data=<folder or zip>"
            rows = hub_rows(self.task, *where, instead=local)
            for number, row in enumerate(rows, start=1):
                yield f"{self.dataset} row {number}", stem, row

    def check_files(self) -> None:
        """Read the local files that are named, to tell early what is wrong with one.

        Raises:
            TaskError: one is missing, holds no row or a broken one.
        """
        for path in self.paths if self.files else ():
            if not sum(1 for _ in file_rows(self.task, path)):
                raise TaskError(f"{self.task}: {path} is empty; allowed: a row for each context")

    def digests(self) -> dict[str, str]:
        """sha256 of each file by its name; of what `datasets` reads, its commit.

        Raises:
            TaskError: a file or the repository cannot be read.
        """
        if self.paths:
            names = [Path(path.partition("::")[0]).name for path in self.paths]
            return {
                name: _sha256(self.task, [path])
                for name, path in zip(names, self.paths, strict=True)
            }
        from huggingface_hub import HfApi

        assert self.dataset is not None
        try:
            if not hub_answers():
                raise ConnectionError("the Hub cannot be reached")
            with quiet_hub():
                commit = HfApi().dataset_info(self.dataset, revision=self.revision).sha
        except Exception as problem:
            raise TaskError(
                f"{self.task}: {self.dataset!r} cannot be read ({type(problem).__name__}); allowed: a "
                "dataset on the Hub, and a network"
            ) from problem
        return {self.dataset: str(commit)}
