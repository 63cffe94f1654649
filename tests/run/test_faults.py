"""Faults inside a run: memory, time, exceptions, numbers that are none, a device that is gone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.command import SHORT, main
from support.faulty import SMALL, Faulty, with_session
from support.jobs import make_job, records_of
from support.tiny import Broken, prompt_ids, tiny_model

from kvbench.engine import generate as generation
from kvbench.engine.faults import is_out_of_memory, pick, release_frames
from kvbench.engine.fork import Fork
from kvbench.engine.generate import run_conversations, run_forks
from kvbench.engine.limits import time_limit
from kvbench.engine.loading import ModelError
from kvbench.engine.stopping import Stopping
from kvbench.kv import BudgetExceeded, CompressedKV, KVError, LayerKV
from kvbench.methods import build_method
from kvbench.run import attempts, runner
from kvbench.run.attempts import DeviceLost, outcomes_of
from kvbench.run.plan import Methods, Outcome, TaskPlan, Unit, status_of
from kvbench.run.runner import run_job


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
    assert status_of(error) == status


def test_a_real_allocation_that_no_machine_can_give_is_oom() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)


def test_a_unit_out_of_memory_runs_its_methods_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []

    def tight(model: Any, prompts: Any, **named: Any) -> Any:
        (prompt,) = prompts
        together.append(len(prompt.methods))
        if prompt.example_id == "e1" and len(prompt.methods) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return run_conversations(model, prompts, **named)

    monkeypatch.setattr("kvbench.run.plan.run_conversations", tight)
    result = run_job(make_job(tmp_path))
    assert together == [3, 3, 1, 1, 1, 3, 3]
    assert (result.failed, result.written) == (0, 12)
    found = records_of(result)
    for records in found.values():
        assert [r.pop("retried", None) for r in records] == [None, True, None, None]
    monkeypatch.undo()
    assert found == records_of(run_job(make_job(tmp_path / "undisturbed")))


def test_a_method_out_of_memory_is_tried_again_alone_and_marked(tmp_path: Path) -> None:
    calls: list[str] = []

    def greedy(layer: LayerKV) -> None:
        calls.append("greedy")
        raise MemoryError

    def sociable(layer: LayerKV) -> None:
        calls.append("shy")
        if calls.count("shy") == 1:
            raise MemoryError

    methods = {
        "greedy": Faulty(fault=greedy),
        "shy": Faulty(fault=sociable),
        "snapkv": build_method("snapkv"),
    }
    result = run_job(make_job(tmp_path, methods, limit=1))
    records = {label: rows[0] for label, rows in records_of(result).items()}
    assert {label: r["status"] for label, r in records.items()} == {
        "greedy": "oom",
        "shy": "ok",
        "snapkv": "ok",
    }
    assert calls.count("greedy") == 2
    assert (records["greedy"]["error"], records["greedy"]["retried"]) == ("MemoryError", True)
    assert records["shy"]["retried"]
    assert "retried" not in records["snapkv"]


def test_an_exception_in_one_method_of_a_probe_leaves_the_others(tmp_path: Path) -> None:
    class Probe:
        """Yields in turn, as the probes do, and knows nothing of failures."""

        def meta(self) -> dict[str, Any]:
            return {"version": 1, "subject": "nothing"}

        def units(self, session: Any, methods: Methods) -> list[Unit]:
            return [Unit(f"u{i}", (f"u{i}a", f"u{i}b"), i) for i in range(3)]

        def run(self, unit: Unit, methods: Methods, session: Any) -> Iterator[Outcome]:
            for label in methods:
                for record_id in unit.record_ids:
                    if label == "bad" and unit.payload == 1:
                        raise ZeroDivisionError("nothing to divide by")
                    yield Outcome(label, record_id, {"score": 1.0})

    labels = ("a", "bad", "z")
    methods = {label: build_method("exact") for label in labels}
    result = run_job(make_job(tmp_path, methods, plan=Probe()))
    records = records_of(result)
    assert [r["status"] for r in records["bad"]] == ["ok", "ok", "error", "error", "ok", "ok"]
    assert records["bad"][2]["error"] == "ZeroDivisionError: nothing to divide by"
    for label in ("a", "z"):
        assert [r["status"] for r in records[label]] == ["ok"] * 6
        assert [r["example_id"] for r in records[label]] == [
            "u0a",
            "u0b",
            "u1a",
            "u1b",
            "u2a",
            "u2b",
        ]
    assert result.failed == 2


def test_what_a_failed_method_held_is_given_back(tmp_path: Path) -> None:
    forks: list[Fork] = []

    class Watching(Fork):
        def fail(self, failure: Exception) -> None:
            super().fail(failure)
            forks.append(self)

    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "Fork", Watching)
        run_forks(
            model, prompt_ids(60), [], {"broken": (Broken(), SMALL)}, Stopping(2),
            seed=0, example_id="x",
        )  # fmt: skip
    (fork,) = forks
    assert fork.layers == {}
    trace = fork.failure.__traceback__ if fork.failure else None
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    inner = next(f for f in frames if f.f_code.co_name == "compress")
    assert inner.f_locals == {}


def test_frames_of_causes_are_released_too() -> None:
    def inner() -> None:
        held = torch.zeros(3)
        raise ValueError(str(held.shape))

    def outer() -> None:
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("outer") from error

    with pytest.raises(RuntimeError) as caught:
        outer()
    release_frames(caught.value)
    cause = caught.value.__cause__
    assert cause is not None
    assert cause.__traceback__ is not None
    assert cause.__traceback__.tb_next is not None
    assert cause.__traceback__.tb_next.tb_frame.f_locals == {}


def test_pick() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [[1.0, 3.0, 2.0], [1.0, nan, 2.0], [inf, 0.0, 1.0], [-inf, 1.0, 0.0], [-inf, -inf, -inf]]
    )
    tokens, finite = pick(logits).tolist()
    assert finite == [1, 0, 0, 1, 0]
    assert (tokens[0], tokens[3]) == (1, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_keys_that_a_method_broke_are_found_in_the_logits_of_its_row(
    tmp_path: Path, bad: float
) -> None:
    def broken_keys(layer: LayerKV) -> LayerKV:
        values = layer.values.clone()
        values[..., -1, :] = bad
        return replace(layer, values=values)

    methods = {"bad": Faulty(fault=broken_keys), "snapkv": build_method("snapkv")}
    result = run_job(make_job(tmp_path, methods, limit=2))
    records = records_of(result)
    for record in records["bad"]:
        assert record["status"] == "error"
        # the first new token comes from the exact prefill, so the second is the first to suffer
        assert record["error"] == "NonFiniteLogits: non-finite logits at new token 2"
        assert (record["score"], record["prediction"], record["new_tokens"]) == (None, None, 1)
    alone = run_job(make_job(tmp_path / "alone", {"snapkv": methods["snapkv"]}, limit=2))
    assert records["snapkv"] == records_of(alone)["snapkv"]


@pytest.mark.parametrize(("compress_after", "token"), [("prompt", 1), ("context", 1)])
def test_a_model_whose_logits_are_not_finite(
    tmp_path: Path, compress_after: str, token: int
) -> None:
    job = make_job(tmp_path, compress_after=compress_after, limit=1)
    with torch.no_grad():
        job.session.model.lm_head.weight[5] = float("nan")
    result = run_job(job)
    assert result.failed == 3
    for records in records_of(result).values():
        assert records[0]["error"] == f"NonFiniteLogits: non-finite logits at new token {token}"


def hang(_layer: LayerKV) -> None:
    time.sleep(60)


def test_a_method_that_hangs_times_out_and_the_others_end_well(tmp_path: Path) -> None:
    methods = {"hung": Faulty(fault=hang), "snapkv": build_method("snapkv")}
    job = with_session(make_job(tmp_path, methods, limit=1), example_timeout=1.0)
    begun = time.monotonic()
    result = run_job(job)
    assert time.monotonic() - begun < 20
    records = {label: rows[0] for label, rows in records_of(result).items()}
    assert records["hung"]["status"] == "timeout"
    assert records["hung"]["error"] == "TimeoutError: the example took more than 1 s"
    assert records["snapkv"]["status"] == "ok"


def test_a_prefill_that_hangs_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = with_session(
        make_job(tmp_path, {"exact": build_method("exact")}, limit=2), example_timeout=1.0
    )
    real = TaskPlan.run

    def run(self: TaskPlan, unit: Unit, methods: Methods, session: Any) -> Iterator[Outcome]:
        if unit.id == "e0":
            while True:  # a loop that never sleeps is interrupted as well
                pass
        yield from real(self, unit, methods, session)

    monkeypatch.setattr(TaskPlan, "run", run)
    result = run_job(job)
    assert [r["status"] for r in records_of(result)["exact"]] == ["timeout", "ok"]


def test_loading_the_model_is_not_the_first_example(tmp_path: Path) -> None:
    job = with_session(
        make_job(tmp_path, {"exact": build_method("exact")}, limit=1), example_timeout=0.5
    )
    model = job.session.__dict__.pop("model")

    def load(*_: Any, **__: Any) -> Any:
        time.sleep(2.0)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.run.session.load_model", load)
        result = run_job(job)
    assert result.failed == 0


def test_a_model_is_loaded_when_something_is_to_be_run_and_before_any_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(spec: Any, **_: Any) -> None:
        raise ModelError("model 'none' cannot be loaded")

    monkeypatch.setattr("kvbench.run.session.load_model", refuse)
    run_job(make_job(tmp_path))
    again = make_job(tmp_path)
    del again.session.__dict__["model"]
    assert run_job(again).written == 0
    with pytest.raises(ModelError):
        run_job(replace(again, retry_failed=True))
    with pytest.raises(ModelError):
        run_job(replace(again, results_dir=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_time_limit_needs_the_main_thread(tmp_path: Path) -> None:
    job = with_session(make_job(tmp_path), example_timeout=5.0)
    said: list[str] = []

    def work() -> None:
        try:
            run_job(job)
        except KVError as error:
            said.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == ["example_timeout is 5.0; allowed outside the main thread: null"]


def test_an_alarm_that_is_swallowed_comes_again() -> None:
    begun = time.monotonic()
    caught = []

    def stubborn() -> None:
        try:
            time.sleep(30)
        except TimeoutError as error:
            caught.append(error)
        time.sleep(30)

    with pytest.raises(TimeoutError), time_limit(0.01, lambda: None):
        stubborn()
    assert len(caught) == 1
    assert time.monotonic() - begun < 10


HANGS_IN_C = """
import ctypes, sys
from kvbench.engine import limits as interrupts
interrupts.HUNG_AFTER = 0.5
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
def hung():
    print("saved", flush=True)
