"""What tests of store and others share."""

from __future__ import annotations

from pathlib import Path

from kvbench.records.read import COMMON_FIELDS
from kvbench.records.store import RecordStore


def make_record(example_id: str, **changes: object) -> dict:
    record: dict = dict.fromkeys(COMMON_FIELDS)
    record |= {"example_id": example_id, "status": "ok", "method": "m", "score": 1.0}
    return record | changes


def fill(folder: Path, ids: list[str]) -> None:
    with RecordStore(folder) as records:
        for example_id in ids:
            records.append(make_record(example_id))
