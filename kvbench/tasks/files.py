"""Data files: text, and rows of JSON lines, JSON lists and parquet, on disk or in a zip archive."""

from __future__ import annotations

import glob
import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvbench.errors import first_line
from kvbench.tasks.base import TaskError


def open_file(file: str) -> Any:
    """A binary stream of a local file, or of ``zip://<name>::<archive>``."""
    if not file.startswith("zip://"):
        return Path(file).open("rb")
    name, _, archive = file.removeprefix("zip://").partition("::")
    return zipfile.ZipFile(archive).open(name)


def matching(patterns: Iterable[str]) -> list[str]:
    """The files that globs match, each once, by path."""
    return sorted({path for each in patterns for path in glob.glob(str(Path(each).expanduser()))})


def read_text(task: str, path: str | Path) -> str:
    """A text file.

    Raises:
        TaskError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise TaskError(f"{task}: cannot read {path}: {problem}") from problem


def digests_of(files: Iterable[str]) -> dict[str, str]:
    """sha256 of each file that is there, by file name."""
    return {Path(file).name: sha256("data", [file]) for file in files if Path(file).is_file()}


def sha256(task: str, files: Iterable[str]) -> str:
    """Of files one behind the other, each as `open_file` takes it.

    Raises:
        TaskError: one cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        try:
            with open_file(file) as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        except OSError as problem:
            raise TaskError(
                f"{task}: cannot read {file}: {problem.strerror or problem}"
            ) from problem
    return digest.hexdigest()


def file_rows(task: str, file: str) -> Iterator[tuple[int, Any]]:
    """Numbers from 1 (of JSON lines, the lines') and rows of a file, by its ending: ``.parquet``,
    ``.json`` (one list) or JSON lines.

    JSON lines are parsed one by one and not by `datasets`' JSON loader: that guesses types (text like
    2009-01-02 becomes a date), names no line, and broken files have crashed its process.

    Raises:
        TaskError: one line naming the file and the line that is wrong.
    """
    try:
        if file.endswith(".parquet"):
            yield from enumerate(_parquet(task, file), start=1)
        elif file.endswith(".json"):
            yield from enumerate(_list(task, file), start=1)
        else:
            yield from _lines(task, file)
    except OSError as problem:
        raise TaskError(f"{task}: cannot read {file}: {problem.strerror or problem}") from problem


def _lines(task: str, file: str) -> Iterator[tuple[int, Any]]:
    with open_file(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, _parsed(task, f"{file} line {number}", line)


def _list(task: str, file: str) -> list[Any]:
    with open_file(file) as stream:
        rows = _parsed(task, file, stream.read())
    if not isinstance(rows, list):
        raise TaskError(f"{task}: {file} holds no list; allowed: a list of objects, or JSON lines")
    return rows


def _parsed(task: str, place: str, text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as problem:
        raise TaskError(f"{task}: {place} is not UTF-8 (byte {problem.start})") from problem
    except (ValueError, RecursionError) as problem:
        raise TaskError(f"{task}: {place} is not complete JSON ({problem})") from problem


def _parquet(task: str, file: str) -> list[dict[str, Any]]:
    """Rows as `datasets`' parquet loader reads them, without its own copy on disk.

    The loader is asked by itself: `load_dataset` reports every use to a server, which a job without
    a network waits for.
    """
    from datasets.packaged_modules.parquet.parquet import Parquet

    try:
        rows = Parquet(data_files={"train": [file]}).as_streaming_dataset(split="train")
        return [dict(row) for row in rows]
    except Exception as problem:
        raise TaskError(f"{task}: cannot read {file}: {first_line(problem)}") from problem
