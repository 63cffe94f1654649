"""The tidy frame: scores, differences, marks and costs; names of variants; kvbench.load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest
from support.report_runs import (
    ERROR_META,
    LINES_META,
    THROUGHPUT_META,
    lines_records,
    write_demo,
    write_run,
    write_scores,
    write_sweep,
)
from support.tables import data, group_of, totals_of

import kvbench
from kvbench.records.read import COMMON_FIELDS, StoreError, load_runs
from kvbench.report import frame
from kvbench.report.build import build_report
from kvbench.report.frame import AVERAGE, scores, tidy, totals, totals_at_rates
from kvbench.report.page import facts_of, how_to_reproduce
from kvbench.report.runs import COLUMNS, Group, group_runs, load_experiment
from kvbench.report.tables import overview_tables, pairs_table, score_table, verdict


def group_from(folder: Path, **values: list[float | None]) -> Group:
    return group_of(write_scores(folder, values))


def marks(group: Group) -> dict[str, set[str]]:
    return {label: set(mark.split()) for label, mark in totals_of(group)["mark"].items()}


def test_failures_are_counted_and_never_dropped(tmp_path: Path) -> None:
    none: list[float | None] = [None] * 4
    group = group_from(
        tmp_path, exact=[1, 1, 1, 1], snapkv=[1, None, 0, None], h2o=none, uniform=[1, 1, 1]
    )
    total = totals_of(group)
    assert dict(total["failures"]) == {
        "exact": "",
        "snapkv": "2 oom",
        "h2o": "4 oom",
        "uniform": "1 missing",
    }
    assert tuple(total.loc["snapkv", ["mean", "n", "expected"]]) == (0.5, 2, 4)
    assert np.isnan(total["mean"]["h2o"])
    assert ["incomplete" in m.split() for m in total["mark"]] == [False, True, True, True]
    broken = [{"example_id": "a", "score": float("nan")}, {"example_id": "b", "score": 1.0}]
    write_run(tmp_path, experiment="nan", records=broken)
    assert list(totals_of(group_of(tmp_path / "nan"))["failures"]) == ["1 no score"]


RANKED: list[tuple[dict[str, list[float | None]], set[str]]] = [
    ({"exact": [1], "snapkv": [1, 0, 1], "uniform": [0, 1, 1]}, {"snapkv", "uniform"}),
    ({"exact": [1, 1, 1], "snapkv": [1, 0, 1]}, set()),  # one alone is not the best
    ({"exact": [0] * 9, "snapkv": [0] * 9, "uniform": [0] * 9}, set()),
    # h2o fails where it is hard: its mean of 1.0 must not win
    ({"h2o": [1, 1, 1, None, None, None], "snapkv": [1, 1, 1, 0.5, 0.5, 0]}, {"snapkv"}),
    # each lacks some: the examples that all scored decide
    ({"h2o": [1, 0.2, 0.3, None], "snapkv": [None, 0.3, 0.4, 0]}, {"snapkv"}),
]


@pytest.mark.parametrize(("values", "best"), RANKED, ids=range(len(RANKED)))
def test_only_means_over_the_same_examples_are_ranked(
    tmp_path: Path, values: dict[str, list[float | None]], best: set[str]
) -> None:
    found = marks(group_from(tmp_path, **{name: each * 10 for name, each in values.items()}))
    assert {label for label, mark in found.items() if "best" in mark} == best


def test_a_difference_in_large_datasets_is_shown_beside_tiny_ones(tmp_path: Path) -> None:
    """Thirteen datasets of 2 to 300 prompts, .2 apart in each: shown, and a note says over which."""
    rng = np.random.default_rng(0)
    for method, p in (("snapkv", 0.7), ("uniform", 0.5)):
        records = [
            {"example_id": f"{k}-{i}", "dataset": f"d{k}", "score": float(rng.random() < p)}
            for k, n in enumerate((2, 3, 5, 10, 20, 30, 50, 100, 150, 200, 200, 200, 300))
            for i in range(n)
        ]
        write_run(tmp_path, experiment="many", method=method, records=records)
    group = group_of(tmp_path / "many")
    assert marks(group)["uniform"] == {"worse"}
    assert any("over the 10 datasets of ten prompts" in x for x in score_table(group).notes)


def test_the_best_is_chosen_where_differences_are_tested(tmp_path: Path) -> None:
    """What leads by a dataset of three prompts alone is not the best, and the best not worse."""
    for method, large, tiny in (("snapkv", 0.0, 1.0), ("h2o", 0.5, 0.0)):
        records = [
            {"example_id": f"{name}-{i}", "dataset": name, "score": score}
            for name, count, score in (("large", 20, large), ("tiny", 3, tiny))
            for i in range(count)
        ]
        write_run(tmp_path, method=method, records=records)
    assert marks(group_of(tmp_path / "demo")) == {"h2o": {"best"}, "snapkv": {"worse"}}


def test_a_field_that_an_older_run_did_not_measure_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_from(tmp_path, exact=[1, 0], snapkv=[1, 0])
    monkeypatch.setattr(frame, "COSTS", (*frame.COSTS, "spare"))
    assert totals_of(group, "spare")["mean"].isna().all()


def test_a_measure_that_some_examples_have_is_a_mean_over_these(tmp_path: Path) -> None:
    parts = [{"a": 1.0}, {"a": 0.0, "b": 1.0}, {"b": 0.0}, {"b": 0.0}]
    records = [{"example_id": f"e{i}", "score": 1.0, **part} for i, part in enumerate(parts)]
    meta = {"measures": ["a", "b", "c"]}
    write_run(tmp_path, records=[*records, {"example_id": "x", "status": "oom"}], task_meta=meta)
    group = group_runs(load_runs(tmp_path / "demo"))[0]
    found = tidy(group).query("by == 'measure' and measure == 'score'").set_index("value")
    assert list(found.index) == ["a", "b"]
    assert list(found["mean"]) == [0.5, pytest.approx(1 / 3)]
    assert list(found["n"]) == [2, 3]
    assert list(found["failures"]) == ["1 oom", "1 oom"]


def test_prompts_too_short_to_compress_are_counted_of_methods_that_save_memory(
    tmp_path: Path,
) -> None:
    records = [{"example_id": f"{i}", "score": 1.0, "compressed": i > 1} for i in range(5)]
    for method in ("exact", "snapkv"):
        write_run(tmp_path, method=method, records=records)
    frame = tidy(group_of(tmp_path / "demo"))
    whole = frame[frame["measure"] == "uncompressed"].set_index("variant")["mean"]
    assert whole.to_dict() == {"exact": 0.0, "snapkv": 2.0}


def test_the_order_of_records_changes_no_digit(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    records = [
        {"example_id": f"e{i}", "dataset": f"d{i % 2}", "prompt": i % 7, "score": rng.random()}
        for i in range(70)
    ]
    frames = []
    for name in ("one", "other"):
        for method in ("exact", "snapkv"):
            about: Any = {"experiment": name, "method": method, "task_meta": ERROR_META}
            write_run(tmp_path, records=records, **about)
        frames.append(tidy(group_of(tmp_path / name)))
        records = [records[i] for i in rng.permutation(70)]
    pd.testing.assert_frame_equal(*frames, check_exact=True)


@pytest.mark.parametrize("seed", range(4))
def test_p_mark_and_sentence_say_the_same_and_one_pair_has_one_interval(
    tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scored = {
        name: list((rng.random(30) < p).astype(float))
        for name, p in (("exact", 0.9), ("snapkv", 0.8), ("h2o", 0.6), ("uniform", 0.3))
    }
    group = group_from(tmp_path, **scored)
    text = verdict(group)
    (best,) = [name for name, mark in marks(group).items() if "best" in mark]
    pairs = data(pairs_table(group))
    for row in pairs[pairs["first"] == best].to_dict("records"):
        shown = row["p"] < 0.05
        assert marks(group)[row["second"]] == {"worse" if shown else "tied"}
        assert (row["second"] in text.partition("significantly worse")[2]) is shown
    change = totals_of(group, "difference").loc["uniform", ["mean", "low", "high"]]
    group = group_from(tmp_path, alone=[1.0] * 30, **scored)
    more = totals_of(group, "difference").loc["uniform", ["mean", "low", "high"]]
    assert tuple(more) == tuple(change), "whatever else is in the table"


def test_a_score_outside_its_range_is_refused_in_a_line(tmp_path: Path) -> None:
    write_run(tmp_path, records=[{"example_id": "a", "score": -5.0}])
    with pytest.raises(StoreError, match=r"example 'a' has score -5; allowed: 0 to 1"):
        group_of(tmp_path / "demo")
    write_run(
        tmp_path, records=[{"example_id": "a", "score": -5.0}], experiment="x", task_meta=ERROR_META
    )
    assert group_of(tmp_path / "x").records["score"].tolist() == [-5.0]


def test_an_oracle_that_keeps_all_does_not_compete_and_lower_can_be_better(tmp_path: Path) -> None:
    for method, keeps in (("exact", True), ("topk", True), ("snapkv", False), ("uniform", False)):
        error = {"exact": 0.0, "topk": 0.1, "snapkv": 0.2, "uniform": 0.4}[method]
        records: list[dict[str, Any]] = [
            {"example_id": f"{p}", "score": error + p / 100, "saves_memory": not keeps}
            for p in range(10)
        ]
        write_run(tmp_path, method=method, records=records, task_meta=ERROR_META)
    found = marks(group_of(tmp_path / "demo"))
    assert found == {"exact": set(), "topk": set(), "snapkv": {"best"}, "uniform": {"worse"}}
    about: Any = {"task_meta": ERROR_META, "options": {"budget.rate": 0.5}}
    records = [{"example_id": f"{p}", "score": 0.05, "saves_memory": False} for p in range(10)]
    write_run(tmp_path, method="topk", records=records, **about)
    group = group_of(tmp_path / "demo")
    mean = totals(tidy(group))["mean"]
    assert [mean[f"topk, at rate {rate}"] for rate in (0.5, 0.25)] == pytest.approx([0.05, 0.145])
    build_report(tmp_path / "demo")


def test_one_seed_of_a_method_without_draws_stands_beside_three(tmp_path: Path) -> None:
    """The same prompts under every seed: snapkv needs one run of them, uniform has three."""
    rng = np.random.default_rng(2)

    def runs(folder: Path, tail: str) -> Group:
        for seed in (0, 1, 2):
            for method, level in (("uniform", 0.4), ("snapkv", 0.75)):
                if method == "uniform" or not seed:
                    each = [(f"e{i}", float(rng.random() < level)) for i in range(40)]
                    records = [
                        {"example_id": e, "score": x, "prompt_tail": tail.format(seed=seed, i=e)}
                        for e, x in each
                    ]
                    write_run(folder, method=method, records=records, seed=seed)
        return group_of(folder / "demo")

    same = runs(tmp_path / "same", "prompt {i}")
    total = totals_of(same)
    mine = same.records[same.records["variant"] == "snapkv"]["score"]
    assert (list(total["n"]), list(total["expected"])) == ([120, 40], [120, 40])
    assert total["mean"]["snapkv"] == pytest.approx(mine.mean())
    theirs = binomtest(int(mine.sum()), 40).proportion_ci(method="wilsoncc")
    bounds = tuple(total.loc["snapkv", ["low", "high"]])
    assert bounds == pytest.approx((theirs.low, theirs.high), abs=1e-6)
    assert marks(same) == {"snapkv": {"best"}, "uniform": {"worse"}}
    other = totals_of(runs(tmp_path / "other", "prompt {i} of seed {seed}"))
    assert other["failures"]["snapkv"] == "80 missing", "other prompts, which it never saw"
    unread = {"status": "timeout", "prompt_tail": None, "answers": None}  # whose prefill failed
    for seed in (1, 2):
        values = [float(rng.random() < 0.5) for _ in range(40)]
        records: list[dict[str, Any]] = [
            {"example_id": f"e{i}", "score": x} for i, x in enumerate(values)
        ]
        records[0] = {"example_id": "e0", **unread} if seed == 1 else records[0]
        write_run(tmp_path / "failed", method="uniform", records=records, seed=seed)
    own = [{"example_id": f"e{i}", "score": float(i % 4 > 0)} for i in range(40)]
    write_run(tmp_path / "failed", method="snapkv", records=own, seed=2)
    failed = totals_of(group_of(tmp_path / "failed" / "demo"))
    assert list(failed["failures"]) == ["1 timeout", ""]
    assert tuple(failed.loc["snapkv", ["mean", "n", "expected"]]) == (0.75, 40, 40)


def test_score_ratio_and_what_is_enough_are_weighed_alike(tmp_path: Path) -> None:
    """Sixty prompts of one dataset at ratio .2, 180 of another at .6: every mean counts both alike, over
    prompts that have a score; one without a score, at ratio .9, counts in none."""
    for method, size in (("exact", 1.0), ("snapkv", 1.0), ("snapkv", 0.5)):
        records = [
            {"example_id": f"{name}-{i}", "dataset": name, "score": score, "ratio": ratio}
            for name, count, score, low in (("small", 60, 1.0, 0.2), ("large", 180, 0.9, 0.6))
            for i in range(count)
            for ratio in [1.0 if method == "exact" else low * size]
        ]
        records.append({"example_id": "x", "dataset": "large", "score": None, "ratio": 0.9})
        options = {"budget.rate": size / 2}
        write_run(tmp_path, method=method, records=records, options=options)
    group = group_of(tmp_path / "demo")
    assert totals_of(group)["mean"]["snapkv, rate 0.5"] == pytest.approx(0.95)
    frame = tidy(group)
    ratios = totals(frame, "ratio")["mean"]
    assert ratios["snapkv, rate 0.5"] == pytest.approx(0.4)
    assert ratios["snapkv, rate 0.25"] == pytest.approx(0.2)
    enough = totals(frame, "ratio_at_95").loc["snapkv"]
    assert (enough["mean"], enough["mark"]) == (pytest.approx(0.2), "at_most")
    curve = totals_at_rates(group)
    assert list(curve["ratio"][curve["label"] == "snapkv"]) == pytest.approx([0.4, 0.2])


def test_a_rate_of_the_middle_and_one_of_the_prompt_are_not_ranked_together(tmp_path: Path) -> None:
    for name, method, score in (("rate", "snapkv", 1.0), ("total_rate", "h2o", 0.0)):
        options = {"budget.rate": 0.25, f"budget.{name}": 0.25}
        records = [{"example_id": f"e{i}", "score": score, "ratio": 0.3} for i in range(12)]
        write_run(tmp_path, method=method, records=records, options=options)
    group = group_of(tmp_path / "demo")
    assert len(group.peers) == 2
    assert not any(marks(group).values())
    headings = [heading for heading, _ in score_table(group).groups()]
    assert headings == ["rate 0.25, ratio 0.30", "total rate 0.25, ratio 0.30"]
    assert pairs_table(group) is None


@pytest.mark.parametrize(("unit", "named"), [("filler", "filler texts"), ("layer", "layers")])
def test_a_sentence_counts_independent_units_by_their_name(
    tmp_path: Path, unit: str, named: str
) -> None:
    for method in ("exact", "snapkv"):
        records = [{"example_id": f"e{i}", unit: i % 12, "score": 1.0} for i in range(36)]
        write_run(tmp_path, method=method, records=records, task_meta=LINES_META | {"unit": unit})
    group = group_of(tmp_path / "demo")
    assert f"snapkv has 100.0 % (12 {named})" in verdict(group)
    assert any(f"one for each {named[:-1]}." in note for note in score_table(group).notes)
    for name, of_unit in (("sample", "prompts"), ("question", "contexts")):
        asked = [
            {"example_id": f"e{i}", "context_id": f"c{i % 12}", name: i // 12, "score": 1.0}
            for i in range(36)
        ]
        write_run(tmp_path, experiment=name, method="snapkv", records=asked)
        assert f"snapkv has 100.0 % (12 {of_unit})" in verdict(group_of(tmp_path / name))


def test_caches_of_two_sizes_are_not_ranked_together(tmp_path: Path) -> None:
    for size, scores_of in ((128, {"snapkv": 0.5, "h2o": 0.0}), (256, {"snapkv": 1.0, "h2o": 0.9})):
        for method, score in scores_of.items():
            records = [{"example_id": f"e{i}", "score": float(i < 20 * score)} for i in range(20)]
            write_run(tmp_path, method=method, records=records, options={"budget.size": size})
    group = group_of(tmp_path / "demo")
    best = {label for label, mark in marks(group).items() if "best" in mark}
    assert best == {"snapkv, size 128", "snapkv, size 256"}
    assert marks(group)["h2o, size 256"] == {"tied"}
    order = [f"{method}, size {size}" for size in (256, 128) for method in ("snapkv", "h2o")]
    assert list(score_table(group).frame["variant"]) == order
    first, second = verdict(group).splitlines()
    assert "snapkv, size 256 has 100.0 %" in first
    assert "snapkv, size 128 has 50.0 %" in second


@pytest.mark.parametrize("seeds", ["seed", "task.seed"])
def test_three_seeds_are_one_table(tmp_path: Path, seeds: str) -> None:
    """Of ``seed`` three draws on each of four prompts; of ``task.seed`` the union of twelve prompts,
    whose names are the same four."""
    for seed in (0, 1, 2):
        for method in ("exact", "uniform"):
            records = [
                {"example_id": f"e{i}", "score": float(method == "exact" or i < seed + 1)}
                | {"compressed": method == "uniform" and i > 0}
                for i in range(4)
            ]
            about: Any = {"seed": seed} if seeds == "seed" else {"options": {seeds: seed}}
            write_run(tmp_path, method=method, records=records, **about)
    (group,) = load_experiment(tmp_path / "demo").groups
    assert group.labels == ["exact", "uniform"]
    total = totals_of(group).loc["uniform"]
    assert tuple(total[["mean", "n", "expected"]]) == (pytest.approx(0.5), 12, 12)
    assert total["units"] == (4 if seeds == "seed" else 12)
    short = "Prompts that are no longer than the capacity are not compressed: uniform "
    assert f"{short}({1 if seeds == 'seed' else 3})." in score_table(group).notes
    note = "Means over 3 draws (seeds) of each prompt."
    assert (note in score_table(group).notes) is (seeds == "seed")


def test_several_datasets_count_alike_and_every_seed_is_expected(tmp_path: Path) -> None:
    for seed in (0, 1):
        for method, shift in (("exact", 0.0), ("snapkv", -0.1)):
            records = [
                {"example_id": f"{name}-{i}", "dataset": name, "score": base + shift + 0.01 * seed}
                for name, base, count in (("qasper", 0.5, 4), ("hotpotqa", 0.9, 12))
                for i in range(count)
            ]
            write_run(tmp_path, task="longbench", method=method, records=records, seed=seed)
    frame = scores(group_of(tmp_path / "demo"))
    assert list(frame["value"].unique()) == ["qasper", "hotpotqa", AVERAGE], (
        "as the task gives them"
    )
    mine = frame[frame["variant"] == "snapkv"].set_index(["measure", "value"])["mean"]
    assert mine["score", "qasper"] == pytest.approx(0.405)
    assert mine["score", AVERAGE] == pytest.approx((0.805 + 0.405) / 2)
    assert mine["difference", AVERAGE] == pytest.approx(-0.1)
    assert mine["difference", "qasper"] == pytest.approx(-0.1)
    assert totals(frame)["expected"]["snapkv"] == 32
    also = scores(group_of(tmp_path / "demo"), also={"both": ["qasper", "hotpotqa"], "x": ["y"]})
    assert totals(also)["mean"]["snapkv"] == pytest.approx((0.805 + 0.405) / 2)
    assert "x" not in set(also["value"]), "an average that lacks a part is left out"


def test_protocols_stand_in_tables_of_their_own(tmp_path: Path) -> None:
    """One command's runs under three; a manifest that lacks the key is of ``prompt``, and a probe of
    fidelity that says so fed the last token already."""
    for protocol, first in (
        ("prompt", 1.0),
        ("context", None),
        ("all_but_last", None),
        (None, None),
    ):
        for method in ("exact", "snapkv", "h2o"):
            about = {"score": 1.0, "first_token_score": first}
            records = [{"example_id": f"e{i}", **about} for i in range(12)]
            if first and method == "h2o":  # wrong behind a right beginning, and right behind it
                records[0] |= {"score": 0.0, "first_token_score": 0.0}
                records[1] |= {"first_token_score": 0.0}
            options = {"compress_after": protocol} if protocol else {"budget.rate": 0.5}
            write_run(tmp_path, method=method, records=records, options=options)
    experiment = load_experiment(tmp_path / "demo")
    named = [f"t, compress_after {name}" for name in ("all_but_last", "context", "prompt")]
    assert [group.task for group in experiment.groups] == named
    assert [group.protocol for group in experiment.groups] == ["all_but_last", "context", "prompt"]
    assert [len(group.peers) for group in experiment.groups] == [1, 1, 2], "ranked apart"
    note = (
        "23 of 24 answers were decided by their first token, which is the exact cache's."
        " Of these, 22 score above 0."
    )
    tables = [score_table(group) for group in experiment.groups]
    assert [note in table.notes for table in tables] == [False, False, True]
    for protocol, said in (("context", False), ("all_but_last", True)):
        about: Any = {"experiment": protocol, "method": "kvzip", "records": RECORD}
        write_run(tmp_path, options={"compress_after": protocol}, **about)
        notes = " ".join(score_table(group_of(tmp_path / protocol)).notes)
        assert ("The protocol of kvzip in their papers" in notes) is said
    assert [named[i] in table.title for i, table in enumerate(tables)] == [True] * 3
    assert set(data(tables[0])["compress_after"]) == {"all_but_last"}
    names = [table.name for table in overview_tables(experiment.groups)]
    assert names == ["overview-recall_mini-prompt"], "of each protocol by itself"
    old = {"compress_after": "prompt", "task._target_": "kvbench.probes.fidelity.FidelityProbe"}
    write_run(tmp_path, experiment="old", records=RECORD, options=old)
    assert group_of(tmp_path / "old").protocol == "all_but_last"


RECORD = [{"example_id": "a", "score": 1.0}]


def test_variants_are_named_by_what_differs_or_by_their_hash(tmp_path: Path) -> None:
    (group,) = load_experiment(write_sweep(tmp_path)).groups
    assert group.labels[:3] == ["exact", "uniform, rate 0.5", "uniform, rate 0.25"]
    assert len(group.labels) == 10, "a budget means nothing to exact"
    assert set(group.baseline.values()) == {None, "exact"}
    for option, values in {
        "budget.size": (64, 256),
        "method.f": ("a/x.txt", "b/y.txt"),
        "verbose": (1, 2),
    }.items():
        for value in values:
            about: Any = {"experiment": option, "options": {option: value}}
            write_run(tmp_path, method="h2o", records=RECORD, **about)
        group = group_of(tmp_path / option)
        name = option.rpartition(".")[2]
        expected = {f"h2o, {name} {value}" for value in values}
        if option == "verbose":  # which changes no score
            expected = {f"h2o, {m['config_hash']}" for m in group.manifests}
        assert set(group.labels) == expected


def test_an_exact_cache_of_few_bits_is_no_baseline(tmp_path: Path) -> None:
    scores_of = {"exact": 1.0, "snapkv": 0.5}
    for bits, packed in ((None, False), (2, True)):
        for method, score in scores_of.items():
            records = [
                {
                    "example_id": f"e{i}",
                    "score": score - packed / 4,
                    "saves_memory": method != "exact" or packed,
                }
                for i in range(12)
            ]
            if method == "exact" or not packed:
                options = {"method.quantize": bits}
                write_run(tmp_path, method=method, records=records, options=options)
    group = group_of(tmp_path / "demo")
    assert set(group.labels) == {"exact", "snapkv", "exact_quantized"}
    changes = totals_of(group, "difference")["mean"]
    assert dict(changes) == {"snapkv": -0.5, "exact_quantized": -0.25}
    assert group.compressed == {"snapkv", "exact_quantized"}


def test_a_throughput_settings_own_rate_is_the_rate_of_its_records(tmp_path: Path) -> None:
    """Of a run whose budget has the rate 0.25."""
    for name, rates, said in (
        ("several", (0.5, 0.2, None), ", mean over rates 0.5, 0.25 and 0.2,"),
        ("one", (0.5,), " at rate 0.5, ratio 0.50,"),
        ("none", (None,), " at rate 0.25, ratio 0.25,"),
    ):
        records = [
            {"example_id": f"{rate}/{run}", "dataset": f"{rate}", "asked_rate": rate, "score": 9.0}
            | {"ratio": rate or 0.25, "prompt_tokens": 512.0, "new_tokens": 8.0}
            for rate in rates
            for run in range(3)
        ]
        write_run(
            tmp_path, experiment=name, method="h2o", records=records, task_meta=THROUGHPUT_META
        )
        loaded = kvbench.load(tmp_path / name).groupby("dataset", sort=False)["rate"].unique()
        assert [list(each) for each in loaded] == [[rate or 0.25] for rate in rates]
        assert said in score_table(group_of(tmp_path / name)).title


def test_models_stand_in_the_order_in_which_they_were_started(tmp_path: Path) -> None:
    """Of a run that went on, its first start counts."""
    starts: Any = [("a", "12", []), ("b", "13", ["10"]), ("c", "11", [])]
    for model, started, earlier in starts:
        folder = write_run(tmp_path, records=lines_records("exact")[:2], model=model)
        made = json.loads((folder / "manifest.json").read_text()) | {"started": started}
        made["earlier_starts"] = [{"started": hour, "code_revision": "older"} for hour in earlier]
        (folder / "manifest.json").write_text(json.dumps(made))
    experiment = load_experiment(tmp_path / "demo")
    assert [g.model for g in experiment.groups] == ["b", "c", "a"]
    assert facts_of(experiment)["date"] == "10, 13"
    code = dict(how_to_reproduce(experiment))["code revision"]
    assert "older" in code, "what measured some of the records"


def test_records_are_a_frame_with_documented_columns_and_parquet(tmp_path: Path) -> None:
    folder = write_demo(tmp_path, ("exact", "snapkv"), ("longeval_lines", "needle"))
    frame = kvbench.load(folder)
    assert list(frame.columns[: len(COLUMNS)]) == list(COLUMNS)
    assert set(COMMON_FIELDS) - set(COLUMNS) == {"entries"}
    runs = load_runs(folder)
    assert len(frame) == sum(len(run.records) for run in runs) == len(kvbench.load(tmp_path))
    assert len(kvbench.load(runs[0].folder)) == len(runs[0].records)
    assert frame["entries_mean"].notna().all()
    frame.to_parquet(tmp_path / "records.parquet")
    again = pd.read_parquet(tmp_path / "records.parquet")
    np.testing.assert_array_equal(again["score"], frame["score"])
    assert list(again["answers"][0]) == frame["answers"][0]
