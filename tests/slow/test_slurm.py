"""A sweep on a real Slurm of this machine: killed, cancelled and preempted jobs lose nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from support.command import main
from support.workers import SMALL, TINY, lines, records, start, stop_all, wait_for, writer

from kvbench.cli.jobs import FAILED, USAGE

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts/slurm_one_node.sh"
CANNOT_INSTALL = 3
TASKS, PARTS = ("longeval_lines", "longeval_redundant"), ("1of2", "2of2")
SWEEP = [*SMALL[:2], "-m", f"task={','.join(TASKS)}", "method=[exact,h2o]"]
SWEEP += ["task.num_lines=[20]", "task.num_examples=24"]
JOBS = list(product(TASKS, PARTS))
SLURM = ["launcher=slurm", "shards=2", "launcher.poll_s=0.5", "launcher.cpus_per_task=1"]
SLURM += ["launcher.gpus_per_node=null", "launcher.mem_gb=null"]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Slurm on loopback, with a CPU for each of four jobs, for as long as these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        # not below pytest's folder: munge wants one that everybody may enter
        patch.setenv("SLURM_ONE_NODE", tempfile.mkdtemp(prefix="slurm-"))
        patch.setenv("SLURM_ONE_NODE_CPUS", "4")
        started = subprocess.run([SCRIPT, "start"], stderr=subprocess.PIPE, text=True, check=False)
        if started.returncode == CANNOT_INSTALL:
            pytest.skip(started.stderr.strip())
        try:
            assert started.returncode == 0, started.stderr
            said = subprocess.run([SCRIPT, "env"], capture_output=True, text=True, check=True)
            name, _, value = said.stdout.strip().removeprefix("export ").partition("=")
            patch.setenv(name, value)
            yield
        finally:
            subprocess.run([SCRIPT, "stop"], check=True)


def stop_for_good(processes: Iterable[int]) -> bool:
    """Stop these again; whether they are all gone."""
    alive = [process for process in processes if Path(f"/proc/{process}").exists()]
    for process in alive:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)
    return not alive


def array(process: subprocess.Popen[str]) -> str:
    """The number of the job array that the command submitted."""
    assert process.stderr is not None
    head = process.stderr.readline()
    assert "4 jobs in Slurm: " in head, head
    return head.partition("in Slurm: ")[2].partition(";")[0]


def at_work(results: Path, task: str, part: str, before: int = 0) -> Callable[[], int | None]:
    """A function: the process that has written more than `before` records of a shard, if there is."""

    def find() -> int | None:
        process = writer(results, task, part) if lines(results, task, part) > before else None
        return process if process and Path(f"/proc/{process}").exists() else None

    return find


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_cancelled_killed_and_preempted_jobs_go_on_where_they_were(tmp_path: Path) -> None:
    whole, spread = tmp_path / "whole", tmp_path / "spread"
    first = start(*SWEEP, *SLURM, f"results_dir={spread}")
    jobs = array(first)
    stopped: dict[tuple[str, str], int] = {}
    wait_for(lambda: stop_all(spread, JOBS, stopped), first)
    slurm("scancel", f"{jobs}_0")
    os.kill(stopped["longeval_redundant", "2of2"], signal.SIGKILL)
    # a job that may push the others from the node: they go back into the queue
    slurm("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    wait_for(lambda: stop_for_good(stopped.values()), first)  # Slurm wakes them and waits first
    alone = start(*SWEEP, f"results_dir={whole}")  # meanwhile
    check_two_ended(first, jobs)
    assert lines(spread, "longeval_lines", "1of2") < 12
    assert lines(spread, "longeval_redundant", "2of2") < 12
    for preempted in (1, 2):
        assert "Restarts=1" in slurm("scontrol", "show", "job", f"{jobs}_{preempted}")

    known = lines(spread, "longeval_lines", "1of2")
    second = start(*SWEEP, *SLURM, f"results_dir={spread}")
    jobs = array(second)
    wait_for(at_work(spread, "longeval_lines", "1of2", known), second)
    slurm("scancel", "--signal=USR2", f"{jobs}_0")  # what Slurm sends before a time limit
    check_ended_well(second, "4 jobs, all well")
    assert "Restarts=1" in slurm("scontrol", "show", "job", f"{jobs}_0")
    check_ended_well(alone)
    expected = records(whole)
    assert [len(rows) for rows in expected.values()] == [24] * 4
    assert records(spread) == expected


def check_two_ended(command: subprocess.Popen[str], jobs: str) -> None:
    """The command says of the first and the last job of the array how each ended."""
    out, err = command.communicate()
    assert command.returncode == FAILED, err
    assert "Traceback" not in err
    assert err.count("ended without a result") == 2, err
    assert f"job {jobs}_0 ended without a result (CANCELLED)" in err
    assert f"job {jobs}_3 ended without a result (FAILED)" in err
    assert "4 jobs, 2 of them failed" in out


def check_ended_well(command: subprocess.Popen[str], said: str = "") -> None:
    """The command ends with status 0."""
    out, err = command.communicate()
    assert command.returncode == 0, err
    assert said in out


def test_what_slurm_refuses_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    refused = "launcher.partition=nope"
    status, _, err = main(capsys, *TINY, *SLURM, refused, f"results_dir={tmp_path}")
    assert status == USAGE
    assert err == "kvbench: Slurm refused the jobs: invalid partition specified: nope\n"
