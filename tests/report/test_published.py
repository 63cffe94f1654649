"""Published numbers beside ours: the tables that ship, the join, what cannot be joined."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.report_runs import THROUGHPUT_META, write_longbench, write_run, write_scores
from support.tables import heads, shown

from kvbench.report.build import build_report
from kvbench.report.papers import PaperError, notes_on
from kvbench.report.published import beside, published_tables
from kvbench.report.runs import load_experiment

PAPER = Path(__file__).parents[2] / "results" / "paper"
RAW = {"balancekv_figure3", "balancekv_table3", "balancekv_table4", "h2o_table12", "models"}
"""Files of results/paper that scripts draw from, or that are no table."""
HEAD = "method,by,value,field,unit,printed\n"


def joined(folder: Path, table: str | None = None) -> pd.DataFrame:
    """The join of the experiment in a folder; `table`: the published file ``mine`` beside it."""
    if table is not None:
        (folder / "paper").mkdir(exist_ok=True)
        (folder / "paper" / "mine.csv").write_text(table)
    return beside(load_experiment(folder / "demo"))


def write_qa(folder: Path, spec: Any, method: str = "exact", n: int = 3, **more: Any) -> None:
    records = [
        {"example_id": f"{name}{i}", "dataset": name, "num_lines": 200, "score": 0.5 * (i % 3)}
        for name in ("qasper", "hotpotqa")
        for i in range(n)
    ]
    write_run(folder, method=method, records=records, options={"paper_table": spec}, **more)


def test_every_published_table_is_tidy_and_in_our_names() -> None:
    files = [path for path in sorted(PAPER.glob("*.csv")) if path.stem not in RAW]
    assert len(files) >= 19
    for path in files:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        assert {"method", "by", "value", "field", "unit", "printed"} <= set(frame), path
        keys = [c for c in frame if c not in ("printed", "unit")]
        assert not frame.duplicated(keys).any(), path
        assert (frame["printed"] != "").all(), path
        assert path.stem.split("_")[0] in (PAPER / "README.md").read_text()


ON_LLAMA = {"file": "balancekv_table1", "where": {"model": "Llama-3.1-8B-Instruct"}}


def test_ours_are_joined_by_method_and_value_in_per_cent(tmp_path: Path) -> None:
    write_qa(tmp_path, ON_LLAMA)
    frame = joined(tmp_path)
    assert list(frame["value"]) == ["qasper", "hotpotqa"], "the paper's average is of 13 datasets"
    assert list(frame["printed"]) == ["42.87", "52.05"]
    assert list(frame["score"]) == pytest.approx([50.0] * 2)
    assert frame["difference"].isna().all(), "the published number is another model's"
    (table,) = published_tables(frame)
    assert heads(table) == ["method", "measured on", "ours", "published", "published of"]
    of_another = ["exact", "qasper", "50.0 [0.0, 100.0]", "42.87", "Llama-3.1-8B-Instruct"]
    assert shown(table)[0] == of_another
    frame.loc[frame["value"] == "qasper", "n"] -= 1
    (table,) = published_tables(frame)
    marks = table.frame.groupby("value")["score_mark"].agg(set)
    assert marks.to_dict() == {"qasper": {"incomplete"}, "hotpotqa": {""}}
    same = tmp_path / "same"
    write_qa(same, ON_LLAMA, model="Llama-3.1-8B-Instruct")
    frame = joined(same)
    assert list(frame["difference"]) == pytest.approx([7.13, -2.05])
    (table,) = published_tables(frame)
    assert heads(table) == ["method", "measured on", "ours", "published", "difference"]
    assert shown(table)[0] == ["exact", "qasper", "50.0 [0.0, 100.0]", "42.87", "+7.1"]


def test_a_printed_fraction_stands_in_the_unit_of_ours_and_is_compared_in_it(
    tmp_path: Path,
) -> None:
    write_qa(tmp_path, "mine")
    frame = joined(tmp_path, f"{HEAD}exact,dataset,qasper,score,fraction,0.830\n")
    assert list(frame["printed"]) == ["0.830"], "the file has what the paper prints"
    (table,) = published_tables(frame)
    assert shown(table)[0][2:4] == ["50.0 [0.0, 100.0]", "83.0"]
    assert list(frame["difference"]) == pytest.approx([50.0 - 83.0])
    printed = {
        file: pd.read_csv(PAPER / f"{file}.csv", dtype=str).set_index("method")["printed"]
        for file in ("balancekv_figure4", "h2o_diversity")
    }
    assert printed["balancekv_figure4"]["balancekv_needle"] == "0.99"
    assert printed["h2o_diversity"]["exact"] == "0.0057"


@pytest.mark.parametrize(
    ("model", "prompt", "difference", "published_of"),
    [
        ("big", 16384, 2.231, ""),
        ("big", 256, math.nan, "big 16384+1024"),
        ("small", 16384, math.nan, "big"),
    ],
)
def test_of_repeated_runs_the_minimum_is_compared_and_other_lengths_are_not(
    tmp_path: Path, model: str, prompt: int, difference: float, published_of: str
) -> None:
    """BalanceKV's Table 2: minima of 10 runs of 16,384 + 1,024 tokens, of a model that is not named."""
    options = {"paper_table": {"file": "balancekv_table2", "model": "big", "statistic": "minimum"}}
    where = {"prompt_tokens": prompt, "asked_new_tokens": 1024, "score": 1.0}
    records = [
        {**where, "example_id": f"{i}", "decode_s": 40.0 + i**2, "prefill_compress_s": 4.0}
        for i in range(4)
    ]
    write_run(tmp_path, model=model, records=records, task_meta=THROUGHPUT_META, options=options)
    frame = joined(tmp_path)
    row = frame[frame["field"] == "decode_s"].iloc[0]
    assert (row["score"], row["median"], row["printed"]) == (40.0, 42.5, "37.769")
    assert row["difference"] == pytest.approx(difference, nan_ok=True)
    assert row["published_of"] == published_of


