"""What a method's code may do to the run it is in: raise anything, return anything, take for ever."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import SHORT, main
from support.faulty import SMALL, Faulty
from support.jobs import Echo, make_job, records_of
from support.tiny import prompt_ids, tiny_model

from kvbench.engine import limits as interrupts
from kvbench.engine import prefill
from kvbench.engine import rows as engine_rows
from kvbench.engine.faults import release_frames
from kvbench.engine.generate import Prompt, run_batch
from kvbench.engine.limits import time_limit
from kvbench.engine.stopping import Stopping
from kvbench.errors import LONGEST, one_line, presentable
from kvbench.kv import LayerKV
from kvbench.methods import build_method
from kvbench.methods.snapkv import SnapKV
from kvbench.run.runner import JobResult, run_job
from kvbench.run.termination import Terminated


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage takes longer than everything else here."""
    monkeypatch.setattr("kvbench.run.attempts.free_memory", lambda device: None)


class Mute(Exception):
    """An error that fails to tell its message."""

    def __str__(self) -> str:
        raise ValueError("nothing to say")


class Panic(BaseException):
    """No `Exception`, as panics of libraries written in Rust."""


def bottomless(layer: LayerKV) -> None:
    bottomless(layer)


def raising(error: BaseException) -> Callable[[LayerKV], None]:
    def fault(_layer: LayerKV) -> None:
        raise error

    return fault


def beside_snapkv(folder: Path, fault: Callable[[LayerKV], Any], **changes: Any) -> JobResult:
    methods = {"bad": Faulty(fault=fault), "snapkv": build_method("snapkv")}
    return run_job(make_job(folder, methods, limit=2, **changes))


def round_in_a_circle() -> Exception:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    return first


RAISED: dict[str, tuple[Callable[[LayerKV], Any], str]] = {
    "sys.exit": (raising(SystemExit(0)), "SystemExit: 0"),
    "a panic": (raising(Panic("called unwrap on None")), "Panic: called unwrap on None"),
    "a mute error": (raising(Mute()), "Mute: (its message is not to be had: ValueError)"),
    "no end": (bottomless, "RecursionError: maximum recursion depth exceeded"),
    "StopIteration": (raising(StopIteration()), "StopIteration"),
    "odd characters": (
        raising(ValueError("a\ud800b\x1b[2Jc\0\u202e\r\nd")),
        r"ValueError: a\ud800b\x1b[2Jc\x00\u202e",
    ),
    "a circle": (raising(round_in_a_circle()), "ValueError: first"),
    "many lines": (raising(ValueError("\n\nfirst\nsecond")), "ValueError: first"),
}


@pytest.mark.parametrize("kind", RAISED)
def test_whatever_a_method_raises_is_its_own_record(tmp_path: Path, kind: str) -> None:
    fault, line = RAISED[kind]
    records = records_of(beside_snapkv(tmp_path, fault))
    assert [(r["status"], r["error"]) for r in records["bad"]] == [("error", line)] * 2
    assert [r["status"] for r in records["snapkv"]] == ["ok", "ok"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Terminated()])
def test_a_wish_to_stop_is_no_failure_of_a_method(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        beside_snapkv(tmp_path, raising(error))
    assert not any(file.read_bytes() for file in tmp_path.rglob("records.jsonl"))


def test_a_message_of_megabytes_is_cut_in_records_and_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = beside_snapkv(tmp_path, raising(ValueError("begin" + "x" * 1_000_000 + "end")))
    for record in records_of(result)["bad"]:
        assert len(record["error"]) < LONGEST + 50
        assert record["error"].startswith("ValueError: beginxxx")
        assert record["error"].endswith("xxxend")
    assert all(len(entry.getMessage()) < 2 * LONGEST for entry in caplog.records)


def test_a_line_is_one_line_whatever_it_says() -> None:
    for text in ("a\nb", "a\u2028b", "\x1b]0;title\x07", "\x00", "\u202etxt"):
        assert presentable(text).isprintable()
    assert presentable("é 中文 🧪") == "é 中文 🧪"
    assert one_line(ValueError()) == "ValueError"
    assert one_line(ValueError("ValueError")) == "ValueError"


def test_a_circle_of_contexts_is_walked_once() -> None:
    release_frames(round_in_a_circle())


WRONG: dict[str, Callable[[LayerKV], LayerKV]] = {
    "one head too few": lambda kv: replace(kv, keys=kv.keys[:, :1], values=kv.values[:, :1]),
    "one and a half heads": lambda kv: replace(
        kv, keys=kv.keys.repeat(1, 2, 1, 1)[:, :3], values=kv.values.repeat(1, 2, 1, 1)[:, :3]
    ),
    "cut keys": lambda kv: replace(kv, keys=kv.keys[..., :3]),
    "more values than keys": lambda kv: replace(kv, values=kv.values.repeat(1, 1, 2, 1)),
    "a second batch": lambda kv: replace(
        kv, keys=kv.keys.repeat(2, 1, 1, 1), values=kv.values.repeat(2, 1, 1, 1)
    ),
    "another precision": lambda kv: replace(kv, keys=kv.keys.double(), values=kv.values.double()),
}


@pytest.mark.parametrize("kind", WRONG)
def test_tensors_that_do_not_fit_are_the_methods_own_record(tmp_path: Path, kind: str) -> None:
    records = records_of(beside_snapkv(tmp_path, WRONG[kind]))
    for record in records["bad"]:
        assert record["status"] == "error"
        assert "; allowed: (1, 2, " in record["error"]
    assert [r.get("retried") for r in records["snapkv"]] == [None, None], "nobody was taken along"


def test_a_method_that_returns_no_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SnapKV, "compress", lambda *_: None)
    methods = {"snapkv": build_method("snapkv"), "uniform": build_method("uniform")}
    records = records_of(run_job(make_job(tmp_path, methods, limit=1)))
    assert records["snapkv"][0]["error"] == (
        "TypeError: compress returned a NoneType; allowed: a CompressedKV"
    )
    assert records["uniform"][0]["status"] == "ok"


