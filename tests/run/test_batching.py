"""Several prompts at once: the answers of one at a time, whatever the batch, and with memory short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import Echo, make_job, records_of, with_session
from support.prompts import methods

from kvbench.engine import decode as engine_decode
from kvbench.prompts import PromptEncoder
from kvbench.records.read import load_run
from kvbench.run import runner as running
from kvbench.run.plan import Fields, Plan, WorkItem
from kvbench.run.runner import LARGEST_AUTO_GROUP, Runner, run_job
from kvbench.tasks.base import Example

# Through the runner: records, batch sizes, memory.


@dataclass(frozen=True, kw_only=True)
class Unlike(Echo):
    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        return [
            replace(example, max_new_tokens=3 + 2 * (i % 3), stop=("A",) if i % 2 else ())
            for i, example in enumerate(super().examples(encoder))
        ]


pytestmark = pytest.mark.usefixtures("no_collection")
LABELS = ("exact", "exact_4bit", "h2o", "balancekv", "snapkv")


def job(folder: Path, labels: Sequence[str] = LABELS, **changes: Any) -> Any:
    task = Unlike(count=changes.pop("count", 7))
    picked = {label: method for label, method in methods().items() if label in labels}
    return make_job(folder, picked, **{"echo": task, **changes})


def scores(result: Any) -> dict[str, list[dict[str, Any]]]:
    return {
        label: [{k: v for k, v in row.items() if k != "batch"} for row in rows]
        for label, rows in records_of(result).items()
    }


def batches(result: Any) -> list[int]:
    return [row["batch"] for row in records_of(result)["exact"] if row["status"] == "ok"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return scores(run_job(job(tmp_path_factory.mktemp("alone"))))


def short_memory(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """No forward pass of more than so many rows."""
    real = engine_decode.forward

    def forward(model: Any, ids: Any, *rest: Any, **how: Any) -> Any:
        if ids.shape[0] > rows:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {ids.shape[0]} rows")
        return real(model, ids, *rest, **how)

    monkeypatch.setattr(engine_decode, "forward", forward)


def test_records_are_the_same_at_any_batch_size(tmp_path: Path, alone: Any) -> None:
    for size, sizes in ((3, [3, 3, 3, 3, 3, 3, 1]), ("auto", [1, 2, 2, 4, 4, 4, 4])):
        result = run_job(job(tmp_path / str(size), batch_size=size))
        assert scores(result) == alone
        assert batches(result) == sizes
    manifest = load_run(result.folders["exact"]).manifest
    assert manifest["batch_size"] == "auto"
    after = {"compress_after": "context", "count": 4}
    later = [
        scores(run_job(job(tmp_path / f"c{size}", ("exact", "h2o"), batch_size=size, **after)))
        for size in (1, 50)
    ]
    assert later[0] == later[1]


@pytest.mark.parametrize(
    ("size", "sizes"), [(4, [2, 2, 2, 2, 2, 2, 1]), ("auto", [1, 2, 2, 2, 2, 2, 2])]
)
def test_running_out_of_memory_halves_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Any, size: Any, sizes: list[int]
) -> None:
    short_memory(monkeypatch, rows=12)  # two prompts of five methods fit, three do not
    result = run_job(job(tmp_path, batch_size=size))
    assert scores(result) == alone
    assert batches(result) == sizes


def test_methods_that_do_not_fit_together_run_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Any
) -> None:
    """And those that do not fit alone are recorded as out of memory."""
    short_memory(monkeypatch, rows=4)  # not even one prompt with its five methods
    together = scores(run_job(job(tmp_path / "4", batch_size=4, limit=3)))
    assert all(row.pop("retried") for rows in together.values() for row in rows)
    assert together == {label: rows[:3] for label, rows in alone.items()}
    short_memory(monkeypatch, rows=0)
    result = run_job(job(tmp_path / "0", ("exact", "h2o"), batch_size=4, limit=3))
    assert result.failed == 6
    for rows in records_of(result).values():
        assert [(r["status"], r["example_id"]) for r in rows] == [
            ("oom", f"e{i}") for i in range(3)
        ]


# The size itself.


class Counting(Plan):
    batches_items = True

    def __init__(self) -> None:
        self.groups: list[int] = []

    def meta(self) -> dict[str, Any]:
        return {}

    def items(self, session: Any, methods: Any) -> list[WorkItem]:
        return []

    def run(self, work: Any, session: Any) -> Iterator[Fields]:
        self.groups.append(len(work))
        return iter([{"method": "m", "example_id": item.id, "status": "ok"} for item, _ in work])


def test_an_item_that_ran_out_of_memory_in_a_group_halves_the_groups(tmp_path: Path) -> None:
    class Tight(Counting):
        def run(self, work: Any, session: Any) -> Iterator[Fields]:
            answers = list(super().run(work, session))
            if len(work) > 2:
                answers[0] |= {"status": "oom", "error": "no memory"}
            return iter(answers)

    plan = Tight()
    work: Any = [(WorkItem(f"u{i}", (f"u{i}",), None), {"m": None}) for i in range(8)]
    runner = Runner(make_job(tmp_path, plan=plan, batch_size=4))
    ids = [records[0]["example_id"] for records in runner.run(work)]
    assert plan.groups == [4, 1, 2, 2]
    assert ids == ["u1", "u2", "u3", "u0", "u4", "u5", "u6", "u7"]


def test_what_was_final_before_a_group_failed_is_kept(tmp_path: Path) -> None:
    class Unscored(Counting):
        def run(self, work: Any, session: Any) -> Iterator[Fields]:
            for record in super().run(work, session):
                if record["example_id"] == "u2":
                    raise ValueError("no score")
                yield record

    plan = Unscored()
    work: Any = [(WorkItem(f"u{i}", (f"u{i}",)), {"m": None}) for i in range(4)]
    made = list(Runner(make_job(tmp_path, plan=plan, batch_size=4)).run(work))
    assert plan.groups == [4, 2, 1, 1], "u0 and u1 run once"
    assert [[(r["example_id"], r["status"]) for r in records] for records in made] == [
        [(f"u{i}", "error" if i == 2 else "ok")] for i in range(4)
    ]


def test_an_item_has_the_time_of_one_answer_unless_it_has_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []

    def limited(model: Any, seconds: float) -> Any:
        limits.append(seconds)
        return nullcontext()

    monkeypatch.setattr(running, "time_limit", limited)
    runner = Runner(with_session(make_job(tmp_path, plan=Counting()), example_timeout=5.0))
    items = (WorkItem("a", ("a",), None), WorkItem("b", ("b",), None, answers=3))
    work: Any = [(item, {"m": None}) for item in items]
    list(runner.run(work))
    assert limits == [5.0, 15.0]


SIZES: list[tuple[Any, int, int | None, list[int]]] = [
    ("auto", 40, 8, [1, 2, 4, 8, 8, 8, 8, 1]),  # 10 + 8 * 8 fits in 85 of 100, 16 items would not
    ("auto", 200, 0, [1, 2, 4, 8, 16, 32, LARGEST_AUTO_GROUP, LARGEST_AUTO_GROUP, 9]),
    ("auto", 3, 60, [1, 1, 1]),
    ("auto", 3, None, [1, 1, 1]),  # memory cannot be measured: nothing is risked
    (4, 9, 8, [4, 4, 1]),
]


@pytest.mark.parametrize(("setting", "count", "per_item", "groups"), SIZES)
def test_auto_doubles_until_twice_the_need_would_not_fit(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    setting: Any,
    count: int,
    per_item: int | None,
    groups: list[int],
) -> None:
    plan = Counting()
    monkeypatch.setattr(running, "reset_peak", lambda device: per_item is not None)
    monkeypatch.setattr(running, "used_bytes", lambda device: 10)
    monkeypatch.setattr(
        running, "peak_bytes", lambda device: 10 + (per_item or 0) * plan.groups[-1]
    )
    monkeypatch.setattr(running, "total_bytes", lambda device: 100)
    work: Any = [(WorkItem(f"u{i}", (f"u{i}",), None), {"m": None}) for i in range(count)]
    runner = Runner(make_job(tmp_path, plan=plan, batch_size=setting))
    ids = [records[0]["example_id"] for records in runner.run(work)]
    assert ids == [item.id for item, _ in work]
    assert plan.groups == groups