with interrupts.time_limit(0.1, hung):
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # waits for itself, deaf to signals
"""


def test_code_that_hears_no_alarm_ends_the_process_after_saving() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS_IN_C], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "saved\n", "")


def test_a_hang_saves_what_the_unit_has_and_what_it_owes(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Outcome] = []

    class Hangs:
        def run(self, unit: Unit, methods: Methods, session: Any) -> Iterator[Outcome]:
            yield Outcome("a", "x", {"status": "ok", "score": 1.0})
            limits[0]()
            yield Outcome("b", "x", {"status": "ok"})

    limits: list[Callable[[], None]] = []

    def remember(seconds: float | None, on_hang: Callable[[], None]) -> Any:
        limits.append(on_hang)
        return time_limit(None, on_hang)

    monkeypatch.setattr(attempts, "time_limit", remember)
    session: Any = SimpleNamespace(example_timeout=3.0, device=torch.device("cpu"))
    plan: Any = Hangs()
    methods: Any = {"a": None, "b": None}
    outcomes_of(plan, Unit("x", ("x",), None), methods, session, saved.extend)
    assert [(o.method, o.fields.get("status")) for o in saved] == [("a", "ok"), ("b", "timeout")]
    assert saved[1].fields["error"] == "hung: no answer long after example_timeout=3"


def test_a_lost_device_ends_the_job_and_the_next_start_goes_on_after_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def illegal(layer: LayerKV) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    methods = {"bad": Faulty(fault=illegal), "snapkv": build_method("snapkv")}
    before = iter([True])
    with monkeypatch.context() as patch:
        for module in (attempts, runner):
            patch.setattr(module, "device_is_usable", lambda device: next(before, False))
        with pytest.raises(DeviceLost, match="answers nothing any more after example 'e0'"):
            run_job(make_job(tmp_path, methods))
    result = run_job(make_job(tmp_path, {**methods, "bad": build_method("snapkv")}))
    records = records_of(result)
    assert [r["status"] for r in records["bad"]] == ["error", "ok", "ok", "ok"]
    assert [r["status"] for r in records["snapkv"]] == ["ok"] * 4
    assert records["bad"][0]["error"].startswith("RuntimeError: CUDA error: an illegal memory")


def test_the_last_table_counts_every_status_and_the_exit_status_is_1(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults of every kind in one job of the command line."""
    monkeypatch.chdir(tmp_path)
    from kvbench.methods.snapkv import SnapKV

    out_of, slow = [MemoryError()] * 2, [TimeoutError("slow")] * 2  # these are tried once more
    faults = iter([*out_of, ValueError("no"), *slow, BudgetExceeded("snapkv", 0, 9, 10)])
    real = SnapKV.compress

    def compress(self: Any, layer: LayerKV, *rest: Any) -> CompressedKV:
        if layer.layer_index == 0:
            failure = next(faults, None)
            if failure is not None:
                raise failure
        return real(self, layer, *rest)

    monkeypatch.setattr(SnapKV, "compress", compress)
    words = [*SHORT, "task.num_examples=6"]
    words.remove("task.num_examples=2")
    status, out, err = main(capsys, *words)
    assert status == 1, err
    assert "Traceback" not in err
    (file,) = tmp_path.glob("runs/**/snapkv-*/records.jsonl")
    found = [json.loads(line)["status"] for line in file.read_text().splitlines()]
    assert found == ["oom", "error", "timeout", "over_budget", "ok", "ok"]
    for word in ("2/6", "1 error", "1 oom", "over_budget, 1 timeout"):  # of a narrow column
        assert word in out
    table = tmp_path / "runs/default/tables/longeval_lines-tiny_random.csv"
    assert '2,6,"1 error, 1 oom, 1 over_budget, 1 timeout"' in table.read_text()
    page = (tmp_path / "runs/default/report.html").read_text()
    assert "1 error, 1 oom, 1 over_budget, 1 timeout" in page
