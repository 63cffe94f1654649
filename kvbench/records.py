"""What a run on disk is, and reading it.

A run lives in one folder, ``<results>/<experiment>/<model>/<task>/<method>-<hash8>``:

    records.jsonl        one JSON object per line, written before the next example starts
    records-<i>of<k>.jsonl   the same, of the i-th of k shards of the run (`kvbench.shards`)
    manifest.json        resolved config, versions, code revision, hardware, seed
    .lock*, .holder*     who is writing; none holds results

The records of a run are those of all its files together. Of several records of one example the first
with status ok counts, or else the first: records.jsonl before the shards' files, these by name.
`kvbench.store` writes them.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        [parse_record(line, path, number) for number, line in enumerate(whole_lines(path)[0], 1)]
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
    """The parsed manifest.json.

    Raises:
        StoreError: it is not there, broken, or of a version that this kvbench does not read.
    """
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


def whole_lines(path: Path) -> tuple[list[bytes], int]:
    """The complete lines of a records file, and how many bytes they take.

    The last line is torn when it has no newline, or when it is not JSON: after a power cut, a file
    system may have grown the file without the bytes.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(explain_os_error(error, path)) from error
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


def parse_record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """A line of a records file.

    Raises:
        StoreError: it is no record; the message names the file and the line.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise StoreError(f"{path}, line {number}: not a JSON object")
    if b"\\ud" in line.lower() and not _is_text(record):
        raise StoreError(f"{path}, line {number}: holds half a character, which no text does")
    try:
        check_record(record)
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


def check_record(record: Mapping[str, Any]) -> None:
    """Refuse what is no record.

    Raises:
        StoreError: a common field is missing or holds something else, or the status is unknown.
    """
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


def explain_os_error(error: OSError, path: Path, kept: int | None = None) -> str:
    """One line about a file system error."""
    earlier = "" if kept is None else f"; the {kept} earlier records are intact"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left to write {path}{earlier}; free some and run the same command again"
    return f"cannot use {path}: {error.strerror or error}{earlier}"
