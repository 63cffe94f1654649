"""Two experiments compared: matching, pairing, what changed, the files and the command."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t
from support.report_runs import ERROR_META, HOSTILE, write_run, write_scores
from support.tables import heads, shown

from kvbench.records.read import StoreError
from kvbench.report.__main__ import main
from kvbench.report.compare import Comparison, comparison_of
from kvbench.report.runs import load_experiment

Values = Mapping[str, Sequence[float | None]]


def write(
    folder: Path, methods: Values, *, seed: int = 0, fields: Any = None, rate: float | None = None
) -> Path:
    costs = {"prediction": HOSTILE, "ratio": 0.25, "compress_s": 0.5, "decode_s": 1.0}
    return write_scores(folder, methods, rate=rate, seed=seed, fields=costs | (fields or {}))


def compared(first: Path, second: Path) -> Comparison:
    return comparison_of(load_experiment(first), load_experiment(second))


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """snapkv got better, h2o is as it was, uniform is new, topk is gone."""
    rng = np.random.default_rng(0)
    before = rng.random(80) * 0.5
    after = list(before + rng.normal(0.1, 0.05, 80))
    first: Values = {"snapkv": list(before), "h2o": [1, 0, None, 1], "topk": [1.0]}
    second: Values = {"snapkv": after, "h2o": [1, None, 1, 1], "uniform": [1.0]}
    return write(tmp_path / "a", first), write(tmp_path / "b", second, rate=0.5)


def test_the_same_examples_are_paired(both: tuple[Path, Path]) -> None:
    comparison = compared(*both)
    by = comparison.frame.set_index("variant")
    before, after = (
        records[records["method"] == "snapkv"]["score"].to_numpy()
        for records in (load_experiment(path).groups[0].records for path in both)
    )
    snapkv = by.loc["snapkv"]
    assert snapkv["common_examples"] == 80
    assert snapkv["difference"] == pytest.approx(100 * (after - before).mean())
    reach = max(before.max(), after.max())  # two units more, up and down
    error = 100 * np.r_[after - before, reach, -reach].std() / math.sqrt(80)
    half = t.ppf(0.975, 79) * error
    assert snapkv["difference_high"] - snapkv["difference_low"] == pytest.approx(2 * half, rel=1e-3)
    assert snapkv["p"] < 0.001
    assert (snapkv["better"], snapkv["worse"]) == ((after > before).sum(), (after < before).sum())
    assert (snapkv["first_ratio"], snapkv["second_seconds"]) == (0.25, 1.5)
    h2o = by.loc["h2o"]
    assert (h2o["common_examples"], h2o["difference"]) == (2, 0), "the first and the last"
    assert (h2o["first_failed"], h2o["second_failed"]) == ("1 oom", "1 oom")
    assert comparison.names == tuple(map(str, both))
    lacking = [
        ["recall_mini / t / topk", str(both[0])],
        ["recall_mini / t / uniform", str(both[1])],
    ]
    assert shown(comparison.tables[-1]) == lacking


def test_a_comparison_begins_with_the_settings_that_differ(both: tuple[Path, Path]) -> None:
    settings, *_ = compared(*both).tables
    assert settings.name == "settings"
    assert shown(settings) == [
        ["budget.rate", "0.25 → 0.5"],
        ["method", "h2o, snapkv, topk → h2o, snapkv, uniform"],
    ]


def test_prompts_are_the_units_and_a_shown_change_is_bold(tmp_path: Path) -> None:
    """Twenty prompts of three records each: the interval is that of twenty means."""
    rng = np.random.default_rng(1)
    change = rng.normal(-0.7, 0.1, (20, 1)) + rng.normal(0.0, 0.01, (20, 3))
    for name, shift in (("a", 0.0), ("b", change)):
        scores = (np.full((20, 3), 0.5) + shift).ravel()
        records = [
            {"example_id": f"e{i}", "score": x, "prompt": f"p{i // 3}", "status": "ok"}
            for i, x in enumerate(scores)
        ]
        write_run(tmp_path / name, method="snapkv", records=records, task_meta=ERROR_META)
    comparison = compared(tmp_path / "a" / "demo", tmp_path / "b" / "demo")
    row, means = comparison.frame.iloc[0], change.mean(1)
    farthest = np.abs(means - means.mean()).max()
    error = np.r_[means, means.mean() + farthest, means.mean() - farthest].std() / math.sqrt(20)
    half = t.ppf(0.975, 19) * error
    assert row["difference_high"] - row["difference_low"] == pytest.approx(2 * half, rel=1e-3)
    assert (row["common_examples"], row["better"], row["worse"]) == (60, 60, 0), "lower is better"
    (table,) = comparison.tables
    assert list(table.frame["difference_mark"]) == ["shown"]
    assert heads(table)[:3] == ["method", "change", "p"]
    older = [{"example_id": f"e{i}", "score": 0.5} for i in range(60)]  # without their prompts
    write_run(tmp_path / "c", method="snapkv", records=older, task_meta=ERROR_META)
    row = compared(tmp_path / "c" / "demo", tmp_path / "b" / "demo").frame.iloc[0]
    assert row["p"] < 0.001, "then every record is a unit"


def test_runs_are_matched_whatever_else_their_folders_hold(tmp_path: Path) -> None:
    """A label names the rate only where a folder has several; the hash is the same."""
    first = write(tmp_path / "a", {"snapkv": [1.0, 0.0]})
    for rate in (0.25, 0.5):
        second = write(tmp_path / "b", {"snapkv": [1.0, 1.0]}, rate=rate)
    comparison = compared(first, second)
    assert list(comparison.frame["variant"]) == ["snapkv, rate 0.25"]
    assert shown(comparison.tables[-1]) == [["recall_mini / t / snapkv, rate 0.5", str(second)]]
    write(tmp_path / "a", {"snapkv": [0.0, 0.0]}, seed=7, rate=0.5)
    third = write(tmp_path / "c", {"snapkv": [1.0, 1.0]}, seed=8, rate=0.5)
    assert list(compared(first, third).frame["first"]) == [0.0], "no hash in common: by the rate"


def test_other_prompts_are_other_examples_and_repeats_one(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"snapkv": [1.0, 1.0, 0.0, 1.0]})
    b = write(tmp_path / "b", {"snapkv": [0, 0, 1, 0]}, fields={"prompt_tail": "another one"})
    (change,) = compared(a, b).frame.to_dict("records")
    assert change["common_examples"] == 0
    assert math.isnan(change["difference"])
    assert math.isnan(change["p"])
    for seed in (1, 2):  # of draws alone: the prompts are the same
        write(tmp_path / "c", {"snapkv": [1.0, 1.0, 0.0, float(seed == 1)]}, seed=seed)
    (change,) = compared(a, tmp_path / "c" / "demo").frame.to_dict("records")
    assert (change["common_examples"], change["difference"]) == (4, pytest.approx(-12.5))
    for seed in (0, 1):  # of prompts, of which the other side has the first alone
        records = [
            {
                "example_id": f"e{i}",
                "score": 0.0,
                **({"prompt_tail": f"another {i}"} if seed else {}),
            }
            for i in range(4)
        ]
        options = {"task.seed": seed}
        write_run(tmp_path / "d", method="snapkv", records=records, options=options)
    (change,) = compared(a, tmp_path / "d" / "demo").frame.to_dict("records")
    assert (change["common_examples"], change["difference"]) == (4, pytest.approx(-75.0))


def test_the_command_writes_page_text_and_numbers(
    both: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*map(str, both), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"compare.html", "compare.csv"}
    assert set(pd.read_csv(out / "compare.csv")["variant"]) == {"snapkv", "h2o"}
    assert main([*map(str, both)]) == 0
    assert (both[1].parent / "compare-a-b" / "compare.csv").exists(), "beside the second"
    page = (out / "compare.html").read_text()
    assert "<script>document" not in page
    assert "only in" in capsys.readouterr().out


def test_experiments_with_nothing_in_common_are_refused(
    both: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "c", task="other", records=[{"example_id": "a", "score": 1.0}])
    with pytest.raises(StoreError, match="no model, task and method in common"):
        compared(both[0], tmp_path / "c" / "demo")
    other_dataset = write(tmp_path / "d", {"snapkv": [1.0]}, fields={"dataset": "40 lines"})
    with pytest.raises(StoreError, match="in common on one dataset"):
        compared(both[0], other_dataset)
    assert main([str(both[0]), str(tmp_path / "c" / "demo")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
