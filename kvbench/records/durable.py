"""Writing files and folders that survive a killed process and a power cut: content is on disk as a whole
or not at all. Symbolic links in a results folder never lead a write or a removal out of that folder."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def replace(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write `path` in one step: the content goes to a temporary file, which is renamed to `path`.

    A temporary file that a killed process left is overwritten, since the caller holds a lock on
    `path`. Where `path` is a link, the link is replaced, not the file that it leads to.

    Args:
        sync: wait until content and name are on disk.

    Raises:
        OSError: the file system refuses; `path` is then as it was.
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
    except OSError:  # on a full disk, half a file would take the space that records need
        with suppress(OSError):
            temporary.unlink()
        raise


def append(path: Path, data: bytes, size: int) -> int:
    """Add `data` to a file of `size` bytes and wait until it is on disk; returns the new size.

    If anything interrupts the write, Ctrl-C too, the file is cut back to `size` bytes.

    Raises:
        OSError: the file system refuses, the file does not exist, or it has another size; a file of
            another size is left as it is.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_size != size:
            raise OSError(errno.ESTALE, "was changed while a run wrote to it", str(path))
        is_whole = False
        try:
            unwritten = data
            while unwritten:
                unwritten = unwritten[os.write(file, unwritten) :]
            os.fsync(file)
            is_whole = True
        finally:
            if not is_whole:
                with suppress(OSError):  # if this fails, the next call refuses the file by its size
                    os.ftruncate(file, size)
    finally:
        os.close(file)
    return size + len(data)


def make_folder(folder: Path, root: Path | None = None) -> None:
    """Make a folder and its parents, and wait until their names are on disk.

    Args:
        root: a folder that `folder` and the files in it must lie in once links are followed. `root`
            itself may be a link, e.g. to a scratch disk.

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
    """Wait until the names of a folder's files are on disk, which syncing a file does not ensure.

    A file system that cannot sync folders is left to itself.

    Raises:
        OSError: the file system fails to write them.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # as some network file systems
            raise
    finally:
        os.close(handle)
