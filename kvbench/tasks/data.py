"""Reading the data of tasks: texts and rows of files, of zip archives and of the Hub."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from kvbench.errors import first_line
from kvbench.hub import hub_answers, quiet_hub
from kvbench.tasks.base import TaskError

# files


def matching(patterns: Iterable[str]) -> list[str]:
    """List the files that match paths and globs, each once, sorted by path."""
    files: set[str] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        files |= {str(path)} if path.is_file() else set(glob.glob(str(path), recursive=True))
    return sorted(files)


def file_digests(patterns: Iterable[str]) -> dict[str, str]:
    """The sha256 of each file that matches; see `digests_in_order`."""
    return digests_in_order("data", matching(patterns))


def digests_in_order(task: str, paths: Sequence[str]) -> dict[str, str]:
    """The sha256 of files (paths as for `_open`) in the order in which they are read: by its name for a
    single file, by number and name for several, since names may recur and ids may follow the order.

    Raises:
        TaskError: a file cannot be read.
    """
    names = [Path(path.partition("::")[0]).name for path in paths]
    if len(names) > 1:
        names = [f"{number} {name}" for number, name in enumerate(names, start=1)]
    return {name: _sha256(task, path) for name, path in zip(names, paths, strict=True)}


def folder_digests(folder: str) -> dict[str, str]:
    """The sha256 of every file in a folder and the folders in it, by its path in the folder. What
    Python writes there itself (``__pycache__``) is left out."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): _sha256("data", str(path))
        for path in paths
        if "__pycache__" not in path.parts
    }


def distinct_names(paths: Sequence[str]) -> list[str]:
    """The names of files or, where two have the same name, the paths of all from the folder that holds
    them."""
    names = [Path(path).name for path in paths]
    if len(set(names)) == len(set(paths)):
        return names
    absolute = [os.path.abspath(path) for path in paths]
    folder = Path(os.path.commonpath(absolute))
    return [Path(path).relative_to(folder).as_posix() for path in absolute]


def read_text(task: str, path: str | Path) -> str:
    """Read a text file.

    Args:
        task: the name of the task, for messages.

    Raises:
        TaskError: the file cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise TaskError(f"{task}: cannot read {path}: {problem}") from problem


def texts_of_files(option: str, patterns: Sequence[str], hint: str = "") -> list[tuple[str, str]]:
    """Read all text files that match. Returns the name (`distinct_names`) and text of each, sorted by
    path.

    Args:
        option: the task's option that has the patterns, for messages.
        hint: where the files come from, for messages.

    Raises:
        TaskError: no file matches, or one cannot be read.
    """
    paths = matching(patterns)
    if not paths:
        raise TaskError(
            f"task.{option}: no file matches {list(patterns)}; allowed: text files, by path or "
            f"glob{hint}"
        )
    texts = [read_text(f"task.{option}", path) for path in paths]
    return list(zip(distinct_names(paths), texts, strict=True))


def _open(file: str) -> Any:
    """Open a local file, or the member of an archive ``zip://<member>::<archive>``, as a binary
    stream."""
    if not file.startswith("zip://"):
        return Path(file).open("rb")
    name, _, archive = file.removeprefix("zip://").partition("::")
    return zipfile.ZipFile(archive).open(name)


def _sha256(task: str, file: str) -> str:
    """The SHA-256 of the content of a file (a path as for `_open`).

    Raises:
        TaskError: the file cannot be read.
    """
    digest = hashlib.sha256()
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
    """Read the rows of a ``.parquet`` file, of a ``.json`` file with one list, or of a file of JSON
    lines. Yields each row with its number from 1, which for JSON lines is the number of the line.

    JSON lines are not read by the JSON loader of `datasets`, because the loader guesses types (text like
    2009-01-02 becomes a date), names not the line of an error but a row of the block that it was
    reading, and has crashed on broken files. Its parquet loader is called directly, because
    `load_dataset` reports every use to a server, for which a job without a network would wait.

    Args:
        task: the name of the task, for messages.
        file: a path as for `_open`.

    Raises:
        TaskError: the message names the file and the line that is wrong.
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
    """Parse a JSON text.

    Args:
        place: the file and line, for messages.

    Raises:
        TaskError: the text is not UTF-8, or not complete JSON.
    """
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as problem:
        raise TaskError(f"{task}: {place} is not UTF-8 (byte {problem.start})") from problem
    except (ValueError, RecursionError) as problem:
        why = str(problem)
        if isinstance(problem, json.JSONDecodeError) and problem.lineno == 1:
            why = f"{problem.msg}: column {problem.colno}"  # the line is that of `place`
        raise TaskError(f"{task}: {place} is not complete JSON ({why})") from problem


# the Hub


def hub_rows(
    task: str,
    repository: str,
    name: str | None,
    split: str,
    revision: str | None = None,
    limit: int | None = None,
    instead: str = "task.files=[<file>]",
) -> list[dict[str, Any]]:
    """Read the rows of a data set on the Hub by `datasets`.

    Args:
        task: the name of the task, for messages.
        name: the data set's configuration; None for its only one.
        limit: how many of the first rows are read; None for all.
        instead: the option that takes local files in place of the repository, for messages.

    Raises:
        TaskError: the data set cannot be read.
    """
    from datasets import load_dataset

    try:
        if not hub_answers():
            raise ConnectionError("the Hub cannot be reached")
        with quiet_hub():
            rows = load_dataset(
                repository, name=name, split=split, streaming=True, revision=revision
            )
            return [dict(row) for row in islice(rows, limit)]
    except Exception as problem:
        data_set = " ".join(part for part in (repository, name, split) if part)
        raise TaskError(
            f"{task}: cannot read {data_set}: {first_line(problem)}; allowed: a network, or {instead}"
        ) from problem


