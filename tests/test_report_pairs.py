"""Pairs of methods: p-values, their adjustment, and the examples that a difference takes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from report_runs import LINES_META, write_run
from scipy.stats import binomtest, permutation_test

from kvbench.report.data import Group, load_experiment
from kvbench.report.formats import latex
from kvbench.report.pairs import ArmPair, count_text, p_text, pairs_frame, pairs_of, pairs_view
from kvbench.report.stats import Stratum, estimates, holm, p_values, units_needed, variances


def stratum(differences: np.ndarray, name: str = "d") -> Stratum:
    values = differences.reshape(len(differences), -1)
    return Stratum(name, np.nan_to_num(values), (~np.isnan(values)).astype(float))


def datasets(folder: Path, scores: dict[str, dict[str, np.ndarray]]) -> Group:
    """One group: {method: {dataset: scores}}; NaN is out of memory."""
    for method, parts in scores.items():
        records = [
            {
                "example_id": f"{name}-{i}",
                "dataset": name,
                "score": None if math.isnan(value) else float(value),
                "status": "oom" if math.isnan(value) else "ok",
            }
            for name, values in parts.items()
            for i, value in enumerate(values)
        ]
        write_run(folder, task="t", method=method, records=records, task_meta=LINES_META)
    return load_experiment(folder / "demo").groups[0]


def test_the_paired_test_is_exact_for_few_units() -> None:
    differences = np.array([0.3, -0.1, 0.4, 0.2, 0.05, -0.02])
    signs = np.array(list(itertools.product((-1, 1), repeat=6)))
    means = np.abs((signs * differences).mean(1))
    exact = (means >= abs(differences.mean()) - 1e-12).mean()
    (p,) = p_values([stratum(differences)])
    assert p == pytest.approx(exact, abs=0.01)
    theirs = permutation_test(
        (differences, np.zeros(6)), lambda x, y: np.mean(x - y), permutation_type="samples"
    )
    assert p == pytest.approx(theirs.pvalue, abs=0.01)


def test_of_right_and_wrong_it_is_mcnemars_exact_test() -> None:
    differences = np.array([1.0] * 12 + [-1.0] * 4 + [0.0] * 60)
    (p,) = p_values([stratum(differences)])
    assert p == pytest.approx(binomtest(4, 16).pvalue, abs=0.008)


def test_over_datasets_it_matches_brute_force() -> None:
    rng = np.random.default_rng(3)
    parts = [rng.normal(0.04, 0.2, n) for n in (12, 30, 80)]
    seen = abs(np.mean([part.mean() for part in parts]))
    count = 0
    for _ in range(20_000):
        flipped = [(rng.choice((-1, 1), len(part)) * part).mean() for part in parts]
        count += abs(np.mean(flipped)) >= seen
    (p,) = p_values([stratum(part, f"d{i}") for i, part in enumerate(parts)])
    assert p == pytest.approx(count / 20_000, abs=0.012)


def test_alike_arms_have_p_one_and_none_is_none() -> None:
    zero, empty = stratum(np.zeros(9)), stratum(np.full(9, np.nan))
    assert p_values([zero]) == [1.0]
    assert math.isnan(p_values([zero, empty])[0])


def test_p_values_are_uniform_when_nothing_differs() -> None:
    rng = np.random.default_rng(11)
    p = np.array(p_values([stratum(rng.normal(0, 1, (25, 400)))]))
    assert (p < 0.05).mean() == pytest.approx(0.05, abs=0.03)
    assert np.median(p) == pytest.approx(0.5, abs=0.08)


def test_holm_by_hand() -> None:
    nan = float("nan")
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, nan, 0.6])[0] == 1.0
    assert math.isnan(holm([0.5, nan, 0.6])[1])
    assert holm([]) == []


def test_variances_are_of_units_and_skip_what_is_missing() -> None:
    values = np.array([[1.0, 1.0], [3.0, np.nan], [2.0, 4.0]])
    one = Stratum("a", np.nan_to_num(values) * 2, (~np.isnan(values)) * 2.0)  # two records a unit
    assert variances([one])[0] == pytest.approx([1.0, 4.5])
    assert np.isnan(variances([stratum(np.array([1.0]))])).all()


def test_the_needed_number_by_hand() -> None:
    # z(0.975) + z(0.8) = 2.80159; squared 7.84888
    assert units_needed([0.25], 0.1) == math.ceil(7.84888 * 25)
    assert units_needed([0.25] * 13, 0.1) == math.ceil(7.84888 * 25 / 13)
    assert units_needed([0.25], -0.1) == units_needed([0.25], 0.1)
    assert units_needed([0.25], 0.0) == math.inf
    assert math.isnan(units_needed([math.nan, 0.1], 0.1))
    assert units_needed([0.0], 0.1) == 2
    assert units_needed([0.25], 0.1, power=0.5) == math.ceil(1.959964**2 * 25)


@pytest.mark.parametrize("power", [0.5, 0.8])
def test_the_needed_number_gives_the_power_that_was_asked_for(power: float) -> None:
    """Simulated studies of that size: how often their bootstrap interval excludes zero."""
    rng = np.random.default_rng(5)
    effect, chances = 0.06, ((0.30, 0.18), (0.12, 0.06), (0.20, 0.20))  # P(+1), P(-1) per dataset
    effect = float(np.mean([up - down for up, down in chances]))
    spread = [up + down - (up - down) ** 2 for up, down in chances]
    n = int(units_needed(spread, effect, power=power))
    studies = 250
    strata = [
        stratum(rng.choice((1.0, -1.0, 0.0), (n, studies), p=(up, down, 1 - up - down)), f"d{i}")
        for i, (up, down) in enumerate(chances)
    ]
    found = np.mean([estimate.excludes_zero for estimate in estimates(strata)])
    assert found == pytest.approx(power, abs=0.08)


def study(folder: Path) -> Group:
    """Two datasets; balancekv and uniform nearly alike, streaming_llm far behind, h2o fails twice."""
    rng = np.random.default_rng(0)
    easy = {name: rng.random(60) * 0.4 + 0.3 for name in ("qasper", "trec")}
    shift = {"exact": 0.1, "balancekv": 0.012, "uniform": 0.0, "streaming_llm": -0.2, "h2o": -0.05}
    scores = {
        method: {name: base + by + rng.normal(0, 0.08, 60) for name, base in easy.items()}
        for method, by in shift.items()
    }
    scores["h2o"]["qasper"][:2] = np.nan
    return datasets(folder, scores)


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Group, list[ArmPair]]:
    group = study(tmp_path)
    averages = {"Llama": {"balancekv": 46.77, "uniform": 46.38, "streaming_llm": 39.79}}
    return group, pairs_of(group, averages)


def test_pairs_are_ranked_paired_and_without_the_baseline(
    pairs: tuple[Group, list[ArmPair]],
) -> None:
    group, found = pairs
    names = [(p.first.method, p.second.method) for p in found]
    assert len(names) == 6  # four compressed methods
    assert "exact" not in {name for pair in names for name in pair}
    assert names[-1] == ("h2o", "streaming_llm")
    assert [p.neighbours for p in found].count(True) == 3
    assert [p.to_best for p in found].count(True) == 3
    by_name = dict(zip(names, found, strict=True))
    close, far = by_name["balancekv", "uniform"], by_name["balancekv", "streaming_llm"]
    assert not close.difference.excludes_zero
    assert far.difference.excludes_zero
    assert far.adjusted < 0.01 < 0.05 < close.p <= close.adjusted
    assert far.needed < 20 < 150 < close.needed
    assert by_name["balancekv", "h2o"].examples == 118  # 120 but two that h2o failed
    wide = group.records.pivot(index="example_id", columns="arm", values="score")
    kept = wide[["balancekv", "h2o"]].dropna()
    split = kept["balancekv"].sub(kept["h2o"]).groupby(lambda name: name.split("-")[0])
    assert by_name["balancekv", "h2o"].difference.value == pytest.approx(split.mean().mean())
    assert by_name["balancekv", "h2o"].deviation == pytest.approx(np.sqrt(split.var().mean()))
    needed = 7.84888 * split.var().mean() / 2 / split.mean().mean() ** 2
    assert by_name["balancekv", "h2o"].needed == pytest.approx(needed, abs=1)


def test_published_gaps_say_what_they_would_take(pairs: tuple[Group, list[ArmPair]]) -> None:
    group, found = pairs
    close = next(p for p in found if {p.first.method, p.second.method} == {"balancekv", "uniform"})
    gap = close.published["Llama"]
    assert abs(gap.difference) == pytest.approx(0.39)
    spread = 2 * close.deviation**2 / 4
    assert gap.needed == math.ceil(7.84888 * spread / 0.0039**2)
    text = pairs_view(group, found)
    assert text.columns[-2:] == ("published (Llama)", "needed for that")
    assert any("0.39" in row[-2] for row in text.rows)
    assert text.rows[0][0] == f"{found[0].first.label} − {found[0].second.label}"
    assert r"\toprule" in latex(text)
    frame = pairs_frame(group, found)
    assert len(frame) == 6
    assert frame["published_difference (Llama)"].notna().sum() == 3
    for column, value in (
        ("difference", found[0].difference.value),
        ("difference_low", found[0].difference.low),
        ("difference_high", found[0].difference.high),
        ("paired_deviation", found[0].deviation),
    ):
        assert frame[column][0] == pytest.approx(100 * value)


def test_arms_that_share_no_example_are_ranked_by_their_own_means(tmp_path: Path) -> None:
    """Each of three scored two of every three examples: any two meet, all three never."""
    scores = {"exact": {"a": np.ones(30)}}
    for k, (method, level) in enumerate({"h2o": 0.2, "snapkv": 0.9, "uniform": 0.5}.items()):
        values = np.full(30, level)
        values[k::3] = np.nan
        scores[method] = {"a": values}
    found = pairs_of(datasets(tmp_path, scores))
    assert [(p.first.method, p.second.method) for p in found] == [
        ("snapkv", "uniform"),
        ("snapkv", "h2o"),
        ("uniform", "h2o"),
    ]
    assert [p.examples for p in found] == [10, 10, 10]
    assert found[1].difference.value == pytest.approx(0.7)


def test_nothing_to_compare_is_no_table(tmp_path: Path) -> None:
    scores = {"exact": {"a": np.ones(3)}, "snapkv": {"a": np.ones(3)}}
    assert pairs_of(datasets(tmp_path, scores)) == []


def test_counts_and_p_values_as_text() -> None:
    assert [count_text(x) for x in (12.0, 12345.0, math.inf, math.nan)] == [
        "12",
        "12,345",
        "∞",
        "–",
    ]
    assert [p_text(p) for p in (5e-5, 0.0123, 0.456, math.nan)] == ["<0.001", "0.012", "0.46", "–"]
