"""Writing so that neither a killed process nor a power cut loses or halves what was written, and so
that a results folder from elsewhere makes nobody write, remove or wait for what lies outside it.

Below a results folder nothing is written through a symbolic link, whoever put it there; the folder
that a user names may be one itself, e.g. to a scratch disk.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path


def read_file(path: Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, or is a folder, a pipe (which would be waited for) or a device.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def replace(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write `path` in one step: another file, then renamed; with `sync`, both are on disk on return.

    What a killed process left under the other name is written anew: whoever writes `path` holds a
    lock. A hard link to `path` keeps what it had.

    Raises:
        OSError: the file system refuses, or one of the names is a link or no file.
    """
    temporary = path.with_name(f".{path.name}.new")
    is_file(path)
    remove(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
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
            remove(temporary)
        raise


def open_to_append(path: Path) -> int:
    """A handle to read `path` and to write at its end; made if missing. Where the file has another
    name (a hard link, as some backups make them), that one keeps what it has.

    Raises:
        OSError: the file system refuses, or the name is a link or no file.
    """
    if is_file(path) and os.lstat(path).st_nlink > 1:
        replace(path, read_file(path))
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o644)


def open_again(path: Path) -> int:
    """The same of a file that is there, whatever other names it has.

    Raises:
        OSError: the file system refuses, or the name is a link or no file.
    """
    is_file(path)
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)


def remove(path: Path) -> None:
    """Remove a file, if it is there.

    Raises:
        OSError: the file system refuses, or the name is a link or no file.
    """
    if is_file(path):
        path.unlink(missing_ok=True)


def is_file(path: Path) -> bool:
    """Whether `path` is a regular file and no link to one; False where there is nothing.

    Raises:
        OSError: it is something else, which is not written or removed.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise _refused(path, mode, "a regular file")
    return True


def make_folder(folder: Path, root: Path | None = None) -> None:
    """Make a folder and its parents; their names survive a power cut.

    Args:
        root: below it, no part of the path may be a link.

    Raises:
        OSError: the file system refuses, or a part of the path is a link.
    """
    if root is not None:
        check_inside(folder, root)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def check_inside(folder: Path, root: Path) -> None:
    """Refuse a folder that a link below `root` would place somewhere else.

    Raises:
        OSError: a part of the path below `root` is a link, or no folder.
    """
    place = root
    for part in folder.relative_to(root).parts:
        place /= part
        try:
            mode = os.lstat(place).st_mode
        except FileNotFoundError:
            return
        if part == ".." or not stat.S_ISDIR(mode):
            raise _refused(place, mode, "a folder")


def _refused(path: Path, mode: int, wanted: str) -> OSError:
    line = f"is not {wanted}, as kvbench makes it"
    if stat.S_ISLNK(mode):
        line = "is a symbolic link; below a results folder none is followed for writing"
    return OSError(errno.ELOOP, line, str(path))


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


class AppendedFiles:
    """The files that one job appends to, from one thread.

    At most `MOST` are open at once (and one more while it is synced); the others are opened again when
    they are written to. Another thread syncs them all, at most once per `PAUSE`: whoever writes does not
    wait, and whatever was written meanwhile is in the next sync.
    """

    MOST = 16
    PAUSE = 1.0
    """Seconds from the first write that is not synced to the sync that takes it."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()  # the latest used last
        self._unsynced: dict[Path, None] = {}
        self._errors: dict[Path, OSError] = {}
        self._lock = threading.Lock()  # of the above, held briefly
        self._syncing = threading.Lock()  # held while the disk syncs
        self._in_sync: Path | None = None
        self._wanted = threading.Event()  # something was written that no sync has taken
        self._over = threading.Event()
        self._begun = False

    def handle(self, path: Path, *, make: bool = False) -> int:
        """A handle to append to a file and to read it, good until another file is asked for.

        Args:
            make: as `open_to_append` does; else the file must be there.

        Raises:
            OSError: as `open_to_append`.
        """
        with self._lock:
            if path in self._open:
                self._open.move_to_end(path)
            else:
                while len(self._open) >= self.MOST:
                    self._close(next(other for other in self._open if other != self._in_sync))
                self._open[path] = open_to_append(path) if make else open_again(path)
            return self._open[path]

    def wake(self, path: Path) -> None:
        """Sync what has been written to a file, soon."""
        with self._lock:
            self._unsynced[path] = None
        self._wanted.set()
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, name="sync", daemon=True).start()

    def finish(self, path: Path) -> None:
        """Sync what is left of a file and close it."""
        with self._syncing:
            try:
                if path in self._unsynced:
                    self._sync(path)
            finally:
                with self._lock:
                    if path in self._open:
                        self._close(path)

    def error(self, path: Path) -> OSError | None:
        """What a sync of the file ended in; told once."""
        return self._errors.pop(path, None)

    def end(self) -> None:
        """Let the thread end, once every file is finished. It is not waited for: an interrupt may have
        come while it was started, and then there may be none."""
        self._over.set()
        self._wanted.set()

    def __enter__(self) -> AppendedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _close(self, path: Path) -> None:
        """A file that is not synced yet is opened again by the sync; an error of the disk until then is
        kept with the file for it."""
        try:
            os.close(self._open.pop(path))
        except OSError as error:  # some network file systems write only now
            self._errors[path] = error

    def _sync(self, path: Path) -> None:
        with self._lock:
            self._unsynced.pop(path)  # before the sync, which may miss what is written from now on
            self._in_sync, file = path, self._open.get(path)
        try:
            if file is not None:
                os.fsync(file)
                return
            file = open_again(path)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        except (FileNotFoundError, NotADirectoryError):  # removed, as the next to write will say
            pass
        except OSError as error:
            self._errors[path] = error
        finally:
            self._in_sync = None

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._over.wait(self.PAUSE)
            self._wanted.clear()
            if self._over.is_set():
                return
            with self._lock:
                paths = list(self._unsynced)
            for path in paths:
                with self._syncing:
                    if path in self._unsynced:  # nobody has finished it meanwhile
                        self._sync(path)


def write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
