"""Sweeps: the other jobs go on when one fails, workers share a queue, and the summary names all jobs."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.command import main
from support.workers import SMALL, TINY, records, start, stop_all, wait_for

from kvbench.cli import slurm
from kvbench.cli.jobs import FAILED, USAGE, GpuLauncher, JobOutcome, Jobs, devices_of, names
from kvbench.errors import LogLine, UserError
from kvbench.run.termination import Terminated


@pytest.fixture(autouse=True)
def _one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_job_that_fails_leaves_the_others_alone(capsys: Any, tmp_path: Path) -> None:
    # what is wrong shows only when the model is loaded: the folder is there, its files are not
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama"}')
    status, out, err = main(
        capsys, "-m", "model=hf", f"model.path={broken},asset:recall_mini", "logger=none",
        "method=[exact]", "task.num_lines=[10]", "task.num_examples=1", "device=cpu",
        f"results_dir={tmp_path / 'results'}",
    )  # fmt: skip
    assert status == USAGE, err
    assert "broken' has no tokenizer; allowed: model.tokenizer=" in err
    assert "Traceback" not in err
    assert "2 jobs, 1 of them failed" in out
    assert [len(rows) for rows in records(tmp_path / "results").values()] == [1]
    assert "page: " in out


def test_the_names_of_a_sweeps_jobs_and_its_exit_status() -> None:
    sweep = [["limit=2", "task=a", "seed=0"], ["limit=2", "task=b", "seed=0"]]
    assert names(sweep) == ["task=a", "task=b"]
    assert names([["limit=2"], ["limit=2"]]) == ["job 1", "job 2"]
    for *statuses, status in (
        [0, 0, 0],
        [0, FAILED, FAILED],
        [USAGE, 0, USAGE],
        [USAGE, FAILED, FAILED],
    ):
        jobs = Jobs(["kvbench"])
        jobs.outcomes += [JobOutcome(status=job_status) for job_status in statuses]
        assert jobs.status == status


def test_shards_and_a_worker_make_the_same_records(capsys: Any, tmp_path: Path) -> None:
    shards, worker = tmp_path / "shards", tmp_path / "worker"
    for folder, words in (
        (shards, ["shards=2"]),
        (worker, ["launcher=gpus", "launcher.workers=1"]),
    ):
        status, out, err = main(capsys, *TINY, f"results_dir={folder}", *words)
        assert status == 0, err
        assert ("2 jobs, all well" in out) is (folder == shards)
        assert out.count(": score, %") == 1, "the table"
        assert out.count("page: ") == 1
        manifest = json.loads(next(folder.rglob("manifest.json")).read_text())
        assert manifest["command"].endswith(f"results_dir={folder} {' '.join(words)}")
        assert not list(folder.rglob("multirun.yaml")), "Hydra leaves no file of its own"
    assert [len(rows) for rows in records(shards).values()] == [5]
    assert records(shards) == records(worker)
    (logs,) = worker.glob("*/.workers/*")
    assert logs.stat().st_mode & 0o077 == 0, "logs may hold secrets"


def test_workers_share_a_queue_and_each_sees_its_own_gpu(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that are refused before torch is imported name the variable in their refusal; one whose
    process dies is named, too."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = {"launcher": {"workers": None, "gpus_per_worker": 1}, "device": "auto"}
    config |= {"results_dir": str(tmp_path)}
    config |= {"hydra": {"sweep": {"dir": str(tmp_path / "logs")}, "overrides": {"hydra": []}}}
    jobs, launcher = Jobs(["kvbench"]), GpuLauncher()
    launcher.setup(hydra_context=None, task_function=jobs, config=OmegaConf.create(config))
    shown = "limit=${oc.env:CUDA_VISIBLE_DEVICES}"
    launcher.launch([[shown, "seed=0"], [shown, "seed=1"], [shown, "seed=2"], ["seed=["]], 0)
    *refused, died = jobs.outcomes
    gpus = [re.findall(r"limit is '(\S+)'; allowed: ", job.summary) for job in refused]
    assert sorted(gpus[:2]) == [["GPU-a"], ["GPU-b"]]
    assert gpus[2] in gpus[:2]
    assert [job.status for job in jobs.outcomes] == [USAGE, USAGE, USAGE, FAILED]
    log = tmp_path / "logs" / "3.log"
    assert died.summary == f"job 3 ended without a result (exit status 1); log: {log}"
    assert "no viable alternative at input" in log.read_text()
    assert capsys.readouterr().err.count(" done: ") == 4


def test_without_slurm_launcher_slurm_says_so(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = main(capsys, *SMALL, "launcher=slurm", f"results_dir={tmp_path / 'r'}")
    assert status == USAGE
    assert err == (
        'kvbench: launcher=slurm: Could not detect "srun", are you indeed on a slurm cluster?; '
        "use a machine with sbatch and srun\n"
    )


@pytest.mark.parametrize("fault", [SystemExit(-1), RuntimeError("too\nmany")])
def test_the_end_of_a_jobs_time_is_no_failure_of_an_example(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requeue(number: int, frame: Any) -> None:
        raise fault

    before = signal.signal(signal.SIGUSR2, requeue)
    monkeypatch.setattr(slurm, "work", lambda *_: signal.raise_signal(signal.SIGUSR2))
    try:
        with pytest.raises(Terminated):
            slurm.SlurmJob()("outcome", "order")
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
    def devices(workers: int | None, device: str = "auto", per_worker: int = 1) -> list[str]:
        return devices_of({"workers": workers, "gpus_per_worker": per_worker}, device)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert devices(None) == ["0", "1", "2"]
    assert devices(4, "cuda") == ["0", "1", "2", "0"]
    assert devices(2, "cpu") == ["", ""]
    assert devices(None, per_worker=2) == ["0,1"]
    assert devices(2, per_worker=3) == ["0,1,2", "0,1,2"]
    with pytest.raises(UserError, match="finds 3 GPU, and gpus_per_worker is 4"):
        devices(None, per_worker=4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for workers, device in ((None, "auto"), (2, "cuda")):
        with pytest.raises(UserError, match="finds no GPU"):
            devices(workers, device)
    # those before the first that is not there; of MIG instances all, though CUDA counts one
    for visible, count, seen in (
        ("4,GPU-5ebe9f43,7", 3, ["4", "GPU-5ebe9f43", "7"]),
        (" 0, 2", 2, ["0", "2"]),
        ("0,-1,2", 1, ["0"]),
        ("MIG-1f2b,MIG-77aa", 1, ["MIG-1f2b", "MIG-77aa"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        assert devices(None) == seen


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


@pytest.mark.slow
def test_one_of_two_workers_is_killed_and_the_rest_goes_on(tmp_path: Path) -> None:
    many = [*SMALL[:-1], "task.num_examples=18"]
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
    assert 24 <= before < 36, "two of three shards are there"
    check_all_well(start(*command))
    assert records(tmp_path / "split") == records(tmp_path / "alone")


def check_one_failed(command: subprocess.Popen[str]) -> None:
    out, err = command.communicate()
    assert command.returncode == FAILED
    assert "Traceback" not in err
    assert err.count("ended without a result (exit status -9)") == 1
    assert "3 jobs, 1 of them failed" in out


def check_all_well(command: subprocess.Popen[str]) -> None:
    out, err = command.communicate()
    assert command.returncode == 0, err
    assert "3 jobs, all well" in out
    assert "longeval_lines on recall_mini at rate" in out


@pytest.mark.slow
@pytest.mark.parametrize("signal_", [signal.SIGTERM, signal.SIGKILL])
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
    end = time.monotonic() + 120
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
