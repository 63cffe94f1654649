"""Numbers of the report: means, intervals, paired differences, failures; as text, CSV and LaTeX."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from scipy.stats import binomtest, bootstrap
from support.report_runs import (
    ERROR_META,
    LINES_META,
    NEEDLE_META,
    lines_records,
    needle_records,
    write_demo,
    write_longbench,
    write_run,
    write_sweep,
)
from support.tables import frame, made_of

from kvbench.records.read import StoreError, load_runs
from kvbench.report.build import build_report
from kvbench.report.experiment import Group, group_runs, load_experiment
from kvbench.report.figures.intervals import breakdown, by_dataset
from kvbench.report.render.terminal import print_tables
from kvbench.report.render.text import latex, markdown
from kvbench.report.sections import section_of
from kvbench.report.stats.estimate import Estimate, Stratum, estimates
from kvbench.report.table import NOTHING, Column, Row, Table, number, size
from kvbench.report.tables import score_tables
from kvbench.report.tables import scores as scores_module
from kvbench.report.tables.score_tables import as_table, split_table
from kvbench.report.tables.scores import AVERAGE, Measure, score_table
from kvbench.report.wandb.log import summary_of


def group_from(folder: Path, **scores: list[float | None]) -> Group:
    """One group of methods with these scores; None is out of memory, missing ones are not run."""
    for method, values in scores.items():
        records = [
            {"example_id": f"e{i}", "score": value, "status": "ok" if value is not None else "oom"}
            for i, value in enumerate(values)
        ]
        write_run(folder, method=method, records=records)
    return group_runs(load_runs(folder / "demo"))[0]


def brute_force(values: np.ndarray, other: np.ndarray | None = None) -> tuple[float, float]:
    """Percentile bootstrap of a mean (of a paired difference), one resample at a time."""
    generator = np.random.default_rng(1)
    means = []
    for _ in range(20000):
        drawn = generator.integers(len(values), size=len(values))
        sample = values[drawn] if other is None else values[drawn] - other[drawn]
        means.append(sample.mean())
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def test_intervals_agree_with_brute_force_and_scipy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    exact = rng.beta(5, 2, 80)
    snapkv = np.clip(exact - rng.beta(1, 6, 80) + 0.05, 0, 1)
    group = group_from(tmp_path, exact=list(exact), snapkv=list(snapkv))
    rows = {row.variant.method: row.total for row in score_table(group).rows}
    score, difference = rows["snapkv"].score, rows["snapkv"].difference
    assert score.value == pytest.approx(snapkv.mean())
    assert (score.low, score.high) == pytest.approx(brute_force(snapkv), abs=0.004)
    theirs = bootstrap((snapkv,), np.mean, method="percentile", random_state=1, n_resamples=9999)
    assert score.low == pytest.approx(theirs.confidence_interval.low, abs=0.004)
    assert difference is not None
    assert difference.value == pytest.approx((snapkv - exact).mean())
    assert (difference.low, difference.high) == pytest.approx(brute_force(snapkv, exact), abs=0.002)
    assert difference.high - difference.low < 0.7 * (score.high - score.low)  # pairing pays
    assert rows["exact"].difference is None


def test_the_average_is_stratified_and_counts_datasets_alike() -> None:
    rng = np.random.default_rng(2)
    first, second = rng.random((30, 1)), rng.random((90, 1)) + 1
    both = [Stratum("a", first, np.ones((30, 1))), Stratum("b", second, np.ones((90, 1)))]
    (found,) = estimates(both)
    assert found.value == pytest.approx((first.mean() + second.mean()) / 2)
    spread = 1.96 * np.sqrt(first.var() / 30 + second.var() / 90) / 2
    assert found.high - found.low == pytest.approx(2 * spread, rel=0.06)
    assert estimates(both) == [found]  # the same draws every time
    both[1].counts[:] = 0
    assert np.isnan(estimates(both)[0].value)


def test_units_are_resampled_together() -> None:
    scores = np.array([[0.0], [1.0], [0.0], [1.0]])
    apart = Stratum("x", np.repeat(scores, 50, axis=0), np.ones((200, 1)))
    together = Stratum("x", scores * 50, np.full((4, 1), 50.0))
    (narrow,), (wide,) = estimates([apart]), estimates([together])
    assert narrow.value == wide.value == 0.5
    assert wide.high - wide.low > 4 * (narrow.high - narrow.low)


def test_failures_are_shown_and_never_dropped(tmp_path: Path) -> None:
    group = group_from(
        tmp_path,
        exact=[1, 1, 1, 1],
        snapkv=[1, None, 0, None],
        h2o=[None, None, None, None],
        uniform=[1, 1, 1],
    )
    table = score_table(group)
    cells = {row.variant.method: row.total for row in table.rows}
    assert cells["snapkv"].failures == {"oom": 2}
    assert (cells["snapkv"].scored, cells["snapkv"].expected) == (2, 4)
    assert cells["snapkv"].score.value == 0.5
    assert cells["uniform"].failures == {"missing": 1}
    assert np.isnan(cells["h2o"].score.value)
    text = markdown(as_table(table))
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    assert "50.0 [2.6, 97.4] †" in lines["snapkv"]
    assert "2/4" in lines["snapkv"]
    assert "2 oom" in lines["snapkv"]
    assert "4 oom" in lines["h2o"]
    assert "1 missing" in lines["uniform"]
    assert "†" not in lines["exact"]
    assert "† some examples failed or are missing" in text


def test_a_score_that_is_no_number_counts_as_failed(tmp_path: Path) -> None:
    records = [{"example_id": "a", "score": float("nan")}, {"example_id": "b", "score": 1.0}]
    write_run(tmp_path, records=records)
    (row,) = score_table(load_experiment(tmp_path / "demo").groups[0]).rows
    assert row.total.failures == {"no score": 1}


def test_only_proven_differences_are_marked(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    best = rng.random(60)
    group = group_from(
        tmp_path,
        exact=list(best + 0.2),
        balancekv=list(best),
        snapkv=list(best - 0.1 + 0.1 * rng.random(60)),
        uniform=list(best + rng.normal(-0.03, 0.2, 60)),
    )
    cells = {row.variant.method: row.total for row in score_table(group).rows}
    assert {m for m, cell in cells.items() if cell.worse} == {"snapkv"}
    assert {m for m, cell in cells.items() if cell.tied} == {"uniform"}
    assert {m for m, cell in cells.items() if cell.best} == {"balancekv"}  # exact does not compete


def test_equal_means_are_both_best_and_one_alone_is_not(tmp_path: Path) -> None:
    group = group_from(tmp_path, exact=[1, 1, 1], snapkv=[1, 0, 1], uniform=[0, 1, 1])
    assert [row.total.best for row in score_table(group).rows] == [False, True, True]
    alone = group_from(tmp_path / "alone", exact=[1, 1, 1], snapkv=[1, 0, 1])
    assert [row.total.best for row in score_table(alone).rows] == [False, False]


def test_only_means_over_the_same_examples_are_ranked(tmp_path: Path) -> None:
    # h2o fails where it is hard: its mean of 1.0 must not win
    group = group_from(
        tmp_path, exact=[1] * 6, h2o=[1, 1, 1, None, None, None], snapkv=[1, 1, 1, 0.5, 0.5, 0]
    )
    best = {row.variant.method: row.total.best for row in score_table(group).rows}
    assert best == {"exact": False, "snapkv": True, "h2o": False}
    # each lacks some: the examples that all scored decide
    both = group_from(tmp_path / "both", h2o=[1, 0.2, 0.3, None], snapkv=[None, 0.3, 0.4, 0])
    best = {row.variant.method: row.total.best for row in score_table(both).rows}
    assert best == {"snapkv": True, "h2o": False}


def test_an_oracle_that_keeps_all_does_not_compete(tmp_path: Path) -> None:
    for method, keeps, scores in (
        ("exact", True, [1, 1, 0]),
        ("topk", True, [1, 1, 1]),
        ("snapkv", False, [1, 0, 0]),
        ("uniform", False, [0, 0, 0]),
    ):
        records = [
            {"example_id": str(i), "score": score, "saves_memory": not keeps}
            for i, score in enumerate(scores)
        ]
        write_run(tmp_path, method=method, records=records)
    (group,) = load_experiment(tmp_path / "demo").groups
    best = {row.variant.method: row.total.best for row in score_table(group).rows}
    assert best == {"exact": False, "topk": False, "snapkv": True, "uniform": False}


def test_lower_can_be_better_and_without_exact_nothing_is_compared(tmp_path: Path) -> None:
    for method, error in (("uniform", 0.4), ("balancekv", 0.2)):
        records = [{"example_id": f"{p}", "score": error + p / 100, "rate": 0.5} for p in range(10)]
        write_run(tmp_path, task="e", method=method, records=records, task_meta=ERROR_META)
    table = score_table(load_experiment(tmp_path / "demo").groups[0])
    assert table.baseline is None
    assert [row.total.best for row in table.rows] == [False, True]
    assert [row.total.worse for row in table.rows] == [True, False]
    assert [row.total.difference for row in table.rows] == [None, None]


def test_a_sweep_without_exact_says_what_to_add(tmp_path: Path) -> None:
    alone = group_from(tmp_path / "a", snapkv=[1, 0, 1, 1], uniform=[0, 0, 1, 1])
    text = markdown(as_table(score_table(alone)))
    assert "Δ" not in text
    assert "add exact to the methods" in text
    beside = group_from(tmp_path / "b", exact=[1, 1, 1, 1], uniform=[0, 0, 1, 1])
    text = markdown(as_table(score_table(beside)))
    assert "Δ exact" in text
    assert "add exact" not in text
    build_report(tmp_path / "a" / "demo")  # figures, too, do without a baseline


def test_columns_of_zeros_have_no_best_and_draw_the_whole_axis(tmp_path: Path) -> None:
    group = group_from(tmp_path, exact=[0] * 9, snapkv=[0] * 9, uniform=[0] * 9)
    table = score_table(group)
    assert not any(row.total.best or row.total.tied or row.total.worse for row in table.rows)
    ax = breakdown(group, table).figure.axes[0]
    assert ax.get_ylim() == (0.0, 103.0)


def test_a_baseline_is_drawn_at_its_own_rates_only(tmp_path: Path) -> None:
    """A sweep over rates without exact: each panel has the variants of its rate."""
    for rate in (0.5, 0.25):
        for method in ("uniform", "snapkv"):
            records = [
                {"example_id": f"{d}{i}", "dataset": d, "score": i % 2}
                for d in ("qasper", "trec")
                for i in range(6)
            ]
            write_run(tmp_path, method=method, records=records, options={"budget.rate": rate})
    (group,) = load_experiment(tmp_path / "demo").groups
    axes = by_dataset(group, score_table(group)).figure.axes
    assert [len(ax.containers) for ax in axes if ax.get_visible()] == [2, 2]


def test_one_example_has_no_interval(tmp_path: Path) -> None:
    group = group_from(tmp_path, exact=[1.0], snapkv=[0.0], uniform=[1.0])
    table = score_table(group)
    assert all(np.isnan(row.total.score.low) for row in table.rows)
    assert not any(row.total.worse for row in table.rows)
    text = markdown(as_table(table))
    assert "**100.0** [–]" in text
    assert "0.0 [–] ≈" in text
    assert "−100.0 [–]" in text
    build_report(tmp_path / "demo")


def test_all_right_is_no_certainty(tmp_path: Path) -> None:
    """Wilson's interval of 25 of 25, by scipy; a percentile bootstrap said [100, 100]."""
    group = group_from(tmp_path, exact=[1.0] * 25, snapkv=[1.0] * 20 + [0.0] * 5)
    scores = [row.total.score for row in score_table(group).rows]
    for found, right in zip(scores, (25, 20), strict=True):
        theirs = binomtest(right, 25).proportion_ci(method="wilson")
        assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high))


