"""Tables of a report, and every form that a table takes."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import rich.console
from support.report_runs import (
    ERROR_META,
    LINES_META,
    THROUGHPUT_META,
    error_records,
    lines_records,
    throughput_records,
    write_demo,
    write_longbench,
    write_run,
    write_scores,
    write_sweep,
)
from support.tables import data, group_of, heads, shown

from kvbench.report.build import build_report, tables_to_print
from kvbench.report.frame import scores, tidy, totals
from kvbench.report.render import csv, latex, markdown, terminal
from kvbench.report.runs import Group, load_experiment
from kvbench.report.table import (
    DIFFERENCE,
    INTERVAL,
    LEGEND,
    MISSING,
    TESTED,
    Column,
    Table,
    footer,
    number,
    value_text,
)
from kvbench.report.tables import fidelity_table, overview_tables, tables_of, timing_table, verdict

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
        Column("score", "score, %", lambda v: value_text(v, "fraction")),
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
    assert build_report(write_scores(tmp_path, scored, fields={"dataset": None})).page.is_file()


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


def printed(*tables: Table, width: int = 80) -> list[str]:
    console = rich.console.Console(width=width, color_system=None)
    with console.capture() as captured:
        terminal(tables, console)
    return [line.rstrip() for line in captured.get().splitlines() if line.strip(" ─")]


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


def test_a_footer_has_three_lines_at_most() -> None:
    notes = ["one.", INTERVAL, LEGEND["best"], "two.", TESTED, LEGEND["tied"], DIFFERENCE, "one."]
    assert footer(notes) == [
        f"{INTERVAL} {TESTED} {DIFFERENCE}",
        f"{LEGEND['best']} {LEGEND['tied']}",
        "one. two.",
    ]
    assert footer([LEGEND["best"]]) == [LEGEND["best"]]


def tables(group: Group) -> dict[str, Table]:
    found = tables_of(group)
    return {t.name.removeprefix(f"{group.task}-{group.model}"): t for t in found}


def test_a_task_has_its_scores_and_costs(tmp_path: Path) -> None:
    group = group_of(write_demo(tmp_path, tasks=["longeval_lines"]))
    found = tables(group)
    expected = ["", "-pairs", "-by-num_lines"]
    assert [name for name in found if name in expected] == expected
    assert heads(found[""]) == [
        "method",
        "longeval_lines",
        "Δ exact",
        "failed",
        "ratio",
        "entries",
        "scored",
    ]
    rows = shown(found[""])
    assert [row[0] for row in rows[:3]] == ["exact", "snapkv", "pyramidkv"], "ranked"
    row = next(row for row in rows if row[0] == "h2o")
    assert row[1:5] == ["47.9 [33.5, 62.6] †", "−39.6 [−54.8, −24.3]", "2 oom", "0.371"]
    assert row[-1] == "48/50"
    frame = data(found[""])
    assert not {name for name in frame["measure"] if "_s" in name}, "seconds are a probe's"
    assert frame["unit"].eq("%").sum() == 15, "scores and differences are saved as per cent"
    pairs = data(found["-pairs"])
    assert len(pairs) == 21 > len(shown(found["-pairs"])), (
        "of many, the table has those of the best"
    )
    assert pairs["first"][0] == "snapkv"
    assert pairs["p"].between(0, 1).all()


def test_the_verdict_is_one_sentence_a_rate_from_the_marks(tmp_path: Path) -> None:
    (group,) = load_experiment(write_sweep(tmp_path)).groups
    lines = verdict(group).splitlines()
    assert len(lines) == 3, "three rates"
    assert lines[1] == (
        "At rate 0.25, ratio 0.37: snapkv has 72.0 % (50 prompts), −20.0 [−32.5, −7.5] against exact;"
        " not significantly different: balancekv; significantly worse: uniform."
    )
    groups = [
        (heading, [row["variant"] for row in rows]) for heading, rows in tables(group)[""].groups()
    ]
    rates = ["rate 0.5, ratio 0.62", "rate 0.25, ratio 0.37", "rate 0.125, ratio 0.25"]
    assert [heading for heading, _ in groups] == ["", *rates]
    assert groups[0][1] == ["exact"]
    assert groups[2][1] == ["snapkv", "balancekv", "uniform"], "by score"


def test_several_rates_are_one_table_that_ends_with_the_ratio_that_is_enough(
    tmp_path: Path,
) -> None:
    """Exact 80 of 80; 72, 76 and 80 of them at ratios .2, .3 and .5: 95 % from .3 on."""
    for method, right in (("exact", [80] * 3), ("snapkv", [72, 76, 80]), ("h2o", [36, 48, 74])):
        for rate, ratio, count in zip((0.1, 0.2, 0.4), (0.2, 0.3, 0.5), right, strict=True):
            fields = {"ratio": ratio if method != "exact" else 1.0}
            scored = {method: [float(i < count) for i in range(80)]}
            write_scores(tmp_path, scored, rate=rate, fields=fields)
    *_, table = tables_to_print(load_experiment(tmp_path / "demo"))
    assert heads(table) == [
        "method",
        "rate 0.4, ratio 0.50",
        "rate 0.2, ratio 0.30",
        "rate 0.1, ratio 0.20",
        "95 % at ratio",
    ]
    rows = {row[0]: row[1:] for row in shown(table)}
    assert [text.partition(" [")[0] for text in rows["snapkv"]] == [
        "100.0",
        "95.0",
        "90.0",
        "0.300",
    ]
    assert list(rows) == ["exact", "snapkv", "h2o"]
    assert rows["h2o"][3].startswith(">0.500 [")
    assert rows["exact"][2:] == [rows["exact"][0], MISSING], "it is the same at each rate"
    narrow = " ".join(printed(table, width=72))
    assert " 0.300 [0, 0.459]" in narrow, "the last column's interval is the last to go"
    assert rows["snapkv"][0] not in narrow
    frame = tidy(group_of(tmp_path / "demo"))
    found = totals(frame, "ratio_at_95")
    assert found["mean"].to_dict() == pytest.approx({"snapkv": 0.3, "h2o": 0.5})
    assert list(found["mark"]) == ["", "more_than"]
    assert "ratio_at_95" in set(data(tables_of(group_of(tmp_path / "demo"))[0])["measure"])


def test_ratios_that_are_enough_of_several_tasks_end_with_what_never_reaches_them(
    tmp_path: Path,
) -> None:
    """h2o keeps little within these rates, whose largest is less than what snapkv needs; an error has no
    95 %."""
    for method, right in (("exact", [80, 80]), ("snapkv", [0, 80]), ("h2o", [0, 0])):
        for rate, count in zip((0.25, 0.5), right, strict=True):
            ratio = 1.0 if method == "exact" else rate * (0.5 if method == "h2o" else 1.0)
            scored = {method: [float(i < count) for i in range(80)]}
            for task, meta in (("one", LINES_META), ("two", LINES_META), ("error", ERROR_META)):
                about: Any = {"task": task, "task_meta": meta, "fields": {"ratio": ratio}}
                write_scores(tmp_path, scored, rate=rate, **about)
    *_, table = tables_to_print(load_experiment(tmp_path / "demo"))
    assert heads(table) == ["method", "one", "two"]
    rows = [[cell.partition(" ")[0] for cell in row] for row in shown(table)]
    assert rows == [["snapkv", "0.488", "0.488"], ["h2o", ">0.250", ">0.250"]]


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


def test_several_models_stand_side_by_side(tmp_path: Path) -> None:
    for model in ("one", "two"):
        for method in ("exact", "snapkv", "h2o"):
            write_run(tmp_path, model=model, method=method, records=lines_records(method))
    *_, table = tables_to_print(load_experiment(tmp_path / "demo"))
    assert heads(table) == ["method", "one", "two", "ratio, mean of models"]
    assert table.answer[0].startswith("one: at rate 0.25, ratio 0.37: snapkv has 72.0 %")
    assert len(table.answer) == 2


@pytest.mark.parametrize("count", [6, 12])
def test_all_that_have_the_best_score_are_named(tmp_path: Path, count: int) -> None:
    right = {"snapkv": 2, "h2o": 2, "balancekv": 2, "uniform": 1}
    scored = {m: [float(i < k * count / 12) for i in range(count)] for m, k in right.items()}
    group = group_of(write_scores(tmp_path, scored))
    said = verdict(group)
    assert "balancekv, snapkv and h2o have 16.7 %" in said or "snapkv, h2o and balancekv" in said
    assert "best" not in said


def test_a_verdict_names_four_methods_and_counts_the_others(tmp_path: Path) -> None:
    worse = ("h2o", "uniform", "subgen", "pyramidkv", "balancekv")
    scored = {"snapkv": [1.0] * 20, **dict.fromkeys(worse, [0.0] * 20)}
    group = group_of(write_scores(tmp_path, scored, task_meta={}))
    best, *_ = shown(tables(group)[""])
    assert best[0] == "snapkv", "of a task that says nothing else higher is better"
    said = verdict(group).partition("significantly worse: ")[2]
    assert said.count(",") == 3
    assert said.endswith(" and 1 more.")


def test_several_datasets_and_tasks_are_set_side_by_side(tmp_path: Path) -> None:
    group = group_of(write_longbench(tmp_path))
    split = data(tables(group)["-by-length_bucket-and-dataset"])
    mine = split[(split["variant"] == "snapkv") & (split["dataset"] == "trec")]
    assert mine["mean_of_parts"].iloc[0] == pytest.approx(mine["score"].mean())
    tasks = ("longeval_lines", "needle", "throughput")  # times are no scores
    several = load_experiment(write_demo(tmp_path, ("exact", "snapkv"), tasks))
    *_, overview = tables_to_print(several)
    assert overview.kind == "overview"
    ratio = "ratio, mean of tasks"
    assert heads(overview) == ["method", "longeval_lines, %", "needle, %", ratio]
    assert [row[::3] for row in shown(overview)] == [["exact", "1.00"], ["snapkv", "0.369"]]


def test_a_task_that_has_only_begun_leaves_the_report_whole(tmp_path: Path) -> None:
    folder = write_demo(tmp_path, ("exact", "snapkv"), ("longeval_lines", "needle"))
    write_run(tmp_path, task="a_begun_one", method="snapkv", records=[])
    *_, overview = tables_to_print(load_experiment(folder))
    assert heads(overview)[1:3] == ["longeval_lines, %", "needle, %"]
    assert build_report(folder).page.exists()


def test_no_column_is_empty_or_without_a_head(tmp_path: Path) -> None:
    groups = load_experiment(write_demo(tmp_path, ("exact", "h2o", "uniform"))).groups
    shown_tables = [table for group in groups for table in tables_of(group)]
    shown_tables += overview_tables(groups[:2])
    assert len(shown_tables) > 8
    for table in shown_tables:
        assert all(name.strip() for name in heads(table)), table.name
        for name, cells in zip(heads(table), zip(*shown(table), strict=True), strict=True):
            assert set(cells) - {"", MISSING}, (table.name, name)


def test_a_leaderboard_has_every_method_on_every_task_at_each_rate(tmp_path: Path) -> None:
    """Of a task that is run once a rate, and of one that measures several rates in one run."""
    for method in ("exact", "uniform", "balancekv"):
        for rate in (0.5, 0.25):
            about: Any = {"method": method, "options": {"budget.rate": rate}}
            records = lines_records(method, rate if method != "exact" else 1.0)
            write_run(tmp_path, task="longeval_lines", records=records, **about)
        meta = ERROR_META | {"metric": "per_query"}
        write_run(
            tmp_path,
            task="layer_error",
            method=method,
            records=error_records(method),
            task_meta=meta,
        )
    groups = load_experiment(tmp_path / "demo").groups
    (table,) = overview_tables(groups)
    assert heads(table) == [
        "method",
        "longeval_lines, %",
        "layer_error: per query, relative error ↓",
        "ratio, mean of tasks",
    ]
    rows_of = {heading: [row["variant"] for row in rows] for heading, rows in table.groups()}
    rates = ["rate 0.5", "rate 0.25", "rate 0.125", "rate 0.0625"]
    assert [heading.partition(",")[0] for heading in rows_of] == ["", *rates]
    assert rows_of[""] == ["exact"]
    assert sorted(rows_of["rate 0.25, ratio 0.25 to 0.37"]) == ["balancekv", "uniform"]
    rate_of = table.frame["group"].str.extract(r"rate ([\d.]+)")[0].astype(float)
    frame = table.frame.assign(rate=rate_of).set_index(["rate", "variant"])
    for rate in (0.5, 0.25):
        of_lines = totals(tidy(groups[0]))["mean"][f"uniform, rate {rate}"]
        assert frame["longeval_lines"][rate, "uniform"] == of_lines
    assert frame["longeval_lines"].isna()[0.125, "uniform"]
    marks = frame["layer_error_mark"].unstack()
    for rate in (0.5, 0.25, 0.125, 0.0625):
        assert list(marks.loc[rate, ["balancekv", "uniform"]]) == ["few"] * 2, "at each rate"


def test_runs_that_failed_are_counted_and_not_timed(tmp_path: Path) -> None:
    speedups = [1.2, 9.0, 1.0, 1.1, 0.9, 1.3, 1.4]
    records = [
        dict(throughput_records("snapkv")[0]) | {"example_id": f"run-{i}", "speedup": x}
        for i, x in enumerate(speedups)
    ]
    failed = {"status": "oom", "score": None, "error": "out of memory", "decode_s": None}
    records += [dict(records[0]) | failed | {"example_id": f"run-{i}"} for i in (7, 8)]
    write_run(tmp_path, method="snapkv", records=records, task_meta=THROUGHPUT_META)
    table = timing_table(group_of(tmp_path / "demo"))
    row = dict(zip(heads(table), shown(table)[0], strict=True))
    assert row["tokens/s x"] == "1.20 [0.900, 9.00]"
    good = pd.DataFrame(records[: len(speedups)])
    assert row["decode s"] == number(good["decode_s"].median())
    assert row["prefill s"] == number((good["prefill_s"] + good["compress_s"]).median())
    assert (row["runs"], row["failed"]) == ("7", "2 oom")


def test_distances_from_the_exact_model_are_averaged_over_prompts(tmp_path: Path) -> None:
    meta = LINES_META | {"score_unit": "KL in nats", "lower_is_better": True, "unit": "prompt"}
    meta |= {"breakdown": ["rate"], "kind": "fidelity"}
    records = [
        {
            "example_id": f"p{p}/{rate}",
            "prompt": f"p{p}",
            "rate": rate,
            "score": kl,
            "kl": kl,
            "max_kl": 2 * kl,
            "agreement": 0.5,
            "difference": kl / 2,
            "perplexity_ratio": math.exp(kl / 2),
            "kl_floor": 1e-7,
            "ratio": rate,
            "compressed": p > 0 or rate < 0.5,
        }
        for p in range(4)
        for rate in (0.5, 0.25)
        for kl in [(p + 1) / 10 / rate]
    ]
    write_run(tmp_path, method="snapkv", records=records, task_meta=meta)
    group = group_of(tmp_path / "demo")
    assert "-fidelity" in tables(group)
    frame, same = data(fidelity_table(group)), scores(group, "rate").iloc[::-1]
    assert list(frame["group"]) == ["rate 0.5", "rate 0.25"]
    assert list(frame["kl"]) == pytest.approx([0.5, 1.0])
    assert list(frame["agreement"]) == [50.0, 50.0], "as per cent"
    table = fidelity_table(group)
    assert table is not None
    largest = heads(table).index("max KL, nats")
    assert [row[largest] for row in shown(table)] == ["1.00", "2.00"], "means without an interval"
    assert list(frame["compressed"]) == ["3/4", "4/4"], "prompts that were not kept whole"
    for key, column in (("low", "kl_low"), ("high", "kl_high")):
        assert list(frame[column]) == pytest.approx(list(same[key])), "one interval in all tables"


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
