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
from contextvars import ContextVar
from types import FrameType, TracebackType

TERMINATED = 143
"""Exit status after SIGTERM, as a shell reports it."""

WAITS = "kvbench: SIGTERM: finishing this example first; another one ends it at once\n"
"""What a first SIGTERM is answered with on stderr."""

PATIENCE = 60.0
"""Seconds that code which runs no Python may ignore an alarm before it counts as hung for good."""


TICK, LATE = 0.25, 0.75
"""Seconds between two ticks of a `RunClock`, and after how many the next one is late."""


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


class RunClock:
    """Seconds in which this process could run: those in which it was stopped (SIGSTOP, a frozen
    container, a laptop that sleeps) do not count.

    A thread calls `tick` several times a second. A tick that comes far too late means that nothing ran
    meanwhile, or that one long call kept the interpreter to itself: then the CPU time says how long.
    """

    def __init__(self) -> None:
        self._state = (0.0, time.monotonic(), time.process_time())

    def ran(self) -> float:
        """Seconds so far; any thread may ask."""
        seconds, at, cpu = self._state
        gap = time.monotonic() - at
        if gap > LATE:
            gap = min(gap, max(LATE, time.process_time() - cpu))
        return seconds + gap

    def tick(self) -> None:
        """Note that the process runs."""
        self._state = (self.ran(), time.monotonic(), time.process_time())


_CLOCK: ContextVar[RunClock | None] = ContextVar("_CLOCK", default=None)
"""The clock of the time limit that is in force here."""


def seconds_run() -> float:
    """A clock to take differences of: within a `time_limit`, the one it goes by."""
    clock = _CLOCK.get()
    return time.perf_counter() if clock is None else clock.ran()


@contextmanager
def time_limit(
    seconds: float | None, on_hang: Callable[[], None], what: str = "the example"
) -> Iterator[None]:
    """Raise TimeoutError in what runs here too long; None: no limit.

    Time in which the process was stopped does not count (see `RunClock`). The alarm comes a tenth (at
    least one second) late, so that a loop which looks at its own clock is the first to notice, and
    again and again as long as something catches it and goes on. Code that runs no Python (a kernel
    that never returns) sees no alarm: `PATIENCE` seconds after one went unheard, `on_hang` is called
    from another thread and the process ends with status 1. Within another limit, that one goes on
    afterwards.

    Args:
        on_hang: saves what can be saved; must not wait for this thread.
        what: what the error says took too long.
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
        left = period - clock.ran()
        if left > 0:  # the process was stopped for a while
            signal.setitimer(signal.ITIMER_REAL, max(left, TICK), period)
            return
        raise TimeoutError(f"{what} took more than {seconds:g} s")

    def watch() -> None:
        due = period + PATIENCE
        while not over.wait(TICK):
            clock.tick()
            if clock.ran() < due:
                continue
            if not heard.is_set():
                try:
                    on_hang()
                finally:
                    os._exit(1)
            heard.clear()
            due = clock.ran() + period

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
