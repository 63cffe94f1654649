"""What may cut an example short: a time limit, and the signal that asks a job to end.

Both use signals, which Python delivers to the main thread only.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

TERMINATED = 143
"""Exit status after SIGTERM, as a shell reports it."""

WAITS = "kvbench: SIGTERM: finishing this example first; another one ends it at once\n"
"""What a first SIGTERM is answered with on stderr."""

PATIENCE = 60.0
"""Seconds that code which runs no Python may ignore an alarm before it counts as hung for good."""


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._busy and not self._asked:
            self._asked = True
            if sys.__stderr__ is not None:  # else 2 may be any file
                with suppress(OSError):  # past Python's own buffer, which this may have interrupted
                    os.write(2, WAITS.encode())
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
    ran, those that are no `Exception` too: a panic in a library written in Rust, a library's
    ``sys.exit``."""
    return isinstance(error, KeyboardInterrupt | GeneratorExit | Terminated)


def in_main_thread() -> bool:
    """Whether this thread is the one that receives signals."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def time_limit(
    seconds: float | None, on_hang: Callable[[], None], what: str = "the example"
) -> Iterator[None]:
    """Raise TimeoutError in what runs here too long; None: no limit.

    The alarm comes a tenth (at least one second) late, so that a loop which looks at its own clock is
    the first to notice, and again and again as long as something catches it and goes on. Code that
    runs no Python (a kernel that never returns) sees no alarm: `PATIENCE` seconds after one went
    unheard, `on_hang` is called from another thread and the process ends with status 1. Within
    another limit, that one goes on afterwards.

    Args:
        on_hang: saves what can be saved; must not wait for this thread.
        what: what the error says took too long.
    """
    if seconds is None:
        yield
        return
    period = seconds + max(1.0, seconds / 10)
    heard, over = threading.Event(), threading.Event()

    def alarm(_signal: int, _frame: FrameType | None) -> None:
        heard.set()
        if over.is_set():
            return
        raise TimeoutError(f"{what} took more than {seconds:g} s")

    def watch() -> None:
        wait = period + PATIENCE
        while not over.wait(wait):
            if not heard.is_set():
                try:
                    on_hang()
                finally:
                    os._exit(1)
            heard.clear()
            wait = period

    watcher = threading.Thread(target=watch, name="example_timeout", daemon=True)
    handler = signal.signal(signal.SIGALRM, alarm)
    watcher.start()
    began = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, period, period)
    try:
        try:
            yield
        finally:
            over.set()  # the next alarm after one that comes right here is a period away
    finally:
        over.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # a limit around this one goes on
            signal.setitimer(
                signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval
            )
