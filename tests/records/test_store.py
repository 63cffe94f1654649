"""Records survive kills, full disks and competing processes."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.stores import fill, make_record

from kvbench.records import store
from kvbench.records.read import COMMON_FIELDS, StoreError, load_runs
from kvbench.records.store import RecordStore, config_hash, run_folder, write_manifest


def test_hash_ignores_order_and_number_spelling() -> None:
    first = {"a": 1, "b": {"c": (1, 2.0)}}
    assert config_hash(first) == config_hash({"b": {"c": [1.0, 2]}, "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})
    assert config_hash({"a": True}) != config_hash({"a": 1})
    assert config_hash({"a": 0.25}) == "cbd07179"


def test_hash_refuses_what_is_not_json() -> None:
    with pytest.raises(StoreError, match="config: a holds a object"):
        config_hash({"a": object()})


def test_run_folder_is_safe_for_the_file_system() -> None:
    folder = run_folder("r", "demo", "../Qwen/Qwen 3", "t", "snap:kv", "0123abcd")
    assert folder == Path("r/demo/_Qwen_Qwen_3/t/snap_kv-0123abcd")
    long = run_folder("r", "e", "x" * 300, "t", "m", "h").parts[2]
    assert len(long) <= 120
    assert long != run_folder("r", "e", "x" * 301, "t", "m", "h").parts[2]
    with pytest.raises(StoreError, match="cannot name a folder"):
        run_folder("r", "..", "m", "t", "m", "h")


def test_records_come_back_as_written(tmp_path: Path) -> None:
    folder = tmp_path / "model" / "task" / "m-00000000"
    with RecordStore(folder) as records:
        assert records.append(
            make_record("b", prediction="a\u2028b\n\0<é", depth=50, answers=["x"])
        )
        assert records.append(make_record("a", status="oom", score=None, error="out of memory"))
        assert not records.append(make_record("b", score=0.0))
        assert records.done == {"a", "b"}
    write_manifest(folder, {"model": "model", "seed": 0})
    (run,) = load_runs(tmp_path)
    assert run.manifest == {"format": 1, "model": "model", "seed": 0}
    assert list(run.records["example_id"]) == ["b", "a"]
    assert run.records["prediction"][0] == "a\u2028b\n\0<é"
    assert run.records["depth"][0] == 50
    assert run.records["score"][0] == 1.0
    assert math.isnan(run.records["score"][1])
    with RecordStore(folder) as records:
        assert records.done == {"a", "b"}


def test_values_json_does_not_know(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as records:
        records.append(
            make_record(
                "a",
                score=float("nan"),
                ratio=np.float32(np.inf),
                capacity=np.int64(3),
                entries={"mean": np.arange(2.0), "max": (1, 2)},
                prediction="half a pair \ud800",
            )
        )
        with pytest.raises(StoreError, match=r"'b'.*extra holds a object"):
            records.append(make_record("b", extra=object()))
    (line,) = (tmp_path / "records.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["score"], record["ratio"], record["capacity"]) == (None, None, 3)
    assert record["entries"] == {"mean": [0.0, 1.0], "max": [1, 2]}
    assert record["prediction"] == "half a pair ?"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"example_id": "a"}, "example 'a' lacks experiment, model, .*error"),
        (make_record("a", status="fine"), "status is 'fine'; allowed: ok, over_budget"),
        (make_record("a") | {"example_id": 3}, "example_id is 3"),
    ],
)
def test_incomplete_records_are_refused(tmp_path: Path, record: dict, message: str) -> None:
    with RecordStore(tmp_path) as records, pytest.raises(StoreError, match=message):
        records.append(record)
    assert (tmp_path / "records.jsonl").read_bytes() == b""


TORN = [b'{"example_id": "c', b'{"example_id": "c"}', b"\0\0\0\0\n", b"{\n"]


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    folder = tmp_path / "model" / "task" / "m-00000000"
    fill(folder, ["a", "b"])
    write_manifest(folder, {})
    path = folder / "records.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert list(load_runs(tmp_path)[0].records["example_id"]) == ["a", "b"]
    assert path.read_bytes() == whole + torn  # a reader changes nothing
    with RecordStore(folder) as records:
        assert records.done == {"a", "b"}
        assert path.read_bytes() == whole
        records.append(make_record("c"))
    assert list(load_runs(tmp_path)[0].records["example_id"]) == ["a", "b", "c"]


def test_the_first_of_two_records_counts(tmp_path: Path) -> None:
    folder = tmp_path / "model" / "task" / "m-00000000"
    fill(folder, ["a"])
    write_manifest(folder, {})
    with (folder / "records.jsonl").open("a") as file:
        file.write(json.dumps(make_record("a", score=0.0)) + "\n")
    (run,) = load_runs(tmp_path)
    assert list(run.records["score"]) == [1.0]


def test_broken_folders_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model" / "task" / "m-00000000"
    with pytest.raises(StoreError, match=r"no results in .*nowhere"):
        load_runs(tmp_path / "nowhere")
    assert load_runs(tmp_path) == []
    fill(folder, ["a", "b"])
    with pytest.raises(StoreError, match="records but no manifest"):
        load_runs(tmp_path)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match=r"manifest\.json cannot be read"):
        load_runs(tmp_path)
    write_manifest(folder, {})
    path = folder / "records.jsonl"
    lines = path.read_text().splitlines()
    for bad, message in [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: not a JSON object"),
        ('{"example_id": "a"}', "line 1: .*lacks experiment"),
        (
            json.dumps(make_record("a", score="high")),
            "line 1: score is 'high'; allowed: a valid number",
        ),
    ]:
        path.write_text("\n".join([bad, lines[1], ""]))
        with pytest.raises(StoreError, match=message):
            load_runs(tmp_path)
    path.write_text("\n".join(["{", lines[1], ""]))
    with pytest.raises(StoreError, match="line 1"), RecordStore(folder):
        pass
    assert not (folder / ".holder").exists()


def test_a_run_without_records_yet(tmp_path: Path) -> None:
    write_manifest(tmp_path / "model" / "task" / "m-00000000", {"seed": 1})
    (run,) = load_runs(tmp_path)
    assert run.records.empty
    assert set(COMMON_FIELDS) <= set(run.records.columns)


def test_manifest_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(tmp_path, {"a": 1})

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(StoreError, match=r"no space left to write .*manifest"):
        write_manifest(tmp_path, {"a": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"format": 1, "a": 1}


def test_an_interrupt_while_writing_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def interrupted(file: int, data: bytes) -> int:
        real(file, data[:9])
        raise KeyboardInterrupt

    with RecordStore(tmp_path) as records:
        with monkeypatch.context() as patch:
            patch.setattr(store.os, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                records.append(make_record("a"))
        assert records.path.read_bytes() == b""
        assert records.append(make_record("a"))


WRITER = """
import sys
from kvbench.records.read import COMMON_FIELDS
from kvbench.records.store import RecordStore
record = dict.fromkeys(COMMON_FIELDS) | {"status": "ok", "prediction": "x" * 3000}
with RecordStore(sys.argv[1], lock_timeout=float(sys.argv[2])) as store:
    print("ready", flush=True)
    for number in range(int(sys.argv[3])):
        store.append(record | {"example_id": f"{number:04d}"})
    sys.stdin.readline()
