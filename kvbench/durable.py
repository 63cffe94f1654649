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
        error: what a sync ended in; later ones are not tried.
    """

    PAUSE = 1.0
    """Seconds from the first write that is not synced to the sync that takes it."""

    def __init__(self, file: int) -> None:
        self.error: OSError | None = None
        self._file = file
        self._wanted = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Sync what has been written, soon."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sync", daemon=True)
            self._thread.start()
        if not self._wanted.is_set():
            self._wanted.set()

    def finish(self) -> None:
        """Wait until everything written is on disk."""
        if self._thread is not None:
            self._over.set()
            self._wanted.set()
            self._thread.join()
            self._thread = None
            self._over.clear()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            over = self._over.wait(self.PAUSE)
            self._wanted.clear()  # before the sync, which may miss what is written from now on
            try:
                os.fsync(self._file)
            except OSError as error:
                self.error = error
                return
            if over:
                return


def write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
