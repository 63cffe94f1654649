"""Real online runs by the real client, to a stand-in for the server on the loopback; and its faults."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.report_runs import write_demo
from support.wandb_files import isolated, offline_run, updates
from support.wandb_server import ENTITY, Fault, StandIn

from kvbench.records.read import load_runs
from kvbench.report.experiment import load_experiment
from kvbench.report.wandb import send as wandb_send
from kvbench.report.wandb.log import comparison_id, log_runs, run_id

KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    import wandb

    isolated(monkeypatch, tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    wandb.teardown()  # the client remembers its server
    yield
    wandb.teardown()


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    return write_demo(tmp_path, ("exact", "snapkv"), ("needle",))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """One run, of few records."""
    return write_demo(tmp_path, ("exact",), ("throughput",))


def key_is_nowhere(folder: Path, *texts: str) -> None:
    """The key is neither in a file below the folder nor in a text."""
    for path in folder.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
    for text in texts:
        assert KEY not in text


def test_an_online_run_arrives_whole_and_logging_again_makes_no_second_one(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = load_runs(experiment)
    (group,) = load_experiment(experiment).groups
    with StandIn() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with caplog.at_level(logging.INFO, "kvbench"):
            assert log_runs(runs, project="p") == 2
            assert log_runs(runs[:1], project="p") == 1
    expected = {run_id(run.manifest) for run in runs} | {comparison_id("demo", group)}
    assert set(server.runs) == expected
    assert server.unknown == []
    said = [r.getMessage() for r in caplog.records if r.name.startswith("kvbench")]
    assert said == [f"W&B: {n} runs sent to {server.url}/{ENTITY}/p" for n in (3, 2)]

    run = next(run for run in runs if run.manifest["method"] == "snapkv")
    got = server.runs[run_id(run.manifest)]
    assert got.complete
    assert got.start["displayName"] == "recall_mini/needle/snapkv rate 0.25/seed0"
    assert got.start["groupName"] == "demo"
    assert got.start["jobType"] == "needle"
    assert set(got.start["tags"]) == {"demo", "recall_mini", "needle", "snapkv", "rate 0.25"}
    assert got.config["config_hash"] == run.manifest["config_hash"]
    assert got.config["run"]["budget"]["rate"] == 0.25
    assert got.summary["needle/score"] == pytest.approx(run.records["score"].mean())
    assert got.summary["ratio"] == pytest.approx(run.records["ratio"].mean())
    curve = [got.history[i]["by_length/score"] for i in sorted(got.history)[1:]]
    assert curve == pytest.approx(run.records.groupby("length")["score"].mean().tolist())
    assert len(got.history) == 5
    tables = [name for name in got.files if name.startswith("media/table/predictions")]
    table = json.loads(got.files[tables[0]])
    assert len(table["data"]) == len(run.records)
    (image,) = [content for name, content in got.files.items() if name.endswith(".png")]
    assert image.startswith(b"\x89PNG")
    assert any(name.endswith(".plotly.json") for name in got.files)
    records = [a for a in server.artifacts.values() if a.name == f"records-{run_id(run.manifest)}"]
    assert records[0].committed
    assert records[0].files["records.jsonl"] == (run.folder / "records.jsonl").read_bytes()
    assert records[0].files["manifest.json"] == (run.folder / "manifest.json").read_bytes()
    key_is_nowhere(experiment, caplog.text)


@pytest.mark.parametrize("fault", ["errors", "rejects", "refused"])
def test_a_server_that_fails_costs_nothing(
    fault: Fault,
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    reason = {
        "errors": "the server {url} answers 500",
        "rejects": "the server refused them, as it does when it does not know the API key",
        "refused": "the server {url} could not be reached: Connection refused",
    }[fault]
    with StandIn(fault) as server:
        url = nobody() if fault == "refused" else server.url
        fails(small, url, reason.format(url=url), monkeypatch, caplog, capfd, seconds=20)
        assert server.runs == {}


def test_a_server_that_never_answers_is_waited_for_once(
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wandb_send, "PROBE_S", 0.5)
    with StandIn("silent") as server:
        reason = f"the server {server.url} could not be reached: no answer in 0.5 s"
        fails(small, server.url, reason, monkeypatch, caplog, capfd, seconds=10)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["dies", "slow"])
def test_a_server_that_fails_halfway_is_given_up_in_time(
    fault: Fault,
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with StandIn(fault, delay=2.0) as server:
        fails(small, server.url, "not done after 5 s", monkeypatch, caplog, capfd, seconds=25)
        server.fault = "none"  # and what was left is sent later, as the message says
        later = [sys.executable, "-m", "wandb", "sync", "wandb"]
        subprocess.run(later, cwd=small, check=True, capture_output=True)
        assert [run.complete for run in server.runs.values()] == [True]


@pytest.mark.slow
def test_a_slow_server_is_waited_for(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with StandIn("slow", delay=0.3) as server, caplog.at_level(logging.WARNING, "kvbench"):
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        log_runs(load_runs(experiment))
    assert [r for r in caplog.records if r.name.startswith("kvbench")] == []
    assert len(server.runs) == 3
    assert all(run.complete for run in server.runs.values())


@pytest.mark.slow
def test_a_job_with_a_key_and_no_server_ends_well_and_says_one_line(tmp_path: Path) -> None:
    url = nobody()
    command = [sys.executable, "-m", "kvbench", "model=tiny_random", "method=[exact]"]
    command += ["task=longeval_lines", "task.num_lines=[20]", "task.num_examples=1"]
    command += ["task.max_new_tokens=2", f"results_dir={tmp_path}/results"]
    done = subprocess.run(
        command,
        env={**os.environ, "WANDB_BASE_URL": url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    place = f"{tmp_path}/results/default/wandb"
    assert [line for line in done.stderr.splitlines() if "W&B" in line] == [
        f"WARNING: W&B: the server {url} could not be reached: Connection refused. 1 of 1 runs were"
        " not sent; they, and what this process logs from now on, are on disk. Send them later with:"
        f" wandb sync {place}"
    ]
    assert (tmp_path / "results/default/report.html").is_file()
    key_is_nowhere(tmp_path, done.stdout, done.stderr)


def fails(
    experiment: Path,
    url: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    seconds: float,
) -> None:
    """Logging to `url` ends in time, says so once, and leaves every run whole on disk."""
    monkeypatch.setenv("WANDB_BASE_URL", url)
    runs = load_runs(experiment)
    before = {path: path.read_bytes() for path in experiment.rglob("*.json*")}
    start = time.monotonic()
    with caplog.at_level(logging.INFO, "kvbench"):
        assert log_runs(runs, timeout_s=5) == 1
        assert time.monotonic() - start < seconds
        again = time.monotonic()
        assert log_runs(runs, timeout_s=5) == 1  # the next job of the same process
        assert time.monotonic() - again < 5
    place = experiment / "wandb"
    said = [r for r in caplog.records if r.name.startswith("kvbench")]
    assert [record.getMessage() for record in said] == [
        f"W&B: {reason}. 1 of 1 runs were not sent; they, and what this process logs from now on,"
        f" are on disk. Send them later with: wandb sync {place}"
    ]
    assert {path: path.read_bytes() for path in before} == before
    for run in runs:
        folder, messages = offline_run(experiment, run_id(run.manifest))
        assert updates(messages, "summary")["ratio"] == pytest.approx(run.records["ratio"].mean())
        assert list(folder.glob("files/media/table/records*.json"))
    assert capfd.readouterr() == ("", "")
    key_is_nowhere(experiment, caplog.text)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "wandb: ERROR Find detailed error logs at: x\nError: No API key configured. Log in.\n",
            "No API key configured. Log in",
        ),
        (f"wandb: ERROR the key {KEY} is old\n", "the key *** is old"),
        ("wandb: ERROR one\nwandb: ERROR two\nwandb: done\n", "two"),
        ("wandb: nothing said\n", "`wandb sync` ended with status 3"),
    ],
)
def test_what_the_client_said_is_the_reason(output: str, reason: str) -> None:
    assert wandb_send._reason(output, 3) == reason


def nobody() -> str:
    """A local address at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_without_a_key_or_when_told_so_nothing_is_sent(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(*_: object) -> None:
        raise AssertionError("sent")

    monkeypatch.setattr("kvbench.report.wandb.log.send", send)
    runs = load_runs(small)
    assert log_runs(runs, mode="offline") == 1
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert log_runs(runs) == 1
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY")
    assert log_runs(runs) == 1
