"""What tests of crash kills and others share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.fork_server import whole_rows

TIMES = ("prefill_s", "compress_s", "decode_s")


def rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return whole_rows(list(folder.glob("e/*/*/*/records.jsonl")), TIMES)
