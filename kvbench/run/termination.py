"""How Ctrl-C and SIGTERM end a command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED = 143
"""Exit status after SIGTERM, as a shell reports it."""


class Terminated(SystemExit):
    """SIGTERM came."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@contextmanager
def terminable() -> Iterator[None]:
    """Within this context SIGTERM raises `Terminated`, as Ctrl-C raises KeyboardInterrupt. A second
    signal of either kind ends the process at once.

    The example in progress is given up; a record is written whole or not at all.
    Nothing is changed outside the main thread, and where SIGTERM has a handler already: in a job on
    Slurm that handler puts a preempted job back into the queue.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in handlers:
            signal.signal(each, signal.SIG_DFL)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number in handlers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)
