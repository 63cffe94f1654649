"""Pairs of methods: p-values, their adjustment, and the examples that a difference takes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest, permutation_test
from support.report_runs import write_run
from support.tables import frame, heads, shown

from kvbench.report.experiment import Group, load_experiment
from kvbench.report.render.text import latex
from kvbench.report.stats.estimate import Stratum
from kvbench.report.stats.significance import (
    ALPHA,
    adjusted_p_values,
    holm,
    p_values,
    units_needed,
    variances,
)
from kvbench.report.table import count_text, p_text
from kvbench.report.tables.pairs import VariantPair, pairs_of, pairs_table
from kvbench.report.tables.scores import score_table


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
        write_run(folder, method=method, records=records)
    return load_experiment(folder / "demo").groups[0]


def test_the_paired_test_is_exact_for_few_units() -> None:
    differences = np.array([0.3, -0.1, 0.4, 0.2, 0.05, -0.02])
    signs = np.array(list(itertools.product((-1, 1), repeat=6)))
    means = np.abs((signs * differences).mean(1))
    exact = (means >= abs(differences.mean()) - 1e-12).mean()
    (p,) = p_values([stratum(differences)])
    assert p == pytest.approx(exact)  # every assignment is tried
    theirs = permutation_test(
        (differences, np.zeros(6)), lambda x, y: np.mean(x - y), permutation_type="samples"
    )
    assert p == pytest.approx(theirs.pvalue)


def test_of_right_and_wrong_it_is_mcnemars_exact_test() -> None:
    differences = np.array([1.0] * 12 + [-1.0] * 4 + [0.0] * 60)
    (p,) = p_values([stratum(differences)])
    assert p == pytest.approx(binomtest(4, 16).pvalue)
    one_sided = [stratum(np.array([1.0] * k + [0.0] * 40)) for k in (4, 5, 6)]
    assert [p_values([one])[0] for one in one_sided] == pytest.approx([0.125, 0.0625, 0.03125])
    twice = Stratum("d", differences[:, None] * 3, np.full((76, 1), 3.0))  # three equal seeds
    assert p_values([twice]) == pytest.approx([p])


def test_one_unit_has_no_p_and_five_show_nothing() -> None:
    rng = np.random.default_rng(0)
    assert math.isnan(p_values([stratum(np.array([0.4]))])[0])
    assert min(p_values([stratum(rng.random((5, 50)) + 1)])) == pytest.approx(2 / 2**5)


def test_a_clear_difference_has_a_p_below_what_random_signs_give() -> None:
    (p,) = p_values([stratum(np.random.default_rng(1).random(60))])
    assert p < 1e-6


def test_the_largest_tables_take_the_normal_approximation() -> None:
    rng = np.random.default_rng(2)
    few = rng.normal(0.02, 0.3, (600, 40))
    large = np.concatenate([few] * 20, axis=1)  # 800 columns
    assert p_values([stratum(large)])[:40] == pytest.approx(p_values([stratum(few)]), abs=0.015)


def test_adjusted_p_values_match_brute_force() -> None:
    """Westfall and Young's step-down maximum over every assignment of signs, one at a time."""
    rng = np.random.default_rng(4)
    values = rng.normal(0, 1, (9, 3)) + np.array([0.9, 0.2, -0.4])
    differences = np.stack(
        [values[:, i] - values[:, j] for i, j in ((0, 1), (0, 2), (1, 2))], axis=1
    )
    scale = np.sqrt((differences**2).sum(0))
    seen = np.abs(differences.sum(0)) / scale
    order = sorted(range(3), key=lambda k: -seen[k])
    counts = np.zeros(3)
    for signs in itertools.product((-1, 1), repeat=9):
        sizes = np.abs(np.array(signs) @ differences) / scale
        for rank, k in enumerate(order):
            counts[k] += max(sizes[j] for j in order[rank:]) >= seen[k] - 1e-9
    by_hand, largest = {}, 0.0
    for k in order:
        largest = max(largest, counts[k] / 2**9)
        by_hand[k] = largest
    p = p_values([stratum(differences)])
    adjusted = adjusted_p_values([stratum(differences)], p)
    assert adjusted == pytest.approx([by_hand[k] for k in range(3)])
    assert all(a >= b for a, b in zip(adjusted, p, strict=True))


