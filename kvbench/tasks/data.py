"""Reading the data of tasks: texts and rows of files, of zip archives and of the Hub."""

from __future__ import annotations

import ast
import glob
import gzip
import hashlib
import json
import os
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from kvbench.errors import first_line
from kvbench.hub import hub_answers, quiet_hub
from kvbench.tasks.base import TaskError

TABLES = {".csv": ",", ".tsv": "\t"}
"""The separator of the cells, by the ending of a file."""
ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", *TABLES)
"""The endings of the files with rows in a folder; each may have ``.gz`` behind it."""
SPLIT_WORDS = {"train", "validation", "valid", "val", "dev", "test"}
"""The words in the names of a folder's files that say of which split they are."""
NUMPY_ARRAY = re.compile(r"""\s*\[\s*['"].*['"]\s+['"].*\]\s*|.*\barray\(\[.*""", re.DOTALL)
"""The text of an array of texts, which pandas writes into a cell. Python would read it as one text."""

File = Path | zipfile.Path
"""A file, or the member of a zip archive."""

# files


def matching(patterns: Iterable[str]) -> list[Path]:
    files: set[str] = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        files |= {str(path)} if path.is_file() else set(glob.glob(str(path), recursive=True))
    return [Path(file) for file in sorted(files)]


def file_digests(patterns: Iterable[str]) -> dict[str, str]:
    return digests_in_order("data", matching(patterns))


def digests_in_order(task: str, files: Sequence[File]) -> dict[str, str]:
    """The sha256 of files in the order in which they are read: by its name for a single file, by number
    and name for several, since names may recur and ids may follow the order."""
    names = [file.name for file in files]
    if len(names) > 1:
        names = [f"{number} {name}" for number, name in enumerate(names, start=1)]
    return {name: _sha256(task, file) for name, file in zip(names, files, strict=True)}


def folder_digests(folder: str) -> dict[str, str]:
    """The sha256 of every file in a folder and the folders in it, by its path, without
    ``__pycache__``."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): _sha256("data", path)
        for path in paths
        if "__pycache__" not in path.parts
    }


def distinct_names(files: Sequence[File]) -> list[str]:
    """The names of files or, where two are the same, all paths from the folder that holds them."""
    names = [file.name for file in files]
    if len(set(names)) == len(set(files)):
        return names
    absolute = [os.path.abspath(str(file)) for file in files]
    folder = Path(os.path.commonpath(absolute))
    return [Path(path).relative_to(folder).as_posix() for path in absolute]


def read_text(task: str, path: str | Path) -> str:
    """`task` is for messages, here and below."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise TaskError(f"{task}: cannot read {path}: {problem}") from problem


def texts_of_files(option: str, patterns: Sequence[str], hint: str = "") -> list[tuple[str, str]]:
    """The name (`distinct_names`) and text of every file that matches, sorted by path. `hint` says in
    messages where the files come from."""
    paths = matching(patterns)
    if not paths:
        raise TaskError(
            f"task.{option}: no file matches {list(patterns)}; allowed: text files, by path or "
            f"glob{hint}"
        )
    texts = [read_text(f"task.{option}", path) for path in paths]
    return list(zip(distinct_names(paths), texts, strict=True))


def _sha256(task: str, file: File) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
    except OSError as problem:
        raise _unreadable(task, file, problem) from problem


def _unreadable(task: str, file: File, problem: OSError) -> TaskError:
    return TaskError(f"{task}: cannot read {file}: {problem.strerror or problem}")


# rows


def ending(file: File) -> str:
    """The file's suffix, in lower case and without ``.gz``."""
    return Path(file.name.lower().removesuffix(".gz")).suffix


def file_rows(task: str, file: File) -> Iterator[tuple[int, Any]]:
    """The rows of a file by its `ending`, each with its number from 1, which for JSON lines is the
    line's.

    JSON is read by Python itself: the readers of pandas and `datasets` guess types (2009-01-02 becomes
    a date, a large number loses digits) and do not name the line that is wrong."""
    try:
        zipped = file.name.lower().endswith(".gz")
        with file.open("rb") as raw, gzip.GzipFile(fileobj=raw) if zipped else raw as stream:
            if ending(file) == ".parquet":
                from pyarrow.parquet import read_table

                yield from enumerate(read_table(stream).to_pylist(), start=1)
            elif ending(file) in TABLES:
                content = stream.read()
                _check_separator(task, file, content)
                yield from enumerate(_table(content, TABLES[ending(file)]), start=1)
            elif ending(file) == ".json":
                yield from _json_rows(task, file, stream.read())
            else:
                yield from _lines(task, file, stream)
    except TaskError:
        raise
    except UnicodeDecodeError as problem:
        raise TaskError(f"{task}: {file} is not UTF-8 (byte {problem.start})") from problem
    except OSError as problem:
        raise _unreadable(task, file, problem) from problem
    except Exception as problem:  # what a parser raises, of gzip, of pandas or of pyarrow
        raise TaskError(f"{task}: cannot read {file}: {first_line(problem)}") from problem


