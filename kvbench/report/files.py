"""Writing what a report consists of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_WRITTEN = ".report-files"
"""Names what the last report of an experiment consists of."""


def write_text(path: Path, text: str) -> Path:
    """Replace the file in one step, so that an open page is never half a page."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> Path:
    """Replace the file in one step."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:  # on a full disk half a page would take the room of records
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return path


def remove_stale(folder: Path, written: Iterable[Path]) -> None:
    """Remove what the report before wrote into an experiment's folder and this one did not: figures and
    tables under names that its arms no longer have. What a person put there stays."""
    names = {path.relative_to(folder).as_posix() for path in written}
    index = folder / _WRITTEN
    try:
        before = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # none yet, or not ours
        before = []
    for part in ("figures", "tables"):
        for path in list((folder / part).iterdir()):
            name = f"{part}/{path.name}"
            if name not in names and isinstance(before, list) and name in before:
                path.unlink()
    write_text(index, json.dumps(sorted(names), indent=0) + "\n")
