"""Append-only records on disk: one JSON line per (example, method), safe to kill at any moment.

A run lives in one folder, ``<results>/<experiment>/<model>/<task>/<method>-<hash8>``:

    records.jsonl        one JSON object per line, written before the next example starts
    records-<i>of<k>.jsonl   the same, of the i-th of k shards of the run (`kvbench.shards`)
    manifest.json        resolved config, versions, code revision, hardware, seed
    .lock*, .holder*     who is writing; none holds results

The records of a run are those of all its files together. Of several records of one example the first
with status ok counts, or else the first: records.jsonl before the shards' files, these by name.

What is promised:

- what `RecordStore.append` returned from survives the death of the process at once, and a power cut
  a second later (`Syncer.PAUSE`, and the time of the disk), which leaving the store waits for (names of
  files and folders included): meanwhile the next examples run;
- a record is either there as a whole line or not there; what a killed process left half-written
  is dropped when the folder is next opened for writing, and ignored by readers;
- an error while writing (no space left, say) takes back what it wrote, so earlier records stay;
- two processes never write one file at once;
- NaN and infinities become ``null``: JSON has neither, and a score that is not a number is missing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from kvbench.durable import Syncer, make_folder, replace, sync_folder, write_all

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
"""Of manifest and records; raised when an older kvbench would misread them. Absent means 1."""
RECORDS = "records.jsonl"
MANIFEST = "manifest.json"

STATUSES = ("ok", "over_budget", "oom", "error", "timeout")

COMMON_FIELDS = (
    "experiment",
    "model",
    "task",
    "dataset",
    "example_id",
    "method",
    "config_hash",
    "seed",
    "status",
    "prompt_tokens",
    "new_tokens",
    "capacity",
    "entries",
    "cache_bytes",
    "exact_bytes",
    "ratio",
    "compressed",
    "saves_memory",
    "prefill_s",
    "compress_s",
    "decode_s",
    "prediction",
    "answers",
    "prompt_tail",
    "score",
    "error",
)
"""Fields every record has; a value that its status makes unavailable is null."""

NUMBER_FIELDS = (
    "prompt_tokens",
    "new_tokens",
    "capacity",
    "cache_bytes",
    "exact_bytes",
    "ratio",
    "prefill_s",
    "compress_s",
    "decode_s",
    "score",
)
"""Common fields that are numbers (or null)."""


_TEXTS = ("experiment", "model", "task", "dataset", "method", "prediction", "prompt_tail", "error")
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_TEXTS, (str,)),
    "entries": (dict,),
    "answers": (list, tuple),
    "compressed": (bool,),
    "saves_memory": (bool,),
}


class StoreError(RuntimeError):
    """A user-facing error: one line that names the file and what is wrong with it."""


def record_files(folder: Path) -> list[Path]:
    """The records files of a run folder, in the order in which they count."""
    shards = sorted(path for path in folder.glob("records-*of*.jsonl") if _SHARD.match(path.name))
    whole = folder / RECORDS
    return [whole, *shards] if whole.exists() else shards


_SHARD = re.compile(r"records-\d+of\d+\.jsonl$")


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder as it was found on disk.

    Attributes:
        folder: where it lies.
        manifest: the parsed manifest.json.
        records: one row per record, in the order written; every common field is a column.
    """

    folder: Path
    manifest: dict[str, Any]
    records: pd.DataFrame


