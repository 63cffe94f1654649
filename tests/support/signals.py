"""What tests of crash signals and others share."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.command import FAST
from support.fork_server import Child, ForkServer
from support.stores import rows_below

EXAMPLES = 40


JOB = [*FAST, f"task.num_examples={EXAMPLES}", "task.max_new_tokens=6"]


FEW = [*JOB, "limit=3"]


Records = Mapping[str, list[dict[str, Any]]]


def wait_for_records(folder: Path, child: Child, count: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and child.running():
        if sum(map(len, rows_below(folder).values())) >= count:
            return
        time.sleep(0.002)
    raise AssertionError(child.err.read_text())


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A file system of its own at `folder`, or a skip that says why not."""
    folder.mkdir(exist_ok=True)
    command = ["mount", *options, str(folder)]
    if shutil.which("mount") is None:
        pytest.skip("needs mount")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)  # helpers of W&B linger


def one_line(err: str) -> str:
    lines = [
        line for line in err.splitlines() if line and "longeval_lines:" not in line
    ]  # progress
    assert len(lines) == 1, err
    assert lines[0].startswith("kvbench: ")
    return lines[0]


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """What `JOB` gives when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert server.kvbench(folder, *JOB).wait() == 0
    return rows_below(folder)


def first_of_each(whole: Records, count: int) -> Records:
    return {name: rows[:count] for name, rows in whole.items()}
