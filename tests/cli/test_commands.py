"""Released predictions, trials of W&B sweeps, and the number that Hydra's sweepers get of a job."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command import FAST
from support.paths import ROOT
from support.report_runs import LONGBENCH_META, write_run
from support.wandb_files import history, isolated, offline_run

from kvbench.cli.jobs import JobOutcome
from kvbench.cli.main import main
from kvbench.errors import UserError
from kvbench.records.read import load_run, load_runs
from kvbench.report.objective import objective_of

ANSWERS = [["Paris", "the city of Paris"], ["a red fox"], ["42"], ["42"]]


def test_released_predictions_stand_beside_the_same_examples(tmp_path: Path, capsys: Any) -> None:
    pair_released = runpy.run_path(str(ROOT / "scripts" / "released.py"))["pair_released"]
    records = [
        {"example_id": f"qasper-{i}", "dataset": "qasper", "answers": answers, "score": 0.0}
        | {"length": 100 + min(i, 2), "ratio": 0.25}
        for i, answers in enumerate(ANSWERS)
    ]
    names = {"experiment": "table1", "task": "longbench", "method": "snapkv"}
    run = write_run(tmp_path / "results", **names, records=records, task_meta=LONGBENCH_META)
    (tmp_path / "pred").mkdir()
    said = [("the 42", 2, 102), ("no", 3, 102), ("a fox", 1, 101), ("x", 0, 7)]
    rows = [{"pred": text, "answers": ANSWERS[i], "length": n} for text, i, n in said]
    lines = "".join(json.dumps(row | {"all_classes": None}) + "\n" for row in rows)
    (tmp_path / "pred" / "qasper.jsonl").write_text(lines)
    pair_released([f"run={run}", f"predictions={tmp_path / 'pred'}"])
    assert "3 of 4 examples matched" in capsys.readouterr().out
    (found,) = load_runs(tmp_path / "results" / "table1_released")
    scores = found.records.set_index("example_id")["score"].to_dict()
    # F1 of "a fox" against "a red fox", articles left out: precision 1, recall 1/2
    assert scores == pytest.approx({"qasper-1": 2 / 3, "qasper-2": 1.0, "qasper-3": 0.0})
    assert found.records["ratio"].isna().all()
    for words, problem in (([], "takes run="), ([f"run={tmp_path}", "predictions=x"], "a run's f")):
        with pytest.raises(UserError, match=problem):
            pair_released(words)


@pytest.mark.slow
def test_a_trial_of_the_sweep_file_returns_its_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by the code of W&B's agent, without a server."""
    from wandb.wandb_agent import Agent

    isolated(monkeypatch, tmp_path)
    sweep = yaml.safe_load((ROOT / "scripts" / "wandb_sweep.yaml").read_text())
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
    assert {run.manifest["config"]["budget"]["rate"] for run in runs} == {0.5}
    (snapkv,) = [run.records for run in runs if run.manifest["method"] == "snapkv"]
    (logged,) = history(offline_run(tmp_path, "t1")[1])
    assert logged[sweep["metric"]["name"]] == snapkv["score"].mean()


def test_hydras_sweepers_get_a_jobs_score(tmp_path: Path, capsys: Any) -> None:
    outcomes: list[JobOutcome] = []
    command = [*FAST, f"results_dir={tmp_path}", "limit=2", "-m", "budget.rate=0.25,0.5"]
    with pytest.raises(SystemExit) as done:
        main(command, outcomes)
    assert done.value.code == 0, capsys.readouterr().err
    assert len(outcomes) == 2
    for outcome in outcomes:
        runs = [load_run(Path(folder)) for folder in outcome.runs]
        (compressed,) = [run for run in runs if run.manifest["method"] == "snapkv"]
        assert float(outcome) == compressed.records["score"].mean()
        assert objective_of(outcome.runs)["ratio"] < 1
    assert math.isnan(float(JobOutcome(error="x", status=1)))