def test_an_incomplete_variant_that_beats_the_best_is_not_worse(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    base = list(rng.random(60) * 0.5)
    better: list[float | None] = [x + 0.3 for x in base]
    worse: list[float | None] = [x - 0.3 for x in base]
    better[:3] = worse[:3] = [None] * 3
    group = group_from(tmp_path, exact=[1.0] * 60, snapkv=base, h2o=better, uniform=worse)
    cells = {row.variant.method: row.total for row in score_table(group).rows}
    assert cells["snapkv"].best
    assert cells["h2o"].tied
    assert not cells["h2o"].worse
    assert cells["uniform"].worse


def test_one_seed_of_a_method_without_draws_stands_beside_three(tmp_path: Path) -> None:
    """The same prompts under every seed: snapkv needs one run of them, uniform has three."""
    rng = np.random.default_rng(2)

    def runs(folder: Path, tail: str) -> Group:
        for seed in (0, 1, 2):
            for method, level in (("uniform", 0.4), ("snapkv", 0.75)):
                if method == "snapkv" and seed:
                    continue
                records = [
                    {
                        "example_id": f"e{i}",
                        "score": float(rng.random() < level),
                        "prompt_tail": tail.format(seed=seed, i=i),
                    }
                    for i in range(40)
                ]
                write_run(folder, method=method, records=records, seed=seed)
        return load_experiment(folder / "demo").groups[0]

    same = runs(tmp_path / "same", "prompt {i}")
    cells = {row.variant.method: row.total for row in score_table(same).rows}
    mine = same.records[same.records["variant"] == "snapkv"]["score"]
    assert cells["snapkv"].best
    assert cells["snapkv"].complete
    assert (cells["snapkv"].scored, cells["uniform"].scored) == (40, 120)
    assert cells["snapkv"].score.value == pytest.approx(mine.mean())
    theirs = binomtest(int(mine.sum()), 40).proportion_ci(method="wilson")
    assert (cells["snapkv"].score.low, cells["snapkv"].score.high) == pytest.approx(
        (theirs.low, theirs.high), abs=1e-6
    )
    assert cells["uniform"].worse
    other = runs(tmp_path / "other", "prompt {i} of seed {seed}")
    cells = {row.variant.method: row.total for row in score_table(other).rows}
    assert cells["snapkv"].failures == {"missing": 80}  # other prompts, which it never saw
    assert not cells["snapkv"].best


def test_several_datasets_and_seeds(tmp_path: Path) -> None:
    for seed in (0, 1):
        for method, shift in (("exact", 0.0), ("snapkv", -0.1)):
            records = [
                {"example_id": f"{name}-{i}", "dataset": name, "score": base + shift + 0.01 * seed}
                for name, base, count in (("qasper", 0.5, 4), ("hotpotqa", 0.9, 12))
                for i in range(count)
            ]
            write_run(tmp_path, task="longbench", method=method, records=records, seed=seed)
    (group,) = load_experiment(tmp_path / "demo").groups
    table = score_table(group)
    assert table.columns == ("qasper", "hotpotqa", AVERAGE)  # as the task gives them
    cells = table.rows[1].cells
    assert cells["qasper"].score.value == pytest.approx(0.405)
    assert cells[AVERAGE].score.value == pytest.approx((0.805 + 0.405) / 2)
    assert cells[AVERAGE].expected == 32  # both seeds
    difference = cells[AVERAGE].difference
    assert difference is not None
    assert difference.value == pytest.approx(-0.1)
    lines = frame(as_table(table))
    assert list(lines["dataset"]) == ["qasper", "hotpotqa", AVERAGE] * 2
    assert lines["score"][3] == pytest.approx(40.5)  # per cent
    assert lines["unit"].unique() == ["%"]


def test_variants_of_a_sweep_are_named_by_what_differs(tmp_path: Path) -> None:
    (group,) = load_experiment(write_sweep(tmp_path)).groups
    labels = [variant.label for variant in group.variants]
    assert labels[0] == "exact"  # a budget means nothing to it
    assert labels[1:4] == ["uniform, rate 0.5", "uniform, rate 0.25", "uniform, rate 0.125"]
    assert len(labels) == 10
    assert set(group.baseline.values()) == {None, "exact"}


def test_files_are_told_apart_by_their_names_or_by_what_is_in_them(tmp_path: Path) -> None:
    def labels(folder: Path, runs: list[tuple[str, str]]) -> list[str]:
        for file, content in runs:
            for method in ("exact", "snapkv"):
                write_run(
                    folder,
                    method=method,
                    records=[{"example_id": "a", "score": 1.0}],
                    options={"task.files": [file], "data": {file.split("/")[-1]: content * 64}},
                )
        (group,) = load_experiment(folder / "demo").groups
        return sorted(variant.label for variant in group.variants)

    found = labels(tmp_path / "a", [("../here/200_lines.jsonl", "a"), ("/x/300_lines.jsonl", "b")])
    assert found == [
        f"{method}, files {lines}_lines.jsonl"
        for method in ("exact", "snapkv")
        for lines in (200, 300)
    ]
    exact, other, *_ = labels(tmp_path / "b", [("x/lines.jsonl", "a"), ("x/lines.jsonl", "b")])
    assert exact.startswith("exact, data ")
    assert other.startswith("exact, data ")
    assert len(exact) == len("exact, data 01234567")
    alike = labels(tmp_path / "c", [("x/lines.jsonl", "a"), ("y/lines.jsonl", "a")])
    assert alike[0] == 'exact, files ["x/lines.jsonl"]'


def test_long_values_do_not_make_long_labels_and_stay_apart(tmp_path: Path) -> None:
    values = ("x" * 300 + "1", "y" * 300, "x" * 300 + "2")
    digest = hashlib.sha256(values[1].encode()).hexdigest()[:8]
    for count, several in ((2, f"text {'y' * 39}…"), (3, f"text {'y' * 31}…{digest}")):
        for value in values[:count]:
            write_run(
                tmp_path / str(count),
                method="snapkv",
                records=[{"example_id": "a", "score": 1.0, "depth": 0}],
                options={"task.text": value},
            )
        (group,) = load_experiment(tmp_path / str(count) / "demo").groups
        assert len(group.variants) == count
        assert any(variant.label.endswith(several) for variant in group.variants)
        for path in build_report(tmp_path / str(count) / "demo", for_print=True).figures:
            assert len(path.name.encode()) <= 255


def test_what_an_earlier_report_wrote_and_this_one_does_not_is_removed(tmp_path: Path) -> None:
    def run(rate: float) -> set[str]:
        write_run(
            tmp_path,
            method="snapkv",
            records=needle_records("snapkv"),
            task_meta=NEEDLE_META,
            options={"budget.rate": rate},
        )
        paths = build_report(tmp_path / "demo", for_print=True)
        return {path.name for path in paths.figures}

    figures = tmp_path / "demo" / "figures"
    before = run(0.25)
    (figures / "mine.png").write_text("a person's")
    after = run(0.5)
    gone = before - after
    assert gone, "the variant is called by its rate now"
    assert {path.name for path in figures.iterdir()} == after | {"mine.png"}
    for damaged in (b"{", b'{"a": 1}', b'[1, "../../demo/report.html"]', b"[" * 99_999):
        (tmp_path / "demo" / ".report-files").write_bytes(damaged)
        build_report(tmp_path / "demo", for_print=True)
        assert {path.name for path in figures.iterdir()} == after | {"mine.png"}
    assert (tmp_path / "demo" / "report.html").exists()


def test_runs_that_nothing_tells_apart_bear_their_hash(tmp_path: Path) -> None:
    for version in (1, 2):
        write_run(
            tmp_path,
            method="snapkv",
            records=[{"example_id": "a", "score": 1.0}],
            options={"verbose": version},
        )
    (group,) = load_experiment(tmp_path / "demo").groups
    hashes = sorted(str(m["config_hash"]) for m in group.manifests)
    assert sorted(variant.label for variant in group.variants) == [
        f"snapkv, {code}" for code in hashes
    ]


def test_breakdown_columns_are_in_their_natural_order(tmp_path: Path) -> None:
    records = lines_records("exact")
    write_run(tmp_path, records=records)
    (group,) = load_experiment(tmp_path / "demo").groups
    assert score_table(group, "num_lines").columns == ("10", "20", "30", "40", "50")


def test_a_task_that_breaks_down_by_dataset_has_that_table_once(tmp_path: Path) -> None:
    meta = LINES_META | {"breakdown": ["dataset", "num_lines"]}
    write_run(tmp_path, records=lines_records("exact"), task_meta=meta)
    (group,) = load_experiment(tmp_path / "demo").groups
    assert [table.by for table in section_of(group, tmp_path).scores] == ["dataset", "num_lines"]


def test_prompts_kept_whole_are_told(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"example_id": "short", "score": 1.0, "compressed": False, "saves_memory": True},
        {"example_id": "long", "score": 1.0, "compressed": True, "saves_memory": True},
    ]
    write_run(tmp_path, method="snapkv", records=records)
    (group,) = load_experiment(tmp_path / "demo").groups
    assert any("uncompressed: snapkv (1)" in note for note in as_table(score_table(group)).notes)


