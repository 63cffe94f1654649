"""Killed at any moment and started again, a run gives the records of a run that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [
    *(sys.executable, "-m", "kvbench", "task.num_lines=[10,20]", "task.num_examples=12"),
    *("method=[exact,uniform,h2o]", "device=cpu", "logger=none"),
]
TIMES = ("prefill_s", "compress_s", "decode_s")


def start(results: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, f"results_dir={results}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def lines_on_disk(results: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in results.rglob("records.jsonl"))


def records(results: Path) -> dict[str, list[dict[str, object]]]:
    found = {}
    for path in sorted(results.rglob("records.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.parent.name] = [
            {key: value for key, value in row.items() if key not in TIMES} for row in rows
        ]
    return found


def test_killed_at_random_points_and_started_again(tmp_path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    never_killed = start(whole)
    draw = random.Random(0)
    kills = 0
    goals = sorted(draw.sample(range(1, 72), 2))
    for goal in goals:
        process = start(torn)
        while process.poll() is None and lines_on_disk(torn) < goal:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    # what a power cut may leave: half a line
    victim = next(iter(torn.rglob("records.jsonl")))
    victim.write_bytes(victim.read_bytes()[:-17])
    assert start(torn).wait() == 0
    assert never_killed.wait() == 0
    assert kills, "the run was over before it could be killed"
    expected = records(whole)
    assert {len(rows) for rows in expected.values()} == {24}
    assert records(torn) == expected
    assert (torn / "default/report.html").is_file()