def texts_of_dataset(
    option: str, name: str, config: str | None, split: str, column: str, limit: int = 200
) -> list[tuple[str, str]]:
    """Read the texts in a column of the first `limit` rows of a data set on the Hub. Returns a name
    ("row 3") and the text of each.

    Args:
        option: the task's option that takes local files in place of the data set, for messages.

    Raises:
        TaskError: the data set cannot be read, or has no such column.
    """
    instead = f"task.{option}=[<file>]"
    rows = hub_rows("task.dataset_name", name, config, split, limit=limit, instead=instead)
    for row in rows:
        if column not in row:
            raise TaskError(
                f"task.dataset_column: dataset {name} has no column {column!r}; one of {', '.join(row)}"
            )
    return [(f"row {number}", str(row[column])) for number, row in enumerate(rows)]


@dataclass(frozen=True)
class Source:
    """The place of the rows of one data set.

    Attributes:
        task: the name of the task, for messages.
        files: globs of local files; they come before all other places.
        data: a local folder or zip that contains `file`.
        dataset: a data repository on the Hub. If `file` is given that file is fetched, else `datasets`
            reads `config` and `split`.
        config, split, revision: of the repository.
        file: the path of the data file in `data` or in the repository. In a folder parquet files of the
            same name are read as well.
        archive: the path of a zip in the repository that contains `file`.
        local: takes the place of `file` within `data`, for a data set that `datasets` reads from the
            Hub.
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
        """The paths of the files, for `file_rows`; empty where `datasets` reads the rows.

        Raises:
            TaskError: a file is missing or cannot be fetched.
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
        """Find a file in a folder or zip. In a zip a member of the same name in another folder is taken
        if there is only one.

        Raises:
            TaskError: `root` is neither a folder nor a zip, or does not contain the file.
        """
        name = Path(file)
        if root.is_dir():
            parquet, shards = name.with_suffix(".parquet").name, f"{name.stem}/*.parquet"
            in_data_folder = (f"data/{parquet}", f"data/{shards}")
            for pattern in (file, name.name, parquet, shards, *in_data_folder):
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
            same_name = [path for path in names if Path(path).name == name.name]
            if file in names:
                return [f"zip://{file}::{root}"]
            if len(same_name) == 1:
                return [f"zip://{same_name[0]}::{root}"]
        elif not root.exists():
            raise TaskError(
                f"{self.task}: task.data is {self.data!r}, which does not exist; allowed: a folder or "
                f"zip with {file}"
            )
        message = f"{self.task}: no {file} in {str(root)!r}; allowed: a folder or zip with it"
        if self.dataset and self.file:
            fetched = self.archive or self.file
            message += f"; it comes with: hf download {self.dataset} {fetched} --repo-type dataset"
        raise TaskError(message)

    def _fetched(self, file: str) -> Path:
        """Fetch a file of the repository; returns its local path.

        Raises:
            TaskError: the file cannot be fetched.
        """
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
        """Read all rows. Yields each row's place for messages ("file row 3"), the name of its file
        (`distinct_names`) without the suffix, and the row.

        Raises:
            TaskError: the message names the row that is wrong.
        """
        inside = [path.removeprefix("zip://").partition("::")[0] for path in self.paths]
        for path, name in zip(self.paths, distinct_names(inside), strict=True):
            stem = Path(name).with_suffix("").as_posix()
            for number, row in file_rows(self.task, path):
                if not isinstance(row, Mapping):
                    raise TaskError(
                        f"{self.task}: {path} row {number} is not an object with fields"
                    )
                yield f"{path} row {number}", stem, row
        if not self.paths:
            assert self.dataset is not None
            stem = self.dataset.rpartition("/")[2]
            rows = hub_rows(
                self.task,
                self.dataset,
                self.config,
                self.split,
                self.revision,
                instead=self._local_option,
            )
            for number, row in enumerate(rows, start=1):
                yield f"{self.dataset} row {number}", stem, row

    @property
    def _local_option(self) -> str:
        """The option that names a local copy of the rows."""
        return "task.files=[<file>]" if self.local is None else "task.data=<folder or zip>"

    def check_files(self) -> None:
        """Read the local files of `files` once, so that a wrong one is refused early.

        Raises:
            TaskError: a file is missing, has no row, or has a broken one.
        """
        for path in self.paths if self.files else ():
            if not sum(1 for _ in file_rows(self.task, path)):
                raise TaskError(f"{self.task}: {path} is empty; allowed: a row for each context")

    def digests(self) -> dict[str, str]:
        """The sha256 of each file (`digests_in_order`), or the repository's commit where `datasets`
        reads the rows.

        Raises:
            TaskError: a file or the repository cannot be read.
        """
        if self.paths:
            return digests_in_order(self.task, self.paths)
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
                f"dataset on the Hub and a network, or {self._local_option}"
            ) from problem
        return {self.dataset: str(commit)}