def _lines(task: str, file: File, lines: Iterable[bytes]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, parsed_json(task, f"{file} line {number}", line)


def _json_rows(task: str, file: File, text: bytes) -> Iterator[tuple[int, Any]]:
    """Read a ``.json`` file: one list, or JSON lines in spite of its name."""
    try:
        rows = parsed_json(task, str(file), text)
    except TaskError as problem:
        if "Extra data" not in str(problem):
            raise
        yield from _lines(task, file, text.split(b"\n"))
        return
    if not isinstance(rows, list):
        raise TaskError(f"{task}: {file} holds no list; allowed: a list of objects, or JSON lines")
    yield from enumerate(rows, start=1)


def parsed_json(task: str, place: str, text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as problem:
        raise TaskError(f"{task}: {place} is not UTF-8 (byte {problem.start})") from problem
    except (ValueError, RecursionError) as problem:
        why = str(problem)
        if isinstance(problem, json.JSONDecodeError) and problem.lineno == 1:
            why = f"{problem.msg}: column {problem.colno}"  # the line is that of `place`
        raise TaskError(f"{task}: {place} is not complete JSON ({why})") from problem


def _check_separator(task: str, file: File, content: bytes) -> None:
    """Refuse a table whose first line has other separators than its ending says, and none of these."""
    header = content.partition(b"\n")[0].decode("utf-8", "replace")
    separator = TABLES[ending(file)]
    used = next((sign for sign in (";", "\t", "|", ",") if sign in header), separator)
    if separator not in header and used != separator:
        shown = "a tab" if separator == "\t" else repr(separator)
        raise TaskError(
            f"{task}: the cells of {file} are separated by {used!r}; allowed in a "
            f"{ending(file)} file: {shown}"
        )


def _table(content: bytes, separator: str) -> list[dict[str, Any]]:
    """Cells are texts, so that 007, NA and 1e5 stay what they are; see `_meant`."""
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # a row with more cells than names
        table = pd.read_csv(
            BytesIO(content),
            sep=separator,
            dtype=str,
            keep_default_na=False,
            index_col=False,
            encoding="utf-8-sig",
        )
    columns = {str(name): _meant(list(map(str, table[name]))) for name in table}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _meant(cells: list[str]) -> list[Any]:
    """The values that pandas wrote as these cells: whole numbers (as text) where every filled cell ends
    in ``.0``; booleans; lists, or objects with a list ``text``, where every filled cell is one."""
    filled = [cell for cell in cells if cell.strip()]
    if filled and {*filled} <= {"True", "False"}:
        return [{"True": True, "False": False}.get(cell, cell) for cell in cells]
    if filled and all(re.fullmatch(r"-?\d+\.0", cell) for cell in filled):
        return [cell.removesuffix(".0") for cell in cells]
    if any(cell.strip()[0] not in "[{" or NUMPY_ARRAY.fullmatch(cell) for cell in filled):
        return list(cells)
    values = [parsed_literal(cell) if cell.strip() else "" for cell in cells]
    lists = [value.get("text") if isinstance(value, dict) else value for value in values]
    plain = (isinstance(items, list) or items == "" for items in lists)
    return values if all(plain) else list(cells)


def parsed_literal(text: str) -> Any:
    """A text as JSON or as a Python literal; None where it is neither."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


# data sets


@dataclass(frozen=True)
class Source:
    """Where the rows of one data set of `task` come from.

    Attributes:
        files: local files, globs, or folders; they come before all other places. Of a folder with files
            whose names say a split (train, test ...) those of `split` are read.
        data: a local folder or zip that contains `file`.
        dataset: a repository on the Hub, whose `file` is fetched, or which `datasets` reads.
        file: the path in `data` or in the repository. In a folder parquet files of the same name are
            read as well.
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
    def paths(self) -> Sequence[File]:
        """The files, for `file_rows`; empty where `datasets` reads the rows."""
        files: list[File] = []
        for pattern in self.files:
            folder = Path(pattern).expanduser()
            found = self._in_folder(folder) if folder.is_dir() else matching([pattern])
            if not found:
                raise TaskError(
                    f"{self.task}: no file matches files={pattern!r}; allowed: a path, a glob or a "
                    "folder"
                )
            files += found
        file = self.file if self.data is None else self.local or self.file
        if files or file is None:
            return files
        if self.data is not None:
            return self._inside(Path(self.data).expanduser(), file)
        path = self._fetched(self.archive or file)
        return self._inside(path, file) if self.archive else [path]

    def _in_folder(self, folder: Path) -> list[Path]:
        names = {path: path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*"))}
        if any(path.suffix == ".arrow" for path in names):
            raise TaskError(
                f"{self.task}: {folder} was written by save_to_disk; allowed: parquet, CSV or JSON "
                "lines (to_parquet, to_json)"
            )
        files = {
            path: set(re.findall("[a-z]+", name.lower()))
            for path, name in names.items()
            if path.is_file() and ending(path) in ENDINGS and "/." not in f"/{name}"
        }
        splits = sorted({name for words in files.values() for name in words & SPLIT_WORDS})
        if not splits:
            return list(files)
        if self.split not in splits:
            raise TaskError(
                f"{self.task}: {folder} has files of {', '.join(splits)} and task.split is "
                f"{self.split!r}; allowed: one of these, or task.files=[<file>]"
            )
        return [file for file, words in files.items() if self.split in words]

    def _inside(self, root: Path, file: str) -> Sequence[File]:
        """The files of this name in a folder or zip. A zip's only member of this name is taken from any
        folder in it."""
        name = Path(file)
        if root.is_dir():
            parquet, shards = name.with_suffix(".parquet").name, f"{name.stem}/*.parquet"
            in_data_folder = (f"data/{parquet}", f"data/{shards}")
            for pattern in (file, name.name, parquet, shards, *in_data_folder):
                if files := sorted(root.glob(pattern)):
                    return files
        elif root.is_file():
            try:
                with zipfile.ZipFile(root) as archive:
                    names = archive.namelist()
            except (OSError, zipfile.BadZipFile) as problem:
                raise TaskError(
                    f"{self.task}: {root} is no zip archive ({problem}); allowed: a folder or zip"
                ) from problem
            same_name = [path for path in names if Path(path).name == name.name]
            if file in names or len(same_name) == 1:
                return [zipfile.Path(root, file if file in names else same_name[0])]
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
        from huggingface_hub import hf_hub_download

        with self._from_hub(f"{file} of {self.dataset} (revision {self.revision or 'main'})"):
            path = hf_hub_download(
                str(self.dataset),
                file,
                repo_type="dataset",
                revision=self.revision,
                local_files_only=not hub_answers(),
            )
        return Path(path)

    @contextmanager
    def _from_hub(self, what: str) -> Iterator[None]:
        """Read something from the Hub; whatever fails is a TaskError that says how to do without it."""
        try:
            with quiet_hub():
                yield
        except Exception as problem:
            raise TaskError(
                f"{self.task}: cannot read {what}: {first_line(problem)}; allowed: a network, or "
                f"{self._local_option}"
            ) from problem

    @property
    def _local_option(self) -> str:
        """The option that names a local copy of the rows."""
        if self.file or self.local:
            return f"task.data=<folder or zip with {self.local or self.file}>"
        return "task.files=[<file>]"

    def rows(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Each row's place for messages ("file row 3"), the name of its file (`distinct_names`) without
        the suffix, and the row, with None for NaN."""
        for place, stem, row in self._rows():
            if not isinstance(row, Mapping):
                raise TaskError(f"{self.task}: {place} is not an object with fields")
            known = {name: value if value == value else None for name, value in row.items()}
            yield place, stem, known

    def _rows(self) -> Iterator[tuple[str, str, Any]]:
        for path, name in zip(self.paths, distinct_names(self.paths), strict=True):
            stem = re.sub(r"(?i)\.gz$", "", name)
            stem = Path(stem).with_suffix("").as_posix()
            for number, row in file_rows(self.task, path):
                yield f"{path} row {number}", stem, row
        if not self.paths:
            assert self.dataset is not None
            stem = self.dataset.rpartition("/")[2]
            for number, row in enumerate(self.hub_rows(), start=1):
                yield f"{self.dataset} row {number}", stem, row

    def hub_rows(self, most: int | None = None) -> list[dict[str, Any]]:
        """The rows that `datasets` reads from the Hub, or the first `most` of them."""
        from datasets import load_dataset

        names = filter(None, (self.dataset, self.config, self.split))
        with self._from_hub(" ".join(names)):
            check_hub()
            rows = load_dataset(
                self.dataset,
                name=self.config,
                split=self.split,
                streaming=True,
                revision=self.revision,
            )
            return [dict(row) for row in islice(rows, most)]

    def check_files(self) -> None:
        for path in self.paths if self.files else ():
            if not sum(1 for _ in file_rows(self.task, path)):
                raise TaskError(f"{self.task}: {path} is empty; allowed: a row for each context")

    def digests(self) -> dict[str, str]:
        """The sha256 of each file, or the repository's commit where `datasets` reads the rows."""
        if self.paths:
            return digests_in_order(self.task, self.paths)
        from huggingface_hub import HfApi

        with self._from_hub(repr(self.dataset)):
            check_hub()
            commit = HfApi().dataset_info(str(self.dataset), revision=self.revision).sha
        return {str(self.dataset): str(commit)}


def check_hub() -> None:
    if not hub_answers():
        raise ConnectionError("the Hub cannot be reached")
