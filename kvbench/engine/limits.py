"""Time limits of examples. Alarms are signals, which only the main thread receives."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HUNG_AFTER = 60.0
"""The seconds after an alarm that was not handled, after which the code counts as hung."""

IGNORED = 5
"""The number of alarms that code may catch before it counts as hung."""

_end_process = (
    os._exit
)  # taken here, since `kvbench.engine.process` replaces it while a method runs


def in_main_thread() -> bool:
    """Whether this thread is the one that receives signals."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def time_limit(seconds: float | None, on_hang: Callable[[], None]) -> Iterator[None]:
    """Raise TimeoutError in code within this context that runs longer than `seconds`.

    The first alarm comes a tenth of the limit, at least a second, after it, so that a loop that checks
    the time itself stops first. Alarms are repeated as long as the code catches the error and goes on.
    An alarm does not interrupt code that runs no Python, such as a kernel that never returns. If an
    alarm has not been handled after `HUNG_AFTER` seconds, or `IGNORED` alarms were caught, another
    thread calls `on_hang` and ends the process with status 1.

    Args:
        seconds: None for no limit.
        on_hang: saves what can be saved. It must not wait for this thread.
    """
    if seconds is None:
        yield
        return
    period = seconds + max(1.0, seconds / 10)
    handled = threading.Event()  # an alarm has been handled since `watch` last waited
    over = threading.Event()  # the code has ended
    alarms = 0

    def alarm(_signal: int, _frame: FrameType | None) -> None:
        nonlocal alarms
        alarms += 1
        handled.set()
        if not over.is_set():
            raise TimeoutError(f"the example took more than {seconds:g} s")

    def watch() -> None:
        wait = period + HUNG_AFTER
        while not over.wait(wait):
            if not handled.is_set() or alarms >= IGNORED:
                try:
                    on_hang()
                finally:
                    _end_process(1)
            handled.clear()
            wait = period

    watcher = threading.Thread(target=watch, name="example_timeout", daemon=True)
    handler = signal.signal(signal.SIGALRM, alarm)
    watcher.start()
    signal.setitimer(signal.ITIMER_REAL, period, period)
    try:
        try:
            yield
        finally:
            over.set()
    finally:
        # Again, if an alarm interrupted the line above; the next alarm is a whole period away.
        over.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
