"""Sweeps: a job that fails leaves the others alone, workers share a queue, the end says it all."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command import main
from support.workers import SMALL, TINY, records, start, stop_all, wait_for

from kvbench.cli.jobs import FAILED, USAGE, JobOutcome, Jobs, names
from kvbench.cli.launch import queue as slurm
from kvbench.cli.launch.devices import DeviceError, see_only, worker_devices
from kvbench.cli.launch.queue import JobState
from kvbench.errors import LogLine
from kvbench.run.termination import Terminated, asks_to_stop


@pytest.fixture(autouse=True)
def _one_thread_each(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# -- in one process ------------------------------------------------------------------------------


def test_a_job_that_fails_leaves_the_others_alone(capsys, tmp_path):
    # what is wrong shows only when the model is loaded: the folder is there, its weights are not
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama"}')
    status, out, err = main(
        capsys, "-m", "model=hf", f"model.path={broken},asset:recall_mini", "logger=none",
        "method=[exact]", "task.num_lines=[10]", "task.num_examples=1", "device=cpu",
        f"results_dir={tmp_path / 'results'}",
    )  # fmt: skip
    assert status == USAGE, err
    assert "cannot be loaded" in err
    assert "Traceback" not in err
    assert "2 jobs, 1 of them failed" in out
    assert [len(rows) for rows in records(tmp_path / "results").values()] == [1]
    assert "page: " in out


def test_the_exit_status_of_a_sweep():
    jobs = Jobs(["kvbench"], sweep=True)
    for outcomes, status in (
        ([0, 0], 0),
        ([0, FAILED], FAILED),
        ([USAGE, 0], USAGE),
        ([USAGE, FAILED, 0], FAILED),
    ):
        jobs.outcomes = [JobOutcome(status=one) for one in outcomes]
        assert jobs.status == status


def test_jobs_are_called_by_what_sets_them_apart():
    sweep = [["limit=2", "task=a", "seed=0"], ["limit=2", "task=b", "seed=0"]]
    assert names(sweep) == ["task=a", "task=b"]
    assert names([["limit=2"]]) == ["limit=2"]
    assert names([["limit=2"], ["limit=2"]]) == ["job 1", "job 2"]


def test_shards_split_every_job_of_a_sweep(capsys, tmp_path):
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert main(capsys, *TINY, f"results_dir={once}")[0] == 0
    status, out, err = main(capsys, *TINY, f"results_dir={twice}", "shards=2")
    assert status == 0, err
    assert "2 jobs, all well" in out
    assert records(twice) == records(once)
    manifest = json.loads(next(twice.rglob("manifest.json")).read_text())
    assert manifest["command"].endswith(f"results_dir={twice} shards=2"), "what the user typed"
    status, out, _ = main(
        capsys, *TINY[:-1], "-m", "task.num_examples=5,4", f"results_dir={tmp_path / 'dry'}", "shards=2",
        "dry_run=true",
    )  # fmt: skip
    assert status == 0
    assert out.count("dry run, nothing written") == 2
    assert "2 jobs, each in 2 shards: 4 jobs; launcher=local" in out
    assert not (tmp_path / "dry").exists()


def test_without_slurm_launcher_slurm_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = main(capsys, *SMALL, "launcher=slurm", f"results_dir={tmp_path / 'r'}")
    assert status == USAGE
    assert err == (
        'kvbench: launcher=slurm: Could not detect "srun", are you indeed on a slurm cluster?; '
        "allowed: a machine with sbatch and srun\n"
    )


def test_verbose_logs_show_no_secrets(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "planted-1234")
    status, _, err = main(
        capsys, *TINY[:-1], "-m", "-vv", "task.num_examples=1,2", f"results_dir={tmp_path}",
        "experiment_name=planted-1234",
    )  # fmt: skip
    assert status == 0, err
    assert "experiment_name=***" in err, "Hydra says what a job is asked for"
    assert "DEBUG: " in err
    assert "planted-1234" not in err
    logged = logging.LogRecord("x", logging.INFO, "", 1, "%s", ("planted-1234",), None)
    try:
        raise ValueError("password=planted-1234")
    except ValueError:
        logged.exc_info = sys.exc_info()
    line = LogLine("%(message)s").format(logged)
    assert "ValueError: password=***" in line
    assert "planted-1234" not in line


# -- Slurm ---------------------------------------------------------------------------------------


def test_why_jobs_wait_is_one_line():
    jobs = [JobState("RUNNING", "None"), JobState("COMPLETED"), JobState("PENDING", "Resources")]
    assert slurm.describe_waiting(jobs) == "1 run, 1 wait: Resources"
    jobs += [JobState("PENDING", "launch failed requeued held"), JobState("PENDING", "Resources")]
    assert slurm.describe_waiting(jobs) == "1 run, 3 wait: Resources, launch failed requeued held"
    assert slurm.describe_waiting([JobState("PENDING", "None"), JobState("RUNNING")]) is None
    assert not JobState("PREEMPTED").alive, "one that goes back into the queue is pending"


def test_results_that_show_late_are_waited_for(monkeypatch, tmp_path):
    """Slurm sees the end of a job before a network file system shows what it wrote."""
    from kvbench.cli.launch import slurm as launchers

    now, said = 100.0, {}
    monkeypatch.setattr(launchers.time, "monotonic", lambda: now)
    monkeypatch.setattr(launchers.queue, "states", lambda arrays: said)
    launcher = object.__new__(launchers.SlurmLauncher)
    launcher.poll_s, launcher._ended_since, launcher._waited = 2.0, {}, None
    paths = SimpleNamespace(folder=tmp_path)
    jobs = {i: SimpleNamespace(job_id=f"7_{i}", paths=paths) for i in range(4)}

    def looks(seconds: float) -> dict[int, str]:
        nonlocal now
        now += seconds
        return launcher.ended(jobs)

    said = {f"7_{i}": JobState("RUNNING") for i in range(4)}
    assert looks(1000.0) == {}
    said = {
        "7_0": JobState("COMPLETED"),  # wrote a result somewhere
        "7_1": JobState("FAILED"),
        "7_2": JobState("PREEMPTED"),
    }  # 7_3: Slurm has forgotten it
    assert looks(0.0) == looks(3.9) == {}
    assert looks(0.1) == {1: "FAILED", 2: "PREEMPTED"}
    said["7_2"] = JobState("PENDING")  # back in the queue after all
    assert looks(0.0) == {1: "FAILED"}
    said["7_2"] = JobState("TIMEOUT")
    assert looks(0.0) == {1: "FAILED"}, "it ended anew"
    assert looks(launchers.LATE - 4.1) == {1: "FAILED", 2: "TIMEOUT"}
    assert looks(0.1) == {0: "COMPLETED", 1: "FAILED", 2: "TIMEOUT", 3: "gone"}
    said = None  # Slurm does not answer
    assert looks(1000.0) == {}


@pytest.mark.parametrize(
    ("fault", "raised"),
    [(SystemExit(-1), Terminated), (RuntimeError("too\nmany"), slurm.NotRequeued)],
)
def test_the_end_of_a_jobs_time_is_no_failure_of_an_example(fault, raised):
    def submitits(number: int, frame: Any) -> None:
        raise fault

    with pytest.raises(raised) as stop:
        slurm.stop_instead(submitits)(signal.SIGUSR2, None)
    assert asks_to_stop(stop.value)
    assert getattr(stop.value, "why", "out of time: too") == "out of time: too"


# -- devices -------------------------------------------------------------------------------------


def test_workers_share_the_visible_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert worker_devices(None, "auto") == ["0", "1", "2"]
    assert worker_devices(2, "cuda") == ["0", "1"]
    assert worker_devices(4, "cuda") == ["0", "1", "2", "0"]
    assert worker_devices(2, "cpu") == ["", ""]
    assert worker_devices(None, "auto", 2) == ["0,1"]
    assert worker_devices(2, "auto", 3) == ["0,1,2", "0,1,2"]
    with pytest.raises(DeviceError, match=r"gpus_per_worker is 4; this machine has 3 GPUs"):
        worker_devices(None, "auto", 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5ebe9f43,7")
    assert worker_devices(None, "auto") == ["4", "GPU-5ebe9f43", "7"]
    # as CUDA counts them: those before the first that is not there, and one MIG instance
    for visible, count, devices in (
        (" 0, 2", 2, ["0", "2"]),
        ("0,-1,2", 1, ["0"]),
        ("2,1", 2, ["2", "1"]),
        ("MIG-1f2b,MIG-77aa", 1, ["MIG-1f2b", "MIG-77aa"]),
        ("GPU-5ebe9f43", 1, ["GPU-5ebe9f43"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        assert worker_devices(None, "auto") == devices
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for visible in ("", "-1", "MIG-1f2b", "GPU-5ebe9f43"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(DeviceError, match="finds no GPU"):
            worker_devices(None, "auto")
    for workers, device in ((None, "auto"), (2, "cuda")):
        with pytest.raises(DeviceError, match="finds no GPU"):
            worker_devices(workers, device)
    see_only("7", workers=1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


# -- other processes -----------------------------------------------------------------------------


def workers_of(parent: int) -> list[int]:
    """Processes that run jobs for a launcher: its children's children."""

    def children(pid: int) -> list[int]:
        path = Path(f"/proc/{pid}/task/{pid}/children")
        return [int(child) for child in path.read_text().split()] if path.exists() else []

    return [worker for controller in children(parent) for worker in children(controller)]