def config_hash(config: Mapping[str, Any]) -> str:
    """The first 8 hex digits of sha256 over `config` as canonical JSON.

    Key order does not matter, lists equal tuples, and 1.0 equals 1 (a YAML writer may use either).

    Raises:
        StoreError: a value that is neither a JSON value nor a path.
    """
    text = json.dumps(_canonical(config, "config"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def run_folder(
    results_dir: str | Path, experiment: str, model: str, task: str, method: str, config_hash: str
) -> Path:
    """``<results_dir>/<experiment>/<model>/<task>/<method>-<config_hash>``, names made safe."""
    return Path(results_dir).joinpath(
        _safe(experiment), _safe(model), _safe(task), _safe(f"{method}-{config_hash}")
    )


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> Path:
    """Write ``manifest.json`` in one step: readers see the old file or the new one, never half.

    Raises:
        StoreError: a value that is not JSON, or the file system refuses.
    """
    path = folder / MANIFEST
    manifest = {"format": FORMAT, **manifest}
    text = json.dumps(_jsonable(manifest, "manifest"), indent=2) + "\n"
    try:
        make_folder(folder)
        replace(path, text.encode())
    except OSError as error:
        raise StoreError(_explain(error, path)) from error
    return path


@contextmanager
def manifest_lock(folder: Path, timeout: float = 60.0) -> Iterator[None]:
    """Held while a manifest is read and written again, so that of several shards that start at once
    none overwrites what another noted.

    Raises:
        StoreError: another process holds it for `timeout` seconds, or the file system refuses.
    """
    path = folder / MANIFEST
    lock = FileLock(str(folder / ".lock-manifest"))
    try:
        make_folder(folder)
        lock.acquire(timeout=timeout)
    except Timeout:
        raise StoreError(f"{path} is locked by another process for {timeout:g} s") from None
    except OSError as error:
        raise StoreError(_explain(error, path)) from error
    try:
        yield
    finally:
        lock.release()


class RecordStore:
    """The records of one run folder, open for appending; use as a context manager.

        with RecordStore(folder) as store:
            for example in examples:
                if example.id not in store.done:
                    store.append(record_of(example))

    Entering takes the folder's lock and drops a half-written last line.

    Args:
        folder: made if missing.
        lock_timeout: seconds to wait for another process that writes here; 0 does not wait, -1
            waits for ever.
        shard: suffix of the shard whose file is written, None for records.jsonl. What the folder's
            other files hold counts as done.

    Raises:
        StoreError: on entering, when the folder is in use, cannot be written or is broken.
    """

    def __init__(
        self, folder: str | Path, lock_timeout: float = 10.0, shard: str | None = None
    ) -> None:
        self.folder = Path(folder)
        suffix = "" if shard is None else f"-{shard}"
        self.path = self.folder / f"records{suffix}.jsonl"
        self._timeout = lock_timeout
        self._lock = FileLock(str(self.folder / f".lock{suffix}"))
        self._holder = self.folder / f".holder{suffix}"
        self._file = -1
        self._size = 0
        self._syncer = Syncer(-1)
        self._done: dict[str, str] = {}  # status by example_id

    def __enter__(self) -> RecordStore:
        try:
            make_folder(self.folder)
            self._acquire()
        except OSError as error:
            raise StoreError(_explain(error, self.path)) from error
        try:
            self._open()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise StoreError(_explain(error, self.path)) from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._syncer.finish()
            if kind is None:
                self._raise_late()
        finally:
            self._close()

    @property
    def done(self) -> set[str]:
        """example_ids that have a record, whatever its status."""
        return set(self._done)

    @property
    def failed(self) -> set[str]:
        """example_ids whose record has a status other than ok."""
        return {example_id for example_id, status in self._done.items() if status != "ok"}

    def drop_failed(self) -> None:
        """Forget the records whose status is not ok, so that their examples run again.

        The file is replaced in one step: readers see the old records or the remaining ones. Other
        shards' files stay as they are: a new record with status ok counts before theirs.

        Raises:
            StoreError: the file system refuses; the records are then as they were.
        """
        failed = self.failed
        if not failed:
            return
        self._syncer.finish()
        lines, _ = _whole_lines(self.path)
        kept = [
            line
            for number, line in enumerate(lines, 1)
            if _parse(line, self.path, number)["example_id"] not in failed
        ]
        try:
            replace(self.path, b"".join(line + b"\n" for line in kept))
        except OSError as error:
            raise StoreError(_explain(error, self.path, len(self._done))) from error
        os.close(self._file)
        self._done = {}
        self._open()
        for example_id in self.failed:
            del self._done[example_id]

    def append(self, record: Mapping[str, Any]) -> bool:
        """Write one record, and let the disk sync while the next example runs.

        Returns:
            False when the example already has a record: the first one stays, nothing is written.

        Raises:
            StoreError: a common field is missing, the status is unknown, a value is not JSON, or
                the file system refuses, now or when it synced an earlier record; in the first case
                the file is then as it was before the call.
        """
        if self._file < 0:
            raise StoreError(f"{self.path} is not open: use `with RecordStore(folder) as store`")
        self._raise_late()
        _check(record)
        example_id = record["example_id"]
        if example_id in self._done:
            return False
        where = f"record of example {example_id!r}"
        text = _as_json(record, where) + "\n"
        line = text.encode(errors="replace")  # half a surrogate pair has no UTF-8 form
        try:
            write_all(self._file, line)
        except BaseException as error:
            self._take_back()
            if isinstance(error, OSError):
                raise StoreError(_explain(error, self.path, len(self._done))) from error
            raise
        self._size += len(line)
        self._done[example_id] = record["status"]
        self._syncer.wake()
        return True

    def _raise_late(self) -> None:
        """Say what a sync that nobody waited for ended in."""
        if self._syncer.error is not None:
            error, self._syncer.error = self._syncer.error, None
            line = _explain(error, self.path)
            raise StoreError(f"{line}; the latest records may be lost by a power cut") from error

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=self._timeout)
        except Timeout:
            raise StoreError(
                f"{self.folder} is being written by {_holder(self._holder)}; waited"
                f" {self._timeout:g} s: wait for it to end, or choose another results_dir"
            ) from None
        me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        try:
            self._holder.write_text(json.dumps(me), encoding="utf-8")
        except OSError:
            self._lock.release()
            raise

    def _open(self) -> None:
        new = not self.path.exists()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if new:
            sync_folder(self.folder)
        _, self._size = _whole_lines(self.path)
        if os.fstat(self._file).st_size > self._size:
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
        self._syncer = Syncer(self._file)
        for record in read_records(self.folder):
            self._done[record["example_id"]] = record["status"]

    def _take_back(self) -> None:
        try:
            os.ftruncate(self._file, self._size)
        except OSError:  # the next opening drops the torn line; nothing may follow it until then
            os.close(self._file)
            self._file = -1

    def _close(self) -> None:
        self._syncer.finish()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._done = {}
        with suppress(OSError):
            self._holder.unlink()
        self._lock.release()


def load_runs(experiment_folder: str | Path) -> list[Run]:
    """Every run below ``<results>/<experiment>``, sorted by folder; changes nothing on disk.

    A half-written last line is ignored, and of two records of one example the first counts.
    Numeric common fields come as floats, NaN where null.

    Raises:
        StoreError: no such folder, a run without a manifest, or a file that is broken otherwise.
    """
    folder = Path(experiment_folder)
    if not folder.is_dir():
        raise StoreError(f"no results in {folder}: the folder does not exist")
    names = (RECORDS, "records-*of*.jsonl", MANIFEST)
    files = [path for name in names for path in folder.glob(f"*/*/*/{name}")]
    # a run that was killed before its manifest was written has nothing to show
    found = {path.parent for path in files if path.name == MANIFEST or path.stat().st_size}
    return [load_run(path) for path in sorted(found)]


def load_run(folder: Path) -> Run:
    """One run folder, as `load_runs` reads it.

    Raises:
        StoreError: no manifest, or a file that is broken.
    """
    import pandas as pd  # not above: the command line imports this module and should start fast

    manifest = read_manifest(folder / MANIFEST)
    records = pd.DataFrame(read_records(folder))
    records = records.reindex(columns=list(dict.fromkeys([*COMMON_FIELDS, *records.columns])))
    for name in NUMBER_FIELDS:
        try:
            records[name] = pd.to_numeric(records[name]).astype(float)
        except (TypeError, ValueError, OverflowError) as error:
            raise StoreError(f"{folder}: field {name!r} holds a value that is no number") from error
    return Run(folder, manifest, records)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run folder, one per example: those of all its files.

    They come in the order written; those of several shards line by line in turn, so that complete
    shards give about the order of a run that was not split.

    Raises:
        StoreError: a broken file.
    """
    parsed = [
        [_parse(line, path, number) for number, line in enumerate(_whole_lines(path)[0], 1)]
        for path in record_files(folder)
    ]
    found: dict[str, dict[str, Any]] = {}
    for record in (record for file in parsed for record in file):
        before = found.get(record["example_id"])
        if before is None or (before["status"] != "ok" and record["status"] == "ok"):
            found[record["example_id"]] = record
    in_turn = (record for row in zip_longest(*parsed) for record in row if record is not None)
    return [record for record in in_turn if found[record["example_id"]] is record]


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{path.parent} has records but no {MANIFEST}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read: {error}; {_MOVE_AWAY}") from error
    if not isinstance(manifest, dict):
        raise StoreError(f"{path} is not a JSON object; {_MOVE_AWAY}")
    written = manifest.get("format", FORMAT)
    if isinstance(written, bool) or not isinstance(written, int) or not 1 <= written <= FORMAT:
        raise StoreError(
            f"{path} is of format {written!r}; this kvbench reads 1 to {FORMAT}: use the version that "
            "wrote it, or another results_dir"
        )
    return manifest


_MOVE_AWAY = "move it away, and the run's command writes a new one; the records stay"


def _whole_lines(path: Path) -> tuple[list[bytes], int]:
    """The complete lines of a records file, and how many bytes they take.

    The last line is torn when it has no newline, or when it is not JSON: after a power cut, a file
    system may have grown the file without the bytes.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(_explain(error, path)) from error
    lines = content.split(b"\n")[:-1]
    if lines and not _is_json(lines[-1]):
        lines.pop()
    return lines, sum(len(line) + 1 for line in lines)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise StoreError(f"{path}, line {number}: not a JSON object")
    if b"\\ud" in line.lower() and not _is_text(record):
        raise StoreError(f"{path}, line {number}: holds half a character, which no text does")
    try:
        _check(record)
    except StoreError as error:
        raise StoreError(f"{path}, line {number}: {error}") from error
    return record


def _is_text(value: Any) -> bool:
    """Whether all strings in a JSON value have a UTF-8 form."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(record: Mapping[str, Any]) -> None:
    """Refuse a record that lacks a common field, or has something else in one."""
    missing = [name for name in COMMON_FIELDS if name not in record]
    if missing:
        raise StoreError(
            f"record of example {record.get('example_id')!r} lacks {', '.join(missing)}"
        )
    if not isinstance(record["example_id"], str):
        raise StoreError(f"example_id is {record['example_id']!r}; it must be a string")
    for name, kind in _KINDS.items():
        if record[name] is not None and not isinstance(record[name], kind):
            raise StoreError(f"{name} is {record[name]!r:.60}; allowed: {kind[0].__name__} or null")
    if record["status"] not in STATUSES:
        raise StoreError(f"status is {record['status']!r}; allowed: {', '.join(STATUSES)}")


def _as_json(record: Mapping[str, Any], where: str) -> str:
    """A record as one line."""
    try:  # nearly always enough, and faster
        return json.dumps(record, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(_jsonable(record, where), ensure_ascii=False)


def _jsonable(value: Any, where: str) -> Any:
    """`value` as JSON types; NaN and infinities become None, numpy and torch scalars numbers."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item, where) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return _jsonable(value.tolist(), where)
    raise StoreError(f"{where} holds a {type(value).__name__}, which is not a JSON value")


def _canonical(value: Any, where: str) -> Any:
    """`value` as JSON types, integral floats as integers."""
    value = _jsonable(value, where)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(item, where) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item, where) for item in value]
    return value


def _safe(name: str) -> str:
    """`name` as one path component: no separators, no leading dot, at most 120 characters."""
    safe = re.sub(r"[^\w.+=@,-]+", "_", name).lstrip(".")
    if not safe:
        raise StoreError(f"{name!r} cannot name a folder")
    if len(safe.encode()) > 120:
        safe = f"{safe[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}-{safe[-30:]}"
    return safe


def _holder(path: Path) -> str:
    """Who holds the lock, as far as the holder said."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):  # not written yet, or just removed
        return "another process"


def _explain(error: OSError, path: Path, kept: int | None = None) -> str:
    """One line about a file system error."""
    earlier = "" if kept is None else f"; the {kept} earlier records are intact"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left to write {path}{earlier}; free some and run the same command again"
    return f"cannot use {path}: {error.strerror or error}{earlier}"
