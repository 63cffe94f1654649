"""Tables of a report, and every form that a table takes."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from support.report_runs import (
    ERROR_META,
    FIDELITY_META,
    LINES_META,
    fidelity_records,
    lines_records,
    write_demo,
    write_longbench,
    write_run,
    write_scores,
)
from support.tables import data, group_of, heads, printed, shown

from kvbench.report.build import build_report, tables_to_print
from kvbench.report.frame import scores, tidy, totals
from kvbench.report.render import csv, latex, markdown
from kvbench.report.runs import Group, load_experiment
from kvbench.report.table import (
    MISSING,
    Column,
    Table,
    score_format,
)
from kvbench.report.tables import fidelity_table, tables_of

TABLE = Table(
    "a_name",
    "Scores & more: 50 %",
    pd.DataFrame(
        {
            "group": ["one_model", "one_model", "other"],
            "method": ["snapkv", "h2o", "h2o"],
            "variant": ["snapkv_a", "[link](x) | <b>", "=cmd|x"],
            "score": [0.5, 0.25, math.nan],
            "score_low": [0.4, 0.1, math.nan],
            "score_high": [0.6, 0.5, math.nan],
            "score_mark": ["best", "tied incomplete", ""],
            "count": [1.0, 1234.0, 0.0],
        }
    ),
    (
        Column("variant", "method"),
        Column("score", "score, %", score_format("fraction")),
        Column("count", text=lambda v: f"{v:,.0f}"),
    ),
    ("A note_1.",),
    pd.DataFrame({"variant": ["=cmd|x", "-1.5"], "score": [0.123456789, 2.0]}),
)


def test_csv_is_numbers_and_no_formula() -> None:
    assert csv(data(TABLE)) == "variant,score\n'=cmd|x,0.123457\n-1.5,2\n"


@pytest.mark.parametrize("count", [0, 12])
def test_records_of_no_dataset_leave_the_report_whole(tmp_path: Path, count: int) -> None:
    """A task may name no dataset, and a run may have no record at all."""
    scored = dict.fromkeys(("exact", "snapkv"), [1.0] * count)
    folder = write_scores(tmp_path, scored, fields={"dataset": None})
    for _ in range(2):  # its own files are no user's, whatever they lack
        assert build_report(folder).page.is_file()


def test_markdown() -> None:
    assert markdown(TABLE) == (
        "### Scores & more: 50 %\n\n"
        "| method | score, % | count |\n"
        "| --- | ---: | ---: |\n"
        "| *one_model* |  |  |\n"
        "| snapkv_a | **50.0 [40.0, 60.0]** | 1 |\n"
        "| [link]\\(x) \\| &lt;b> | 25.0 [10.0, 50.0] ≈† | 1,234 |\n"
        "| *other* |  |  |\n"
        "| =cmd\\|x | – | 0 |\n\n"
        "- A note_1.\n"
    )


def test_latex() -> None:
    name, score, _ = TABLE.columns
    narrow = replace(TABLE, columns=(name, replace(score, bounds=False)))
    assert latex(narrow).startswith("\\begin{table}\n\\caption")
    depths = pd.DataFrame(
        {"variant": ["streaming_llm"], **{f"{depth}": ["100.0"] for depth in range(5)}}
    )
    six = replace(TABLE, frame=depths, columns=tuple(map(Column, depths)))
    assert latex(six).startswith("\\begin{table*}"), (
        "38 characters, and the space between six columns"
    )
    assert latex(TABLE) == (
        "\\begin{table*}\n"
        "\\caption{Scores \\& more: 50 \\%. A note\\_1.}\n"
        "\\label{tab:a-name}\n"
        "\\resizebox{\\textwidth}{!}{%\n"
        "\\begin{tabular}{llrr}\n"
        "\\toprule\n"
        " & method & score, \\% & count \\\\\n"
        "\\midrule\n"
        "one\\_model & snapkv\\_a & \\textbf{50.0 {[}40.0, 60.0]} & 1 \\\\\n"
        "one\\_model & {[}link](x) $|$ $<$b$>$ & 25.0 {[}10.0, 50.0] $\\approx$$\\dagger$"
        " & 1,234 \\\\\n"
        "other & =cmd$|$x & -- & 0 \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}}\n"
        "\\end{table*}\n"
    )


def test_terminal() -> None:
    assert printed(TABLE, TABLE) == [
        *2
        * [
            "Scores & more: 50 %",
            " method                        score, %   count",
            " one_model",
            " snapkv_a             50.0 [40.0, 60.0]       1",
            " [link](x) | <b>   25.0 [10.0, 50.0] ≈†   1,234",
            " other",
            " =cmd|x                               –       0",
        ],
        "  A note_1.",
    ]
    narrow = printed(TABLE, width=42)
    assert " ".join(narrow).split()[-6:] == ["On", "a", "wider", "terminal", "also:", "count."]
    assert max(map(len, narrow)) <= 42
    narrower = " ".join(" ".join(printed(TABLE, width=36)).split())
    assert " 50.0 " in narrower, "the score stays, without its interval"
    assert "[40.0" not in narrower
    assert narrower.endswith("On a wider terminal also: intervals.")


def test_the_terminal_explains_only_what_it_shows(tmp_path: Path) -> None:
    methods = ("exact", "snapkv", "h2o")
    for i in range(5):
        for method in methods:
            write_run(tmp_path, task=f"task_{i}", method=method, records=lines_records(method))
    *_, overview = tables_to_print(load_experiment(tmp_path / "demo"))
    texts = (" ".join(printed(overview, width=width)) for width in (200, 80))
    wide, narrow = (re.sub(" +", " ", text) for text in texts)
    assert "95 % confidence interval" in wide
    assert "95 % confidence interval" not in narrow
    assert narrow.count(" 72.0") >= 5, "every task's score"
    assert "†: some examples failed" in narrow, "h2o, twice"
    assert "▲" not in wide
    assert "significantly better" not in wide


def tables(group: Group) -> dict[str, Table]:
    found = tables_of(group)
    return {t.name.removeprefix(f"{group.task}-{group.model}"): t for t in found}


def test_a_table_is_saved_in_per_cent_and_with_every_pair(tmp_path: Path) -> None:
    found = tables(group_of(write_demo(tmp_path, tasks=["longeval_lines"])))
    frame = data(found[""])
    assert not {name for name in frame["measure"] if "_s" in name}, "seconds are a probe's"
    assert frame["unit"].eq("%").sum() == 15, "scores and differences"
    pairs = data(found["-pairs"])
    assert len(pairs) == 21 > len(shown(found["-pairs"])), (
        "of many, the table has those of the best"
    )
    assert pairs["first"][0] == "snapkv"
    assert pairs["p"].between(0, 1).all()


@pytest.mark.parametrize("case", ["lower is better", "without exact", "one rate", "exact has 0"])
def test_what_keeps_no_share_of_a_score_has_no_ratio_that_is_enough(
    tmp_path: Path, case: str
) -> None:
    meta = ERROR_META if case == "lower is better" else LINES_META
    rates = (0.5,) if case == "one rate" else (0.5, 0.25)
    for method in ("snapkv",) if case == "without exact" else ("exact", "snapkv"):
        for rate in rates:
            score = 0.0 if method == "exact" and case == "exact has 0" else 1.0
            how = {"rate": rate, "fields": {"ratio": rate}, "task_meta": meta}
            write_scores(tmp_path, {method: [score] * 80}, **how)
    group = group_of(tmp_path / "demo")
    assert not len(totals(tidy(group), "ratio_at_95"))


def test_means_of_parts_are_those_of_their_records(tmp_path: Path) -> None:
    group = group_of(write_longbench(tmp_path))
    split = data(tables(group)["-by-length_bucket-and-dataset"])
    mine = split[(split["variant"] == "snapkv") & (split["dataset"] == "trec")]
    assert mine["mean_of_parts"].iloc[0] == pytest.approx(mine["score"].mean())


def test_models_stand_together_under_one_protocol_with_the_notes_of_each(tmp_path: Path) -> None:
    for model, protocol in (("a", "prompt"), ("b", "prompt"), ("c", "context")):
        records = [
            {
                "example_id": f"{d}{i}",
                "dataset": d,
                "score": 1.0,
                "compressed": model == "a" or i > 1,
            }
            for d in "xy"
            for i in range(3)
        ]
        options = {"compress_after": protocol}
        write_run(tmp_path, model=model, method="snapkv", records=records, options=options)
    build_report(tmp_path / "demo")
    together, alone = (
        (tmp_path / "demo" / "tables" / f"t-{protocol}-paper.md").read_text()
        for protocol in ("prompt", "context")
    )
    assert "| *a* |" in together
    assert "| *b* |" in together
    assert "*c*" not in together, "of another protocol"
    kept = "Prompts that are no longer than the capacity are not compressed: snapkv (4)."
    assert f"b: {kept}" in together
    assert f" {kept}" in alone
    assert f": {kept}" not in alone


def test_a_task_that_has_only_begun_leaves_the_report_whole(tmp_path: Path) -> None:
    folder = write_demo(tmp_path, ("exact", "snapkv"), ("longeval_lines", "needle"))
    write_run(tmp_path, task="a_begun_one", method="snapkv", records=[])
    *_, overview = tables_to_print(load_experiment(folder))
    assert heads(overview)[1:3] == ["longeval_lines, %", "needle, %"]
    assert build_report(folder).page.exists()


def test_a_distance_has_one_interval_in_all_tables(tmp_path: Path) -> None:
    write_run(tmp_path, method="snapkv", records=fidelity_records(), task_meta=FIDELITY_META)
    group = group_of(tmp_path / "demo")
    frame, same = data(fidelity_table(group)), scores(group, "rate").iloc[::-1]
    assert list(frame["kl"]) == pytest.approx([0.5, 1.0])
    for key, column in (("low", "kl_low"), ("high", "kl_high")):
        assert list(frame[column]) == pytest.approx(list(same[key]))
    # A difference of likelihoods may be negative, although none is: no interval of logarithms.
    middle = (frame["difference_low"] + frame["difference_high"]) / 2
    assert list(middle) == pytest.approx(list(frame["difference"]))


def test_a_method_that_fails_at_some_rates_has_a_score_at_the_others_alone(tmp_path: Path) -> None:
    meta = LINES_META | {"score_unit": "nats", "lower_is_better": True, "breakdown": ["rate"]}
    rates = (0.5, 0.25, 0.125)
    for method, least in (("snapkv", 0.1), ("pages", 0.2), ("adakv", 0.4)):
        records = [
            {"example_id": f"p{p}/{rate}", "rate": rate, "status": "ok" if good else "error"}
            | ({"score": 0.1 / rate, "ratio": rate} if good else {})
            for p in range(12)
            for rate in rates
            for good in [rate > least]
        ]
        write_run(tmp_path, method=method, records=records, task_meta=meta)
    (table,) = tables_to_print(load_experiment(tmp_path / "demo"))[1:]
    first, *others = [[cell.split()[0] for cell in row[:4]] for row in shown(table)]
    assert first == ["snapkv", "0.200", "0.400", "0.800"], (
        "what fails is no better than what is hard"
    )
    assert sorted(others) == [
        ["adakv", "0.200", MISSING, MISSING],
        ["pages", "0.200", "0.400", MISSING],
    ]
    build_report(tmp_path / "demo")
