"""The store of records: what is written is read back, and what cannot be written or read is named."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stores import fill, make_record

from kvbench.records import store as storing
from kvbench.records.read import (
    COMMON_FIELDS,
    StoreError,
    load_run,
    load_runs,
    read_manifest,
    read_records,
)
from kvbench.records.schema import NUMBER_FIELDS
from kvbench.records.store import RecordStore, config_hash, run_folder, safe_name, write_manifest

INNER = Path("model") / "task" / "m-00000000"


def test_a_configs_hash_depends_on_its_values_alone() -> None:
    first = {"a": 1, "b": {"c": (1, 2.0)}}
    assert config_hash(first) == config_hash({"b": {"c": [1.0, 2]}, "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})
    assert config_hash({"a": True}) != config_hash({"a": 1})
    assert config_hash({"a": 0.25}) == "cbd07179"
    with pytest.raises(StoreError, match="config: a holds a object"):
        config_hash({"a": object()})


def test_a_runs_folder_is_made_of_safe_names() -> None:
    folder = run_folder("r", "demo", "../Qwen/Qwen 3", "t", "snap:kv", "0123abcd")
    assert folder == Path("r/demo/_Qwen_Qwen_3/t/snap_kv-0123abcd")
    with pytest.raises(StoreError, match="cannot name a folder"):
        run_folder("r", "..", "m", "t", "m", "h")


def test_names_of_folders_are_bounded_in_bytes(tmp_path: Path) -> None:
    for letter, length in product("xé日\U0001f9ea\ud800", (119, 120, 121, 255, 300)):
        name = safe_name("a" + letter * length)
        assert len(name.encode()) <= 120
        (tmp_path / name).mkdir(exist_ok=True)
    assert safe_name("é" * 300) != safe_name("é" * 301)


def test_a_store_knows_which_examples_are_done_and_writes_each_once(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as records:
        assert records.append(make_record("b"))
        assert records.append(make_record("a", status="oom", score=None, error="out of memory"))
        assert not records.append(make_record("b", score=0.0))
        assert records.statuses == {"a": "oom", "b": "ok"}
    assert records.path.read_bytes().count(b"\n") == 2
    with pytest.raises(StoreError, match="is not open"):
        records.append(make_record("z"))


def test_records_come_back_as_written(tmp_path: Path) -> None:
    folder = tmp_path / INNER
    with RecordStore(folder) as records:
        records.append(make_record("b", prediction="a\u2028b\n\0<é", depth=50, answers=["x"]))
        records.append(make_record("a", status="oom", score=None))
    write_manifest(folder, {"model": "model", "seed": 0})
    (run,) = load_runs(tmp_path)
    assert run.manifest == {"format": 2, "earlier_starts": [], "model": "model", "seed": 0}
    assert list(run.records["example_id"]) == ["b", "a"]
    assert run.records["prediction"][0] == "a\u2028b\n\0<é"
    assert (run.records["depth"][0], run.records["score"][0]) == (50, 1.0)
    assert math.isnan(run.records["score"][1])


def test_only_files_of_a_runs_own_names_are_read_and_numbers_are_floats(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as records:
        records.append(make_record("a", prompt_tokens=3))
    with records.path.open("a") as file:  # of two records of an example the first counts
        file.write(json.dumps(make_record("a", score=0.0)) + "\n")
    write_manifest(tmp_path, {})
    for name in ("records-old.jsonl", "records_copy.jsonl", "records-1of2.jsonl.jsonl"):
        (tmp_path / name).write_text(json.dumps(make_record("not of this run")) + "\n")
    records = load_run(tmp_path).records
    assert records[["example_id", "score"]].values.tolist() == [["a", 1.0]]
    assert {str(records[name].dtype) for name in NUMBER_FIELDS} == {"float64"}


def test_values_that_json_does_not_have_become_values_that_it_has(tmp_path: Path) -> None:
    values = {"score": float("nan"), "ratio": np.float32(np.inf), "capacity": np.int64(3)}
    values["entries"] = {"mean": np.arange(2.0), "max": (1, 2)}
    with RecordStore(tmp_path) as records:
        records.append(make_record("a", **values, prediction="half a pair \ud800"))
    record = json.loads((tmp_path / "records.jsonl").read_text())
    assert (record["score"], record["ratio"], record["capacity"]) == (None, None, 3)
    assert record["entries"] == {"mean": [0.0, 1.0], "max": [1, 2]}
    assert record["prediction"] == "half a pair ?"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (make_record("b") | {"status": "fine"}, "status"),
        (make_record("b") | {"example_id": 3}, "example_id"),
        (make_record("b") | {"extra": object()}, "extra"),
        ({"example_id": "b"}, r"example 'b': lacks experiment, model, .*error"),
    ],
    ids=["status", "example_id", "extra", "lacking"],
)
def test_a_record_that_readers_would_refuse_is_not_written(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    with RecordStore(tmp_path) as records:
        with pytest.raises(StoreError, match=message):
            records.append(record)
        assert records.path.read_bytes() == b""


def test_a_run_without_records_is_empty_and_one_without_a_manifest_is_named(tmp_path: Path) -> None:
    folder = tmp_path / INNER
    with pytest.raises(StoreError, match=r"no results in .*nowhere"):
        load_runs(tmp_path / "nowhere")
    fill(folder, [])
    assert load_runs(tmp_path) == [], "killed before its manifest was written"
    write_manifest(folder, {"seed": 1})
    (run,) = load_runs(tmp_path)
    assert run.records.empty
    assert set(COMMON_FIELDS) <= set(run.records.columns)
    fill(folder, ["a", "b"])
    (folder / "manifest.json").unlink()
    with pytest.raises(StoreError, match="records but no manifest"):
        load_runs(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot use .*: Not a directory"):
        RecordStore(tmp_path / "file" / "run").__enter__()


BROKEN_LINES = [
    ("{", "line 1: not JSON"),
    ("[1]", "line 1: not a JSON object"),
    ("\0" * 50, "line 1: not JSON"),
    (json.dumps(make_record("b"))[:-20], "line 1: not JSON"),
    ("[" * 99_999, "line 1: not JSON"),
    ('{"example_id": "a"}', "line 1: .*lacks experiment"),
    (json.dumps(make_record("a", score="high")), "line 1: score is 'high'; allowed: a valid"),
    (json.dumps(make_record("a", score=math.nan)), "line 1: score is nan; allowed: a finite"),
]


def test_a_broken_line_is_named_and_its_file_is_not_changed(tmp_path: Path) -> None:
    folder = tmp_path / INNER
    write_manifest(folder, {})
    path = folder / "records.jsonl"
    for line, message in BROKEN_LINES:
        damaged = "\n".join([line, json.dumps(make_record("b")), ""])
        path.write_text(damaged)
        with pytest.raises(StoreError, match=message):
            load_runs(tmp_path)
        with pytest.raises(StoreError, match="line 1"), RecordStore(folder):
            pass
        assert path.read_text() == damaged


def no_space_left(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_manifest_is_replaced_whole_and_remembers_its_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        path = write_manifest(tmp_path, {"a": number, "started": f"{number}"})
    starts = read_manifest(path)["earlier_starts"]
    assert [start["started"] for start in starts] == ["1", "2"]
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(storing.os, "replace", no_space_left)
        with pytest.raises(StoreError, match=r"no space left to write .*manifest"):
            write_manifest(tmp_path, {"a": 4})
    assert path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_failed_record_is_followed_by_the_one_that_counts(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as records:
        records.append(make_record("a"))
        assert records.append(make_record("b", status="oom", score=None, error="first"))
        assert records.append(make_record("b", status="oom", score=None, error="second"))
        assert records.statuses == {"a": "ok", "b": "oom"}
    assert [row["error"] for row in read_records(tmp_path)] == [None, "second"]
    with RecordStore(tmp_path) as records:
        assert records.append(make_record("b"))
        assert not records.append(make_record("b", status="oom"))
        assert records.statuses == {"a": "ok", "b": "ok"}
    assert [row["status"] for row in read_records(tmp_path)] == ["ok", "ok"]


WRITER = """
import sys
from kvbench.records.read import COMMON_FIELDS
from kvbench.records.store import RecordStore
record = dict.fromkeys(COMMON_FIELDS) | {"status": "ok", "prediction": "x" * 3000}
with RecordStore(sys.argv[1], lock_timeout=float(sys.argv[2])) as store:
    print("ready", flush=True)
    for number in range(3):
        store.append(record | {"example_id": f"{number:04d}"})
    sys.stdin.readline()
"""


def test_a_second_writer_waits_or_is_refused(tmp_path: Path) -> None:
    def writer(timeout: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(timeout)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]

    first = writer(0)
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    refusal = r"is being written by another process; waited 0.[12] s: [^\n]*$"
    with pytest.raises(StoreError, match=refusal), RecordStore(tmp_path, lock_timeout=0.2):
        pass
    first.communicate("go\n")
    with RecordStore(tmp_path, lock_timeout=0.2) as records:
        assert len(records.statuses) == 3
        with pytest.raises(StoreError, match=refusal), RecordStore(tmp_path, 0.1):
            pass
        patient = writer(20)
        time.sleep(0.3)
        records.append(make_record("z"))
    patient.communicate("go\n")
    assert patient.returncode == 0


def test_a_temporary_file_of_a_killed_process_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    (tmp_path / ".manifest.json.new").write_bytes(b"half of")
    storing.replace_file(path, b"all of it")
    assert path.read_bytes() == b"all of it"
    other = tmp_path / "other"
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode, "others may read it as any new file"
    other.unlink()
    assert list(tmp_path.iterdir()) == [path]
