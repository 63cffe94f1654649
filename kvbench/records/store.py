"""Writes the files of a run: one JSON line per example and method, safe to kill at any moment.

`kvbench.records.read` says which files there are and which records count. What is promised:

- when `RecordStore.append` returns, the record is on disk;
- a record is a whole line or none: readers ignore a line that a killed process left half-written, and
  it is removed when the folder is next opened for writing;
- an error while writing, e.g. no space left, removes what was written of that record; earlier ones stay;
- two processes never write one file at once;
- a file that is replaced (`replace_file`) is as it was, or all of it is new;
- NaN and infinities become ``null``: JSON has neither, and a score that is not a number is missing;
- a key or password of the environment that occurs in a prompt or an answer is replaced.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kvbench.errors import without_keys
from kvbench.records.read import (
    EXAMPLES,
    MANIFEST,
    complete_lines,
    read_manifest,
    read_statuses,
    record_files,
)
from kvbench.records.schema import FORMAT, Record, StoreError, disk_errors, parsed

START_KEYS = ("started", "command", "shard", "code_revision", "versions", "hardware")
"""The manifest keys that differ from one start of a run to another, kept of every start."""


def config_hash(config: Mapping[str, Any]) -> str:
    """The first 8 hex digits of sha256 over `config` as canonical JSON.

    Key order does not matter, lists equal tuples, and 1.0 equals 1 (a YAML writer may use either).
    """

    def parse_number(text: str) -> float:
        value = float(text)
        return int(value) if value.is_integer() else value

    plain = json.loads(json.dumps(jsonable(config, "config")), parse_float=parse_number)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def run_folder(
    results_dir: str | Path, experiment: str, model: str, task: str, method: str, config_hash: str
) -> Path:
    """``<results_dir>/<experiment>/<model>/<task>/<method>-<config_hash>``, each name by `safe_name`."""
    names = (experiment, model, task, f"{method}-{config_hash}")
    return Path(results_dir).joinpath(*map(safe_name, names))


def safe_name(name: str) -> str:
    """`name` as one path component: no separators, no leading dot, at most 120 bytes. Of a longer name
    both ends stay, with a hash between them."""
    safe = re.sub(r"[^\w.+=@,-]+", "_", name).lstrip(".")
    if not safe:
        raise StoreError(f"{name!r} cannot name a folder")
    encoded = safe.encode()
    if len(encoded) > 120:
        digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
        first, last = (part.decode(errors="ignore") for part in (encoded[:60], encoded[-30:]))
        safe = f"{first}-{digest}-{last}"
    return safe


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> Path:
    """Write ``manifest.json``. The `START_KEYS` of the one that it replaces are added to
    ``earlier_starts``."""
    path = folder / MANIFEST
    with disk_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        starts: list[dict[str, Any]] = []
        if path.is_file():
            previous = read_manifest(path)
            starts = previous.get("earlier_starts", [])
            starts.append({key: previous.get(key) for key in START_KEYS})
        content = {"format": FORMAT, "earlier_starts": starts, **manifest}
        replace_file(path, f"{json.dumps(jsonable(content, 'manifest'), indent=2)}\n".encode())
    return path


def write_examples(folder: Path, example_ids: Collection[str]) -> Path:
    """Write ``examples.json``, the ids of the examples that a command is to run."""
    path = folder / EXAMPLES
    with disk_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{json.dumps(sorted(example_ids))}\n".encode())
    return path


class RecordStore:
    """The records of one run folder, open for appending; use as a context manager.

        with RecordStore(folder) as store:
            for example in examples:
                if example.id not in store.statuses:
                    store.append(record_of(example))

    Entering takes the lock of the file that is written and removes a half-written last line.

    Args:
        lock_timeout: seconds to wait for another process that writes the same file; -1: without limit.
        shard: suffix of the shard whose file is written, None for records.jsonl. Examples with a record
            in another file of the folder count as done.

    Attributes:
        statuses: by id, of the examples that have a record; empty while the store is closed.
    """

    def __init__(
        self,
        folder: str | Path,
        lock_timeout: float = 10.0,
        shard: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        suffix = "" if shard is None else f"-{shard}"
        self.path = self.folder / f"records{suffix}.jsonl"
        self._timeout = lock_timeout
        self._lock = FileLock(str(self.folder / f".lock{suffix}"))
        self.statuses: dict[str, str] = {}

    def __enter__(self) -> RecordStore:
        with disk_errors(self.path):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._acquire(self._lock)
            with ExitStack() as stack:
                stack.callback(self.__exit__)
                self.path.touch()
                _, size = complete_lines(self.path)
                if self.path.stat().st_size > size:  # a half-written last line
                    os.truncate(self.path, size)
                self.statuses = read_statuses(self.folder)
                stack.pop_all()  # it is open, and the lock stays
        return self

    def __exit__(self, *_: object) -> None:
        self.statuses = {}
        self._lock.release()

    def move_away(self, example_ids: Collection[str], name: str) -> int:
        """Move the records of these examples to ``earlier/<name>``, with the manifest, so that they run
        again. A process moves away once under one name: one that starts again goes on.

        Returns:
            How many records were moved.
        """
        place = self.folder / "earlier" / safe_name(name)
        moved = place / self.path.name
        if moved.is_file():
            return 0
        with disk_errors(place):
            place.mkdir(parents=True, exist_ok=True)
            if (self.folder / MANIFEST).is_file():
                shutil.copyfile(self.folder / MANIFEST, place / MANIFEST)
        away: list[bytes] = []
        rest: dict[Path, list[bytes]] = {}

        def is_chosen(line: bytes) -> bool:
            return json.loads(line)["example_id"] in example_ids

        with ExitStack() as stack:
            for path in record_files(self.folder):
                if not any(map(is_chosen, complete_lines(path)[0])):
                    continue
                if path != self.path:  # of another shard, or of a run that was not split
                    suffix = path.stem.removeprefix("records")
                    lock = FileLock(str(self.folder / f".lock{suffix}"))
                    self._acquire(lock)
                    stack.callback(lock.release)
                lines, _ = complete_lines(path)
                away += filter(is_chosen, lines)
                rest[path] = [line for line in lines if not is_chosen(line)]
            with disk_errors(place):
                # In this order: what is interrupted between them is in both places, never in none.
                replace_file(moved, b"".join(line + b"\n" for line in away))
                for path, lines in rest.items():
                    replace_file(path, b"".join(line + b"\n" for line in lines))
        self.statuses = read_statuses(self.folder)
        return len(away)

    def _acquire(self, lock: FileLock) -> None:
        try:
            lock.acquire(timeout=self._timeout)
        except Timeout:
            raise StoreError(
                f"{self.folder} is being written by another process; waited {self._timeout:g} s: "
                "wait for it to end, or choose another results_dir"
            ) from None

    def append(self, record: Mapping[str, Any]) -> bool:
        """Write one record; it is on disk on return.

        Returns:
            Whether it was written: False when the example already has a record whose status is ok.
        """
        if not self._lock.is_locked:
            raise StoreError(f"{self.path} is not open: use `with RecordStore(folder) as store`")
        where = f"{self.path}, example {record.get('example_id')!r:.80}"
        text = without_keys(json.dumps(jsonable(record, where), ensure_ascii=False))
        line = f"{text}\n".encode(errors="replace")  # half a surrogate pair has no UTF-8 form
        example_id = parsed(Record, line, where)["example_id"]
        if self.statuses.get(example_id) == "ok":
            return False
        with disk_errors(self.path):
            append_to_file(self.path, line)
        self.statuses[example_id] = record["status"]
        return True


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` in one step: the content goes to a temporary file, which is renamed to `path`."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:  # on a full disk, half a file would take the space that records need
        temporary.unlink(missing_ok=True)
        raise


def append_to_file(path: Path, data: bytes) -> None:
    """Add `data` to a file that is there, and wait until it is on disk. If anything interrupts the
    write, Ctrl-C too, the file is cut back to what it was."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    size = os.fstat(file).st_size
    is_whole = False
    try:
        unwritten = data
        while unwritten:
            unwritten = unwritten[os.write(file, unwritten) :]
        os.fsync(file)
        is_whole = True
    finally:
        if not is_whole:
            with suppress(OSError):
                os.ftruncate(file, size)
        os.close(file)


def jsonable(value: Any, where: str) -> Any:
    """`value` as JSON types. NaN and infinities become None, tuples and arrays lists, scalars of numpy
    and torch numbers, and paths text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item, where) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return jsonable(value.tolist(), where)
    raise StoreError(f"{where} holds a {type(value).__name__}, which is not a JSON value")
