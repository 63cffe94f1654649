"""Sweeps: a job that fails leaves the others alone, workers share a queue, the end says it all."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.command import main
from support.workers import SMALL, TINY, records, start, stop_all, wait_for

from kvbench.cli import slurm
from kvbench.cli.jobs import FAILED, USAGE, JobOutcome, Jobs, devices_of, names
from kvbench.errors import LogLine, UserError
from kvbench.run.termination import Terminated


@pytest.fixture(autouse=True)
def _one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_job_that_fails_leaves_the_others_alone(capsys: Any, tmp_path: Path) -> None:
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


def test_the_exit_status_and_the_names_of_a_sweeps_jobs() -> None:
    cases = {(0, 0): 0, (0, FAILED): FAILED, (USAGE, 0): USAGE, (USAGE, FAILED, 0): FAILED}
    for statuses, status in cases.items():
        jobs = Jobs(["kvbench"])
        jobs.outcomes += [JobOutcome(status=one) for one in statuses]
        assert jobs.status == status
    sweep = [["limit=2", "task=a", "seed=0"], ["limit=2", "task=b", "seed=0"]]
    assert names(sweep) == ["task=a", "task=b"]
    assert names([["limit=2"], ["limit=2"]]) == ["job 1", "job 2"]


def test_shards_and_workers_make_the_same_records(capsys: Any, tmp_path: Path) -> None:
    once, shards, workers = (tmp_path / name for name in ("once", "shards", "workers"))
    assert main(capsys, *TINY, f"results_dir={once}")[0] == 0
    more = {shards: ["shards=2"], workers: ["launcher=gpus", "launcher.workers=2"]}
    for folder, words in more.items():
        status, out, err = main(capsys, *TINY, f"results_dir={folder}", *words)
        assert status == 0, err
        assert "2 jobs, all well" in out
        assert out.count("page: ") == 1
        assert not list(folder.rglob("multirun.yaml"))
        assert records(folder) == records(once)
        manifest = json.loads(next(folder.rglob("manifest.json")).read_text())
        typed = f"results_dir={folder} {' '.join(words)}"
        assert manifest["command"].endswith(typed), "what the user typed"
    assert err.count(" done: shard=") == 2
    check_nobody_else_reads(workers)


def check_nobody_else_reads(results: Path) -> None:
    """What workers print may hold what is secret."""
    (logs,) = results.glob("*/.workers/*")
    assert logs.stat().st_mode & 0o077 == 0


def test_without_slurm_launcher_slurm_says_so(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = main(capsys, *SMALL, "launcher=slurm", f"results_dir={tmp_path / 'r'}")
    assert status == USAGE
    assert err == (
        'kvbench: launcher=slurm: Could not detect "srun", are you indeed on a slurm cluster?; '
        "allowed: a machine with sbatch and srun\n"
    )


@pytest.mark.parametrize("fault", [SystemExit(-1), RuntimeError("too\nmany")])
def test_the_end_of_a_jobs_time_is_no_failure_of_an_example(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submitits(number: int, frame: Any) -> None:
        raise fault

    before = signal.signal(signal.SIGUSR2, submitits)
    monkeypatch.setattr(slurm, "work", lambda *_: signal.raise_signal(signal.SIGUSR2))
    try:
        with pytest.raises(Terminated):
            slurm.Work()("outcome", "order")
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_verbose_logs_show_no_secrets(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "planted-1234")
    status, _, err = main(
        capsys, *TINY[:-1], "-m", "-v", "-v", "task.num_examples=1,2", f"results_dir={tmp_path}",
        "differs=[planted-1234]",
    )  # fmt: skip
    assert status == 0, err
    assert "differs=[***" in err, "Hydra says what a job is asked for"
    assert "DEBUG: " in err
    assert "planted-1234" not in err
    error = ValueError("password=planted-1234")
    logged = logging.LogRecord("x", 20, "", 1, "%s", ("planted-1234",), (ValueError, error, None))
    line = LogLine("%(message)s").format(logged)
    assert "ValueError: password=***" in line
    assert "planted-1234" not in line


def test_workers_share_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(workers: int | None, device: str = "auto", each: int = 1) -> list[str]:
        return devices_of({"workers": workers, "gpus_per_worker": each}, device)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert given(None) == ["0", "1", "2"]
    assert given(4, "cuda") == ["0", "1", "2", "0"]
    assert given(2, "cpu") == ["", ""]
    assert given(None, each=2) == ["0,1"]
    assert given(2, each=3) == ["0,1,2", "0,1,2"]
    with pytest.raises(UserError, match="finds 3 GPU, and gpus_per_worker is 4"):
        given(None, each=4)
    # as CUDA counts them: those before the first that is not there, and one MIG instance
    for visible, count, devices in (
        ("4,GPU-5ebe9f43,7", 3, ["4", "GPU-5ebe9f43", "7"]),
        (" 0, 2", 2, ["0", "2"]),
        ("0,-1,2", 1, ["0"]),
        ("MIG-1f2b,MIG-77aa", 1, ["MIG-1f2b", "MIG-77aa"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        assert given(None) == devices
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for workers, device in ((None, "auto"), (2, "cuda")):
        with pytest.raises(UserError, match="finds no GPU"):
            given(workers, device)


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


@pytest.mark.slow
def test_one_of_two_workers_is_killed_and_the_rest_goes_on(tmp_path: Path) -> None:
    many = [*SMALL[:-1], "task.num_examples=36"]
    alone = start(*many, f"results_dir={tmp_path / 'alone'}")
    assert alone.wait() == 0
    command = [*many, "launcher=gpus", "launcher.workers=2", "shards=3"]
    command += [f"results_dir={tmp_path / 'split'}"]
    first = start(*command)
    first_two = [("longeval_lines", "1of3"), ("longeval_lines", "2of3")]
    stopped: dict[Any, int] = {}
    wait_for(lambda: stop_all(tmp_path / "split", first_two, stopped), first)
    assert sorted(children(first.pid)) == sorted(stopped.values()), "one process per worker"
    os.kill(stopped[first_two[0]], signal.SIGKILL)
    os.kill(stopped[first_two[1]], signal.SIGCONT)
    check_one_failed(first)
    before = sum(map(len, records(tmp_path / "split").values()))
    assert 48 <= before < 72, "two of three shards are there"
    check_all_well(start(*command))
    assert records(tmp_path / "split") == records(tmp_path / "alone")


def check_one_failed(command: subprocess.Popen[str]) -> None:
    """The command ends with one line about the job whose worker was killed."""
    out, err = command.communicate()
    assert command.returncode == FAILED
    assert "Traceback" not in err
    assert err.count("ended without a result (exit status -9)") == 1
    assert "3 jobs, 1 of them failed" in out


def check_all_well(command: subprocess.Popen[str]) -> None:
    """The command ends with the tables of all shards."""
    out, err = command.communicate()
    assert command.returncode == 0, err
    assert "3 jobs, all well" in out
    assert "longeval_lines on recall_mini at rate" in out


@pytest.mark.slow
@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_command(tmp_path: Path, signal_: signal.Signals) -> None:
    command = [*SMALL[:-1], "task.num_examples=200", "launcher=gpus", "launcher.workers=2"]
    parent = start(*command, f"results_dir={tmp_path}", start_new_session=True)
    wait_for(lambda: len(list(tmp_path.rglob("records-*.jsonl"))) >= 4, parent)
    workers = children(parent.pid)
    assert len(workers) == 2
    parent.send_signal(signal_)
    _, err = parent.communicate()
    if signal_ == signal.SIGKILL:
        assert parent.returncode == -signal_
    else:
        assert parent.returncode == 128 + signal_
        assert "the same command goes on from there" in err
    assert "Traceback" not in err
    end = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
