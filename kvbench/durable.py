"""Writing so that neither a killed process nor a power cut loses or halves what was written."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Write `path` in one step: another file, on disk, then renamed, and the renaming on disk.

    Whoever writes `path` holds a lock, so what a killed process left under the other name is its own.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def make_folder(folder: Path) -> None:
    """Make a folder and its parents; their names survive a power cut."""
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


class Syncer:
    """Syncs one file in a thread of its own, at most once per `PAUSE`: whoever writes does not wait, and
    whatever was written meanwhile is in the next sync.

    Attributes:
        error: what a sync ended in.
    """

    PAUSE = 1.0
    """Seconds from the first write that is not synced to the sync that takes it."""

    def __init__(self, file: int) -> None:
        self.error: OSError | None = None
        self._file = file
        self._wanted = threading.Event()  # something was written that no sync has taken
        self._over = threading.Event()
        self._file_in_use = threading.Lock()
        self._begun = False

    def wake(self) -> None:
        """Sync what has been written, soon."""
        if not self._wanted.is_set():
            self._wanted.set()
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, name="sync", daemon=True).start()

    def finish(self) -> None:
        """Sync what is left; nothing uses the file afterwards. The thread is not waited for: an
        interrupt may have come while it was started, and then there may be none."""
        with self._file_in_use:
            if self._wanted.is_set() and not self._over.is_set():
                self._sync()
            self._over.set()
        self._wanted.set()  # lets the thread end

    def _sync(self) -> None:
        self._wanted.clear()  # before the sync, which may miss what is written from now on
        try:
            os.fsync(self._file)
        except OSError as error:
            self.error = error

    def _run(self) -> None:
        while self.error is None:
            self._wanted.wait()
            self._over.wait(self.PAUSE)
            with self._file_in_use:
                if self._over.is_set():
                    return
                self._sync()


def write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
