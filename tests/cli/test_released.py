"""Released predictions: matched by answers and length, scored as ours, paired by the comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.report_runs import LONGBENCH_META, write_run

from kvbench.cli.main import main
from kvbench.cli.released import pair_released
from kvbench.errors import UserError
from kvbench.records.read import load_runs
from kvbench.report.compare import compare
from kvbench.report.experiment import load_experiment

ANSWERS = (["Paris"], ["a red fox"], ["42"], ["42"])


def experiment(folder: Path) -> Path:
    """Four examples of qasper; two of them have the same answer and length."""
    records = [
        {
            "example_id": f"qasper-{i}",
            "dataset": "qasper",
            "answers": answers,
            "length": 100 + min(i, 2),
            "length_bucket": "0-4k",
            "prediction": "Paris" if i == 0 else "nothing",
            "score": float(i == 0),
            "prompt_tokens": 900,
            "ratio": 0.25,
        }
        for i, answers in enumerate(ANSWERS)
    ]
    return write_run(
        folder,
        experiment="table1",
        task="longbench",
        method="snapkv",
        records=records,
        task_meta=LONGBENCH_META,
    )


def release(folder: Path, lines: list[dict[str, Any]]) -> Path:
    """LongBench's predictions of one dataset."""
    folder.mkdir()
    (folder / "qasper.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def line(pred: str, i: int) -> dict[str, Any]:
    return {"pred": pred, "answers": ANSWERS[i], "length": 100 + min(i, 2), "all_classes": None}


def test_released_predictions_stand_beside_the_same_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = experiment(tmp_path / "results")
    lines = [line("the 42", 2), line("no", 3), line("a fox", 1), {**line("x", 0), "length": 7}]
    folder = release(tmp_path / "pred", lines)
    assert pair_released([f"run={run}", f"predictions={folder}"]) == 0
    assert "3 of 4 examples matched" in capsys.readouterr().out
    place = tmp_path / "results" / "table1_released"
    (found,) = load_runs(place)
    scores = found.records.set_index("example_id")["score"].to_dict()
    # F1 of "a fox" against "a red fox", articles left out: precision 1, recall 1/2
    assert scores == pytest.approx({"qasper-1": 2 / 3, "qasper-2": 1.0, "qasper-3": 0.0})
    assert found.records["ratio"].isna().all()
    compared = compare(load_experiment(tmp_path / "results" / "table1"), load_experiment(place))
    (total,) = compared.frame.to_dict("records")
    assert total["paired"]
    assert total["common_examples"] == 3
    assert (total["better"], total["worse"]) == (2, 0)


def test_what_cannot_be_paired_is_one_line(tmp_path: Path) -> None:
    run = experiment(tmp_path / "results")
    empty = release(tmp_path / "pred", [line("x", 0)])
    other = release(tmp_path / "other", [{**line("x", 0), "answers": ["Rome"]}])
    broken = release(tmp_path / "broken", [{"answers": ["x"]}])
    for words, said in (
        ([], "takes run="),
        ([f"run={run}", "prediction=x"], "did you mean 'predictions'"),
        ([f"run={tmp_path}", f"predictions={empty}"], "allowed: a run's folder"),
        ([f"run={run}", f"predictions={tmp_path / 'no'}"], "allowed: a folder"),
        ([f"run={run}", f"predictions={other}"], "no line of"),
        ([f"run={run}", f"predictions={broken}"], "line 1 is no prediction"),
    ):
        with pytest.raises(UserError, match=said):
            pair_released(words)
    with pytest.raises(SystemExit) as stop:
        main(["released", f"run={run}"])
    assert stop.value.code == 2
