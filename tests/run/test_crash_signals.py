"""Signals, kills, full and read-only disks, as the command line meets them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.signals import (
    EXAMPLES,
    FEW,
    JOB,
    Records,
    first_of_each,
    mounted,
    one_line,
    wait_for_records,
)
from support.stores import rows_below

from kvbench.engine.limits import time_limit
from kvbench.records.read import load_runs
from kvbench.run.termination import WAIT_NOTICE, Terminated, Termination


def test_terminated_killed_interrupted_the_next_start_goes_on(
    server: ForkServer, tmp_path: Path, undisturbed: Records
) -> None:
    """One run, stopped in three ways, one start after the other."""
    child = server.kvbench(tmp_path, *JOB)
    wait_for_records(tmp_path, child, 3)
    child.signal(signal.SIGTERM)
    assert child.wait() == 143
    assert one_line(child.err.read_text().replace(WAIT_NOTICE, "")) == (
        "kvbench: terminated; what is done is on disk, the same command goes on from there"
    )
    counts = {len(rows) for rows in rows_below(tmp_path).values()}
    assert len(counts) == 1, "an example that was begun is finished with every method"
    done = counts.pop()
    assert 2 <= done < EXAMPLES
    assert rows_below(tmp_path) == first_of_each(undisturbed, done)
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        before = sum(map(len, rows_below(tmp_path).values()))
        child = server.kvbench(tmp_path, *JOB)
        wait_for_records(tmp_path, child, before + 5)
        child.signal(number)
        assert child.wait() == status
        assert "Traceback" not in child.err.read_text()
    assert one_line(child.err.read_text()) == (
        "kvbench: interrupted; what is done is on disk, the same command goes on from there"
    )
    assert not (tmp_path / "runs/default/report.html").exists(), "nobody waited for a page"
    assert server.kvbench(tmp_path, *JOB).wait() == 0
    assert rows_below(tmp_path) == undisturbed
    assert (tmp_path / "runs/default/report.html").exists()


def test_two_at_once_share_nothing_and_lose_nothing(
    server: ForkServer, tmp_path: Path, undisturbed: Records
) -> None:
    first = server.kvbench(tmp_path, *JOB)
    wait_for_records(tmp_path, first, 2)
    patient = server.kvbench(tmp_path, *JOB, "lock_timeout=60")
    impatient = server.kvbench(tmp_path, *JOB, "lock_timeout=0")
    first.signal(signal.SIGSTOP)  # holds the folder as long as the others need
    assert impatient.wait() == 1
    said = one_line(impatient.err.read_text())
    assert f"is being written by process {first.pid} on " in said
    first.signal(signal.SIGCONT)
    assert first.wait() == 0
    assert patient.wait() == 0
    assert rows_below(tmp_path) == undisturbed


def test_termination_waits_for_the_example_once() -> None:
    order = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated) as stop, Termination() as termination:  # noqa: PT012
        with termination.example():
            order.append("first")
        with termination.example():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            order.append("finished")
        order.append("never")
    assert stop.value.code == 143
    assert order == ["first", "finished"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_termination_between_examples_and_a_second_time_is_at_once() -> None:
    with pytest.raises(Terminated), Termination():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        pytest.fail("went on")
    order = []
    with pytest.raises(Terminated), Termination() as termination, termination.example():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        order.append("waits")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        order.append("went on")
    assert order == ["waits"]


def test_a_limit_within_a_limit_leaves_the_outer_one() -> None:
    def loop() -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            time.sleep(0.01)

    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^the outer took more than 0.2 s"):  # noqa: PT012, SIM117
        with time_limit(0.2, lambda: None, "the outer"):
            with time_limit(60, lambda: None, "the inner"):
                time.sleep(0.3)
            loop()
    assert time.monotonic() - began < 5
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with time_limit(60, lambda: None):
        with (
            pytest.raises(TimeoutError, match=r"^the inner took"),
            time_limit(0.1, print, "the inner"),
        ):
            loop()
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 66


def test_a_full_disk_is_one_line_and_the_records_stay(
    server: ForkServer, tmp_path: Path, undisturbed: Records
) -> None:
    """A disk that is full at many points of a run in turn, the last of them after its records."""
    said, kept = [], []
    with mounted(tmp_path / "runs", "-t", "tmpfs", "-o", "size=512k", "tmpfs") as disk:
        ballast = disk / "ballast"
        for room in (0, 4, 12, 24, 96):
            ballast.write_bytes(b"")
            taken = os.statvfs(disk).f_bavail * 4 - room
            ballast.write_bytes(b"\0" * (taken * 1024))
            child = server.kvbench(tmp_path, *FEW)
            assert child.wait() == 1
            said.append(one_line(child.err.read_text()))
            kept.append(sum(map(len, rows_below(tmp_path).values())))
            if (disk / "default").exists():
                for run in load_runs(disk / "default"):
                    assert set(run.records["status"]) <= {"ok"}
        assert all("no space left" in line.lower() for line in said), said
        assert kept == sorted(kept), "nothing written is lost"
        assert kept[0] == 0
        assert "cannot write the report" in said[-1], "the records were there, the page was not"
        assert rows_below(tmp_path) == first_of_each(undisturbed, 3)


def test_a_read_only_results_folder_is_one_line_and_nothing_is_lost(
    server: ForkServer, tmp_path: Path, undisturbed: Records
) -> None:
    assert server.kvbench(tmp_path, *JOB, "limit=1").wait() == 0
    before = rows_below(tmp_path)
    results = tmp_path / "runs"
    with mounted(results, "--bind", str(results)):
        done = subprocess.run(["mount", "-o", "remount,bind,ro", str(results)], capture_output=True)
        if done.returncode:
            pytest.skip("remounting read-only is not permitted here")
        for words in (FEW, [*FEW, "experiment_name=new"], ["-m", *FEW, "seed=1,2"]):
            child = server.kvbench(tmp_path, *words)
            assert child.wait() == 1
            err = child.err.read_text()
            for line in err.splitlines() if "-m" in words else [one_line(err)]:
                assert line.startswith("kvbench: "), err
                assert "Read-only file system" in line
        assert server.kvbench(tmp_path, *FEW, "dry_run=true").wait() == 0
    assert rows_below(tmp_path) == before
    assert server.kvbench(tmp_path, *FEW).wait() == 0
    assert rows_below(tmp_path) == first_of_each(undisturbed, 3)
