"""The files of a run on disk, and functions that read them.

A run lives in one folder, ``<results>/<experiment>/<model>/<task>/<method>-<hash8>``:

    records.jsonl        one JSON object per line, written before the next example starts
    records-<i>of<k>.jsonl   the same, of the i-th of k shards of the run (`kvbench.records.shards`)
    manifest.json        resolved config, versions, code revision, hardware, seed
    examples.json        the example ids that the command which ran last asked for, a list
    .lock*               locks of the processes that write; they hold no results
    earlier/<time>/      records that ``rerun=true`` moved away, with the manifest of that time; not read

The records of a run are those of all its files together. Of several records of one example, the first
whose status is ok counts; if none is ok, the last. Files are read in the order of `record_files`.
`kvbench.records.store` writes these files.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.records.schema import (
    COMMON_FIELDS,
    NUMBER_FIELDS,
    Manifest,
    Record,
    StoreError,
    disk_errors,
    parsed,
)

if TYPE_CHECKING:
    import pandas as pd

RECORDS = "records.jsonl"
MANIFEST = "manifest.json"
EXAMPLES = "examples.json"


def record_files(folder: Path) -> list[Path]:
    """The records files of a run folder: records.jsonl, then those of shards by name."""
    name = re.compile(r"records(-\d+of\d+)?\.jsonl")
    paths = [path for path in folder.glob("records*.jsonl") if name.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (path.name != RECORDS, path.name))


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder as it was read from disk.

    Attributes:
        records: one row per record, in the order written; every common field is a column.
        asked: ids of the examples that the latest command was to run, those of all its shards. None
            where there is no examples.json, which older runs lack.
    """

    folder: Path
    manifest: dict[str, Any]
    records: pd.DataFrame
    asked: frozenset[str] | None = None


def load_runs(experiment_folder: str | Path) -> list[Run]:
    """The runs below ``<results>/<experiment>``, sorted by folder, but for those that are left aside
    (`kvbench.records.aside`); changes nothing on disk.

    A half-written last line is ignored. Common fields that are numbers are floats, NaN where null.
    """
    from kvbench.records.aside import aside_of  # it reads the manifests by this module

    folder = Path(experiment_folder)
    if not folder.is_dir():
        raise StoreError(f"no results in {folder}: the folder does not exist")
    files = [*folder.glob(f"*/*/*/{MANIFEST}"), *folder.glob("*/*/*/records*.jsonl")]
    # A run that was killed before its manifest was written has an empty records file: left out.
    folders = {path.parent for path in files if path.name == MANIFEST or path.stat().st_size}
    return [load_run(path) for path in sorted(folders - {run.folder for run in aside_of(folder)})]


def load_run(folder: Path) -> Run:
    import pandas as pd  # not above: slow to import, and writing records does without

    if not (folder / MANIFEST).exists():
        raise StoreError(f"{folder} has records but no {MANIFEST}")
    manifest = read_manifest(folder / MANIFEST)
    records = pd.DataFrame(read_records(folder))
    records = records.reindex(columns=list(dict.fromkeys([*COMMON_FIELDS, *records.columns])))
    for name in NUMBER_FIELDS:
        records[name] = pd.to_numeric(records[name]).astype(float)
    return Run(folder, manifest, records, read_examples(folder))


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The records of a run folder, those of all its files, one per example.

    They are in the order written. Of several files they are taken in turn, a line of each, so that
    the shards of a complete run give about the order of a run that was not split.
    """
    files = [
        [
            parsed(Record, line, f"{path}, line {number}")
            for number, line in enumerate(complete_lines(path)[0], 1)
        ]
        for path in record_files(folder)
    ]
    counting: dict[str, dict[str, Any]] = {}  # the record of each example that counts
    for record in chain.from_iterable(files):
        earlier = counting.get(record["example_id"])
        if earlier is None or earlier["status"] != "ok":
            counting[record["example_id"]] = record
    in_turn = (record for row in zip_longest(*files) for record in row if record is not None)
    return [record for record in in_turn if counting[record["example_id"]] is record]


def read_statuses(folder: Path) -> dict[str, str]:
    """The status of each example that has a record in a run folder; none where there is no folder."""
    return {record["example_id"]: record["status"] for record in read_records(folder)}


def read_manifest(path: Path) -> dict[str, Any]:
    with disk_errors(path):
        content = path.read_bytes()
    where = f"{path} (move it away, and the run's command writes a new one; the records stay)"
    return parsed(Manifest, content, where)


def read_examples(folder: Path) -> frozenset[str] | None:
    """The ids of examples.json, which the latest command was to run; None where it is not there."""
    path = folder / EXAMPLES
    if not path.exists():
        return None
    with disk_errors(path):
        content = path.read_bytes()
    return frozenset(parsed(list[str], content, f"{path} (it may be removed)"))


def complete_lines(path: Path) -> tuple[list[bytes], int]:
    """The lines of a records file without its newlines, and how many bytes they take with them.

    A last line without a newline is left out. So is one that is no JSON: after a power cut, a file
    system may have made the file longer without having written the bytes.
    """
    with disk_errors(path):
        content = path.read_bytes()
    lines = content.split(b"\n")[:-1]
    try:
        json.loads(lines[-1] if lines else b"{}")
    except (ValueError, RecursionError):
        lines.pop()
    return lines, sum(len(line) + 1 for line in lines)
