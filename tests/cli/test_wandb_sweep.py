"""Sweeps that look for the best: a trial of W&B's, run by its agent's own code without a server, and the
number that Hydra's sweepers get of a job."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command import FAST
from support.wandb_files import history, isolated, offline_run, start_of, updates

from kvbench.cli.jobs import JobOutcome
from kvbench.cli.main import main
from kvbench.records.read import load_runs
from kvbench.report.objective import objective_of

FILE = Path(__file__).parents[2] / "scripts" / "wandb_sweep.yaml"


def test_a_trial_of_the_sweep_file_returns_its_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wandb.wandb_agent import Agent

    isolated(monkeypatch, tmp_path)
    sweep = yaml.safe_load(FILE.read_text())
    changes = {"limit=20": "limit=2", "${args_no_hyphens}": "task.num_lines=[20]"}
    words = [changes.get(word, word) for word in sweep["command"]]
    words += ["${args_no_hyphens}", f"results_dir={tmp_path}", *FAST[1:2]]
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SWEEP_ID": "s1",
        "WANDB_RUN_ID": "",  # the agent's, and as before afterwards
        "WANDB_SWEEP_PARAM_PATH": "",
        "WANDB_SILENT": "true",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    }.items():
        monkeypatch.setenv(name, value)
    agent: Any = Agent.__new__(Agent)
    agent._sweep_command, agent._function, agent._run_processes = words, None, {}
    agent._in_jupyter, agent._forward_signals = False, False
    chosen = {name: {"value": one["values"][-1]} for name, one in sweep["parameters"].items()}
    agent._command_run({"run_id": "t1", "program": sweep["program"], "args": chosen})
    assert agent._run_processes["t1"].wait() == 0

    runs = load_runs(tmp_path / "sweep")
    assert {run.manifest["method"] for run in runs} == {"exact", "snapkv"}
    for run in runs:
        assert run.manifest["identity"]["method"].get("kernel_size", 7) == 7
        assert run.manifest["config"]["budget"]["rate"] == 0.5
        assert run.manifest["config"]["budget"]["window"] == 32
    _, messages = offline_run(tmp_path, "t1")
    assert start_of(messages).sweep_id == "s1"
    (snapkv,) = [run.records for run in runs if run.manifest["method"] == "snapkv"]
    (logged,) = history(messages)
    assert logged[sweep["metric"]["name"]] == snapkv["score"].mean()
    assert logged["ratio"] == pytest.approx(snapkv["ratio"].mean())
    assert {"exact/score", "snapkv/score", "snapkv/ratio"} <= set(logged)
    assert updates(messages, "config")["budget.rate"] == 0.5


def test_hydras_sweepers_get_a_jobs_score(tmp_path: Path, capsys: Any) -> None:
    outcomes: list[JobOutcome] = []
    command = [*FAST, f"results_dir={tmp_path}", "limit=2", "-m", "budget.rate=0.25,0.5"]
    with pytest.raises(SystemExit) as done:
        main(command, outcomes)
    assert done.value.code == 0, capsys.readouterr().err
    assert len(outcomes) == 2
    for outcome in outcomes:
        runs = [
            run for run in load_runs(Path(str(outcome.folder))) if str(run.folder) in outcome.runs
        ]
        (compressed,) = [run for run in runs if run.manifest["method"] == "snapkv"]
        assert len(runs) == 2
        assert float(outcome) == compressed.records["score"].mean()
        assert objective_of(outcome.runs)["ratio"] < 1
    assert math.isnan(float(JobOutcome(error="x", status=1)))
