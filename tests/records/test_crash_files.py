"""What power cuts, other versions and wrong clocks leave in a run's folder, and what becomes of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.jobs import make_job, records_of
from support.stores import fill, make_record

from kvbench.methods import build_method
from kvbench.records import store
from kvbench.records.read import (
    FORMAT,
    StoreError,
    load_runs,
    read_manifest,
    read_records,
)
from kvbench.records.store import RecordStore, write_manifest
from kvbench.run.runner import run_job


def folder_of(root: Path) -> Path:
    return root / "model" / "task" / "m-00000000"


def ids(root: Path) -> list[str]:
    (run,) = load_runs(root)
    return list(run.records["example_id"])


def test_a_power_cut_at_every_byte_of_a_record(tmp_path: Path) -> None:
    """Whatever part of the last line is there, the lines before it count and it can be written anew."""
    folder = folder_of(tmp_path)
    write_manifest(folder, {})
    fill(folder, ["a", "b"])
    path = folder / "records.jsonl"
    with RecordStore(folder) as records:
        records.append(make_record("c", prediction="é\u2028\U0001f9ea\n", answers=["x"]))
    whole = path.read_bytes()
    start = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert [r["example_id"] for r in read_records(folder)] == ["a", "b"]
        with RecordStore(folder) as records:
            assert records.done == {"a", "b"}
        assert path.read_bytes() == whole[:start]
    with RecordStore(folder) as records:
        records.append(make_record("c", prediction="é\u2028\U0001f9ea\n", answers=["x"]))
    assert path.read_bytes() == whole


TAILS = {
    "zeros": lambda line: b"\0" * len(line),
    "zeros and a newline": lambda line: b"\0" * (len(line) - 1) + b"\n",
    "zeros in the middle": lambda line: line[:40] + b"\0" * (len(line) - 60) + line[-20:],
    "zeros at the end": lambda line: line[:-30] + b"\0" * 30,
    "zeros after": lambda line: line + b"\0" * 4096,
    "half a character": lambda line: line[: line.index("é".encode()) + 1],
    "half a character and a newline": lambda line: line[: line.index("é".encode()) + 1] + b"\n",
    "other bytes": lambda line: line[:50] + b"\xff\xfe" + line[52:],
    "brackets": lambda line: b"[" * 100_000 + b"\n",
    "digits": lambda line: b"9" * 10_000 + b"\n",
    "an older file's block": lambda line: line[:100] + b'": "old"}\n',
}


@pytest.mark.parametrize("tail", TAILS)
def test_what_a_file_system_may_leave_of_the_last_line(tmp_path: Path, tail: str) -> None:
    folder = folder_of(tmp_path)
    write_manifest(folder, {})
    fill(folder, ["a", "b"])
    path = folder / "records.jsonl"
    before = path.read_bytes()
    record = make_record("c", prediction="caffé")
    line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    expected = ["a", "b", "c"] if tail == "zeros after" else ["a", "b"]
    path.write_bytes(before + TAILS[tail](line))
    assert ids(tmp_path) == expected
    with RecordStore(folder) as records:
        assert records.done == set(expected)
        records.append(record)
    assert path.read_bytes() == before + line


def test_damage_before_the_last_line_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    write_manifest(folder, {})
    fill(folder, ["a", "b", "c"])
    path = folder / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for broken in (b"\0" * 50 + b"\n", lines[1][:-20] + b"\n", b"\xff\n", b"[" * 99_999 + b"\n"):
        content = lines[0] + broken + lines[2]
        path.write_bytes(content)
        with pytest.raises(StoreError, match=r"records\.jsonl, line 2: not JSON") as error:
            load_runs(tmp_path)
        assert "\n" not in str(error.value)
        with pytest.raises(StoreError, match="line 2"), RecordStore(folder):
            pass
        assert path.read_bytes() == content


def test_names_are_on_disk_before_a_record_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut forgets names that were never synced, so every new name's folder is."""
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(store.os, "fsync", fsync)
    folder = folder_of(tmp_path / "results")
    with RecordStore(folder) as records:
        write_manifest(folder, {})
        opened = set(synced)
        synced.clear()
        records.append(make_record("a", status="error"))
    assert set(synced) == {str(folder / "records.jsonl")}
    above = {str(p) for p in (folder, *folder.parents) if p.is_relative_to(tmp_path)}
    assert above <= opened
    with RecordStore(folder) as records:
        synced.clear()
        records.drop_failed()
        assert synced == [str(folder / ".records.jsonl.new"), str(folder)]


def test_what_a_kill_left_beside_a_file_is_overwritten(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    fill(folder, ["a"])
    for name in (".manifest.json.new", ".records.jsonl.new"):
        (folder / name).write_bytes(b'{"half')
    write_manifest(folder, {"seed": 1})
    with RecordStore(folder) as records:
        records.append(make_record("b", status="oom"))
        records.drop_failed()
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "manifest.json", "records.jsonl"]
    assert ids(tmp_path) == ["a"]


