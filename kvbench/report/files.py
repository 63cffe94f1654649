"""Writing what a report consists of."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from kvbench.records.durable import make_folder, replace

_LONGEST_NAME = 200
"""Bytes of a file's name; file systems allow 255, of which a name under way needs some."""


def write_text(path: Path, text: str) -> Path:
    """Replace the file in one step, so that an open page is never half a page. What has no UTF-8 form
    (a folder may be named in other bytes) becomes a question mark."""
    replace(path, text.encode("utf-8", errors="replace"), sync=False)
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
    safe = "".join(c if c.isprintable() else "-" for c in re.sub(r"[/ ]", "_", name))
    if len(safe.encode()) <= _LONGEST_NAME:
        return safe
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
    return f"{safe.encode()[: _LONGEST_NAME - 9].decode(errors='ignore')}-{digest}"
