"""Shards of a run: disjoint, balanced, and together the same records as a run that was not split."""

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import make_job
from support.stores import TIMES

from kvbench.cli import build as app
from kvbench.methods import build_method
from kvbench.records.read import COMMON_FIELDS, StoreError, load_run, load_runs, record_files
from kvbench.records.shards import Shard, ShardError
from kvbench.records.store import RecordStore, manifest_lock, write_manifest
from kvbench.report import build
from kvbench.run import runner
from kvbench.run.runner import run_job


def shards(count: int) -> list[Shard]:
    return [Shard(i, count) for i in range(1, count + 1)]


@given(st.integers(0, 300), st.integers(1, 40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_shards_are_disjoint_balanced_and_whole(n, count):
    units = list(range(n))
    parts = [shard.select(units) for shard in shards(count)]
    assert sorted(unit for part in parts for unit in part) == units
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for part in parts:
        assert part == sorted(part)


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 12))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_shard_of_a_prefix_is_a_prefix_of_the_shard(n, more, count):
    for shard in shards(count):
        short, long = shard.select(range(n)), shard.select(range(n + more))
        assert long[: len(short)] == short


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("period", [2, 3, 4, 5, 6, 8, 12])
def test_what_comes_round_in_a_cycle_is_spread_over_the_shards(count, period):
    n = 4096
    fair = n / period / count
    for shard in shards(count):
        taken = [unit % period for unit in shard.select(range(n))]
        for kind in range(period):
            assert taken.count(kind) == pytest.approx(fair, rel=0.2), (shard, kind)


def test_shards_are_read_from_text():
    assert Shard.parse(None) is None
    assert Shard.parse("3/8") == Shard(3, 8)
    assert str(Shard(3, 8)) == "3/8"
    for wrong in (
        "0/4",
        "5/4",
        "1/0",
        "4",
        "a/b",
        "1/2/3",
        "-1/4",
        " 1/4",
        "",
        1,
        0.25,
        True,
        ["1/4"],
    ):
        with pytest.raises(ShardError, match=r"shard is .*; allowed: i/k with whole numbers"):
            Shard.parse(wrong)


def plain(records: object) -> list[dict[str, object]]:
    """Records without seconds, by example."""
    rows = json.loads(records.drop(columns=list(TIMES)).to_json(orient="records"))
    return sorted(rows, key=lambda row: row["example_id"])


def test_shards_together_are_the_run_that_was_not_split(tmp_path):
    limit = 5
    whole = make_job(tmp_path / "whole", limit=limit)
    expected = run_job(whole)
    assert expected.complete
    split = [make_job(tmp_path / "split", limit=limit, shard=shard) for shard in shards(3)]
    results = [run_job(job) for job in split]
    assert [result.complete for result in results] == [False, False, True]
    assert sum(result.written for result in results) == expected.written
    for label, folder in results[0].folders.items():
        assert folder.name == expected.folders[label].name, "shards must not change the run's hash"
        assert [path.name for path in record_files(folder)] == [
            "records-1of3.jsonl",
            "records-2of3.jsonl",
            "records-3of3.jsonl",
        ]
        assert plain(load_run(folder).records) == plain(load_run(expected.folders[label]).records)
        manifest = load_run(folder).manifest
        starts = [*manifest["earlier_starts"], manifest]
        assert [start["shard"] for start in starts] == ["1/3", "2/3", "3/3"]
    # other splits, and none, find everything done
    for shard in (None, Shard(1, 2), Shard(2, 2)):
        assert run_job(replace(split[0], shard=shard)).written == 0


def test_a_run_that_is_not_split_does_what_the_shards_left(tmp_path):
    expected = run_job(make_job(tmp_path / "whole"))
    first = run_job(make_job(tmp_path / "split", shard=Shard(2, 2)))
    rest = run_job(make_job(tmp_path / "split"))
    assert 0 < first.written < expected.written == first.written + rest.written
    for label, folder in rest.folders.items():
        assert plain(load_run(folder).records) == plain(load_run(expected.folders[label]).records)


def _shard_process(folder: Path, shard: Shard) -> None:
    run_job(make_job(folder, shard=shard, lock_timeout=0))


