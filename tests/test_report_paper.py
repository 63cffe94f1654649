"""Published numbers beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from report_runs import LINES_META, lines_records, write_run

from kvbench.report.build import build_report
from kvbench.report.data import load_experiment
from kvbench.report.paper import PaperError, Published, published_tables

PAPER = Path(__file__).parents[1] / "results" / "paper"


def compared(folder: Path, spec: Any, method: str = "exact", model: str = "m") -> list[Published]:
    records: list[dict[str, Any]] = [
        {"example_id": f"{name}{i}", "dataset": name, "num_lines": 200 + 100 * i, "score": 0.5 * i}
        for name in ("qasper", "hotpotqa")
        for i in range(3)
    ]
    write_run(
        folder,
        task="t",
        method=method,
        model=model,
        records=records,
        task_meta=LINES_META,
        options={"paper_table": spec},
    )
    return published_tables(load_experiment(folder / "demo"))


def test_every_published_table_can_be_read() -> None:
    files = sorted(PAPER.glob("*.csv"))
    assert len(files) >= 20
    for path in files:
        frame = pd.read_csv(path)
        assert len(frame)
        assert all(column == column.strip() and column for column in frame.columns)
    assert f"`{files[0].stem[:9]}" in (PAPER / "README.md").read_text()


def test_a_wide_table_meets_our_datasets(tmp_path: Path) -> None:
    spec = {"file": "balancekv_table1", "where": {"model": "Llama-3.1-8B-Instruct"}}
    (table,) = compared(tmp_path, spec)
    assert table.columns == ("hotpotqa", "qasper")  # the paper's average is over 13 datasets
    (row,) = table.rows
    assert (row.method, row.model, row.label) == ("exact", "Llama-3.1-8B-Instruct", "exact")
    assert [pair.published for pair in row.pairs] == [52.05, 42.87]
    assert [pair.ours for pair in row.pairs] == pytest.approx([50.0] * 2)
    assert row.pairs[0].difference == pytest.approx(-2.05)


def test_averages_are_compared_over_the_same_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    folder.mkdir()
    (folder / "mine.csv").write_text(
        "method,qasper,hotpotqa,average\nexact,40,60,50\nexact,OOM,,\n"
    )
    compared(tmp_path, "mine")
    (table,) = published_tables(load_experiment(tmp_path / "demo"), folder)
    assert table.columns == ("hotpotqa", "qasper")  # a column with text in it is no number
    (folder / "mine.csv").write_text("method,qasper,hotpotqa,average\nexact,40,60,50\n")
    (table,) = published_tables(load_experiment(tmp_path / "demo"), folder)
    assert [(c, p.published) for c, p in zip(table.columns, table.rows[0].pairs, strict=True)] == [
        ("hotpotqa", 60.0),
        ("qasper", 40.0),
        ("average", 50.0),
    ]


def test_a_long_table_is_spread_over_a_field(tmp_path: Path) -> None:
    spec = {"file": "subgen_table1", "value": "accuracy", "by": "num_lines", "scale": 100}
    (table,) = compared(tmp_path, spec)
    assert table.columns == ("200", "300", "400")
    assert [(p.published, p.ours) for p in table.rows[0].pairs] == [
        (pytest.approx(98.0), pytest.approx(0.0)),
        (pytest.approx(100.0), pytest.approx(50.0)),
        (pytest.approx(68.0), pytest.approx(100.0)),
    ]


def test_every_model_of_the_paper_is_shown_when_none_is_chosen(tmp_path: Path) -> None:
    (table,) = compared(tmp_path, "balancekv_table1")
    assert len({row.model for row in table.rows}) == 3


def test_without_a_published_table_nothing_is_shown(tmp_path: Path) -> None:
    assert compared(tmp_path, None) == []
    assert compared(tmp_path / "other", "balancekv_table1", method="a_new_method") == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_table", r"paper_table no_such_table\.csv is in none of"),
        (
            {"file": "balancekv_figure3", "value": "value", "by": "rate", "method": "exact"},
            "has several rows per rate: choose some by `where`",
        ),
        ({"file": "subgen_table1", "value": "acc"}, "has no column acc; it has method, n_tokens"),
    ],
)
def test_a_wrong_name_is_a_warning_on_the_page(tmp_path: Path, spec: Any, message: str) -> None:
    with pytest.raises(PaperError, match=message):
        compared(tmp_path, spec)
    paths = build_report(tmp_path / "demo")
    assert len(paths.warnings) == 1
    assert paths.warnings[0].split()[0] in paths.page.read_text()


def test_the_page_shows_both(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        task="longeval_lines",
        method="exact",
        records=[r | {"num_lines": 200} for r in lines_records("exact")],
        task_meta=LINES_META,
        options={
            "paper_table": {
                "file": "subgen_table1",
                "value": "accuracy",
                "by": "num_lines",
                "scale": 100,
            }
        },
    )
    text = build_report(tmp_path / "demo").page.read_text()
    assert "Published numbers beside ours" in text
    assert "98 / <b>" in text