@pytest.mark.slow
def test_one_of_two_workers_is_killed_and_the_rest_goes_on(tmp_path):
    many = [*SMALL[:-1], "task.num_examples=36"]
    alone = start(*many, f"results_dir={tmp_path / 'alone'}")
    assert alone.wait() == 0
    command = [*many, "launcher=gpus", "launcher.workers=2", "shards=3"]
    command += [f"results_dir={tmp_path / 'split'}"]
    first = start(*command)
    first_two = [("longeval_lines", "1of3"), ("longeval_lines", "2of3")]
    stopped: dict[Any, int] = {}
    wait_for(lambda: stop_all(tmp_path / "split", first_two, stopped), first)
    assert sorted(workers_of(first.pid)) == sorted(stopped.values()), "one process per worker"
    os.kill(stopped[first_two[0]], signal.SIGKILL)
    os.kill(stopped[first_two[1]], signal.SIGCONT)
    out, err = first.communicate()
    assert first.returncode == FAILED
    assert "Traceback" not in err
    assert err.count("ended without a result (killed)") == 1
    assert "3 jobs, 1 of them failed" in out
    before = sum(map(len, records(tmp_path / "split").values()))
    assert 48 <= before < 72, "two of three shards are there"
    again = start(*command)
    out, err = again.communicate()
    assert again.returncode == 0, err
    assert "3 jobs, all well" in out
    assert "longeval_lines on recall_mini: score" in out, "the tables are those of all shards"
    assert out.count("36/36") == 2
    assert records(tmp_path / "split") == records(tmp_path / "alone")
    environment = json.loads(next((tmp_path / "split").rglob("manifest.json")).read_text())
    assert "launcher=gpus" in environment["command"], "what the user typed"


@pytest.mark.slow
@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_command(tmp_path, signal_):
    command = [*SMALL[:-1], "task.num_examples=200", "launcher=gpus", "launcher.workers=2"]
    parent = start(*command, f"results_dir={tmp_path}", start_new_session=True)
    while len(list(tmp_path.rglob("records-*.jsonl"))) < 4:
        assert parent.poll() is None
        time.sleep(0.02)
    workers = workers_of(parent.pid)
    assert len(workers) == 2
    parent.send_signal(signal_)
    _, err = parent.communicate()
    if signal_ == signal.SIGKILL:
        assert parent.returncode == -signal_
    else:
        assert parent.returncode == 128 + signal_
        assert "the same command goes on from there" in err
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("multirun.yaml"))
    for _ in range(100):
        if not any(Path(f"/proc/{worker}").exists() for worker in workers):
            break
        time.sleep(0.1)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
