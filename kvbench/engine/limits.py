"""Time limits of examples. Alarms are signals, which only the main thread receives."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HUNG_AFTER = 60.0
"""Seconds after an unhandled alarm at which code that runs no Python counts as hung."""

IGNORED = 5
"""Alarms after which a body that catches every one and goes on counts as hung."""

_end_process = os._exit  # which `kvbench.engine.process` takes from a method's code


def in_main_thread() -> bool:
    """Whether this thread is the one that receives signals."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def time_limit(seconds: float | None, on_hang: Callable[[], None]) -> Iterator[None]:
    """Raise TimeoutError in a body that runs longer than `seconds`; None: no limit.

    The alarm comes a tenth (at least one second) after the limit, so that a loop that checks the time
    itself notices first, and it is repeated for as long as the body catches it and goes on. Code that
    runs no Python (a kernel that never returns) is not interrupted by an alarm: `HUNG_AFTER` seconds
    after one that was not handled, or after `IGNORED` that were caught, `on_hang` is called from another
    thread and the process ends with status 1.

    Args:
        on_hang: saves what can be saved; must not wait for this thread.
    """
    if seconds is None:
        yield
        return
    period = seconds + max(1.0, seconds / 10)
    heard = threading.Event()  # an alarm came since `watch` looked last
    over = threading.Event()  # the body has ended
    alarms = 0

    def alarm(_signal: int, _frame: FrameType | None) -> None:
        nonlocal alarms
        alarms += 1
        heard.set()
        if not over.is_set():
            raise TimeoutError(f"the example took more than {seconds:g} s")

    def watch() -> None:
        wait = period + HUNG_AFTER
        while not over.wait(wait):
            if not heard.is_set() or alarms >= IGNORED:
                try:
                    on_hang()
                finally:
                    _end_process(1)
            heard.clear()
            wait = period

    watcher = threading.Thread(target=watch, name="example_timeout", daemon=True)
    handler = signal.signal(signal.SIGALRM, alarm)
    watcher.start()
    signal.setitimer(signal.ITIMER_REAL, period, period)
    try:
        try:
            yield
        finally:
            over.set()  # the next alarm after one that comes right here is a period away
    finally:
        over.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
