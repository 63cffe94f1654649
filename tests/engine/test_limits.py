"""A body that catches every alarm of its time limit does not go on for ever."""

from __future__ import annotations

import subprocess
import sys

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
