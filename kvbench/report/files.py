"""Writing what a report consists of."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from kvbench.records.durable import make_folder, read_file, remove, replace

_WRITTEN = ".report-files"
"""Names what the last report of an experiment consists of, each file with its sha256."""

_MADE = re.compile(r"(figures/[^/]+\.(png|pdf)|tables/[^/]+\.(csv|md|tex))")
"""What a report writes below its folder."""

_LONGEST_NAME = 200
"""Bytes of a file's name; file systems allow 255, of which a name under way needs some."""


def write_text(path: Path, text: str) -> Path:
    """Replace the file in one step, so that an open page is never half a page. What has no UTF-8 form
    (a folder may be named in other bytes) becomes a question mark."""
    return write_bytes(path, text.encode("utf-8", errors="replace"))


def write_bytes(path: Path, content: bytes) -> Path:
    """Replace the file in one step."""
    replace(path, content, sync=False)
    return path


def part_of(folder: Path, name: str) -> Path:
    """A folder inside a report's, made if missing; `folder` may be a link, what is in it may not.

    Raises:
        OSError: the file system refuses, or the name is a link or no folder.
    """
    make_folder(folder / name, folder)
    return folder / name


def file_stem(name: str) -> str:
    """`name` as the stem of a file's name, whatever is in it; of a long one the beginning and a digest
    of the whole."""
    safe = re.sub(r"[/ ]", "_", name)
    safe = "".join(c if c.isprintable() else "-" for c in safe)
    if len(safe.encode()) <= _LONGEST_NAME:
        return safe
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
    return f"{safe.encode()[: _LONGEST_NAME - 9].decode(errors='ignore')}-{digest}"


def is_made(path: Path) -> bool:
    """Whether a report writes a file of such a name; `path` is relative to its folder."""
    return _MADE.fullmatch(path.as_posix()) is not None


def remove_stale(folder: Path, written: Iterable[Path]) -> None:
    """Remove what the report before wrote into an experiment's folder and this one did not: figures and
    tables under names that its variants no longer have. What a person put there, or changed, stays."""
    made = {path.relative_to(folder).as_posix(): _digest(path) for path in written}
    index = folder / _WRITTEN
    try:
        before = json.loads(read_file(index))
    except (OSError, ValueError, RecursionError):  # none yet, or not ours
        before = {}
    for name, digest in before.items() if isinstance(before, dict) else ():
        if name not in made and _MADE.fullmatch(name) and _is_unchanged(folder / name, digest):
            remove(folder / name)
    write_text(index, json.dumps(made, indent=0, sort_keys=True) + "\n")


def _is_unchanged(path: Path, digest: object) -> bool:
    """Whether a regular file is still what a report wrote."""
    try:
        return not path.is_symlink() and _digest(path) == digest
    except (OSError, ValueError):  # gone, no file, or a name that none can have
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(read_file(path)).hexdigest()
