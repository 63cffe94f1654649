"""Writing files so that a killed process leaves them whole: as they were, or with all of what is new."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Write `path` in one step: the content goes to a temporary file, which is renamed to `path`."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:  # on a full disk, half a file would take the space that records need
        temporary.unlink(missing_ok=True)
        raise


def append(path: Path, data: bytes) -> None:
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
