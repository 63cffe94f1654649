"""Faults inside a run: whatever code raises, returns or never ends, memory, time, numbers that are none,
a device that is gone. Each is a record of its own, and nobody else's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import Echo, Faulty, make_job, records_of, with_session

from kvbench.engine import decode, prefill
from kvbench.engine.device import is_out_of_memory
from kvbench.engine.model import ModelError
from kvbench.kv import LayerKV
from kvbench.methods import build_method
from kvbench.run import runner
from kvbench.run.plan import failure_fields
from kvbench.run.runner import run_job

pytestmark = pytest.mark.usefixtures("no_collection")


def beside_snapkv(folder: Path, fault: Callable[[LayerKV], Any], **changes: Any) -> Any:
    """Records of a method with a fault, and those of SnapKV, which must be as they are alone."""
    methods = {"bad": Faulty(fault=fault), "snapkv": build_method("snapkv")}
    seconds = changes.pop("example_timeout", None)
    job = with_session(make_job(folder, methods, limit=2, **changes), example_timeout=seconds)
    records = records_of(run_job(job))
    assert [r["status"] for r in records["snapkv"]] == ["ok", "ok"]
    return records["bad"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), "oom"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "oom"),
        (TimeoutError("late"), "timeout"),
        (ValueError("memory of the war"), "error"),
    ],
)
def test_statuses(error: Exception, status: str) -> None:
    assert failure_fields(error)["status"] == status
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)


# Whatever a method raises or returns.


def bottomless(layer: LayerKV) -> None:
    bottomless(layer)


def raising(error: Exception) -> Callable[[LayerKV], None]:
    def fault(_layer: LayerKV) -> None:
        raise error

    return fault


def not_a_number(layer: LayerKV) -> LayerKV:
    values = layer.values.clone()
    values[..., -1, :] = float("nan")
    return replace(layer, values=values)


NOT_FINITE = "NonFiniteLogits: non-finite logits at new token 1"
FAULTS: dict[str, tuple[Callable[[LayerKV], Any], str]] = {
    "no end": (bottomless, "RecursionError: maximum recursion depth exceeded"),
    "StopIteration": (raising(StopIteration()), "StopIteration"),
    "odd characters": (
        raising(ValueError("a\ud800b\x1b[2Jc\0\u202e\r\nd")),
        r"ValueError: a\ud800b\x1b[2Jc\x00\u202e",
    ),
    "many lines": (raising(ValueError("\n\nfirst\nsecond")), "ValueError: first"),
    "one head too few": (
        lambda kv: replace(kv, keys=kv.keys[:, :1], values=kv.values[:, :1]),
        "; allowed: (1, 2, ",
    ),
    "a number that is none": (not_a_number, NOT_FINITE),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_whatever_a_method_does_is_its_own_record(tmp_path: Path, kind: str, caplog: Any) -> None:
    fault, says = FAULTS[kind]
    caplog.set_level("DEBUG", logger="kvbench")
    for record in beside_snapkv(tmp_path, fault):
        assert record["status"] == "error"
        assert record["error"] == says or (says[0] == ";" and says in record["error"])
        assert (record["score"], record["prediction"]) == (None, None)
        assert record["dataset"] == "echo", "failed or not"
    assert caplog.text.encode(), "a log file can hold it"


# Memory.


@pytest.mark.parametrize("place", ["prefill", "decode", "score"])
def test_memory_may_run_out_anywhere_and_the_next_example_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """What all methods do together fails for all, once together and once each alone."""

    @dataclass(frozen=True, kw_only=True)
    class Tight(Echo):
        def score(self, prediction: str, example: Any) -> Any:
            if place == "score" and example.id == "e1":
                raise MemoryError
            return super().score(prediction, example)

    real = prefill.forward

    def forward(model: Any, ids: Any, positions: Any, state: Any, *rest: Any, **more: Any) -> Any:
        if state.rows[0].example_id == "e1" and (
            place == ("prefill" if ids.shape[1] > 1 else "decode")
        ):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, ids, positions, state, *rest, **more)

    for module in (prefill, decode):
        monkeypatch.setattr(module, "forward", forward)
    for rows in records_of(run_job(make_job(tmp_path, echo=Tight(count=3)))).values():
        assert [r["status"] for r in rows] == ["ok", "oom", "ok"]
        assert [r.get("retried") for r in rows] == [None, True, None]


# Time.


def test_a_method_that_hangs_times_out_and_the_others_finish(tmp_path: Path) -> None:
    (first, second) = beside_snapkv(
        tmp_path, lambda kv: time.sleep(1.2) if kv.n < 80 else None, example_timeout=1.0
    )
    assert first["status"] == "timeout"
    assert first["error"] == "TimeoutError: the example took more than 1 s"
    assert second["status"] == "ok"


def test_a_prefill_that_hangs_times_out_and_loading_is_no_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = {"exact": build_method("exact")}
    job = with_session(make_job(tmp_path, methods, limit=2), example_timeout=1.0)
    model, first = job.session.__dict__.pop("model"), []

    def load(*_: Any, **__: Any) -> Any:
        time.sleep(1.5)
        return model

    def slow(*_: Any) -> None:
        if not first:
            time.sleep(1.2)  # in the first layer of the first example alone
        first.append(True)

    monkeypatch.setattr("kvbench.run.session.load_model", load)
    hook = model.model.layers[0].register_forward_hook(slow)
    try:
        records = records_of(run_job(job))["exact"]
    finally:
        hook.remove()
    assert [r["status"] for r in records] == ["timeout", "ok"]


# The device, the model, the command line.


def test_a_device_that_is_lost_ends_the_job_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered")
    methods = {"bad": Faulty(fault=raising(illegal)), "snapkv": build_method("snapkv")}
    before = iter([True])
    with monkeypatch.context() as patch:
        patch.setattr(runner, "device_is_usable", lambda device: next(before, False))
        with pytest.raises(runner.DeviceLost, match="answers nothing any more after example 'e0'"):
            run_job(make_job(tmp_path, methods))
    methods["bad"] = Faulty(fault=lambda layer: None)
    records = records_of(run_job(make_job(tmp_path, methods)))
    assert [r["status"] for r in records["bad"]] == ["error", "ok", "ok", "ok"]
    assert [r["status"] for r in records["snapkv"]] == ["ok"] * 4
    assert records["bad"][0]["error"].startswith("RuntimeError: CUDA error: an illegal memory")


def test_a_model_is_loaded_when_something_is_to_be_run_and_before_any_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(spec: Any, **_: Any) -> None:
        raise ModelError("model 'none' cannot be loaded")

    monkeypatch.setattr("kvbench.run.session.load_model", refuse)
    run_job(make_job(tmp_path))
    again = make_job(tmp_path)
    del again.session.__dict__["model"]
    assert run_job(again).written == run_job(replace(again, retry_failed=True)).written == 0
    with pytest.raises(ModelError):
        run_job(replace(again, results_dir=tmp_path / "new"))
    assert not (tmp_path / "new").exists()
