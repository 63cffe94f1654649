"""Records to write, and the records below a folder."""

from __future__ import annotations

import json
from glob import glob
from pathlib import Path
from typing import Any

from kvbench.records.read import COMMON_FIELDS
from kvbench.records.store import RecordStore

TIMES = ("prefill_s", "compress_s", "decode_s")


def rows_below(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Records by the name of their run's folder, those of all its shards, whole lines only, without what
    a clock measured.

    A job may be writing there meanwhile: `glob` passes over hidden folders, which are temporary ones,
    and over folders that go while they are listed, where `Path.rglob` raises.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in sorted(glob("**/records*.jsonl", root_dir=folder, recursive=True)):
        path = folder / name
        content = path.read_bytes()
        for line in content[: content.rfind(b"\n") + 1].splitlines():
            row = {key: value for key, value in json.loads(line).items() if key not in TIMES}
            rows.setdefault(path.parent.name, []).append(row)
    return rows


def make_record(example_id: str, **changes: object) -> dict:
    record: dict = dict.fromkeys(COMMON_FIELDS)
    record |= {"example_id": example_id, "status": "ok", "method": "m", "score": 1.0}
    return record | changes


def fill(folder: Path, ids: list[str]) -> None:
    with RecordStore(folder) as records:
        for example_id in ids:
            records.append(make_record(example_id))
