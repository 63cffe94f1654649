"""scripts/import_results.py: results of kvpress and lm-evaluation-harness as records of kvbench."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from kvbench.records.read import load_runs

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "import_results.py"))
main = SCRIPT["main"]


def kvpress(folder: Path, press: str, right: list[bool]) -> None:
    """A folder as kvpress's evaluate.py leaves it."""
    place = folder / press
    place.mkdir(parents=True)
    rows = [
        {
            "question": "Which numbers?",
            "answer": np.array([str(1000 + i), str(2000 + i)], dtype=object),
            "task": "niah_multivalue" if i % 2 else "qa_1",
            "predicted_answer": f" {1000 + i} and {2000 + i}" if good else "no",
        }
        for i, good in enumerate(right)
    ]
    frame = pd.DataFrame(rows).sample(frac=1.0, random_state=7)
    frame.to_csv(place / "predictions.csv", index=False)
    config = {"dataset": "ruler", "data_dir": "4096", "model": "org/m", "press_name": press}
    (place / "config.yaml").write_text(yaml.safe_dump(config | {"compression_ratio": 0.5}))


def test_kvpress_folders_are_variants_paired_by_example(tmp_path: Path) -> None:
    for press, count in (("no_press", 12), ("snapkv", 8)):
        kvpress(tmp_path / "theirs", press, [i < count for i in range(12)])
    place = tmp_path / "runs" / "kvpress"
    assert main([str(tmp_path / "theirs"), str(place)]) == 0
    runs = {run.manifest["method"]: run for run in load_runs(place)}
    assert set(runs) == {"exact", "snapkv"}
    means = runs["snapkv"].records.groupby("dataset")["score"].mean()
    assert dict(means) == pytest.approx({"qa_1": 4 / 6, "niah_multivalue": 4 / 6})
    ids = [set(run.records["example_id"]) for run in runs.values()]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 12
    assert runs["snapkv"].manifest["config"]["budget"] == {"total_rate": 0.5}


def test_an_experiment_that_is_there_already_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kvpress(tmp_path / "theirs", "snapkv", [True])
    assert main([str(tmp_path / "theirs"), str(tmp_path)]) == 1
    assert "is there already; allowed: a new folder" in capsys.readouterr().err


def test_a_folder_without_results_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), str(tmp_path / "new")]) == 1
    assert "has no results of kvpress or lm-evaluation-harness" in capsys.readouterr().err


def test_samples_of_lm_eval_are_variants_by_their_folder(tmp_path: Path) -> None:
    for variant, score in (("exact", 1.0), ("h2o", 0.0)):
        place = tmp_path / "theirs" / variant / "org__m"
        place.mkdir(parents=True)
        for time, value in (("2026-01-01T00", 0.5), ("2026-01-02T00", score)):
            line = {"doc_id": 3, "target": 1, "filtered_resps": ["x"], "acc": value}
            (place / f"samples_piqa_{time}.jsonl").write_text(json.dumps(line) + "\n")
    assert main([str(tmp_path / "theirs"), str(tmp_path / "runs" / "lm")]) == 0
    runs = load_runs(tmp_path / "runs" / "lm")
    scores = {run.manifest["method"]: run.records["score"].tolist() for run in runs}
    assert scores == {"exact": [1.0], "h2o": [0.0]}, "of several files the latest"


def test_a_dataset_that_is_not_scored_here_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kvpress(tmp_path / "theirs", "snapkv", [True])
    settings = tmp_path / "theirs" / "snapkv" / "config.yaml"
    settings.write_text(settings.read_text().replace("ruler", "zero_scrolls"))
    assert main([str(tmp_path / "theirs"), str(tmp_path / "runs" / "x")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