"""


def writer(folder: Path, timeout: float, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(timeout), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_second_writer_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    process = writer(tmp_path, 0, 3)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with (
        pytest.raises(
            StoreError, match=rf"written by process {process.pid} on .* since 20"
        ) as error,
        RecordStore(tmp_path, lock_timeout=0.2),
    ):
        pass
    assert "\n" not in str(error.value)
    process.communicate("go\n")
    with RecordStore(tmp_path, lock_timeout=0.2) as records:
        assert len(records.done) == 3
        with pytest.raises(StoreError, match=f"process {os.getpid()}"), RecordStore(tmp_path, 0.1):
            pass
    with pytest.raises(StoreError, match="is not open"):
        records.append(make_record("z"))


def test_a_second_writer_waits_its_turn(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as records:
        process = writer(tmp_path, 20, 3)
        records.append(make_record("0000"))
        time.sleep(0.3)
    process.communicate("go\n")
    assert process.returncode == 0
    with RecordStore(tmp_path) as records:
        assert records.done == {"0000", "0001", "0002"}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StoreError, match=r"cannot use .*: Not a directory"),
        RecordStore(tmp_path / "file" / "run"),
    ):
        pass


def test_failed_records_can_be_run_again(tmp_path: Path) -> None:
    with RecordStore(tmp_path) as records:
        records.append(make_record("a"))
        records.append(make_record("b", status="oom", score=None))
        records.append(make_record("c"))
        assert records.failed == {"b"}
        records.drop_failed()
        assert (records.done, records.failed) == ({"a", "c"}, set())
        assert records.append(make_record("b"))
    with RecordStore(tmp_path) as records:
        records.drop_failed()  # nothing to drop
        assert records.done == {"a", "b", "c"}
        assert records.failed == set()


def test_a_full_disk_keeps_failed_records_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with RecordStore(tmp_path) as records:
        records.append(make_record("a", status="error", score=None))
    with RecordStore(tmp_path) as records:
        with monkeypatch.context() as patch:
            patch.setattr(store.os, "fsync", full)
            with pytest.raises(StoreError, match="no space left"):
                records.drop_failed()
        assert records.done == {"a"}
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "records.jsonl"]
