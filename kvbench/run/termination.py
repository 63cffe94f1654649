"""Ends the process on SIGTERM, but only when the example in progress is finished; after the last example
only when the tables and the page are written."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from kvbench.engine.limits import in_main_thread

TERMINATED = 143
"""Exit status after SIGTERM, as a shell reports it."""

WAIT_NOTICE = "kvbench: SIGTERM: finishing what is in progress first; another one ends it at once\n"
"""Printed on stderr at the first SIGTERM."""


class Terminated(SystemExit):
    """Raised to end the process after a SIGTERM, when all finished records are on disk."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


# Both are global, since a signal comes to the process.
_busy = False
"""Whether an example or a page is in progress, which SIGTERM must not interrupt."""

_asked = False
"""Whether SIGTERM came while `_busy` was true."""


@contextmanager
def terminable() -> Iterator[None]:
    """Within this context SIGTERM ends the process when the example in progress is finished; a second
    SIGTERM ends it at once.

        with terminable():
            for example in examples:
                with finished_first():
                    ...  # finished even if SIGTERM comes now; Terminated is raised afterwards

    Nothing is changed outside the main thread, and where SIGTERM has a handler already. In a job on
    Slurm that handler puts the job back into the queue when it is preempted, which a job that had ended
    by itself would not be.
    """
    global _asked
    ours = in_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        _asked = False
        signal.signal(signal.SIGTERM, _handle)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _handle(_signal: int, _frame: FrameType | None) -> None:
    """Note the first SIGTERM if an example is in progress; end the process otherwise."""
    global _asked
    if _asked or not _busy:
        raise Terminated
    _asked = True
    if sys.__stderr__ is not None:  # without it, descriptor 2 may belong to another file
        # Not by print: the signal may have interrupted another write to Python's buffer.
        with suppress(OSError):
            os.write(2, WAIT_NOTICE.encode())


@contextmanager
def finished_first(*, more: bool = False) -> Iterator[None]:
    """Within this context, inside `terminable`, SIGTERM does not interrupt.

    Args:
        more: SIGTERM must not interrupt what follows the context either, such as the page after the last
            example. That ends with the next such context without `more`, or with `end_if_asked`.

    Raises:
        Terminated: at the end of a context without `more`, if SIGTERM came.
    """
    global _busy
    _busy = True
    try:
        yield
    except BaseException:
        _busy = False
        raise
    if not more:
        end_if_asked()


def end_if_asked() -> None:
    """Let SIGTERM interrupt again.

    Raises:
        Terminated: SIGTERM came before.
    """
    global _busy
    _busy = False
    if _asked:
        raise Terminated


def asks_to_stop(error: BaseException) -> bool:
    """Whether an exception means that a user or the system asked this process to end (Ctrl-C, SIGTERM).

    Any other exception is a failure of the code that ran. That includes two that do not derive from
    `Exception`: a library's ``sys.exit``, and a panic of a library written in Rust.
    """
    return isinstance(error, KeyboardInterrupt | Terminated)