def test_an_experiment_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no runs in"):
        load_experiment(tmp_path)


def test_markdown_holds_no_html_and_leaves_comparisons_readable() -> None:
    rows = (("<b>x</b>", "<0.001"), ("</td>", "a < b"))
    text = markdown(made_of(("m", "p"), rows, title="<!-- t -->"))
    assert "&lt;b>x&lt;/b>" in text
    assert "&lt;/td>" in text
    assert "&lt;!-- t -->" in text
    assert "| <0.001" in text
    assert "| a < b" in text


TABLE = Table(
    "a_b",
    "needle_1: 50 % & more",
    (
        Column("variant", "method", "label"),
        Column("difference", "Δ exact", "difference", "fraction"),
    ),
    (
        Row(
            {"variant": "streaming_llm", "difference": Estimate(-0.031, -0.05, -0.012)},
            marks={"difference": "†≈"},
            bold=frozenset({"difference"}),
            group="Qwen_2",
        ),
        Row({"variant": "a|b", "difference": NOTHING}, group="Llama"),
    ),
    ("x^2 ~ {y} \\ $5 #1",),
)


def test_latex_is_escaped() -> None:
    text = latex(TABLE)
    assert (
        r"streaming\_llm & \textbf{$-$3.1} [$-$5.0, $-$1.2]\rlap{$^\dagger$$^\approx$} \\" in text
    )
    assert r"\multicolumn{2}{l}{\emph{Qwen\_2}} \\" in text
    assert r"50 \% \& more" in text
    assert r"x\textasciicircum{}2 \textasciitilde{} \{y\} \textbackslash{} \$5 \#1" in text
    for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\begin{tabular}{lr}"):
        assert rule in text