def test_an_average_is_compared_over_the_same_datasets_only(tmp_path: Path) -> None:
    write_qa(tmp_path, "mine")
    rows = "exact,dataset,qasper,score,%,40\nexact,dataset,hotpotqa,score,%,60\n"
    whole = HEAD + rows + "exact,dataset,average,score,%,50\n"
    assert set(joined(tmp_path, whole)["value"]) == {"qasper", "hotpotqa", "average"}
    other = whole + "exact,dataset,trec,score,%,70\n"
    assert set(joined(tmp_path, other)["value"]) == {"qasper", "hotpotqa"}
    write_qa(tmp_path, "mine", method="snapkv")
    rated = "rate," + HEAD + ",exact,dataset,qasper,score,%,40\n"
    for rate, methods in (("0.25", {"exact", "snapkv"}), ("a quarter", {"exact"})):
        row = f"{rate},snapkv,dataset,qasper,score,%,30\n"
        assert set(joined(tmp_path, rated + row)["method"]) == methods, "rates are numbers"
    summed = HEAD + "exact,dataset,qasper+hotpotqa,score,%,90\n"
    frame = joined(tmp_path, summed)
    assert list(frame["score"]) == [100.0]


def test_rates_are_matched_and_of_several_names_the_best_is_taken(tmp_path: Path) -> None:
    """SubGen's Table 1: fewer entries the more lines; tasks are columns of one table."""
    scored = {"exact": 1.0, "subgen_recent_2048": 0.25, "subgen_recent_3072": 0.5, "subgen": 1.0}
    for lines, rate in ((200, 0.65), (300, 0.58), (400, 0.9)):
        for method in list(scored)[3:] if lines == 400 else list(scored)[:3]:
            records = [
                {
                    "example_id": f"{i}",
                    "num_lines": lines,
                    "score": scored[method],
                    "cache_bytes": (2 + i % 2) * 2**30,
                }
                for i in range(4)
            ]
            about: Any = {"task": f"longeval_{lines}", "model": "longchat_7b_v15_32k"}
            options = {"paper_table": "subgen_table1", "budget.rate": rate}
            write_run(tmp_path, method=method, records=records, options=options, **about)
    frame = joined(tmp_path)
    best = frame[frame["variant"].str.startswith("best of")]
    assert list(best["score"]) == [50.0, 50.0]
    assert list(best["printed"]) == ["86", "66"]
    table, sizes = published_tables(frame)
    assert [row[3] for row in shown(table) if row[0] == "exact"] == ["98", "100"]
    assert sizes.title.endswith(", cache bytes: ours beside subgen_table1, GiB")
    assert [[row[2][:4], *row[3:5]] for row in shown(sizes) if row[0] == "exact"] == [
        ["2.50", "2.351", "+0.149"],
        ["2.50", "3.488", "−0.988"],
    ]
    headings = [heading for heading, _ in table.groups()]
    assert headings == [
        f"longeval_{n} on longchat_7b_v15_32k; published: longchat_7b_v15_32k" for n in (200, 300)
    ]
    assert "400" not in set(frame["value"]), "the paper has no such rate"
    for option, value in (("rate", 0.9), ("size", 900)):  # of which the paper says nothing
        for method in ("subgen_recent_2048", "subgen_recent_3072"):
            records = [{"example_id": f"{i}", "num_lines": 200, "score": 1.0} for i in range(4)]
            about = {"task": "longeval_200", "model": "longchat_7b_v15_32k", "records": records}
            options = {"paper_table": "subgen_table1", f"budget.{option}": value}
            write_run(tmp_path, method=method, options=options, **about)
    again = joined(tmp_path)
    best = again[again["variant"].str.startswith("best of") & again["field"].eq("score")]
    assert sorted(best["score"]) == [50.0, 50.0], "the best at the paper's rate"
    assert len(again) == len(frame)


