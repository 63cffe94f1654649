"""Jobs with many methods: few files are open at once, one thread syncs, and nothing else changes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.jobs import make_job, records_of
from support.stores import make_record

from kvbench.methods import build_method
from kvbench.records.durable import AppendedFiles
from kvbench.records.read import StoreError, read_records
from kvbench.records.store import RecordStore
from kvbench.run.runner import run_job

MOST = AppendedFiles.MOST


@contextmanager
def stores(folder: Path, count: int) -> Iterator[list[RecordStore]]:
    """So many stores of one job."""
    with ExitStack() as stack:
        files = stack.enter_context(AppendedFiles())
        places = [folder / f"m{i:03d}" for i in range(count)]
        yield [stack.enter_context(RecordStore(place, files=files)) for place in places]


def append_to_all(some: Sequence[RecordStore], *ids: str) -> None:
    for example_id in ids:
        for number, one in enumerate(some):
            assert one.append(make_record(example_id, score=float(number)))


def open_files(folder: Path) -> Counter[str]:
    """Descriptors of this process below a folder, by the name of the file."""
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        try:
            place = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # that of the listing
            continue
        if place.startswith(f"{folder}/"):
            found[Path(place).name] += 1
    return found


def syncing() -> int:
    return sum(thread.name == "sync" for thread in threading.enumerate())


def test_a_job_with_sixty_methods_holds_few_files_and_one_thread(tmp_path: Path) -> None:
    """The lock of every run folder stays with the job; of the records files, 16 are open at most, and
    one that is synced."""
    before = {t for t in threading.enumerate() if t.name == "sync"}
    seen: list[Counter[str]] = []
    threads: list[int] = []

    def look(_: object) -> None:
        seen.append(open_files(tmp_path))
        mine = {t for t in threading.enumerate() if t.name == "sync"} - before
        threads.append(len(mine))

    methods = {f"m{i:02d}": build_method("exact") for i in range(60)}
    result = run_job(make_job(tmp_path / "many", methods), look)
    assert len(seen) > 4
    assert MOST <= max(found["records.jsonl"] for found in seen) <= MOST + 1
    assert {found[".lock"] for found in seen} == {60}
    assert max(found.total() for found in seen) <= 60 + MOST + 1
    assert max(threads) == 1
    assert not open_files(tmp_path)
    alone = records_of(run_job(make_job(tmp_path / "one", {"m07": build_method("exact")})))["m07"]
    many = records_of(result)
    assert len(many) == 60
    for label, rows in many.items():
        other = {"method": label, "config_hash": result.folders[label].name.rpartition("-")[2]}
        assert rows == [row | other for row in alone]


def test_many_stores_of_a_job_write_what_each_alone_would(tmp_path: Path) -> None:
    ids = [str(i) for i in range(5)]
    with stores(tmp_path / "many", 40) as some:
        append_to_all(some, *ids)
        assert not some[3].append(make_record("2")), "it has that already"
    for number in range(40):
        name = f"m{number:03d}"
        with RecordStore(tmp_path / "alone" / name) as one:
            for example_id in ids:
                one.append(make_record(example_id, score=float(number)))
        wrote = [tmp_path / kind / name / "records.jsonl" for kind in ("many", "alone")]
        assert wrote[0].read_bytes() == wrote[1].read_bytes()


@pytest.mark.parametrize("count,each", [(1, 1), (MOST, 1), (MOST + 1, 5), (40, 5)])  # noqa: PT006
def test_how_often_a_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, each: int
) -> None:
    """Once where 16 hold them all, else once for each record at most."""
    opened: Counter[str] = Counter()
    real = os.open

    def counting(path: str | Path, flags: int, *rest: int, **more: int) -> int:
        if str(path).endswith("records.jsonl") and flags & os.O_APPEND:
            opened[str(path)] += 1
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", counting)
    monkeypatch.setattr(AppendedFiles, "PAUSE", 60.0)  # leaving syncs
    with stores(tmp_path, count) as some:
        append_to_all(some, *(str(i) for i in range(each)))
    assert len(opened) == count
    again = each + 2 if count > MOST else 1  # when made, for each record, for the sync on leaving
    assert max(opened.values()) <= again


def test_what_was_closed_meanwhile_is_synced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files, by one thread, without leaving; and on leaving, whatever is left."""
    synced: dict[str, int] = {}
    by: set[str] = set()
    real = os.fsync

    def noted(file: int) -> None:
        real(file)
        path = os.readlink(f"/proc/self/fd/{file}")
        if path.endswith("records.jsonl"):
            synced[path] = os.fstat(file).st_size
            by.add(threading.current_thread().name)

    def sizes() -> dict[str, int]:
        return {str(path): path.stat().st_size for path in tmp_path.glob("*/records.jsonl")}

    with stores(tmp_path, 40) as some:
        monkeypatch.setattr(os, "fsync", noted)
        monkeypatch.setattr(AppendedFiles, "PAUSE", 0.05)
        append_to_all(some, "a", "b")
        deadline = time.monotonic() + 30
        while synced != sizes() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert synced == sizes()
        assert by == {"sync"}
        monkeypatch.setattr(AppendedFiles, "PAUSE", 60.0)
        append_to_all(some, "c")
    assert synced == sizes()
    assert len(synced) == 40


