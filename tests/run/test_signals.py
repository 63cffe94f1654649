"""Signals, kills, full and read-only disks and vanishing folders, as the command line meets them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from support.command import FAST
from support.fork_server import Child, ForkServer
from support.stores import rows_below

JOB = [*FAST[:-1], "task.num_lines=[8]", "task.num_examples=16", "task.max_new_tokens=6"]
FEW = [*JOB, "limit=3"]
PAGE = "runs/longeval_lines-tiny_random/report.html"
ENDLESS = ("kvbench.run.plan.converse", 2)
"""The function whose second call comes to no end."""
GOES_ON = "what is done is on disk, the same command goes on from there"
Records = Mapping[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """What `JOB` gives when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert server.kvbench(folder, *JOB).wait() == 0
    return rows_below(folder)


def first_of_each(whole: Records, count: int) -> Records:
    return {name: rows[:count] for name, rows in whole.items()}


def wait_until(child: Child, happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and child.running():
        if happened():
            return
        time.sleep(0.01)
    raise AssertionError(child.err.read_text())


def wait_for_records(folder: Path, child: Child, count: int) -> None:
    wait_until(child, lambda: written(folder) >= count)


def written(folder: Path) -> int:
    """How many lines of records there are; without those of hidden folders, which are temporary."""
    files = glob("runs/*/*/*/*/records.jsonl", root_dir=folder)
    return sum((folder / file).read_bytes().count(b"\n") for file in files)


def wait_until_stalled(child: Child) -> None:
    wait_until(child, lambda: child.out.exists() and "stalled" in child.out.read_text())


def one_line(child: Child) -> str:
    """All that a command says on stderr, but for its progress."""
    err = child.err.read_text()
    (line,) = (line for line in err.splitlines() if line and "longeval_lines:" not in line)
    return line.removeprefix("kvbench: ")


def test_terminated_killed_interrupted_the_next_start_goes_on(
    server: ForkServer, tmp_path: Path, undisturbed: Records
) -> None:
    """One run, stopped in three ways, one start after the other."""
    child = stopped(server, tmp_path, signal.SIGTERM, after=3, status=143)
    assert one_line(child) == f"terminated; {GOES_ON}"
    for name, rows in rows_below(tmp_path).items():
        assert rows == undisturbed[name][: len(rows)]
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        before = written(tmp_path)
        child = stopped(server, tmp_path, number, after=before + 5, status=status)
    assert one_line(child) == f"interrupted; {GOES_ON}"
    assert not (tmp_path / PAGE).exists(), "nobody waited for a page"
    assert server.kvbench(tmp_path, *JOB).wait() == 0
    assert rows_below(tmp_path) == undisturbed
    assert (tmp_path / PAGE).exists()


def stopped(server: ForkServer, folder: Path, number: int, *, after: int, status: int) -> Child:
    """The job, begun and stopped by a signal when so many records are there."""
    child = server.kvbench(folder, *JOB)
    wait_for_records(folder, child, after)
    child.signal(number)
    assert child.wait() == status
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(server: ForkServer, tmp_path: Path, number: int) -> None:
    """The first one unwinds a command that may take its time (here: it sleeps on its way out)."""
    child = server.kvbench(tmp_path, *FEW, stall=ENDLESS, slow_exit=True)
    wait_until_stalled(child)
    child.signal(number)
    wait_until(child, lambda: "signal came" in child.out.read_text())
    child.signal(number)
    assert child.wait() == -number


def test_terminated_inside_an_example(
    server: ForkServer, tmp_path: Path, undisturbed: Records
) -> None:
    child = server.kvbench(tmp_path, *FEW, stall=ENDLESS)
    wait_until_stalled(child)
    child.signal(signal.SIGTERM)
    assert child.wait() == 143
    assert one_line(child) == f"terminated; {GOES_ON}"
    assert server.kvbench(tmp_path, *FEW).wait() == 0
    assert rows_below(tmp_path) == first_of_each(undisturbed, 3)