def test_variants_that_answer_alike_cost_less_than_holm() -> None:
    rng = np.random.default_rng(5)
    base = rng.random(200)
    clones = [base + rng.normal(0, 0.001, 200) for _ in range(6)]
    worse = base - 0.02 + rng.normal(0, 0.12, 200)
    variants = [*clones, worse]
    pairs = list(itertools.combinations(range(7), 2))
    differences = np.stack([variants[i] - variants[j] for i, j in pairs], axis=1)
    p = p_values([stratum(differences)])
    adjusted = adjusted_p_values([stratum(differences)], p)
    at = pairs.index((0, 6))
    assert p[at] <= adjusted[at] < 0.7 * holm(p)[at]


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


def test_alike_variants_have_p_one_and_none_is_none() -> None:
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
    # (1.959964 sqrt(0.26) + 0.841621 sqrt(0.25))^2 / 0.01
    assert units_needed([0.25], 0.1) == 202
    assert units_needed([0.25], -0.1) == 202
    # V = 0.25 / 13; (1.959964 sqrt(V + 0.01 / 13) + 0.841621 sqrt(V))^2 / 0.01
    assert units_needed([0.25] * 13, 0.1) == 16
    assert units_needed([0.25], 0.1, alpha=0.05 / 21) > 1.7 * 202
    assert units_needed([0.25], 0.0) == math.inf
    assert math.isnan(units_needed([math.nan, 0.1], 0.1))
    assert math.isnan(units_needed([0.0], 0.1))  # nothing is known of how scores differ


def test_no_plan_is_below_what_the_test_can_reject_with() -> None:
    """Six must differ at 5 %: 2 / 2^6 = .031; at 5 % / 21 it takes ten."""
    assert units_needed([0.0001], 0.9) == 6
    assert units_needed([0.0001], 0.9, differing=0.1) == 60
    assert units_needed([0.0001], 0.9, alpha=0.05 / 21) == 10
    assert binomtest(0, 5).pvalue > 0.05 >= binomtest(0, 6).pvalue
    assert binomtest(0, 9).pvalue > 0.05 / 21 >= binomtest(0, 10).pvalue


@pytest.mark.parametrize("power", [0.5, 0.8])
def test_the_needed_number_gives_the_power_that_was_asked_for(power: float) -> None:
    """Simulated studies of that size: how often the adjusted test rejects."""
    rng = np.random.default_rng(5)
    chances = ((0.30, 0.18), (0.12, 0.06), (0.20, 0.20))  # P(+1), P(-1) per dataset
    effect = float(np.mean([up - down for up, down in chances]))
    spread = [up + down - (up - down) ** 2 for up, down in chances]
    differing = float(np.mean([up + down for up, down in chances]))
    alpha = ALPHA / 6
    n = int(units_needed(spread, effect, alpha=alpha, power=power, differing=differing))
    studies = 250
    strata = [
        stratum(rng.choice((1.0, -1.0, 0.0), (n, studies), p=(up, down, 1 - up - down)), f"d{i}")
        for i, (up, down) in enumerate(chances)
    ]
    assert np.mean(np.array(p_values(strata)) < alpha) == pytest.approx(power, abs=0.08)


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
def pairs(tmp_path: Path) -> tuple[Group, list[VariantPair]]:
    group = study(tmp_path)
    averages = {"Llama": {"balancekv": 46.77, "uniform": 46.38, "streaming_llm": 39.79}}
    return group, pairs_of(group, averages)


