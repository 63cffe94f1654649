"""Published numbers beside ours."""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from support.report_runs import (
    DATASETS,
    THROUGHPUT_META,
    lines_records,
    throughput_records,
    write_longbench,
    write_run,
)
from support.tables import bold, frame, heads, shown

import kvbench
from kvbench.report.__main__ import main
from kvbench.report.build import build_report
from kvbench.report.experiment import load_experiment
from kvbench.report.render.text import latex, markdown
from kvbench.report.stats.margins import margin_of
from kvbench.report.tables.differences import PaperError
from kvbench.report.tables.published import published_tables
from kvbench.report.tables.published_rows import Published, comparison_tables, joined_tasks
from kvbench.report.tables.score_tables import paper_layout
from kvbench.report.tables.scores import AVERAGE, score_table

PAPER = Path(__file__).parents[2] / "results" / "paper"


def compared(folder: Path, spec: Any, method: str = "exact", model: str = "m") -> list[Published]:
    records: list[dict[str, Any]] = [
        {"example_id": f"{name}{i}", "dataset": name, "num_lines": 200 + 100 * i, "score": 0.5 * i}
        for name in ("qasper", "hotpotqa")
        for i in range(3)
    ]
    write_run(folder, method=method, model=model, records=records, options={"paper_table": spec})
    return published_tables(load_experiment(folder / "demo"))


def published_spec(experiment: str) -> Any:
    file = Path(kvbench.__file__).parent / "conf" / "experiment" / f"{experiment}.yaml"
    return yaml.safe_load(file.read_text())["paper_table"]


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
    assert table.columns == ("qasper", "hotpotqa")  # the paper's average is over 13 datasets
    (row,) = table.rows
    assert (row.method, row.model, row.label) == ("exact", "Llama-3.1-8B-Instruct", "exact")
    assert [pair.published for pair in row.pairs] == [42.87, 52.05]
    assert [pair.ours.value for pair in row.pairs] == pytest.approx([50.0] * 2)
    assert row.pairs[0].difference == pytest.approx(7.13)


def test_averages_are_compared_over_the_same_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    folder.mkdir()
    (folder / "mine.csv").write_text(
        "method,qasper,hotpotqa,average\nexact,40,60,50\nexact,OOM,,\n"
    )
    compared(tmp_path, "mine")
    (table,) = published_tables(load_experiment(tmp_path / "demo"), folder)
    assert table.columns == ("qasper", "hotpotqa")  # a column with text in it is no number
    (folder / "mine.csv").write_text("method,qasper,hotpotqa,average\nexact,40,60,50\n")
    (table,) = published_tables(load_experiment(tmp_path / "demo"), folder)
    assert [(c, p.published) for c, p in zip(table.columns, table.rows[0].pairs, strict=True)] == [
        ("qasper", 40.0),
        ("hotpotqa", 60.0),
        ("average", 50.0),
    ]


def test_a_long_table_is_spread_over_a_field(tmp_path: Path) -> None:
    spec = {"file": "subgen_table1", "value": "accuracy", "by": "num_lines", "scale": 100}
    (table,) = compared(tmp_path, spec)
    assert table.columns == ("200", "300", "400")
    assert [(p.published, p.ours.value) for p in table.rows[0].pairs] == [
        (pytest.approx(98.0), pytest.approx(0.0)),
        (pytest.approx(100.0), pytest.approx(50.0)),
        (pytest.approx(68.0), pytest.approx(100.0)),
    ]


def test_every_model_of_the_paper_is_shown_when_none_is_chosen(tmp_path: Path) -> None:
    (table,) = compared(tmp_path, "balancekv_table1")
    assert len({row.model for row in table.rows}) == 3


def test_our_model_is_compared_with_itself(tmp_path: Path) -> None:
    (table,) = compared(tmp_path, "balancekv_table1", model="Qwen2.5-14B-Instruct")
    (row,) = table.rows
    assert row.model == "Qwen2.5-14B-Instruct"
    assert [pair.printed for pair in row.pairs] == ["43.39", "64.06"]


