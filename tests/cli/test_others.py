"""Results of kvpress and lm-evaluation-harness, read as variants of the same tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from kvbench.cli.others import experiment_of, main, parse_list
from kvbench.records.read import load_runs


def kvpress(folder: Path, press: str, ratio: float, right: list[bool], **settings: Any) -> Path:
    """A folder as kvpress's evaluate.py leaves it: RULER's niah with two answers, and one of qa."""
    place = folder / f"ruler__4096__m__{press}__{ratio:.2f}"
    place.mkdir(parents=True)
    rows = [
        {
            "question": "Which numbers?",
            "answer_prefix": "Answer:",
            "answer": np.array([str(1000 + i), str(2000 + i)], dtype=object),
            "task": "niah_multivalue" if i % 2 else "qa_1",
            "max_new_tokens": 32,
            "predicted_answer": f" {1000 + i} and {2000 + i}"
            if good
            else f"{1000 + i}"
            if i % 2
            else "no",
            "compression_ratio": ratio,
        }
        for i, good in enumerate(right)
    ]
    pd.DataFrame(rows).sample(frac=1.0, random_state=7).to_csv(
        place / "predictions.csv", index=False
    )
    config = {"dataset": "ruler", "data_dir": "4096", "model": "org/m", "press_name": press}
    config |= {"compression_ratio": ratio, "seed": 42, **settings}
    (place / "config.yaml").write_text(yaml.safe_dump(config))
    scores: dict[str, list[float]] = {}
    for i, good in enumerate(right):
        scores.setdefault("niah_multivalue" if i % 2 else "qa_1", []).append(
            1.0 if good else 0.5 * (i % 2)
        )
    means = {k: {"string_match": round(100 * float(np.mean(v)), 2)} for k, v in scores.items()}
    (place / "metrics.json").write_text(json.dumps(means))
    return place


def test_kvpress_folders_are_variants_paired_by_example(tmp_path, capsys):
    folder = tmp_path / "theirs"
    kvpress(folder, "no_press", 0.0, [True] * 12)
    kvpress(folder, "snapkv", 0.5, [True] * 8 + [False] * 4)
    kvpress(folder, "knorm", 0.5, [i % 3 == 0 for i in range(12)])
    place = Path(experiment_of(str(folder)))
    assert place == tmp_path / "theirs_kvbench"
    assert capsys.readouterr().err == "", "our scores are those of metrics.json"
    runs = {run.manifest["method"]: run for run in load_runs(place)}
    assert set(runs) == {"exact", "snapkv", "knorm"}
    scores = runs["snapkv"].records.groupby("dataset")["score"].mean()
    assert scores["qa_1"] == pytest.approx(4 / 6)
    assert scores["niah_multivalue"] == pytest.approx((4 + 2 * 0.5) / 6)
    ids = [set(run.records["example_id"]) for run in runs.values()]
    assert ids[0] == ids[1] == ids[2]
    assert len(ids[0]) == 12
    assert main([str(folder)]) == 0, "read again, the report is made again"
    page = (place / "report.html").read_text()
    assert "snapkv" in page
    (table,) = [path for path in (place / "tables").glob("*.csv") if "ruler" in path.name][:1]
    assert {"snapkv", "knorm"} <= set(table.read_text().replace("/", ",").split(","))
    assert not (folder / "report.html").exists(), "their folder is left as it is"


def test_a_mean_that_differs_is_said(tmp_path, capsys):
    place = kvpress(tmp_path / "theirs", "snapkv", 0.5, [True] * 4)
    (place / "metrics.json").write_text(json.dumps({"qa_1": {"string_match": 71.0}}))
    experiment_of(str(tmp_path / "theirs"))
    assert (
        "qa_1 has 100.00 by the scores made here, 71.0 in metrics.json" in capsys.readouterr().err
    )


def test_what_cannot_be_scored_is_said(tmp_path, capsys):
    kvpress(tmp_path / "theirs", "snapkv", 0.5, [True] * 4, dataset="loogle")
    assert main([str(tmp_path / "theirs")]) == 1
    said = capsys.readouterr().err
    assert "dataset is 'loogle', kvpress keeps no score per example" in said
    assert "results of no dataset scored here; allowed: ruler, longbench" in said


def samples(folder: Path, task: str, right: list[bool], stamp: str = "2026-01-02") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "doc_id": i,
            "doc": {"q": i},
            "target": "A",
            "arguments": [],
            "resps": [["A"]],
            "filtered_resps": ["A" if good else "B"],
            "filter": "none",
            "metrics": ["acc", "acc_norm"],
            "acc": float(good),
            "acc_norm": 1.0,
        }
        for i, good in enumerate(right)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"samples_{task}_{stamp}.jsonl").write_text(text)


def test_lm_eval_samples_are_variants(tmp_path):
    folder = tmp_path / "out"
    for name, right in {"full": [True] * 9, "evicted": [True] * 5 + [False] * 4}.items():
        samples(folder / name / "org__m", "piqa", [False] * 9, "2026-01-01")
        samples(folder / name / "org__m", "piqa", right)
        samples(folder / name / "org__m", "copa", right[::-1])
    place = Path(experiment_of(str(folder)))
    found = {(r.manifest["method"], r.manifest["task"]): r.records for r in load_runs(place)}
    assert set(found) == {(m, t) for m in ("full", "evicted") for t in ("piqa", "copa")}
    assert found["evicted", "piqa"]["score"].mean() == pytest.approx(5 / 9), "the latest file"
    assert set(found["full", "copa"]["model"]) == {"org__m"}
    assert main([str(folder)]) == 0


def test_broken_files_are_one_line(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "samples_x_1.jsonl").write_text('{"doc_id": 1, "filter": "none"}\n')
    assert main([str(tmp_path / "a")]) == 1
    assert "line 1 is no sample; allowed: JSON with doc_id and a metric" in capsys.readouterr().err
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "predictions.csv").write_text("x\n1\n")
    assert main([str(tmp_path / "b")]) == 1
    assert "config.yaml is not there" in capsys.readouterr().err


def test_ours_are_not_touched(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    assert experiment_of(str(tmp_path)) == str(tmp_path)
    assert experiment_of(str(tmp_path / "none")) == str(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("['a', 'b']", ["a", "b"]),
        ("['a' 'b']", ["a", "b"]),
        ("[\"it's\"\n 'b']", ["it's", "b"]),
        ("[7]", ["7"]),
        ("plain", ["plain"]),
        ("", []),
    ],
)
def test_lists_in_a_csv_file(text, wanted):
    assert parse_list(text) == wanted
