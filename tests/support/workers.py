"""Commands in processes of their own, and what their workers have written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.stores import rows_below

SMALL = ["model=recall_mini", "logger=none", "device=cpu", "task=longeval_lines"]
SMALL += ["task.num_lines=[20]"]
SMALL += ["method=[exact,h2o]", "task.num_examples=8"]


TINY = ["model=tiny_random", "method=[exact]", "task.max_new_tokens=2", *SMALL[1:5]]
TINY += ["task.num_examples=5"]


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found = rows_below(folder)
    return {run: sorted(rows, key=lambda row: row["example_id"]) for run, rows in found.items()}


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvbench", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_for(what: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Until `what` is true, while the command waits for its jobs."""
    end = time.monotonic() + 240
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "took too long"
        time.sleep(0.02)


def lines(results: Path, task: str, part: str) -> int:
    """Fewest records that a run of the task has in this shard's file."""
    files = list(results.glob(f"*/*/{task}/*/records-{part}.jsonl"))
    return min((path.read_bytes().count(b"\n") for path in files), default=0)


def writer(results: Path, task: str, part: str) -> int | None:
    """The process that writes this shard: it has its lock open."""
    locks = {str(path) for path in results.resolve().glob(f"*/*/{task}/h2o-*/.lock-{part}")}
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # another user's, or just closed
            if os.readlink(handle) in locks:
                return int(handle.parts[2])
    return None


def stop_all(results: Path, jobs: Collection[tuple[str, str]], stopped: dict[Any, int]) -> bool:
    """Stop each job (task, shard) at its first records, so that none ends before all have begun."""
    for task, part in jobs:
        process = writer(results, task, part) if lines(results, task, part) else None
        if process is not None and (task, part) not in stopped:
            os.kill(process, signal.SIGSTOP)
            stopped[task, part] = process
    return len(stopped) == len(jobs)
