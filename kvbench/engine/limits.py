"""Time limits of examples. Alarms are signals, which only the main thread receives."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

HUNG_AFTER = 60.0
"""Seconds after an unhandled alarm at which code that runs no Python counts as hung."""

TICK, LATE = 0.25, 0.75
"""Seconds between two ticks of a `RunClock`, and after how many the next one is late."""


def in_main_thread() -> bool:
    """Whether this thread is the one that receives signals."""
    return threading.current_thread() is threading.main_thread()


class RunClock:
    """A clock of the seconds in which this process could run. Seconds in which it was stopped (SIGSTOP,
    a frozen container, a laptop that sleeps) do not count.

    A thread calls `tick` several times a second. A tick that comes far too late means that nothing ran
    meanwhile, or that one long call kept the interpreter to itself: then the CPU time says how long.
    """

    def __init__(self) -> None:
        self._state = (0.0, time.monotonic(), time.process_time())

    def elapsed(self) -> float:
        """Seconds so far. Thread-safe."""
        seconds, at, cpu = self._state
        gap = time.monotonic() - at
        if gap > LATE:
            gap = min(gap, max(LATE, time.process_time() - cpu))
        return seconds + gap

    def tick(self) -> None:
        """Note that the process runs."""
        self._state = (self.elapsed(), time.monotonic(), time.process_time())


_CLOCK: ContextVar[RunClock | None] = ContextVar("_CLOCK", default=None)
"""The clock of the innermost time limit in force."""


def active_seconds() -> float:
    """Seconds of a monotonic clock: within a `time_limit` the limit's own."""
    clock = _CLOCK.get()
    return time.perf_counter() if clock is None else clock.elapsed()


@contextmanager
def time_limit(
    seconds: float | None, on_hang: Callable[[], None], what: str = "the example"
) -> Iterator[None]:
    """Raise TimeoutError in a body that runs longer than `seconds`; None: no limit.

    Time in which the process was stopped does not count (see `RunClock`). The alarm comes a tenth (at
    least one second) after the limit, so that a loop that checks the time itself notices first, and it
    is repeated for as long as the body catches it and goes on. Code that runs no Python (a kernel that
    never returns) is not interrupted by an alarm: `HUNG_AFTER` seconds after one that was not handled,
    `on_hang` is called from another thread and the process ends with status 1. Limits can be nested.

    Args:
        on_hang: saves what can be saved; must not wait for this thread.
        what: named by the error.
    """
    if seconds is None:
        yield
        return
    period = seconds + max(1.0, seconds / 10)
    heard, over = threading.Event(), threading.Event()
    clock = RunClock()

    def alarm(_signal: int, _frame: FrameType | None) -> None:
        heard.set()
        if over.is_set():
            return
        left = period - clock.elapsed()
        if left > 0:  # the process was stopped for a while
            signal.setitimer(signal.ITIMER_REAL, max(left, TICK), period)
            return
        raise TimeoutError(f"{what} took more than {seconds:g} s")

    def watch() -> None:
        due = period + HUNG_AFTER
        while not over.wait(TICK):
            clock.tick()
            if clock.elapsed() < due:
                continue
            if not heard.is_set():
                try:
                    on_hang()
                finally:
                    os._exit(1)
            heard.clear()
            due = clock.elapsed() + period

    watcher = threading.Thread(target=watch, name="example_timeout", daemon=True)
    handler = signal.signal(signal.SIGALRM, alarm)
    watcher.start()
    token = _CLOCK.set(clock)
    began = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, period, period)
    try:
        try:
            yield
        finally:
            over.set()  # the next alarm after one that comes right here is a period away
    finally:
        over.set()
        _CLOCK.reset(token)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # a limit around this one goes on
            signal.setitimer(
                signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval
            )
