"""Writing so that neither a killed process nor a power cut loses or halves what was written, and so
that links in a results folder from elsewhere make nobody write or remove what lies outside it."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def replace(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write `path` in one step: another file, then renamed; with `sync`, both are on disk on return.

    What a killed process left under the other name is written anew: whoever writes `path` holds a
    lock. Where `path` is a link, the link is replaced, not the file it leads to.

    Raises:
        OSError: the file system refuses.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if sync:
            sync_folder(path.parent)
    except OSError:  # on a full disk half a file would take the room of records
        with suppress(OSError):
            temporary.unlink()
        raise


def append(path: Path, data: bytes, size: int) -> int:
    """Add `data` to a file of `size` bytes and wait until it is on disk; returns the new size.

    Whatever stops it, what was written is taken back.

    Raises:
        OSError: the file system refuses, or the file is not there or has another size, which is then
            left as it is.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_size != size:
            raise OSError(errno.ESTALE, "was changed while a run wrote to it", str(path))
        try:
            rest = data
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        except BaseException:
            with suppress(OSError):  # then it has another size at the next call
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)
    return size + len(data)


def make_folder(folder: Path, root: Path | None = None) -> None:
    """Make a folder and its parents; their names survive a power cut.

    Args:
        root: the folder and what is in it must not leave it; it may be a link itself, e.g. to a scratch
            disk.

    Raises:
        OSError: the file system refuses, or a link or ``..`` leads out of `root`.
    """
    for path in (folder, *folder.glob("*")):
        if root is not None and not path.resolve().is_relative_to(root.resolve()):
            raise OSError(errno.ELOOP, f"leads out of {root}", str(path))
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk: syncing a file leaves its name to luck."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(handle)
