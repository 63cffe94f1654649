"""Signals, kills and vanishing folders at moments of their own: while a model is loaded, between jobs,
while failed records are dropped, while a page is written."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import Child, ForkServer
from support.jobs import make_job
from support.signals import FEW, JOB, first_of_each, mounted, one_line, wait_for_records
from support.stores import make_record, rows_below

from kvbench.records import durable
from kvbench.records.read import StoreError, read_records
from kvbench.records.store import RecordStore
from kvbench.report import wandb as wandb_send
from kvbench.report.build import build_report
from kvbench.run import runner
from kvbench.run.attempts import DeviceLost
from kvbench.run.plan import TaskPlan
from kvbench.run.runner import run_job
from kvbench.run.termination import WAIT_NOTICE, Terminated, Termination

TERMINATED = "kvbench: terminated; what is done is on disk, the same command goes on from there"


def wait_until_stalled(child: Child) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and child.running():
        if child.out.exists() and "stalled" in child.out.read_text():
            return
        time.sleep(0.005)
    raise AssertionError(child.err.read_text())


STALLS = {
    "loading the model": ("kvbench.run.session.load_model", 1),
    "writing a manifest": ("kvbench.records.store.replace", 2),
    "building the page": ("kvbench.report.build.build_report", 1),
    "between two jobs of a sweep": ("kvbench.cli.build.build_job", 4),  # two are checked before
}


@pytest.mark.parametrize("moment", STALLS)
def test_terminated_at_any_moment_of_a_command(
    server: ForkServer, tmp_path: Path, undisturbed: Any, moment: str
) -> None:
    words = [*FEW, *(["-m", "seed=0,1"] if "sweep" in moment else [])]
    child = server.kvbench(tmp_path, *words, stall=STALLS[moment])
    wait_until_stalled(child)
    child.signal(signal.SIGTERM)
    assert child.wait() == 143
    assert one_line(child.err.read_text()) == TERMINATED
    assert server.kvbench(tmp_path, *words[: len(FEW)]).wait() == 0
    assert rows_below(tmp_path) == first_of_each(undisturbed, 3)


def test_an_example_without_end_takes_two_signals(
    server: ForkServer, tmp_path: Path, undisturbed: Any
) -> None:
    child = server.kvbench(tmp_path, *FEW, stall=("kvbench.run.plan.run_conversations", 2))
    wait_until_stalled(child)
    child.signal(signal.SIGTERM)
    time.sleep(0.2)
    assert child.running(), "the first waits for the example"
    assert child.err.read_text() == WAIT_NOTICE
    child.signal(signal.SIGTERM)
    assert child.wait() == 143
    assert one_line(child.err.read_text().removeprefix(WAIT_NOTICE)) == TERMINATED
    assert rows_below(tmp_path) == first_of_each(undisturbed, 1)


def test_interrupted_twice_is_no_traceback(server: ForkServer, tmp_path: Path) -> None:
    """The second comes while the first is being answered."""
    child = server.kvbench(tmp_path, *JOB, stall=("kvbench.cli.main.complain", 1))
    wait_for_records(tmp_path, child, 1)
    child.signal(signal.SIGINT)
    wait_until_stalled(child)
    child.signal(signal.SIGINT)
    assert child.wait() == -signal.SIGINT
    assert "Traceback" not in child.err.read_text()
    assert any(rows_below(tmp_path).values())


def test_a_closed_terminal_loses_nothing(
    server: ForkServer, tmp_path: Path, undisturbed: Any
) -> None:
    child = server.kvbench(tmp_path, *FEW, stall=("kvbench.run.plan.run_conversations", 3))
    wait_until_stalled(child)
    child.signal(signal.SIGHUP)
    assert child.wait() == -signal.SIGHUP
    assert rows_below(tmp_path) == first_of_each(undisturbed, 2)


def test_a_termination_within_another_is_the_same() -> None:
    with pytest.raises(Terminated), Termination() as outer, Termination() as inner:  # noqa: PT012
        assert inner is outer
        with inner.example():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        pytest.fail("went on")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_terminated_while_wandb_sends_its_client_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tmp_path / "client"
    client.write_text(f"#!/bin/sh\ntouch {client}.began\nexec sleep 600\n")
    client.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(client))
    monkeypatch.setattr(wandb_send, "probe", lambda url: None)
    begun: list[subprocess.Popen[str]] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            begun.append(self)

    monkeypatch.setattr(wandb_send.subprocess, "Popen", Watched)

    def terminate() -> None:
        while not client.with_name("client.began").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    with pytest.raises(Terminated), Termination():
        wandb_send.send([tmp_path / "wandb" / "offline-run-1"], timeout_s=60)
    assert begun[-1].poll() == -signal.SIGKILL


@pytest.mark.parametrize(("batch", "timeouts"), [(1, {"001"}), (2, {"000", "001"})])
def test_a_kernel_that_never_returns_is_recorded_and_the_next_start_goes_on_after_it(
    server: ForkServer, tmp_path: Path, batch: int, timeouts: set[str]
) -> None:
    words = [*FEW, "example_timeout=1", f"batch_size={batch}"]
    call = 2 if batch == 1 else 1
    child = server.kvbench(
        tmp_path, *words, stall=("kvbench.run.plan.run_conversations", call), deaf=True
    )
    assert child.wait() == 1
    err = child.err.read_text()
    assert "hung" in err
    assert "; recorded; the same command goes on after" in err
    assert "Traceback" not in err
    first = statuses(tmp_path)
    assert {key for key, status in first.items() if status == "timeout"} == timeouts
    assert len(first) == 2
    if batch == 1:
        assert server.kvbench(tmp_path, *words).wait() == 1, "an example has failed"
        assert statuses(tmp_path) == {"000": "ok", "001": "timeout", "002": "ok"}


def statuses(folder: Path) -> dict[str, str]:
    """The status of every example, the same with both methods."""
    one, other = (
        {row["example_id"][-3:]: row["status"] for row in some}
        for some in rows_below(folder).values()
    )
    assert one == other
    return one


# Failed records that are run again.


def spoil(folder: Path) -> None:
    """As if the second and third example had failed with every method."""
    for path in folder.glob("e/*/*/*/records.jsonl"):
        found = read_records(path.parent)
        path.unlink()
        with RecordStore(path.parent) as store:
            for record in found:
                bad = record["example_id"] in ("e1", "e2")
                store.append(record | ({"status": "error", "error": "x"} if bad else {}))


def by_id(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        name: {row["example_id"]: row for row in some} for name, some in rows_below(folder).items()
    }


def test_killed_while_failed_records_are_dropped_and_run_again(
    server: ForkServer, tmp_path: Path
) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    whole.mkdir()
    assert server.job(whole).wait() == 0
    shutil.copytree(whole, torn)
    spoil(torn)
    step = 0
    while True:
        child = server.job(torn, (step, 0.5), retry_failed=True)
        status = child.wait()
        for name, some in by_id(torn).items():
            well = {key for key, row in some.items() if row["status"] == "ok"}
            assert {"e0", "e3"} <= well, f"{name}, killed at {step}: a good record is gone"
        if status == 0:
            break
        assert status == -signal.SIGKILL, child.err.read_text()
        step += 3
    assert step > 20
    assert by_id(torn) == by_id(whole)
    assert not list(torn.glob("e/*/*/*/.*.new"))


def test_two_at_once_with_retry_failed(server: ForkServer, tmp_path: Path) -> None:
    whole, both = tmp_path / "whole", tmp_path / "both"
    whole.mkdir()
    assert server.job(whole).wait() == 0
    shutil.copytree(whole, both)
    spoil(both)
    children = [server.job(both, retry_failed=True) for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    assert by_id(both) == by_id(whole)
    assert {len(some) for some in rows_below(both).values()} == {4}, "nobody repeated anything"


def test_what_cannot_be_opened_again_after_dropping_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with pytest.raises(StoreError, match="Too many open files"), RecordStore(tmp_path) as store:  # noqa: PT012
        store.append(make_record("a", status="error"))
        store.append(make_record("b"))
        with monkeypatch.context() as patch:
            patch.setattr(store, "_open", refuse)
            store.drop_failed()
    with RecordStore(tmp_path, lock_timeout=0) as store:
        assert store.done == {"b"}


# Folders that vanish.


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize("vanish", [remove, move, replace_by_a_file])
def test_a_folder_that_vanishes_during_the_run_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vanish: Callable[[Path], None]
) -> None:
    real, seen = TaskPlan.run, []

    def run(self: TaskPlan, unit: Any, *rest: Any) -> Any:
        seen.append(unit.id)
        if unit.id == "e1":
            vanish(tmp_path / "e")
        yield from real(self, unit, *rest)

    monkeypatch.setattr(TaskPlan, "run", run)
    with pytest.raises(StoreError, match="was removed or moved while the run wrote to it") as error:
        run_job(make_job(tmp_path))
    assert "\n" not in str(error.value)
    assert seen == ["e0", "e1"], "no hours of records that nobody finds"
    if vanish is move:
        for path in (tmp_path / "elsewhere").rglob("records.jsonl"):
            assert len(read_records(path.parent)) == 1


def test_half_a_page_takes_no_room_of_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_job(make_job(tmp_path, limit=1))

    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            super().write(content[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "open", Full, raising=False)
        with pytest.raises(StoreError, match=r"cannot write the report in .*No space left"):
            build_report(tmp_path / "e")
    assert not list(tmp_path.rglob("*.new"))
    assert build_report(tmp_path / "e").page.exists()


@pytest.mark.slow
def test_a_disk_that_is_full_for_wandb_costs_its_copy_and_nothing_else(
    server: ForkServer, tmp_path: Path, undisturbed: Any
) -> None:
    wandb = ["logger=wandb", "logger.mode=offline"]
    words = [*(word for word in FEW if not word.startswith("logger=")), *wandb]
    with mounted(tmp_path / "runs", "-t", "tmpfs", "-o", "size=2m", "tmpfs") as disk:
        assert server.kvbench(tmp_path, *FEW).wait() == 0
        for room in (16, 64, 200):
            shutil.rmtree(disk / "default" / "wandb", ignore_errors=True)
            (disk / "ballast").write_bytes(b"")
            taken = os.statvfs(disk).f_bavail * 4 - room
            (disk / "ballast").write_bytes(b"\0" * (taken * 1024))
            child = server.kvbench(tmp_path, *words)
            assert child.wait() == 1, "the page has no room either"
            err = child.err.read_text()
            assert "was not logged: [Errno 28] No space left on device" in err
            assert "Traceback" not in err
            found = {k: v for k, v in rows_below(tmp_path).items() if k != "records"}  # W&B's copy
            assert found == first_of_each(undisturbed, 3)
        (disk / "ballast").unlink()
        child = server.kvbench(tmp_path, *words)
        assert child.wait() == 0
        assert "not logged" not in child.err.read_text()


# A device that is gone.


def test_after_a_lost_device_no_job_of_the_process_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "device_is_usable", lambda device: False)
    with pytest.raises(DeviceLost, match="answers nothing any more; the same command goes on"):
        run_job(make_job(tmp_path))
    assert not (tmp_path / "e").exists()
