"""SIGTERM asks a job to end: it does, after the example in progress."""

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

WAIT_NOTICE = "kvbench: SIGTERM: finishing this example first; another one ends it at once\n"
"""What a first SIGTERM is answered with on stderr."""


class Terminated(SystemExit):
    """SIGTERM came: what is done is on disk."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


class Termination:
    """SIGTERM ends a job after the example in progress; a second one ends it at once.

        with Termination() as termination:
            for example in examples:
                with termination.example():
                    ...  # finished even if SIGTERM comes now; Terminated is raised afterwards

    SIGTERM is left as it is outside the main thread, and where it has a handler already: in a job on
    Slurm it announces that the job is preempted, and one that ends by itself is not put back into the
    queue. Within another `Termination`, it is the other.
    """

    def __init__(self) -> None:
        self._busy = False
        self._asked = False

    def __enter__(self) -> Termination:
        before = signal.getsignal(signal.SIGTERM)
        self._ours = in_main_thread() and before == signal.SIG_DFL
        if self._ours:
            signal.signal(signal.SIGTERM, self._handle)
        outer = getattr(before, "__self__", None)
        return outer if isinstance(outer, Termination) else self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._busy and not self._asked:
            self._asked = True
            if sys.__stderr__ is not None:  # else 2 may be any file
                with suppress(OSError):  # past Python's own buffer, which this may have interrupted
                    os.write(2, WAIT_NOTICE.encode())
            return
        raise Terminated

    @contextmanager
    def example(self) -> Iterator[None]:
        """While this lasts, SIGTERM waits.

        Raises:
            Terminated: at the end, if it came.
        """
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
        if self._asked:
            raise Terminated


def asks_to_stop(error: BaseException) -> bool:
    """Whether an exception is somebody's wish that this process ends. Any other is a failure of what
    ran: a panic in a library written in Rust, a library's ``sys.exit``."""
    return isinstance(error, KeyboardInterrupt | Terminated)
