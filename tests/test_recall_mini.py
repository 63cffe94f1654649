"""The shipped model: small, without pickles, and it finds what it is asked for."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.jobs import make_job, records_of
from support.paths import ROOT
from support.probing import shipped

from kvbench.methods import build_method
from kvbench.run.runner import run_job
from kvbench.tasks.base import Task
from kvbench.tasks.longeval_lines import LongEvalLines
from kvbench.tasks.needle import Needle

ASSET = ROOT / "kvbench" / "assets" / "recall_mini"
NEVER_TRAINED_SEED = 77


def mean_score(folder: Path, task: Task) -> float:
    """Of the exact cache over a task's examples."""
    job = make_job(folder, {"exact": build_method("exact")}, echo=task, session=shipped())
    return statistics.mean(record["score"] for record in records_of(run_job(job))["exact"])


def test_it_is_small_and_holds_no_pickles() -> None:
    assert sum(file.stat().st_size for file in ASSET.glob("*.safetensors")) <= 12e6
    assert {file.suffix for file in ASSET.iterdir()} <= {".safetensors", ".json", ".md"}


@pytest.mark.slow
def test_it_finds_lines_and_the_needle(tmp_path: Path, shared_file: Any) -> None:
    path = shared_file("data/longeval_lines/200_lines.jsonl")
    (tmp_path / "five.jsonl").write_text("".join(path.open().readlines()[:5]))
    needle = yaml.safe_load((ROOT / "conf" / "task" / "needle.yaml").read_text())
    texts = {name: needle[name] for name in ("needle", "question", "answer")}
    grid: dict[str, Any] = {"lengths": [512, 1024], "depths": [0, 50, 100], "num_examples": 1}
    tasks: list[tuple[Task, float]] = [
        (LongEvalLines(num_lines=[20], num_examples=15, seed=NEVER_TRAINED_SEED), 0.99),
        (LongEvalLines(num_lines=[50, 100], num_examples=10, seed=NEVER_TRAINED_SEED), 0.9),
        (Needle(**texts, **grid, seed=NEVER_TRAINED_SEED), 0.95),
        (LongEvalLines(files=[str(tmp_path / "five.jsonl")]), 0.8),
    ]
    for i, (task, least) in enumerate(tasks):
        assert mean_score(tmp_path / str(i), task) >= least
