"""The throughput probe: what it measures and divides, batches, memory, experiments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.jobs import SMALL, make_job, records_of
from torch import Tensor

from kvbench.engine import ask as engine
from kvbench.engine import decode as engine_decode
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.probes import throughput
from kvbench.probes.throughput import Throughput, largest_batch
from kvbench.run.job import Job
from kvbench.run.runner import run_job
from kvbench.tasks.base import TaskError

METHODS = {name: build_method(name) for name in ("h2o", "exact", "balancekv")}
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("no_collection")


def job(tmp_path: Path, probe: Any, methods: dict[str, Any] = METHODS) -> Job:
    return make_job(tmp_path, methods, plan=probe)


def test_a_batch_is_measured_as_a_whole_and_prefilled_once_per_run(tmp_path):
    probe = Throughput(settings=[(60, 4, 1, 0.5), (60, 4, 1, 0.2), (60, 4, 3, 0.2)], runs=2)
    throughput_job = job(tmp_path, probe)
    prefills = []
    throughput_job.session.model.register_forward_pre_hook(
        lambda _, __, inputs: prefills.append(inputs["input_ids"].shape[1] > 1), with_kwargs=True
    )
    result = run_job(throughput_job)
    assert result.failed == 0
    records = records_of(result, times=True)
    # for each method two runs and a warm-up, of 1, 1 and 3 rows
    assert sum(prefills) == 3 * 3 * (1 + 1 + 3)
    assert {len(rows) for rows in records.values()} == {3 * 2}
    for label, rows in records.items():
        for row, exact in zip(rows, records["exact"], strict=True):
            check_speeds(row, exact)
            size = replace(SMALL, rate=row["asked_rate"]).capacity(60)
            assert row["entries"]["max"] == (60 if label == "exact" else size)
            assert str(row["batch"]) == row["asked_batch"]
            assert row["peak_bytes"] > 0
    by_batch = {row["batch"]: row for row in records["h2o"] if row["asked_rate"] == 0.2}
    for name in ("cache_bytes", "exact_bytes"):
        assert by_batch[3][name] == 3 * by_batch[1][name]
    assert by_batch[3]["ratio"] == by_batch[1]["ratio"] < 0.6


def test_an_exact_cache_of_few_bits_is_no_reference(tmp_path):
    methods = {"exact": build_method("exact", quantize={"bits": 4, "group_size": 16})}
    result = run_job(job(tmp_path, Throughput(settings=[(60, 2, 1)], runs=1), methods))
    (row,) = records_of(result, times=True)["exact"]
    assert row["status"] == "ok"
    assert row["speedup"] is row["prefill_ratio"] is row["decode_speedup"] is None


def check_speeds(row: dict[str, Any], exact: dict[str, Any]) -> None:
    """Rates of 4 new tokens a row are of the seconds; comparisons are with the exact cache."""
    total = row["prefill_s"] + row["compress_s"] + row["decode_s"]
    assert row["latency_s"] == pytest.approx(total)
    assert row["tokens_per_s"] == row["score"] == pytest.approx(4 * row["batch"] / total)
    decoded = 3 * row["batch"] / row["decode_s"]  # the first token comes from the prefill
    assert row["decode_tokens_per_s"] == pytest.approx(decoded)
    assert row["speedup"] == pytest.approx(row["tokens_per_s"] / exact["tokens_per_s"])
    prefill = row["prefill_compress_s"] / exact["prefill_compress_s"]
    assert row["prefill_ratio"] == pytest.approx(prefill)


def test_the_largest_batch_is_found_and_a_length_that_does_not_fit_stops_no_other(
    tmp_path, monkeypatch
):
    """300 entries fit in the first layer, and of exact caches no prompt of more than 100 tokens."""
    forward, prefill = engine_decode.forward, engine.prefill

    def short_forward(model: Any, ids: Tensor, positions: Tensor, state: Any, **rest: Any) -> Any:
        rows = getattr(state, "rows", [])
        if ids.shape[1] == 1 and sum(row.caches[0][0].length for row in rows) > 300:
            raise torch.OutOfMemoryError("CUDA out of memory: entries")
        return forward(model, ids, positions, state, **rest)

    def short_prefill(model: Any, ids: list[int], rows: list[Any], **options: Any) -> Any:
        if len(ids) > 100 and rows[0].label == "exact":
            raise torch.OutOfMemoryError("CUDA out of memory: the cache")
        return prefill(model, ids, rows, **options)

    monkeypatch.setattr(engine_decode, "forward", short_forward)
    monkeypatch.setattr(engine, "prefill", short_prefill)
    settings = [(80, 2, "largest"), (120, 2, 1), (60, 2, 1)]
    result = run_job(job(tmp_path, Throughput(settings=settings, runs=1, most_batch=8)))
    records = records_of(result, times=True)
    assert [row["status"] for row in records["exact"]] == ["ok", "oom", "ok"]
    assert records["exact"][0]["batch"] == 3  # 300 // 80
    assert records["h2o"][0]["batch"] == 8  # 26 entries each: 11 would fit, most_batch ends it
    assert records["h2o"][0]["asked_batch"] == "largest"
    assert {row["status"] for row in records["h2o"]} == {"ok"}
    assert result.failed == 1
    assert [row["speedup"] is None for row in records["h2o"]] == [False, True, False]


@pytest.mark.parametrize(
    ("room", "most", "largest"), [(1, 64, 1), (64, 64, 64), (100, 64, 64), (90, 1024, 88)]
)
def test_the_largest_batch_is_within_a_sixteenth(room, most, largest):
    tried = []

    def trial(batch: int) -> None:
        tried.append(batch)
        if batch > room:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert largest_batch(trial, CPU, most) == largest
    assert len(tried) == len(set(tried))
    assert max(tried) <= most


def test_a_batch_that_would_take_a_cpu_s_memory_is_not_tried(monkeypatch):
    trial = Mock()
    monkeypatch.setattr(throughput, "reset_peak", lambda device: True)
    monkeypatch.setattr(throughput, "used_bytes", lambda device: 10)
    monkeypatch.setattr(throughput, "peak_bytes", lambda device: 10 + 10 * trial.call_args[0][0])
    monkeypatch.setattr(throughput, "total_bytes", lambda device: 100)
    assert largest_batch(trial, CPU, 1024) == 4, "eight would take 90 of 100"
    for error, message in (
        (torch.OutOfMemoryError("CUDA out of memory"), "not even one prompt fits"),
        (ValueError("a bug"), "a bug"),
    ):
        with pytest.raises(type(error), match=message):
            largest_batch(Mock(side_effect=error), CPU, 8)


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(TaskError, match=r"has \[512, 32\]; allowed: \[prompt tokens"):
        Throughput(settings=[(512, 32)])
    with pytest.raises(TaskError, match=r"\['most'\]; allowed: a valid integer or 'larg"):
        Throughput(batch=["most"])
    one_setting = job(tmp_path, Throughput(settings=[(60, 5, 1)], runs=1))
    plan, session = one_setting.plan, one_setting.session
    wide = {"h2o": (METHODS["h2o"], Budget(sink=40, window=40))}
    with pytest.raises(KVError, match=r"window is 80; the prompt has 60 tokens"):
        plan.items(session, wide)
    spec = replace(session.spec, architecture={"max_position_embeddings": 64})
    with pytest.raises(KVError, match="60 prompt and 5 new tokens are 65; model tiny has 64 posi"):
        plan.items(replace(session, spec=spec), one_setting.methods)
