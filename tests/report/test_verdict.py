"""The verdict in words: differences that a test shows, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.report_runs import ERROR_META, error_records, write_run

from kvbench.report.experiment import Group, load_experiment
from kvbench.report.tables.scores import score_table
from kvbench.report.tables.verdict import verdict_of


def group_with(tmp_path: Path, shares: dict[str, float], count: int = 100) -> Group:
    """Methods that are right on the first so many of the examples."""
    for method, share in shares.items():
        records = [
            {"example_id": f"{i:03d}", "num_lines": 20, "score": float(i < share * count)}
            for i in range(count)
        ]
        write_run(tmp_path, method=method, records=records)
    (group,) = load_experiment(tmp_path / "demo").groups
    return group


def test_who_leads_who_loses_and_what_nothing_separates(tmp_path: Path) -> None:
    shares = {"exact": 1.0, "snapkv": 0.98, "pyramidkv": 0.99, "uniform": 0.2, "h2o": 0.35}
    assert verdict_of(group_with(tmp_path, shares)) == (
        "At rate 0.25 pyramidkv and snapkv are not shown to differ from exact; h2o and uniform lose"
        " 65.0 to 80.0 points to exact; nothing separates pyramidkv from snapkv."
    )


def test_a_loss_is_named_where_it_is_shown(tmp_path: Path) -> None:
    found = verdict_of(group_with(tmp_path, {"exact": 1.0, "snapkv": 0.9, "uniform": 0.5}))
    assert found == "At rate 0.25 snapkv loses 10.0 points to exact; uniform loses 50.0 points."
    few = verdict_of(group_with(tmp_path / "few", {"exact": 1.0, "snapkv": 0.75}, count=4))
    assert few == "At rate 0.25 snapkv is not shown to differ from exact."


def test_the_words_agree_with_the_marks_of_the_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    shares = {name: float(rng.uniform(0.4, 0.9)) for name in ("snapkv", "h2o", "uniform", "subgen")}
    group = group_with(tmp_path, {"exact": 1.0, **shares})
    cells = {row.variant.label: row.total for row in score_table(group).rows}
    leaders = verdict_of(group).split(";")[0]
    for name in shares:
        assert (name in leaders) == (cells[name].best or cells[name].tied)


def test_of_errors_the_lowest_is_best(tmp_path: Path) -> None:
    for method in ("uniform", "balancekv"):
        records = error_records(method)
        write_run(tmp_path, task="e", method=method, records=records, task_meta=ERROR_META)
    (group,) = load_experiment(tmp_path / "demo").groups
    assert verdict_of(group).startswith(
        "On average over rates 0.5 to 0.0625 balancekv has the lowest relative error (0."
    )


def test_who_ties_with_the_best_is_not_among_the_others(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for method, level in {"balancekv": 0.2, "h2o": 0.201, "uniform": 0.5, "local": 0.6}.items():
        records = [
            {"example_id": f"e{i:02d}", "relative_error": (value := level + noise), "score": value}
            for i, noise in enumerate(map(float, rng.normal(0, 0.01, 40)))
        ]
        meta = {**ERROR_META, "unit": "example_id"}
        write_run(tmp_path, task="e", method=method, records=records, task_meta=meta)
    (group,) = load_experiment(tmp_path / "demo").groups
    found = verdict_of(group)
    assert "uniform and local are shown worse (0.498 or more)" in found
    assert "the others" not in found
    assert any(
        f"nothing separates {a}" in found for a in ("balancekv from h2o", "h2o from balancekv")
    )
