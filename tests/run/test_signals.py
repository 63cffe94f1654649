"""Signals and kills, as the command line meets them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from glob import glob
from pathlib import Path

import pytest
from support.command import FAST, ended
from support.stores import rows_below
from support.workers import start, wait_for

JOB = [*FAST[:-1], "task.num_lines=[8]", "task.num_examples=16", "task.max_new_tokens=6"]
PAGE = "runs/longeval_lines-tiny_random/report.html"
GOES_ON = "what is done is on disk, the same command goes on from there"


def written(folder: Path) -> int:
    """How many lines of records there are; without those of hidden folders, which are temporary."""
    files = glob("runs/*/*/*/*/records.jsonl", root_dir=folder)
    return sum((folder / file).read_bytes().count(b"\n") for file in files)


def stopped(folder: Path, number: int, *, status: int) -> str:
    """The job, begun and stopped by a signal after five more records; what it says on stderr, but for
    its progress."""
    before = written(folder)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = start(*JOB, cwd=folder, env=environment)
    wait_for(lambda: written(folder) >= before + 5, process)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == status, err
    return "\n".join(line for line in err.splitlines() if line and "longeval_lines:" not in line)


def test_terminated_killed_interrupted_the_next_start_goes_on(tmp_path: Path) -> None:
    """One run, stopped in three ways, one start after the other."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    assert ended(JOB, folder=whole).status == 0
    expected = rows_below(whole)
    assert stopped(cut, signal.SIGTERM, status=143) == f"kvbench: terminated; {GOES_ON}"
    for name, rows in rows_below(cut).items():
        assert rows == expected[name][: len(rows)]
    stopped(cut, signal.SIGKILL, status=-signal.SIGKILL)
    assert stopped(cut, signal.SIGINT, status=130) == f"kvbench: interrupted; {GOES_ON}"
    assert not (cut / PAGE).exists(), "nobody waited for a page"
    assert ended(JOB, folder=cut).status == 0
    assert rows_below(cut) == expected
    assert (cut / PAGE).exists()


SLOW_TO_END = """
import time
from kvbench.run.termination import terminable
with terminable():
    try:
        print("begun", flush=True)
        time.sleep(600)
    finally:
        print("ending", flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(number: int) -> None:
    """The first one unwinds a command that may take its time."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_END], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for said in ("begun\n", "ending\n"):
        assert process.stdout.readline() == said
        process.send_signal(number)
    assert process.wait() == -number