def test_killed_before_the_manifest_a_run_is_not_there_yet(tmp_path: Path) -> None:
    other = tmp_path / "model" / "task" / "n-00000000"
    fill(other, ["a"])
    write_manifest(other, {})
    fill(folder_of(tmp_path), [])
    assert [run.folder for run in load_runs(tmp_path)] == [other]
    fill(folder_of(tmp_path), ["a"])
    with pytest.raises(StoreError, match="records but no manifest"):
        load_runs(tmp_path)


@pytest.mark.parametrize("written", [FORMAT + 1, 0, -1, "2", 1.5, None, True])
def test_a_manifest_of_another_format_is_one_line_and_nothing_changes(
    tmp_path: Path, written: Any
) -> None:
    methods = {"exact": build_method("exact")}
    result = run_job(make_job(tmp_path, methods, limit=2))
    folder = result.folders["exact"]
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["format"] == FORMAT
    path.write_text(json.dumps({**manifest, "format": written}))
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix}
    for act in (lambda: load_runs(tmp_path / "e"), lambda: run_job(make_job(tmp_path, methods))):
        with pytest.raises(
            StoreError, match=r"manifest\.json is of format .*; this kvbench"
        ) as error:
            act()
        assert "\n" not in str(error.value)
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix} == before


def test_a_manifest_older_than_formats_is_read_and_goes_on(tmp_path: Path) -> None:
    methods = {"exact": build_method("exact")}
    result = run_job(make_job(tmp_path, methods, limit=2))
    path = result.folders["exact"] / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["format"], manifest["earlier_starts"]
    path.write_text(json.dumps(manifest))
    assert read_manifest(path) == manifest
    assert run_job(make_job(tmp_path, methods)).written == 2
    assert len(json.loads(path.read_text())["earlier_starts"]) == 1


def test_records_of_a_version_that_wrote_fewer_fields_are_named_and_stay(tmp_path: Path) -> None:
    methods = {"exact": build_method("exact")}
    result = run_job(make_job(tmp_path, methods, limit=2))
    path = result.folders["exact"] / "records.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        del row["saves_memory"]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(content)
    for act in (lambda: load_runs(tmp_path / "e"), lambda: run_job(make_job(tmp_path, methods))):
        with pytest.raises(StoreError, match=r"line 1: record of example 'e0' lacks saves_memory"):
            act()
    assert path.read_text() == content


@pytest.mark.parametrize("content", [b"", b'{"a', b"[]", b"\xff\xfe", b"null", b"[" * 99_999])
def test_a_broken_manifest_is_one_line_that_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    methods = {"exact": build_method("exact")}
    result = run_job(make_job(tmp_path, methods, limit=1))
    path = result.folders["exact"] / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"manifest\.json .*; move it away") as error:
        run_job(make_job(tmp_path, methods))
    assert "\n" not in str(error.value)
    path.unlink()
    fresh = run_job(make_job(tmp_path / "fresh", methods))
    assert records_of(run_job(make_job(tmp_path, methods))) == records_of(fresh)


@contextmanager
def clock(monkeypatch: pytest.MonkeyPatch, jumps: list[float]) -> Iterator[None]:
    """A wall clock that is wrong by each of `jumps` in turn."""
    import datetime as module

    turn = iter(jumps * 10_000)
    real = time.time

    class Jumping(module.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return module.datetime.fromtimestamp(time.time(), tz)

    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + next(turn))
        patch.setattr(time, "time_ns", lambda: int(1e9 * (real() + next(turn))))
        for place in ("kvbench.records.store.datetime", "kvbench.run.runner.datetime"):
            patch.setattr(place, Jumping)
        yield


def test_a_clock_that_jumps_changes_no_duration_and_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_job(make_job(tmp_path / "whole"))
    for limit in (1, 3, None):
        with clock(monkeypatch, [0.0, -86_400.0, 10 * 365 * 86_400.0]):
            result = run_job(make_job(tmp_path / "jumps", limit=limit))
    rows = records_of(result, times=True)
    for name in ("prefill_s", "compress_s", "decode_s"):
        for some in rows.values():
            assert all(0.0 <= row[name] < 60.0 for row in some), name
    assert records_of(result) == records_of(whole)
    for run in load_runs(tmp_path / "jumps" / "e"):
        assert len(run.manifest["earlier_starts"]) == 2
        assert list(run.records["example_id"]) == ["e0", "e1", "e2", "e3"]


def test_no_duration_and_no_order_is_taken_from_the_wall_clock() -> None:
    package = Path(store.__file__).parent
    for file in package.rglob("*.py"):
        assert "time.time(" not in file.read_text(), file
    uses = {file.name for file in package.rglob("*.py") if "datetime.now" in file.read_text()}
    assert uses <= {"store.py", "runner.py"}, "only notes of when something began"
