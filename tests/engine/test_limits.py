"""A body that catches every alarm of its time limit does not go on for ever."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from kvbench.engine.limits import time_limit

LOOP = """
import time
from kvbench.engine import limits
limits.HUNG_AFTER, limits.IGNORED = 0.1, 1
with limits.time_limit(0.05, lambda: print("saved", flush=True)):
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            time.sleep(1)
        except TimeoutError:
            pass
"""


def test_a_loop_that_catches_every_alarm_counts_as_hung() -> None:
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("saved\n", 1), done.stderr


@pytest.mark.parametrize(("seconds", "alarm"), [(2, 3.0), (10, 11.0), (50, 55.0)])
def test_the_alarm_comes_a_tenth_but_at_least_a_second_later(
    seconds: float, alarm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[tuple[float, float]] = []
    monkeypatch.setattr(signal, "setitimer", lambda which, *times: timers.append(times))
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(seconds, lambda: None):
        assert signal.getsignal(signal.SIGALRM) is not before
    assert timers[0] == (alarm, alarm)
    assert timers[-1][0] == 0, "no alarm is left"
    assert signal.getsignal(signal.SIGALRM) is before
    with time_limit(None, lambda: None):
        assert len(timers) == 2