# Where memory runs out.


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

    real = prefill.forward_rows

    def forward(model: Any, ids: Any, positions: Any, state: Any, *rest: Any, **more: Any) -> Any:
        forks = state.forks
        if forks[0].example_id == "e1" and place == ("prefill" if ids.shape[1] > 1 else "decode"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, ids, positions, state, *rest, **more)

    monkeypatch.setattr(prefill, "forward_rows", forward)
    result = run_job(make_job(tmp_path, echo=Tight(count=3)))
    for rows in records_of(result).values():
        assert [r["status"] for r in rows] == ["ok", "oom", "ok"]
        assert [r.get("retried") for r in rows] == [None, True, None]
    assert result.failed == 3


# Numbers that are none.


@pytest.mark.parametrize("token", [1, 3])
def test_one_row_whose_logits_break_is_one_record(
    monkeypatch: pytest.MonkeyPatch, token: int
) -> None:
    """Of two prompts decoded together, one breaks at its first or third token."""
    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    methods = {name: (build_method(name), SMALL) for name in ("exact", "snapkv")}
    prompts = [
        Prompt(prompt_ids(n, seed=n), [], methods, Stopping(6), f"p{n}") for n in (60, 70, 80)
    ]
    whole = run_batch(model, prompts, seed=0)
    real = engine_rows.forward
    steps = []

    def forward(*arguments: Any) -> Any:
        logits = real(*arguments)
        steps.append(len(logits))
        if len(steps) == token - 1:  # the first new token comes from the prefill
            logits[2] = float("nan")  # exact of the second prompt
        return logits

    def first(self: Stopping, logits: Any) -> Any:
        seen.append(None)
        return logits * float("nan") if token == 1 and len(seen) == 3 else logits

    seen: list[None] = []
    monkeypatch.setattr(engine_rows, "forward", forward)
    monkeypatch.setattr(Stopping, "first", first)
    broken = run_batch(model, prompts, seed=0)
    failed = broken[1].pop("exact")
    assert str(failed.failure) == f"non-finite logits at new token {token}"
    assert failed.tokens == whole[1].pop("exact").tokens[: token - 1]
    for before, after in zip(whole, broken, strict=True):
        for label, result in after.items():
            assert result.failure is None, label
            assert result.tokens == before[label].tokens


# Time.


@pytest.mark.parametrize("where", ["over", "timer"])
def test_an_alarm_at_the_very_end_leaves_no_alarm_behind(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The limit passes while the example that kept it is being left."""

    def ring() -> None:
        os.kill(os.getpid(), signal.SIGALRM)

    class Event(threading.Event):
        def set(self) -> None:
            if not rung and where == "over" and self is events[1]:
                rung.append(True)
                ring()
            super().set()

    def event() -> Event:
        events.append(Event())
        return events[-1]

    def setitimer(which: int, seconds: float, *rest: float) -> Any:
        if seconds == 0 and where == "timer" and not rung:
            rung.append(True)
            ring()
        return real(which, seconds, *rest)

    events: list[Event] = []
    rung: list[bool] = []
    real = signal.setitimer
    before = signal.getsignal(signal.SIGALRM)
    with monkeypatch.context() as patch:
        patch.setattr(interrupts.threading, "Event", event)
        patch.setattr(signal, "setitimer", setitimer)
        try:
            with time_limit(30.0, lambda: None):
                pass
        except TimeoutError:
            assert where == "over"
    assert rung
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    for thread in threading.enumerate():
        if thread.name == "example_timeout":
            thread.join(5)
            assert not thread.is_alive()


# The command line.


def test_a_method_that_exits_is_a_failure_of_the_command(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SnapKV, "compress", lambda *_: os.sys.exit(0))  # type: ignore[attr-defined]
    status, out, err = main(capsys, *SHORT)
    assert status == 1
    assert "0/2" in out
    assert "2 error" in out
    assert "Traceback" not in err
    for name, wanted in (("exact", "ok"), ("snapkv", "error")):
        (file,) = tmp_path.glob(f"runs/**/{name}-*/records.jsonl")
        records = [json.loads(line) for line in file.open()]
        assert [record["status"] for record in records] == [wanted] * 2
        assert {record["dataset"] for record in records} == {"20 lines"}, "failed or not"


def test_what_is_logged_of_a_failure_at_length_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "Q7x" * 11)
    secret = os.environ["HF_TOKEN"]
    job = make_job(tmp_path, limit=1)

    def run(*_: Any) -> Any:
        raise ValueError(f"GET https://hub?token={secret} failed")

    monkeypatch.setattr(type(job.plan), "run", run)
    with caplog.at_level(logging.DEBUG, "kvbench"):
        run_job(job)
    assert "Traceback (most recent call last)" in caplog.text
    assert secret not in caplog.text
    assert "GET https://hub?token=*** failed" in caplog.text