def test_fields_and_settings_stand_beside_what_records_have(tmp_path: Path) -> None:
    where = {"prompt_tokens": 2048, "asked_new_tokens": 2048, "asked_batch": "64", "score": 900.0}
    for method in ("exact", "h2o"):
        records = [{**where, "example_id": f"{i}", "latency_s": 50.0 + i} for i in range(3)]
        write_run(
            tmp_path,
            method=method,
            model="opt_6_7b",
            records=records,
            task_meta=THROUGHPUT_META,
            options={"paper_table": "h2o_table5"},
        )
    frame = joined(tmp_path)
    found = {(m, f): (p, s) for m, f, p, s in frame[["method", "field", "printed", "score"]].values}
    assert found == {("exact", "score"): ("OOM", 900.0), ("h2o", "score"): ("1161.0", 900.0)}
    assert set(frame["published_model"]) == {"OPT-6.7B"}, "models.csv knows its name"


def test_known_differences_reach_the_page_with_and_without_a_published_table(
    tmp_path: Path,
) -> None:
    scored = write_scores(tmp_path / "without", {"exact": [1.0, 0.0]})
    for folder, spec in ((write_longbench(tmp_path), "balancekv_table1"), (scored, None)):
        options = {"paper_table": spec, "differs": ["50 examples a dataset", "greedy"]}
        for run in folder.glob("*/*/*/manifest.json"):
            made = json.loads(run.read_text())
            run.write_text(json.dumps(made | {"config": made["config"] | options}))
        paths = build_report(folder)
        assert not paths.warnings
        page = paths.page.read_text()
        assert page.count("differs from the paper: 50 examples a dataset") == 1
        assert ("ours beside balancekv_table1" in page) is (spec is not None)
        assert (folder / "tables" / "balancekv_table1-published.csv").is_file() is bool(spec)
        captions = page.count("<caption><span>longbench, compress_after prompt: score, %<")
        assert captions == bool(spec), "a table of a task's datasets stands once"
    assert notes_on([]) == ["differs from the paper: in no setting that is known."]


NOT_JOINED: list[tuple[Any, bytes | None, str]] = [  # the spec, the file mine.csv, what is said
    (5, b"", "paper_table is 5"),
    ([5], b"", "paper_table is [5]"),
    ({"file": "../secret"}, b"", "paper_table.file"),
    ({"file": "x", "scale": 100}, b"", "paper_table.scale is unknown"),
    ({"file": "x", "where": "y"}, b"", "paper_table.where is 'y'"),
    ("nowhere", b"", "paper_table"),
    ({"file": "mine", "where": {"shots": 5}}, HEAD.encode(), "mine.csv has no column shots"),
    ("mine", b"\xff\xfe\x00", "mine.csv"),
    ("mine", b'a,b\n"x', "mine.csv"),
    ("mine", b"method,accuracy\nexact,1\n", "mine.csv"),
    ("mine", HEAD.encode() + b"exact,absent,x,score,%,1\n", ""),
    ("mine", HEAD.encode() + b"exact,dataset,x,absent,s,1\n", ""),
    ("mine", HEAD.encode() + b"mine,dataset,qasper,score,%,1\n", "(datasets: qasper, hotpotqa;"),
    (
        "mine",
        HEAD.encode() + b"exact,dataset,average,score,%,1\n",
        "no row is of a method, rate and",
    ),
    ("mine", None, "is a link"),
]


@pytest.mark.parametrize(("spec", "content", "said"), NOT_JOINED, ids=range(len(NOT_JOINED)))
def test_what_cannot_be_joined_is_a_warning_of_one_line(
    tmp_path: Path, spec: Any, content: bytes | None, said: str
) -> None:
    (tmp_path / "paper").mkdir()
    file = tmp_path / "paper" / "mine.csv"
    if content is None:
        (tmp_path / "secret.csv").write_text(HEAD + "exact,dataset,qasper,score,%,987654\n")
        file.symlink_to(tmp_path / "secret.csv")
    else:
        file.write_bytes(content)
    write_qa(tmp_path, spec)
    with pytest.raises(PaperError) as error:
        joined(tmp_path)
    warning = str(error.value)
    if spec == "nowhere":
        assert build_report(tmp_path / "demo").warnings == (warning,)
    assert "\n" not in warning
    assert said in warning
    assert "paper_table" in warning or "mine.csv" in warning