def test_pairs_are_ranked_paired_and_without_the_baseline(
    pairs: tuple[Group, list[VariantPair]],
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
    assert close.difference.low <= 0 <= close.difference.high
    assert far.difference.low > 0 or far.difference.high < 0
    assert far.p_adjusted < 0.01 < 0.05 < close.p <= close.p_adjusted
    assert list(close.needed) == [0.02, 0.05]
    assert close.needed[0.02] > 4 * close.needed[0.05]  # for stated differences, not for those seen
    assert by_name["balancekv", "h2o"].examples == 118  # 120 but two that h2o failed
    wide = group.records.pivot(index="example_id", columns="variant", values="score")
    kept = wide[["balancekv", "h2o"]].dropna()
    split = kept["balancekv"].sub(kept["h2o"]).groupby(lambda name: name.split("-")[0])
    assert by_name["balancekv", "h2o"].difference.value == pytest.approx(split.mean().mean())
    assert by_name["balancekv", "h2o"].paired_deviation == pytest.approx(
        np.sqrt(split.var().mean())
    )
    # 5 % / 6 pairs: z = 2.638257; two datasets
    spread = split.var().mean() / 2
    root = 2.638257 * math.sqrt(spread + 0.02**2 / 2) + 0.841621 * math.sqrt(spread)
    needed = math.ceil(root**2 / 0.02**2)
    assert by_name["balancekv", "h2o"].needed[0.02] == needed
    assert close.p == pytest.approx(p_of(group, "balancekv", "uniform"), abs=0.01)


def p_of(group: Group, first: str, second: str) -> float:
    """A permutation test of the mean over both datasets, by scipy."""
    wide = group.records.pivot(index="example_id", columns="variant", values="score")
    difference = wide[first] - wide[second]  # 60 examples of each: the plain mean is that of means
    return float(
        permutation_test(
            (difference.to_numpy(), np.zeros(len(difference))),
            lambda x, y, axis: np.mean(x - y, axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=20_000,
            rng=0,
        ).pvalue
    )


def test_published_gaps_say_what_they_would_take(pairs: tuple[Group, list[VariantPair]]) -> None:
    group, found = pairs
    close = next(p for p in found if {p.first.method, p.second.method} == {"balancekv", "uniform"})
    gap = close.published["Llama"]
    assert abs(gap.difference) == pytest.approx(0.39)
    spread = close.paired_deviation**2 / 2
    root = 2.638257 * math.sqrt(spread + 0.0039**2 / 2) + 0.841621 * math.sqrt(spread)
    assert gap.needed == pytest.approx(root**2 / 0.0039**2, abs=1)
    text = pairs_table(group, found)
    assert heads(text)[-2:] == ["published (Llama)", "needed for that"]
    assert any("0.39" in row[-2] for row in shown(text))
    assert shown(text)[0][0] == f"{found[0].first.label} − {found[0].second.label}"
    assert r"\toprule" in latex(text)
    assert "needed per dataset for 2 points" in heads(text)
    assert any("a plan" in note for note in text.notes)
    lines = frame(text)
    assert len(lines) == 6
    assert list(lines["needed_per_dataset_for_5_points"]) == [p.needed[0.05] for p in found]
    assert lines["published_difference (Llama)"].notna().sum() == 3
    for column, value in (
        ("difference", found[0].difference.value),
        ("difference_low", found[0].difference.low),
        ("difference_high", found[0].difference.high),
        ("paired_deviation", found[0].paired_deviation),
    ):
        assert lines[column][0] == pytest.approx(100 * value)


def test_marks_and_pairs_of_one_page_agree(tmp_path: Path) -> None:
    """What is shown worse in the score table has an adjusted p below 5 % among the pairs."""
    rng = np.random.default_rng(7)
    for trial in range(6):
        ability = rng.normal(size=(120, 1))
        levels = np.linspace(0.2, -0.35, 7)
        right = (ability + rng.normal(size=(120, 7)) + levels > 0).astype(float)
        names = ("h2o", "snapkv", "uniform", "balancekv", "subgen", "pyramidkv", "streaming_llm")
        scores = {"exact": {"a": np.ones(120)}}
        scores |= {name: {"a": right[:, i]} for i, name in enumerate(names)}
        group = datasets(tmp_path / str(trial), scores)
        shown = {row.variant.label: row.total for row in score_table(group).rows}
        for pair in pairs_of(group):
            if shown[pair.first.label].best and not shown[pair.second.label].best:
                assert shown[pair.second.label].worse == (pair.p_adjusted < ALPHA)
                assert shown[pair.second.label].tied == (pair.p_adjusted >= ALPHA)


def test_variants_that_share_no_example_are_ranked_by_their_own_means(tmp_path: Path) -> None:
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
