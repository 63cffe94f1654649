"""On SIGTERM a job finishes the current example and then ends; after the last example it first writes
the tables and the page."""

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
"""What a first SIGTERM is answered with on stderr."""


class Terminated(SystemExit):
    """Raised after a SIGTERM; all finished records are on disk."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


_busy = False
"""Whether this process has something to finish first, an example or a page."""

_asked = False
"""Whether SIGTERM came while there was. The state is the process's, since signals come to a process."""


@contextmanager
def terminable() -> Iterator[None]:
    """While this lasts, SIGTERM ends the process, after the example in progress; a second one at once.

        with terminable():
            for example in examples:
                with finished_first():
                    ...  # finished even if SIGTERM comes now; Terminated is raised afterwards

    SIGTERM is left as it is outside the main thread, and where it has a handler already: in a job on
    Slurm it announces that the job is preempted, and one that ends by itself is not put back into the
    queue.
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
    """Note a first SIGTERM while an example runs; end the process at any other."""
    global _asked
    if _asked or not _busy:
        raise Terminated
    _asked = True
    if sys.__stderr__ is not None:  # without it, descriptor 2 may belong to another file
        # Not by Python's buffer, whose own writing the signal may have interrupted.
        with suppress(OSError):
            os.write(2, WAIT_NOTICE.encode())


@contextmanager
def finished_first(*, more: bool = False) -> Iterator[None]:
    """Within this context, inside `terminable`, SIGTERM does not interrupt.

    Args:
        more: what comes after the context is to be finished, too, as the page after the last example:
            SIGTERM goes on waiting until another such context, without more, ends.

    Raises:
        Terminated: at the end of the context, if SIGTERM came and there is no more.
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
    """From here on SIGTERM interrupts again. Raises `Terminated` if it came before."""
    global _busy
    _busy = False
    if _asked:
        raise Terminated


def asks_to_stop(error: BaseException) -> bool:
    """Whether an exception means that a user or the system asked this process to end (Ctrl-C, SIGTERM).
    Any other is a failure of the code that ran, even a library's ``sys.exit`` or a panic of one written
    in Rust, which are no `Exception` either."""
    return isinstance(error, KeyboardInterrupt | Terminated)