def test_markdown_has_one_line_per_row() -> None:
    lines = markdown(TABLE).splitlines()
    assert lines[2].startswith("| method ")
    assert set(lines[3]) <= set("|:-")
    assert lines[4].startswith("| *Qwen_2*")
    assert "| **−3.1** [−5.0, −1.2] †≈ |" in lines[5]
    assert lines[7].startswith("| a\\|b")
    assert len({line.count("|") - line.count("\\|") for line in lines[2:8]}) == 1


def test_the_console_shows_marks_and_notes_once() -> None:
    out = io.StringIO()
    print_tables([TABLE, TABLE], Console(file=out, width=100))
    assert out.getvalue().count("x^2") == 1
    assert out.getvalue().count("streaming_llm") == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.09996, "0.100"), (0.0504, "0.0504"), (37.769, "37.8"), (1200.4, "1200"),
     (float("nan"), "–"), (3e-7, "3.00e-07")],
)  # fmt: skip
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_sizes_are_readable() -> None:
    assert [size(x) for x in (512, 2048, 858 * 2**20, 3 * 2**30)] == [
        "512 B",
        "2.00 KiB",
        "858 MiB",
        "3.00 GiB",
    ]


def test_the_report_needs_no_model_library() -> None:
    code = (
        "import sys, kvbench.report.build, kvbench.report.wandb.log, kvbench.report.render.text\n"
        "heavy = {'torch', 'transformers', 'wandb', 'matplotlib.pyplot', 'kvbench.engine',"
        " 'kvbench.methods', 'kvbench.tasks', 'kvbench.run.runner'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_frame_of_a_table_is_numbers(tmp_path: Path) -> None:
    group = group_from(tmp_path, exact=[1.0, 0.0], snapkv=[1.0, None])
    lines = frame(as_table(score_table(group)))
    assert lines["score"].dtype == float
    assert list(lines["failures"]) == ["", "1 oom"]


def test_a_dataset_split_by_length_has_the_mean_of_its_buckets(tmp_path):
    write_longbench(tmp_path, count=4, methods=("exact", "snapkv"))
    (group,) = load_experiment(next(tmp_path.iterdir())).groups
    lines = frame(split_table(group, "length_bucket"))
    assert list(dict.fromkeys(lines["variant"])) == ["exact", "snapkv"]
    part = lines[(lines["variant"] == "snapkv") & (lines["dataset"] == "lcc")]
    records = group.records[
        (group.records["variant"] == "snapkv") & (group.records["dataset"] == "lcc")
    ]
    by_hand = [
        100 * records["score"][records["length_bucket"] == bucket].mean()
        for bucket in ("0-4k", "4-8k", "8k+")
    ]
    assert part["length_bucket"].tolist() == ["0-4k", "4-8k", "8k+"]
    assert part["score"].tolist() == pytest.approx(by_hand)
    assert part["scored"].tolist() == [2, 1, 1]
    assert part["mean_of_parts"].tolist() == pytest.approx([np.mean(by_hand)] * 3)


def test_a_measured_field_is_declared_once_and_shown_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """README: a line in COSTS. Table, CSV, page and the summary of W&B have it."""
    more = Measure("cache_bytes_max", "cache_bytes", "max", "largest cache", "bytes")
    for module in (scores_module, score_tables):
        monkeypatch.setattr(module, "COSTS", (*scores_module.COSTS, more))
    paths = build_report(write_demo(tmp_path, ("exact", "snapkv"), ("longeval_lines",)))
    (group,) = load_experiment(paths.page.parent).groups
    largest = group.records[group.records["method"] == "snapkv"]["cache_bytes"].max()
    text = (paths.page.parent / "tables" / "longeval_lines-recall_mini.md").read_text()
    assert "largest cache" in text
    assert size(largest) in text
    lines = pd.read_csv(paths.page.parent / "tables" / "longeval_lines-recall_mini.csv")
    assert lines.set_index("variant")["cache_bytes_max"]["snapkv"] == largest
    assert size(largest) in paths.page.read_text()
    table = score_table(group)
    summary = summary_of(table, table.rows[1])
    assert summary["cache_bytes_max"] == largest