def test_nobody_waits_for_a_slow_disk_until_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the thread is in a sync that takes long, records go to files that are opened and closed."""
    in_sync, go_on = threading.Event(), threading.Event()
    synced = []

    def stuck(file: int) -> None:
        in_sync.set()
        assert go_on.wait(30)
        os.fstat(file)  # it has not been closed beneath the sync
        synced.append(os.readlink(f"/proc/self/fd/{file}"))

    with stores(tmp_path, 40) as some:
        monkeypatch.setattr(os, "fsync", stuck)
        monkeypatch.setattr(AppendedFiles, "PAUSE", 0.0)
        some[0].append(make_record("first"))
        assert in_sync.wait(30)
        append_to_all(some, "a", "b", "c")
        assert not synced
        assert open_files(tmp_path)["records.jsonl"] <= MOST + 1
        go_on.set()
    assert set(synced) == {str(one.path) for one in some}


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("count", [4, 40])
def test_a_sync_that_fails_is_told_by_its_stores_next_record_or_on_leaving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, again: bool
) -> None:
    def broken(file: int) -> None:
        if "m003" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.EIO, "Input/output error")

    with (  # noqa: PT012
        pytest.raises(StoreError, match=r"m003.*Input/output error; the latest records may be"),
        stores(tmp_path, count) as some,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            append_to_all(some, "a")
            some[3]._files.finish(some[3].path)
        for number, one in enumerate(some):
            if number != 3:
                one.append(make_record("b"))
        if again:
            some[3].append(make_record("b"))
    assert {len(read_records(path)) for path in tmp_path.iterdir()} == {1, 2}
    with stores(tmp_path, count) as some:
        assert [one.done for one in some] == [{"a"} if i == 3 else {"a", "b"} for i in range(count)]


def remove(path: Path) -> None:
    path.unlink()


def put_another(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.write_text("")


def put_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_a_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("vanish", [remove, put_another, put_a_folder, put_a_link])
@pytest.mark.parametrize("count", [2, 40])
def test_a_file_that_goes_while_it_is_closed_is_not_made_anew(
    tmp_path: Path, vanish, count: int
) -> None:
    """Whether it is open at the time (of 2) or not (of 40): one line, and nothing is written there."""
    (tmp_path / "m000" / "elsewhere").parent.mkdir()
    (tmp_path / "m000" / "elsewhere").write_text("keep")
    with (  # noqa: PT012
        pytest.raises(StoreError, match=r"m000.records\.jsonl") as error,
        stores(tmp_path, count) as some,
    ):
        append_to_all(some, "a")
        path = some[0].path
        vanish(path)
        assert some[1].append(make_record("b"))
        some[0].append(make_record("b"))
    assert "\n" not in str(error.value)
    gone = "was removed or moved while the run wrote to it"
    assert (gone in str(error.value)) == (count < MOST or vanish in (remove, put_another))
    assert (tmp_path / "m000" / "elsewhere").read_text() == "keep"
    assert not path.is_file() or path.is_symlink() or path.read_text() == ""


@pytest.mark.parametrize("written", [0, 20])
@pytest.mark.parametrize("count", [1, 40])
def test_no_space_left_keeps_earlier_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, written: int
) -> None:
    """In a file that stayed open (of 1), and in one that is opened again (of 40)."""
    real, calls = os.write, iter([written])

    def short_then_full(file: int, data: bytes) -> int:
        if next(calls, 0):
            return real(file, data[:written])
        raise OSError(errno.ENOSPC, "No space left on device")

    with stores(tmp_path, count) as some:
        append_to_all(some, "a")
        before = some[0].path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", short_then_full)
            with pytest.raises(StoreError, match=r"no space left .*1 earlier records are") as error:
                some[0].append(make_record("b"))
        assert "\n" not in str(error.value)
        assert some[0].path.read_bytes() == before
        append_to_all(some, "b")  # space is back
    assert all(len(read_records(path)) == 2 for path in tmp_path.iterdir())


def test_no_descriptor_left_is_one_line_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def none_left(path: str | Path, *rest: int, **more: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    with stores(tmp_path, 40) as some:
        append_to_all(some, "a")
        monkeypatch.setattr(os, "open", none_left)
        with pytest.raises(StoreError, match=r"m000.*Too many open files; the 1 earlier") as error:
            some[0].append(make_record("b"))
        assert "\n" not in str(error.value)
        monkeypatch.setattr(os, "open", real)
        append_to_all(some, "b")
    assert all(len(read_records(path)) == 2 for path in tmp_path.iterdir())


def test_failed_records_of_many_stores_are_dropped_and_written_again(tmp_path: Path) -> None:
    with stores(tmp_path, 40) as some:
        for one in some:
            one.append(make_record("a"))
            one.append(make_record("b", status="oom", score=None))
    with stores(tmp_path, 40) as some:
        for one in some:
            one.drop_failed()
            assert one.done == {"a"}
        append_to_all(some, "b", "c")
        assert open_files(tmp_path)["records.jsonl"] <= MOST + 1
    for path in tmp_path.iterdir():
        assert [row["status"] for row in read_records(path)] == ["ok"] * 3


WRITER = """
import sys
from contextlib import ExitStack
from kvbench.records.durable import AppendedFiles
from kvbench.records.read import COMMON_FIELDS
from kvbench.records.store import RecordStore
record = dict.fromkeys(COMMON_FIELDS) | {"status": "ok", "prediction": "x" * 2000}
with ExitStack() as stack:
    files = stack.enter_context(AppendedFiles())
    places = [f"{sys.argv[1]}/m{i:03d}" for i in range(40)]
    some = [stack.enter_context(RecordStore(place, files=files)) for place in places]
    for number in range(10_000):
        for one in some:
            if one.append(record | {"example_id": str(number)}):
                print(one.folder.name, number, flush=True)
"""


def test_killed_while_it_writes_to_many_files_nothing_is_lost(tmp_path: Path) -> None:
    """Whatever `append` returned from is there, three kills in a row; the locks are free at once."""
    promised: set[tuple[str, str]] = set()
    for seconds in (0.05, 0.2, 0.1):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        promised.add(tuple(process.stdout.readline().split()))
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].splitlines(keepends=True)
        promised |= {tuple(line.split()) for line in rest if line.endswith("\n")}
        with stores(tmp_path, 40) as some:
            there = {(one.folder.name, done) for one in some for done in one.done}
        assert promised <= there
        assert len(there) - len(promised) <= 3, "none but those that were written when it died"
    assert len(promised) > 100


def test_the_thread_ends_with_the_job(tmp_path: Path) -> None:
    before = syncing()
    with stores(tmp_path, 3) as some:
        append_to_all(some, "a")
        assert syncing() == before + 1
    deadline = time.monotonic() + 10
    while syncing() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert syncing() <= before
