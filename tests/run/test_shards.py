"""Shards of a run: disjoint, balanced, and together the same records as a run that was not split."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import make_job
from support.stores import TIMES, make_record

from kvbench.errors import UserError
from kvbench.records.read import load_run, record_files
from kvbench.records.shards import Shard
from kvbench.records.store import RecordStore
from kvbench.run.runner import run_job


def shards(count: int) -> list[Shard]:
    return [Shard(i, count) for i in range(1, count + 1)]


@given(st.integers(0, 300), st.integers(1, 40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_shards_are_disjoint_and_balanced(n: int, count: int) -> None:
    parts = [shard.select(range(n)) for shard in shards(count)]
    assert sorted(item for part in parts for item in part) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(part == sorted(part) for part in parts)


def test_items_that_come_round_in_a_cycle_are_spread_over_all_shards() -> None:
    for count, cycle in itertools.product((2, 3, 4, 5), range(2, 7)):
        items = [i % cycle for i in range(60 * count * cycle)]
        for shard in shards(count):
            times = Counter(shard.select(items)).values()
            assert len(times) == cycle
            assert min(times) >= 30
            assert max(times) <= 90


@pytest.mark.parametrize(
    "wrong", ["0/4", "5/4", "4", "a/b", "1/2/3", "-1/4", " 1/4", "", 0.25, True, ["1/4"]]
)
def test_a_shard_is_read_from_text_and_other_texts_are_refused(wrong: Any) -> None:
    assert Shard.parse(None) is None
    assert Shard.parse("3/8") == Shard(3, 8)
    assert str(Shard(3, 8)) == "3/8"
    with pytest.raises(UserError, match=r"shard is .*; allowed: i/k with whole numbers"):
        Shard.parse(wrong)


def plain(folder: Path) -> list[dict[str, object]]:
    records = load_run(folder).records.drop(columns=list(TIMES))
    return sorted(json.loads(records.to_json(orient="records")), key=lambda r: r["example_id"])


def test_shards_together_are_the_run_that_was_not_split(tmp_path: Path) -> None:
    expected = run_job(make_job(tmp_path / "whole"))
    assert expected.complete
    jobs = [make_job(tmp_path / "split", shard=shard) for shard in shards(3)]
    results = [run_job(job) for job in jobs]
    assert [result.complete for result in results] == [False, False, True]
    assert sum(result.written for result in results) == expected.written
    for label, folder in results[0].folders.items():
        assert folder.name == expected.folders[label].name, "shards must not change the run's hash"
        names = ["records-1of3.jsonl", "records-2of3.jsonl", "records-3of3.jsonl"]
        assert [path.name for path in record_files(folder)] == names
        assert plain(folder) == plain(expected.folders[label])
        manifest = load_run(folder).manifest
        starts = [*manifest["earlier_starts"], manifest]
        assert [start["shard"] for start in starts] == ["1/3", "2/3", "3/3"]


def test_another_count_of_shards_or_none_goes_on_where_they_ended(tmp_path: Path) -> None:
    expected = run_job(make_job(tmp_path / "whole"))
    first = run_job(make_job(tmp_path / "more", shard=Shard(1, 2)))
    rest = run_job(make_job(tmp_path / "more"))
    assert expected.written == first.written + rest.written
    assert all(plain(rest.folders[label]) == plain(f) for label, f in expected.folders.items())


def write(folder: Path, shard: str | None, *records: dict[str, object]) -> None:
    with RecordStore(folder, shard=shard) as store:
        store.statuses.clear()  # as if both had run at once
        for one in records:
            assert store.append(one)


def test_records_of_several_files_count_once(tmp_path: Path) -> None:
    """records.jsonl before the shards', ok before failures; another's file is never changed."""

    def record(example_id: str, status: str, **fields: object) -> dict[str, object]:
        return make_record(example_id, status=status, **fields)

    write(tmp_path, "2of2", record("a", "ok", score=2.0), record("b", "oom"))
    write(
        tmp_path, "1of2", record("a", "ok"), record("b", "ok"), record("c", "error", error="last")
    )
    write(tmp_path, None, record("c", "error"), record("a", "ok", score=0.0))
    (tmp_path / "manifest.json").write_text("{}")
    rows = load_run(tmp_path).records.set_index("example_id")
    assert sorted(rows.index) == ["a", "b", "c"]
    assert (rows.loc["a", "score"], rows.loc["b", "status"]) == (0.0, "ok")
    assert rows.loc["c", "error"] == "last"
    path = tmp_path / "records-1of2.jsonl"
    path.write_bytes(path.read_bytes() + b'{"torn')
    before = path.read_bytes()
    with RecordStore(tmp_path) as store:
        assert store.statuses == {"a": "ok", "b": "ok", "c": "error"}
        assert store.append(record("c", "ok"))
    assert path.read_bytes() == before
    assert set(load_run(tmp_path).records["status"]) == {"ok"}
