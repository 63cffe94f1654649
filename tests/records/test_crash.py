"""What power cuts and full disks may leave in a run's folder, and what the next reader and the next job
make of it. Killed processes: tests/run/test_signals.py."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import make_job, records_of
from support.stores import fill, make_record

from kvbench.methods import build_method
from kvbench.records import store as storing
from kvbench.records.read import StoreError, load_runs, read_records
from kvbench.records.schema import FORMAT
from kvbench.records.store import RecordStore, write_manifest
from kvbench.run.runner import run_job

INNER = Path("model") / "task" / "m-00000000"
EXACT = {"exact": build_method("exact")}


# Power cuts and full disks.

TAILS: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda line: line[:-1],
    "zeros": lambda line: b"\0" * len(line),
    "zeros and a newline": lambda line: b"\0" * (len(line) - 1) + b"\n",
    "zeros in the middle": lambda line: line[:40] + b"\0" * (len(line) - 60) + line[-20:],
    "zeros after": lambda line: line + b"\0" * 4096,
    "half a character": lambda line: line[: line.index("é".encode()) + 1] + b"\n",
    "other bytes": lambda line: line[:50] + b"\xff\xfe" + line[52:],
    "brackets": lambda line: b"[" * 100_000 + b"\n",
    "an older file's block": lambda line: line[:100] + b'": "old"}\n',
}


@pytest.mark.parametrize("tail", TAILS)
def test_what_a_power_cut_may_leave_of_the_last_line(tmp_path: Path, tail: str) -> None:
    folder = tmp_path / INNER
    write_manifest(folder, {})
    fill(folder, ["a", "b"])
    path = folder / "records.jsonl"
    before = path.read_bytes()
    record = make_record("c", prediction="caffé")
    line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    tails = [TAILS[tail](line)]
    if tail == "cut":
        tails += [line[:end] for end in range(0, len(line), 9)]
    expected = ["a", "b", "c"] if tail == "zeros after" else ["a", "b"]
    for torn in tails:
        path.write_bytes(before + torn)
        assert [row["example_id"] for row in read_records(folder)] == expected
        assert path.read_bytes() == before + torn, "a reader changes nothing"
        with RecordStore(folder) as records:
            assert list(records.statuses) == expected
            records.append(record)
        assert path.read_bytes() == before + line


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("function", ["write", "fsync"])
def test_what_stops_a_write_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, failure: BaseException
) -> None:
    real_write = os.write

    def failing(file: int, data: bytes = b"") -> None:
        if data:
            real_write(file, data[:9])
        raise failure

    fill(tmp_path, ["a"])
    before = (tmp_path / "records.jsonl").read_bytes()
    with RecordStore(tmp_path) as records:
        with monkeypatch.context() as patch:
            patch.setattr(storing.os, function, failing)
            with pytest.raises((KeyboardInterrupt, StoreError)) as error:
                records.append(make_record("b"))
        if isinstance(failure, OSError):
            assert "no space left" in str(error.value)
            assert "its earlier records are intact" in str(error.value)
        assert records.path.read_bytes() == before
        assert records.append(make_record("b"))


def test_a_file_that_was_removed_is_not_written(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as records:
        records.append(make_record("a"))
        records.path.unlink()
        with pytest.raises(StoreError, match=r"cannot use .*records.jsonl: No such file"):
            records.append(make_record("b"))


# Manifests of other versions.

BROKEN = [b"", b'{"a', b"[]", b"\xff\xfe", b"null", b"[" * 99_999]
BROKEN += [json.dumps({"format": value}).encode() for value in (FORMAT + 1, 0, "2", 1.5, True)]


def test_a_manifest_of_another_version_or_none_is_one_line(tmp_path: Path) -> None:
    path = run_job(make_job(tmp_path, EXACT, limit=1)).folders["exact"] / "manifest.json"
    for content in BROKEN:
        path.write_bytes(content)
        message = "format is .*; allowed: " if b"format" in content else r"\(move it away"
        with pytest.raises(StoreError, match=rf"^[^\n]*{message}[^\n]*$"):
            load_runs(tmp_path / "e")
        with pytest.raises(StoreError, match=rf"^[^\n]*{message}[^\n]*$"):
            run_job(make_job(tmp_path, EXACT))
        assert path.read_bytes() == content
    path.unlink()
    fresh = run_job(make_job(tmp_path / "fresh", EXACT))
    assert records_of(run_job(make_job(tmp_path, EXACT))) == records_of(fresh)