def test_digits_are_those_of_the_paper(tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    folder.mkdir()
    (folder / "mine.csv").write_text("method,qasper,hotpotqa\nexact,40.10,60\n")
    compared(tmp_path, "mine")
    (table,) = published_tables(load_experiment(tmp_path / "demo"), folder)
    assert [pair.printed for pair in table.rows[0].pairs] == ["40.10", "60"]


def published_by_length(folder: Path, **spec: object) -> Published:
    """Ten of twenty right at two lengths, beside 50 and 99 as published."""
    (folder / "paper").mkdir(parents=True, exist_ok=True)
    (folder / "paper" / "mine.csv").write_text(
        "method,num_lines,accuracy\nexact,10,50\nexact,20,99\n"
    )
    records = [
        {"example_id": f"{n}-{i}", "num_lines": n, "score": float(i % 2)}
        for n in (10, 20)
        for i in range(20)
    ]
    write_run(
        folder,
        records=records,
        options={"paper_table": {"file": "mine", "value": "accuracy", "by": "num_lines", **spec}},
    )
    (table,) = published_tables(load_experiment(folder / "demo"), folder / "paper")
    return table


def test_what_lies_beyond_two_runs_of_ours_is_flagged(tmp_path: Path) -> None:
    table = published_by_length(tmp_path)
    assert table.rescored is None
    margin = (
        100 * 1.959964 * math.sqrt(2 * 0.25 / 20) + 0.5
    )  # f = 1, p = 1/2, printed to whole per cent
    assert [pair.margin for pair in table.rows[0].pairs] == pytest.approx([margin] * 2)
    assert [pair.beyond for pair in table.rows[0].pairs] == [False, True]
    (view,) = comparison_tables([table])
    rows = shown(view)
    assert [row[1] for row in rows] == ["ours", "95 % interval", "published", "difference"]
    assert rows[2][2:] == ["50", "99 ‡"]
    assert rows[3][2:] == ["0.0 (±31.5)", "−49.0 (±31.5)"]
    assert any("descriptive" in note and "f is 1" in note for note in view.notes)
    assert r"99\rlap{$^\ddagger$}" in latex(view)
    lines = frame(view)
    assert list(lines["beyond_margin"]) == [False, True]
    assert list(lines["scored"]) == [20, 20]


def test_the_share_answered_anew_narrows_the_margin(tmp_path: Path) -> None:
    table = published_by_length(tmp_path, rescored=0.04)
    margin = 100 * 1.959964 * math.sqrt(2 * 0.04 * 0.25 / 20) + 0.5
    assert table.rows[0].pairs[0].margin == pytest.approx(margin)
    (view,) = comparison_tables([table])
    assert any(
        "f, the share of examples that such runs answer anew, is 4 %" in n for n in view.notes
    )
    with pytest.raises(PaperError, match="rescored is 4; allowed: a share from 0 to 1"):
        published_by_length(tmp_path / "other", rescored=4)


def test_the_margin_of_an_average_is_that_of_its_datasets() -> None:
    parts = [(0.5, 18), (0.9, 98)]
    smoothed = [(0.5 * 18 + 1) / 20, (0.9 * 98 + 1) / 100]
    variance = sum(2 * 0.1 * p * (1 - p) / n for p, (_, n) in zip(smoothed, parts, strict=True))
    of_mean = margin_of(parts, 0.1, total=False, unit=0.0)
    assert of_mean == pytest.approx(1.959964 * math.sqrt(variance) / 2)
    assert margin_of(parts, 0.1, total=True, unit=0.0) == pytest.approx(2 * of_mean)
    assert margin_of([(1.0, 50)], 0.1, total=False, unit=0.0) > 0


def test_two_honest_runs_measure_the_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of forty scores change: d^2 is 2, 2 p (1 - p) is 1/2 for each of forty."""
    table = published_by_length(tmp_path)
    assert table.rescored is None
    records = [
        {"example_id": f"{n}-{i}", "num_lines": n, "score": float(i % 2)}
        for n in (10, 20)
        for i in range(20)
    ]
    records[0]["score"], records[1]["score"] = 1.0, 0.0
    write_run(tmp_path / "b", records=records)
    first = tmp_path / "demo"
    assert main([str(first), "--rescored", str(tmp_path / "b" / "demo")]) == 0
    assert "5.0 % of 40 scores changed" in capsys.readouterr().out
    expected = (2 + 1) / (40 * 0.5 + 2)
    (table,) = published_tables(load_experiment(first), tmp_path / "paper")
    assert table.rescored == pytest.approx(expected)
    (first / "rescored.json").write_text("[]")
    with pytest.raises(PaperError, match=r"rescored\.json cannot be read"):
        published_tables(load_experiment(first), tmp_path / "paper")
    assert main([str(first), "--rescored", str(tmp_path / "none")]) == 1


def test_another_model_has_no_margin(tmp_path: Path) -> None:
    (table,) = compared(tmp_path, "balancekv_table1")
    assert all(math.isnan(pair.margin) for row in table.rows for pair in row.pairs)
    assert not any(pair.beyond for row in table.rows for pair in row.pairs)


def test_some_of_the_examples_are_no_run_of_the_same(tmp_path: Path) -> None:
    spec = {"file": "balancekv_table1", "rescored": 0.05}
    options = {"paper_table": spec, "limit": 10}
    records = [{"example_id": f"q{i}", "dataset": "qasper", "score": i % 2} for i in range(10)]
    write_run(
        tmp_path, task="longbench", model="Qwen2.5-14B-Instruct", records=records, options=options
    )
    (table,) = published_tables(load_experiment(tmp_path / "demo"))
    assert table.rescored is None


def test_sums_of_datasets_are_compared_as_sums(tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    folder.mkdir()
    (folder / "mine.csv").write_text("method,qa,code\nexact,90,80\n")
    spec = {"file": "mine", "sums": {"qa": ["qasper", "hotpotqa"], "code": ["lcc"]}}
    compared(tmp_path, spec)
    experiment = load_experiment(tmp_path / "demo")
    (table,) = published_tables(experiment, folder)
    assert table.columns == ("qa",)  # nothing of `code` was run
    (pair,) = table.rows[0].pairs
    assert pair.ours.value == pytest.approx(100.0)  # 50 + 50
    cell = score_table(experiment.groups[0]).rows[0].cells[AVERAGE]
    assert pair.ours.low == pytest.approx(200 * cell.score.low)
    assert pair.published == 90


def test_seconds_are_compared_with_seconds(tmp_path: Path) -> None:
    spec = {"file": "balancekv_table2", "fields": {"decode_s": "decode_s"}}
    for method in ("exact", "snapkv", "uniform"):
        write_run(
            tmp_path,
            task="throughput",
            method=method,
            records=throughput_records(method),
            task_meta=THROUGHPUT_META,
            options={"paper_table": spec},
        )
    experiment = load_experiment(tmp_path / "demo")
    (table,) = published_tables(experiment)
    assert [row.method for row in table.rows] == ["exact", "snapkv"]
    (pair,) = table.rows[0].pairs
    records = experiment.groups[0].records
    assert pair.ours.value == pytest.approx(
        records[records["variant"] == "exact"]["decode_s"].mean()
    )
    assert pair.printed == "37.769"
    assert math.isnan(pair.margin)  # seconds of other hardware
    assert not pair.beyond
    assert comparison_tables([table])[0].title == "throughput: ours beside balancekv_table2, s"
    assert "37.769" in build_report(tmp_path / "demo").page.read_text()


@pytest.mark.parametrize(
    ("experiment", "model", "new", "printed"),
    [
        ("h2o_table3", "OPT-6.7B", 512, "51.7"),
        ("h2o_table4", "OPT-30B", 64, "6.7"),
        ("h2o_table7", "OPT-6.7B", 512, "51.7"),
        ("h2o_table7", "OPT-6.7B-bnb4", 512, "72.5"),
    ],
)
def test_throughputs_stand_beside_the_name_that_records_have(
    tmp_path: Path, experiment: str, model: str, new: int, printed: str
) -> None:
    """Records bear a model's own name, with how its weights are packed, not that of its file."""
    where = {"prompt_tokens": 512, "asked_new_tokens": new, "asked_batch": "largest"}
    for method in ("exact", "h2o"):
        write_run(
            tmp_path,
            task="throughput",
            method=method,
            model=model,
            records=[{"example_id": "0", "dataset": "512", **where, "score": 40.0}],
            task_meta=THROUGHPUT_META,
            experiment=experiment,
            options={"paper_table": published_spec(experiment)},
        )
    (table,) = published_tables(load_experiment(tmp_path / experiment))
    h2o = next(row for row in table.rows if row.label.startswith("h2o"))
    assert [pair.printed for pair in h2o.pairs if pair.ours.value == 40.0] == [printed]


def test_throughput_at_several_settings_is_compared_setting_by_setting(tmp_path: Path) -> None:
    """The specs of the two H2O experiments, on records as the probe writes them."""
    settings = {"h2o_table3": [(512, 32, 4), (512, 512, 4), (512, 1024, 4), (64, 8, 1)]}
    settings["h2o_table5"] = [(2048, 2048, 24), (2048, 2048, 64)]
    for experiment, asked in settings.items():
        spec = published_spec(experiment)
        several = spec if isinstance(spec, list) else [spec]
        spec = [one | {"records": {"asked_rate": 0.2}} for one in several]  # of two that were run
        for method in ("exact", "h2o", "snapkv"):
            records = [
                {
                    "example_id": f"{n}+{new}/b{batch}/{rate}/{run}",
                    "dataset": f"{n}+{new}/b{batch}/{rate}",
                    "prompt_tokens": n,
                    "asked_new_tokens": new,
                    "asked_batch": str(batch) if experiment.endswith("5") else "largest",
                    "asked_rate": rate,
                    "latency_s": batch * new / (900 + 100 * run + 1000 * rate),
                    "score": 900 + 100 * run + 1000 * rate,
                }
                for n, new, batch in asked
                for rate in (0.2, 0.25)
                for run in range(3)
            ]
            write_run(
                tmp_path,
                task="throughput",
                method=method,
                model="opt_6_7b",
                records=records,
                task_meta=THROUGHPUT_META,
                experiment=experiment,
                options={"paper_table": spec},
            )

    def shown(table: Published) -> dict[tuple[str, str], tuple[str, float]]:
        return {
            (row.label, column): (pair.printed, round(pair.ours.value, 6))
            for row in table.rows
            for column, pair in zip(table.columns, row.pairs, strict=True)
        }

    def at(new: int) -> str:
        return f"prompt_len 512, gen_len {new}"

    both = "prompt_len 2048, gen_len 2048"
    (tokens,) = published_tables(load_experiment(tmp_path / "h2o_table3"))
    assert (tokens.unit, tokens.columns) == ("tokens/s", tuple(map(at, (32, 512, 1024))))
    assert shown(tokens)[("h2o", at(512))] == ("51.7", 1200.0)  # rate 0.2 alone
    assert shown(tokens)[("exact", at(32))] == ("20.2", 1200.0)
    assert {row.method for row in tokens.rows} == {"exact", "h2o"}
    assert {row.model for row in tokens.rows} == {"OPT-6.7B"}
    latency, tokens = published_tables(load_experiment(tmp_path / "h2o_table5"))
    assert (latency.unit, latency.columns) == ("s", (f"{both}, batch 24",))
    seconds = sum(24 * 2048 / rate for rate in (1100, 1200, 1300)) / 3
    assert shown(latency)[("h2o", f"{both}, batch 24")] == ("53.5", round(seconds, 6))
    assert shown(tokens)[("exact", f"{both}, batch 64")] == ("OOM", 1200.0)
    assert shown(tokens)[("h2o", f"{both}, batch 64")] == ("1161.0", 1200.0)
    paths = build_report(tmp_path / "h2o_table5")
    assert not paths.warnings
    assert "OOM" in paths.page.read_text()
    names = {path.stem for path in paths.tables}
    assert {f"h2o_table5-throughput{part}-published" for part in ("", "-latency_s")} <= names


def test_columns_may_be_methods_and_rates_are_matched(tmp_path: Path) -> None:
    spec = {"file": "balancekv_table5", "methods": ["balancekv", "uniform", "exact"]}
    for method, rate in (("exact", 0.25), ("balancekv", 0.9), ("balancekv", 0.95), ("snapkv", 0.9)):
        records = [
            {"example_id": f"{name}{i}", "dataset": name, "score": 0.5}
            for name in ("qasper", "multifieldqa_en", "lcc")
            for i in range(2)
        ]
        write_run(
            tmp_path,
            method=method,
            records=records,
            options={"paper_table": spec, "budget.rate": rate},
        )
    (table,) = published_tables(load_experiment(tmp_path / "demo"))
    published = {
        (row.label, column): pair.printed
        for row in table.rows
        for column, pair in zip(table.columns, row.pairs, strict=True)
        if pair.printed
    }
    assert published[("balancekv, rate 0.9", "qasper")] == "42.3"
    assert published[("balancekv, rate 0.95", "lcc")] == "49.3"
    assert ("balancekv, rate 0.95", "qasper") not in published
    assert ("snapkv", "qasper") not in published
    (exact,) = [row for row in table.rows if row.label == "exact"]  # of three rates, one row
    assert {pair.printed for pair in exact.pairs} == {"43.1", "47.8", "49.5"}


def test_tasks_may_be_columns_of_one_table_each_at_its_own_rate(tmp_path: Path) -> None:
    """SubGen's Table 1: fewer entries the more lines."""
    spec = published_spec("subgen_table1")
    for lines, rate in ((200, 0.65), (300, 0.58), (400, 0.25)):
        for method in ("exact", "subgen"):
            score = 1.0 if method == "exact" else 0.5
            write_run(
                tmp_path,
                task=f"longeval_{lines}",
                method=method,
                model="longchat_7b_v15_32k" if lines < 400 else "other",
                records=[
                    {"example_id": f"{lines}-{i}", "num_lines": lines, "score": score}
                    for i in range(4)
                ],
                options={"paper_table": spec, "budget.rate": rate},
            )
    tables = published_tables(load_experiment(tmp_path / "demo"))
    (view,) = comparison_tables(tables)
    assert view.name == "subgen_table1-longeval_lines-published"
    assert heads(view) == ["method", "", "200", "300", "400"]
    assert [heading for heading, _ in view.groups()] == [
        "longchat_7b_v15_32k; published: longchat_7b_v15_32k",
        "other; published: longchat_7b_v15_32k",
    ]
    found = {(i, row[1]): tuple(row[2:]) for i, row in enumerate(shown(view))}
    names = [row[0] for row in shown(view) if row[0]]
    assert names == ["exact", "subgen", "exact"]  # at rate 0.25 the paper has no SubGen
    assert found[0, "ours"] == ("100.0", "100.0", "")
    assert found[2, "published"] == ("98", "100", "")
    assert found[4, "ours"] == ("50.0", "50.0", "")
    assert found[6, "published"] == ("86", "66", "")
    assert found[10, "published"] == ("", "", "68")
    (side_by_side, _) = joined_tasks(tables)
    assert (side_by_side.task, side_by_side.columns) == ("longeval_lines", ("200", "300"))
    report = build_report(tmp_path / "demo")
    page = report.page.read_text()
    assert page.count("ours beside subgen_table1") == 1
    overview = (report.page.parent / "tables" / "overview-longchat_7b_v15_32k.md").read_text()
    assert [row.split(" |")[0].strip("| ") for row in overview.splitlines()[4:7]] == [
        "exact",
        "subgen, rate 0.65",
        "subgen, rate 0.58",
    ]
    for label in ("subgen, rate 0.65", "subgen, rate 0.58"):
        assert label in page


def test_a_method_that_one_of_the_tasks_lacks_leaves_a_gap(tmp_path: Path) -> None:
    spec = published_spec("subgen_table1")
    for lines, rate, methods in ((200, 0.65, ("subgen", "h2o")), (300, 0.58, ("subgen",))):
        for method in methods:
            write_run(
                tmp_path,
                task=f"longeval_{lines}",
                method=method,
                records=[{"example_id": f"{lines}", "num_lines": lines, "score": 0.5}],
                options={"paper_table": spec, "budget.rate": rate},
            )

    def published() -> list[tuple[str, ...]]:
        (view,) = comparison_tables(published_tables(load_experiment(tmp_path / "demo")))
        rows = shown(view)
        assert not any("†" in text for row in rows for text in row)
        names = [row[0] for row in rows if row[0]]
        texts = [row[2:] for row in rows if row[1] == "published"]
        return [(name, *text) for name, text in zip(names, texts, strict=True)]

    assert published() == [("h2o", "66", "–"), ("subgen", "86", "66")]
    write_run(
        tmp_path,
        task="longeval_200",
        method="subgen",
        records=[{"example_id": "200", "num_lines": 200, "score": 0.25}],
        options={"paper_table": spec, "budget.rate": 0.65, "method.recent": 9},
    )
    assert published() == [
        ("h2o", "66", "–"),
        ("subgen, recent 9", "86", "–"),
        ("subgen, recent unset", "86", "–"),
        ("subgen", "–", "66"),
    ], "no variant's numbers hide another's"


def test_the_average_of_figure_4_is_of_the_variant_that_protects_tokens(tmp_path: Path) -> None:
    for method in ("balancekv", "balancekv_needle", "snapkv"):
        write_run(
            tmp_path,
            task="needle",
            method=method,
            records=[{"example_id": f"n{i}", "score": 0.5} for i in range(2)],
            options={"paper_table": published_spec("balancekv_figure4")},
        )
    (table,) = published_tables(load_experiment(tmp_path / "demo"))
    assert {row.method: row.pairs[0].printed for row in table.rows} == {
        "balancekv_needle": "99",
        "snapkv": "83",
    }


def test_a_whole_table_like_the_papers(tmp_path: Path) -> None:
    models = ("Llama-3.1-8B-Instruct", "Qwen2.5-14B-Instruct")
    paths = build_report(write_longbench(tmp_path, 4, models=models))
    folder = paths.page.parent / "tables"
    experiment = load_experiment(tmp_path / "table1")
    view = paper_layout([score_table(group) for group in experiment.groups], list(DATASETS))
    assert heads(view)[1:15] == [*DATASETS, AVERAGE]  # as the paper has them
    assert [heading for heading, _ in view.groups()] == list(models)
    assert len(view.rows) == 12
    columns = {column for _, column in bold(view)}
    assert columns == set(range(1, 15))  # every column has a best
    assert "exact" not in {shown(view)[i][0] for i, _ in bold(view)}
    assert markdown(view) == (folder / "longbench-paper.md").read_text()
    assert (folder / "longbench-paper.tex").exists()
    frame = pd.read_csv(folder / "balancekv_table1-longbench-published.csv")
    assert len(frame) == 2 * 6 * 14
    ours = frame[(frame["variant"] == "balancekv") & (frame["model"] == models[0])].set_index(
        "column"
    )
    assert ours["published"]["qasper"] == 35.75
    assert ours["published"][AVERAGE] == 46.77
    parts = ours["score"].drop(AVERAGE)
    assert ours["score"][AVERAGE] == pytest.approx(parts.mean(), abs=1e-3)  # the plain mean
    assert ours["score_low"][AVERAGE] < ours["score"][AVERAGE] < ours["score_high"][AVERAGE]
    text = (folder / f"longbench-{models[0]}-pairs.md").read_text()
    assert "−0.39" in text or "+0.39" in text  # balancekv 46.77, uniform 46.38
    page = paths.page.read_text()
    assert "46.77" in page
    assert "Which compressed methods are shown to differ" in page


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
        (
            {"file": "h2o_table3", "field": "seconds"},
            "h2o_table3: the records have no field seconds",
        ),
        (
            {"file": "balancekv_table2", "fields": {"decode_s": "decode_s"}},
            "balancekv_table2 has one setting; t was run with several",
        ),
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
        records=[r | {"num_lines": 200} for r in lines_records("exact")],
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
    assert ">98<" in re.sub(r"</?span[^>]*>", "", text)


def test_known_differences_from_the_paper_go_with_its_numbers(tmp_path: Path) -> None:
    """Beneath the published table on the page, in Markdown and in LaTeX, each line once, although
    every run's manifest has them; nothing where an experiment says nothing, and a line for none."""
    spec = {"file": "subgen_table1", "value": "accuracy", "by": "num_lines", "scale": 100}

    def report(name: str, differences: list[list[str] | None]) -> tuple[str, list[Path]]:
        for i, lines in enumerate(differences):
            said = {} if lines is None else {"differences": lines}
            write_run(
                tmp_path / name,
                task="longeval_lines",
                method=("exact", "subgen")[i],
                records=[r | {"num_lines": 200} for r in lines_records("exact")],
                options={"paper_table": {**spec, **said}},
            )
        paths = build_report(tmp_path / name / "demo")
        assert not paths.warnings
        return paths.page.read_text(), [p for p in paths.tables if p.stem.endswith("published")]

    page, tables = report("two", [["50 cases & <b>", "another seed"], ["another seed", "a third"]])
    assert page.count("ours beside subgen_table1") == 1  # one table of both runs
    by_suffix = {path.suffix: path.read_text() for path in tables}
    for line in ("50 cases & <b>", "another seed", "a third"):
        note = f"Differs from the paper: {line}"
        assert page.count(f"<li>{escape(note)}</li>") == 1
        assert by_suffix[".md"].count(f"- {note.replace('<', '&lt;')}\n") == 1
        shown = note.replace("&", r"\&").replace("<", "$<$").replace(">", "$>$")
        assert by_suffix[".tex"].count(shown) == 1
    page, tables = report("none", [[]])
    assert page.count("Differs from the paper: in no setting that is known.") == 1
    page, tables = report("silent", [None])
    assert "Differs from the paper" not in page
    assert not any("Differs" in path.read_text() for path in tables)


@pytest.mark.parametrize("wrong", ["a line", {"a": 1}, 3])
def test_differences_are_a_list_of_lines(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(PaperError, match=r"paper_table\.differences is .*; allowed: a list of"):
        compared(tmp_path, {"file": "balancekv_table1", "differences": wrong})


def test_the_best_of_several_settings_stands_beside_a_number_that_is_the_best(
    tmp_path: Path,
) -> None:
    """SubGen's two numbers of recent tokens; in each column the better, and only where both are run."""
    scores = {
        200: {"subgen_recent_2048": 0.25, "subgen_recent_3072": 0.75, "h2o": 1.0},
        300: {"subgen_recent_2048": 1.0, "subgen_recent_3072": 0.5},
        400: {"subgen_recent_3072": 0.5},
    }
    for lines, variants in scores.items():
        for method, score in variants.items():
            write_run(
                tmp_path,
                task=f"longeval_{lines}",
                method=method,
                records=[
                    {
                        "example_id": f"{lines}-{i}",
                        "num_lines": lines,
                        "score": float(i < 4 * score),
                    }
                    for i in range(4)
                ],
                options={
                    "paper_table": published_spec("subgen_table1"),
                    "budget.rate": {200: 0.65, 300: 0.58, 400: 0.5}[lines],
                },
            )
    (table,) = joined_tasks(published_tables(load_experiment(tmp_path / "demo")))
    assert table.columns == ("200", "300", "400")
    found = {
        row.label: [(pair.printed, pair.ours.value) for pair in row.pairs] for row in table.rows
    }
    assert found["subgen, best of 2"][:2] == [("86", 75.0), ("66", 100.0)]
    assert found["subgen, best of 2"][2][0] == ""  # of 400 lines there is one variant alone
    assert found["subgen_recent_2048"][:2] == [("86", 25.0), ("66", 100.0)]
    assert [ours for _, ours in found["subgen_recent_3072"]] == [75.0, 50.0, 50.0]
    assert found["h2o"][0] == ("66", 100.0)
    (row,) = (row for row in table.rows if row.label == "subgen, best of 2")
    (better,) = (row for row in table.rows if row.label == "subgen_recent_3072")
    assert row.pairs[0].ours == better.pairs[0].ours  # with its interval
    page = build_report(tmp_path / "demo").page.read_text()
    assert "subgen, best of 2" in page
