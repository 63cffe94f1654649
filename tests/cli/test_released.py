"""scripts/released.py: predictions that others published become an experiment."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.report_runs import LONGBENCH_META, write_run

from kvbench.errors import UserError
from kvbench.records.read import load_runs

ANSWERS = [["Paris", "the city of Paris"], ["a red fox"], ["42"], ["42"]]


PAIR_RELEASED = runpy.run_path(str(ROOT / "scripts" / "released.py"))["pair_released"]


def test_released_predictions_stand_beside_the_same_examples(tmp_path: Path, capsys: Any) -> None:
    records = [
        {"example_id": f"qasper-{i}", "dataset": "qasper", "answers": answers, "score": 0.0}
        | {"length": 100 + min(i, 2), "ratio": 0.25}
        for i, answers in enumerate(ANSWERS)
    ]
    names = {"experiment": "table1", "task": "longbench", "method": "snapkv"}
    run = write_run(tmp_path / "results", **names, records=records, task_meta=LONGBENCH_META)
    (tmp_path / "pred").mkdir()
    predictions = [("the 42", 2, 102), ("no", 3, 102), ("a fox", 1, 101), ("x", 0, 7)]
    rows = [{"pred": text, "answers": ANSWERS[i], "length": n} for text, i, n in predictions]
    lines = "".join(json.dumps(row | {"all_classes": None}) + "\n" for row in rows)
    (tmp_path / "pred" / "qasper.jsonl").write_text(lines)
    PAIR_RELEASED([f"run={run}", f"predictions={tmp_path / 'pred'}"])
    assert "3 of 4 examples matched" in capsys.readouterr().out
    (released,) = load_runs(tmp_path / "results" / "table1_released")
    scores = released.records.set_index("example_id")["score"].to_dict()
    # F1 of "a fox" against "a red fox", articles left out: precision 1, recall 1/2
    assert scores == pytest.approx({"qasper-1": 2 / 3, "qasper-2": 1.0, "qasper-3": 0.0})
    assert released.records["ratio"].isna().all()


@pytest.mark.parametrize(
    ("words", "message"), [([], "takes run="), (["run=.", "predictions=x"], "a run's folder")]
)
def test_arguments_that_are_wrong_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PAIR_RELEASED(words)
