"""Killed at any point, in the middle of a write too, and started again: the same records."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.stores import rows_below

from kvbench.records.read import load_runs


def survives(server: ForkServer, folder: Path, count: int, seed: int) -> tuple[int, int]:
    """Kill `count` jobs, each in a folder that earlier kills left as it is, and compare what a last
    start makes of it with a job that nobody disturbed.

    Returns:
        Kills that came in time, and folders that were brought to an end.
    """
    draw = random.Random(seed)
    whole = folder / "whole"
    whole.mkdir()
    begun = time.monotonic()
    assert server.job(whole).wait() == 0
    seconds = time.monotonic() - begun
    expected = rows_below(whole)
    kills = finished = 0
    torn = folder / "0"
    torn.mkdir()
    while True:
        if kills < count and draw.random() < 0.5:  # anywhere in the code
            child = server.job(torn)
            time.sleep(draw.uniform(0.0, seconds))
            if child.running():
                child.signal(signal.SIGKILL)
        elif kills < count:  # at a change of the disk, or in it
            child = server.job(torn, (int(draw.expovariate(1 / 12)), draw.random()))
        else:
            child = server.job(torn)
        status = child.wait()
        assert status in (0, -signal.SIGKILL), child.err.read_text()
        kills += status != 0
        found = rows_below(torn)
        for name, some in found.items():
            assert some == expected[name][: len(some)], "a record is there as it should be, or not"
        for run in load_runs(torn / "e") if (torn / "e").is_dir() else []:
            whole_lines = len(found.get(run.folder.name, []))
            assert len(run.records) in (whole_lines, whole_lines - 1)
        if status == 0:
            assert found == expected
            assert not list(torn.glob("e/*/*/*/.*.new")), "nothing is left over"
            finished += 1
            if kills == count:
                return kills, finished
            torn = folder / str(finished)
            torn.mkdir()


def test_ten_random_kill_points(server: ForkServer, tmp_path: Path) -> None:
    kills, finished = survives(server, tmp_path, 10, seed=0)
    assert kills == 10
    assert finished >= 1


@pytest.mark.slow
def test_two_hundred_random_kill_points(server: ForkServer, tmp_path: Path) -> None:
    kills, finished = survives(server, tmp_path, 200, seed=1)
    assert kills == 200
    assert finished >= 10


def test_every_change_of_the_disk_in_turn(server: ForkServer, tmp_path: Path) -> None:
    """One start after another in one folder, each killed at its first, second ... change."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder in (whole, torn):
        folder.mkdir()
    assert server.job(whole).wait() == 0
    step = 0
    while True:
        status = server.job(torn, (step, 0.5)).wait()
        if status == 0:
            break
        assert status == -signal.SIGKILL
        step += 3
    assert step > 30
    assert rows_below(torn) == rows_below(whole)


def test_what_was_killed_says_nothing_else(server: ForkServer, tmp_path: Path) -> None:
    """The manifest of a run that was killed many times is whole, and remembers its starts."""
    for step in (20, 30, 40):
        assert server.job(tmp_path, (step, 0.0)).wait() == -signal.SIGKILL
    assert server.job(tmp_path).wait() == 0
    for path in tmp_path.glob("e/*/*/*/manifest.json"):
        manifest = json.loads(path.read_text())
        assert manifest["method"] == path.parent.name.rpartition("-")[0]
        assert len(manifest["earlier_starts"]) <= 3