def test_shards_that_run_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_shard_process, args=(tmp_path, shard)) for shard in shards(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    expected = run_job(make_job(tmp_path / "whole"))
    for run in load_runs(tmp_path / "e"):
        (whole,) = (f for f in expected.folders.values() if f.name == run.folder.name)
        assert plain(run.records) == plain(load_run(whole).records)
        starts = [*run.manifest["earlier_starts"], run.manifest]
        assert sorted(start["shard"] for start in starts) == ["1/4", "2/4", "3/4", "4/4"]


def test_no_shard_reads_the_manifest_while_another_writes_it(tmp_path, monkeypatch):
    """The two processes above rarely meet there: here each step looks for the lock."""
    held = []

    def watched(step: Any) -> Any:
        def call(*arguments: Any) -> Any:
            folder = next(some for some in arguments if isinstance(some, Path))
            with pytest.raises(
                StoreError, match=r"manifest\.json is locked by another process for 0 s"
            ):
                manifest_lock(folder, timeout=0).__enter__()
            held.append(step)
            return step(*arguments)

        return call

    for step in (runner._manifest, write_manifest):
        monkeypatch.setattr(runner, step.__name__, watched(step))
    folders = run_job(make_job(tmp_path, shard=Shard(1, 2))).folders
    assert len(held) == 2 * len(folders)
    monkeypatch.undo()
    for folder in folders.values():
        with manifest_lock(folder, timeout=0):
            pass


def test_a_manifest_that_cannot_be_locked_is_one_line(tmp_path):
    (tmp_path / ".lock-manifest").mkdir()
    with pytest.raises(StoreError, match=r"cannot use .*manifest\.json: Is a directory$"):
        manifest_lock(tmp_path).__enter__()


def record(example_id: str, status: str = "ok", **fields: object) -> dict[str, object]:
    common = dict.fromkeys(COMMON_FIELDS)
    return {**common, "example_id": example_id, "status": status, **fields}


def write(folder: Path, shard: str | None, *records: dict[str, object]) -> None:
    with RecordStore(folder, shard=shard) as store:
        store._done.clear()  # as if both had run at once
        for one in records:
            assert store.append(one)


def test_duplicates_of_several_files_are_dropped_the_same_way_always(tmp_path):
    write(tmp_path, "2of2", record("a", score=2.0), record("b", "oom", error="2of2"))
    write(tmp_path, "1of2", record("a", score=1.0), record("b", score=1.0), record("c", "error"))
    write(tmp_path, None, record("c", "error", error="whole"), record("a", score=0.0))
    (tmp_path / "manifest.json").write_text("{}")
    rows = load_run(tmp_path).records.set_index("example_id")
    assert sorted(rows.index) == ["a", "b", "c"]
    assert rows.loc["a", "score"] == 0.0, "records.jsonl counts first"
    assert rows.loc["b", "status"] == "ok", "ok counts before failures"
    assert rows.loc["c", "error"] == "whole"
    with RecordStore(tmp_path) as store:
        assert store.done == {"a", "b", "c"}
        assert store.failed == {"c"}


def test_failures_of_another_shards_file_can_be_run_again(tmp_path):
    write(tmp_path, "1of2", record("a", "oom"), record("b"))
    (tmp_path / "manifest.json").write_text("{}")
    before = (tmp_path / "records-1of2.jsonl").read_bytes()
    with RecordStore(tmp_path) as store:
        store.drop_failed()
        assert store.done == {"b"}
        assert store.append(record("a", score=1.0))
        assert store.failed == set()
    assert (tmp_path / "records-1of2.jsonl").read_bytes() == before
    assert set(load_run(tmp_path).records["status"]) == {"ok"}


def test_a_torn_line_of_another_shard_is_ignored(tmp_path):
    write(tmp_path, "1of2", record("a"), record("b"))
    path = tmp_path / "records-1of2.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with RecordStore(tmp_path, shard="2of2") as store:
        assert store.done == {"a"}
    assert path.read_bytes().count(b"\n") == 1, "another's file is never changed"


def _finish(folder: Path, order: Any, together: Any) -> None:
    real = build.build_report

    def slow(path: Path) -> object:
        order.put("start")
        time.sleep(2)  # the others are waiting by then
        built = real(path)
        order.put("end")
        return built

    build.build_report = slow
    together.wait()
    app.finish(folder)


def test_one_page_is_built_at_a_time_and_none_in_vain(tmp_path):
    run_job(make_job(tmp_path, methods={"exact": build_method("exact")}, limit=1))
    context = multiprocessing.get_context("fork")
    shared = (context.Queue(), context.Barrier(3))
    processes = [context.Process(target=_finish, args=(tmp_path / "e", *shared)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    order = shared[0]
    assert [order.get(timeout=1) for _ in range(2)] == ["start", "end"]
    assert order.empty(), "who waited for a page of the same records does not build it again"
    assert (tmp_path / "e/report.html").is_file()
