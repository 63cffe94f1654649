"""Writing what a report consists of."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


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
