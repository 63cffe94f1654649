"""What the report's intervals, marks and p-values promise, by exact sums and by simulation."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from scipy.stats import binom, binomtest, multinomial, norm, studentized_range, t

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
import bench_statistics as bench

from kvbench.report.marks import standing
from kvbench.report.self_bleu import self_bleu, words_of
from kvbench.report.stats import (
    ALONE,
    ALPHA,
    DRAWS,
    Scores,
    Stratum,
    compared,
    differences,
    independent,
    margin_of,
    mean_intervals,
    median_of,
    together,
)


def stratum(values: np.ndarray) -> Stratum:
    values = values.reshape(len(values), -1)
    return Stratum(np.nan_to_num(values), (~np.isnan(values)).astype(float))


@pytest.mark.parametrize("n", bench.SIZES)
def test_intervals_of_shares_hold_them_exactly(n: int) -> None:
    """Coverage by the binomial distribution: no simulation, every count of right answers."""
    right = (np.arange(n)[:, None] < np.arange(n + 1)[None]).astype(float)
    found = mean_intervals([stratum(right)], fraction=True)
    low, high = (np.array([getattr(one, name) for one in found]) for name in ("low", "high"))
    for p in bench.LEVELS:
        held = (low <= p) & (p <= high)
        assert binom.pmf(np.flatnonzero(held), n, p).sum() >= 0.92
    assert (high > low).all()
    for k in range(4, n - 3):
        theirs = binomtest(k, n).proportion_ci(method="wilson")
        assert (low[k], high[k]) == pytest.approx((theirs.low, theirs.high))


@pytest.mark.parametrize("n", [10, 20, 50, 100])
def test_paired_shares_hold_the_truth_and_seldom_differ_by_chance(n: int) -> None:
    """Coverage and false positives by the trinomial distribution: every count of gains and losses."""
    counts = np.array([(b, c) for b in range(n + 1) for c in range(n + 1 - b)])
    columns = [np.r_[np.ones(b), -np.ones(c), np.zeros(n - b - c)] for b, c in counts]
    found = differences([stratum(np.stack(columns, axis=1))], fraction=True)
    low, high, p = (np.array([getattr(one, key) for one in found]) for key in ("low", "high", "p"))
    np.testing.assert_array_equal((low > 0) | (high < 0), p < ALPHA)
    for up, down in ((0.02, 0.02), (0.1, 0.1), (0.3, 0.1), (0.1, 0.0), (0.5, 0.5)):
        shares = np.c_[counts, n - counts.sum(1)]
        chances = multinomial.pmf(shares, n, (up, down, 1 - up - down))
        held = (low <= up - down) & (up - down <= high)
        assert chances[held].sum() >= 0.93
        assert up != down or chances[p < ALPHA].sum() <= 0.07
    b, c = 7, 2  # by hand: (b + 1) / (n + 2) and (c + 1) / (n + 2)
    one, up, down = found[counts.tolist().index([b, c])], 8 / (n + 2), 3 / (n + 2)
    half = t.ppf(0.975, n - 1) * np.sqrt((up + down - (up - down) ** 2) / n)
    assert (one.value, one.value - one.low) == pytest.approx((5 / n, half), rel=1e-3)


def with_two_units(x: np.ndarray) -> float:
    """The variance of the mean of units without bounds, and of two more, 1.5 times as far from the mean
    as the farthest."""
    farthest = np.abs(x - x.mean()).max()
    return float(np.r_[x, x.mean() + 1.5 * farthest * np.array([-1, 1])].var() / len(x))


def test_other_scores_have_students_interval_on_two_more_units() -> None:
    errors = np.random.default_rng(0).lognormal(size=12)
    (found,) = mean_intervals([stratum(errors)], fraction=False)
    low, high = t.interval(0.95, 11, errors.mean(), np.sqrt(with_two_units(errors)))
    assert (found.low, found.high) == pytest.approx((low, high))
    (same,) = differences([stratum(np.full(3, 0.2))], fraction=False)
    assert same.low < 0 < same.high, "three that are equal are too few"
    assert same.p > ALPHA


def test_an_average_of_datasets_by_welch_and_satterthwaite() -> None:
    """Each dataset has its own variance: of errors as it is seen, of answers from (x + 1) / (n + 2)."""
    rng = np.random.default_rng(3)
    errors = [rng.normal(0.2, 0.1, 9), rng.normal(0.4, 0.3, 30)]
    right = [np.r_[np.ones(3), np.zeros(1)], np.ones(40)]
    cases = [
        (errors, [with_two_units(x) for x in errors], False),
        (right, [(4 / 6) * (2 / 6) / 4, (41 / 42) * (1 / 42) / 40], True),
    ]
    for parts, each, fraction in cases:
        freedom = sum(each) ** 2 / sum(
            v**2 / (len(x) - 1) for v, x in zip(each, parts, strict=True)
        )
        half = t.ppf(0.975, freedom) * np.sqrt(sum(each)) / 2
        strata = [stratum(x) for x in parts]
        (found,) = mean_intervals(strata, fraction=fraction)
        assert found.value == pytest.approx(np.mean([x.mean() for x in parts]))
        assert found.low == pytest.approx(max(0.0 if fraction else -9, found.value - half))
        assert found.high == pytest.approx(min(1.0 if fraction else 9, found.value + half))


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize(("sizes", "width"), [([25], 0.1), ([2, 5, 25], 0.2)])
def test_shares_of_none_and_of_all_have_an_interval(
    value: float, sizes: list[int], width: float
) -> None:
    strata = [stratum(np.full(n, value)) for n in sizes]
    (mean,) = mean_intervals(strata, fraction=True)
    assert mean.high - mean.low > width


def test_a_difference_between_equals_has_an_interval() -> None:
    (same,) = differences([stratum(np.zeros(25))], fraction=True)
    assert same.low == pytest.approx(-same.high, abs=1e-9)
    assert (same.high > 0.05, same.p) == (True, 1.0)


@pytest.mark.parametrize("find", [mean_intervals, differences])
def test_one_unit_has_none_and_missing_ones_are_left_out(find: Any) -> None:
    (one,) = find([stratum(np.array([1.0]))], fraction=True)
    assert one.value == 1
    assert np.isnan([one.low, one.high]).all()
    values = np.array([1.0, np.nan, 0.0, 1.0, 1.0, np.nan])
    known = values[~np.isnan(values)]
    gaps, kept = (find([stratum(x)], fraction=True)[0][:3] for x in (values, known))
    assert gaps == kept
    assert np.isnan(find([stratum(values), stratum(values * np.nan)], fraction=True)[0].value)


def scores(values: np.ndarray) -> Scores:
    none: tuple[dict[str, int], ...] = ({},) * values.shape[1]
    return Scores("", "d", values, np.ones(values.shape, dtype=bool), np.arange(len(values)), none)


@pytest.mark.parametrize("tests", [1, 5])
def test_the_bound_of_independent_tests_is_sidaks(tests: int) -> None:
    z = independent(tests)[-round(ALPHA * DRAWS)]
    assert 2 * norm.sf(z) == pytest.approx(1 - 0.95 ** (1 / tests), rel=5e-3)


def test_a_family_of_one_is_the_test_alone() -> None:
    values = np.random.default_rng(0).normal(0.3, 1, (40, 2))
    change = values[:, 0] - values[:, 1]
    (found,) = differences([stratum(change)], fraction=False)
    error = np.sqrt(with_two_units(change))
    assert found.p == pytest.approx(2 * t.sf(abs(change.mean()) / error, 39), abs=2e-4)
    interval = t.interval(0.95, 39, change.mean(), error)
    assert (found.low, found.high) == pytest.approx(interval, abs=1e-3)
    assert together([scores(values)], [(0, 1)]) is ALONE


def test_all_pairs_of_one_table_are_tukeys() -> None:
    """Independent variants of equal variance: the studentized range, and less than Bonferroni's."""
    values = np.random.default_rng(1).normal(size=(4000, 5))
    pairs = list(itertools.combinations(range(5), 2))
    z = together([scores(values)], pairs)[-round(ALPHA * DRAWS)]
    assert z == pytest.approx(studentized_range.ppf(0.95, 5, 10**6) / np.sqrt(2), rel=0.02)
    clones = np.c_[
        values[:, :1] + np.random.default_rng(2).normal(0, 0.01, (4000, 6)), values[:, 1]
    ]
    alike = together([scores(clones)], [(i, 6) for i in range(6)])[-round(ALPHA * DRAWS)]
    assert alike == pytest.approx(1.96, rel=0.02), "variants that answer alike cost little"


def test_interval_p_and_family_agree_and_missing_scores_are_left_out() -> None:
    rng = np.random.default_rng(5)
    values = (rng.random((60, 6)) < np.linspace(0.3, 0.9, 6)).astype(float)
    values[:7, 3] = np.nan
    pairs = list(itertools.combinations(range(6), 2))
    comparison = compared([scores(values)], pairs, fraction=True)
    for (i, j), one in comparison.items():
        assert (one.p < ALPHA) is (one.low > 0 or one.high < 0)
        assert one.value == pytest.approx(np.nanmean(values[:, i] - values[:, j]))
        (alone,) = differences([stratum(values[:, i] - values[:, j])], fraction=True)
        assert alone.p <= one.p + 1e-9
        assert one.low <= alone.low
    assert comparison[0, 5].p < 0.001
    assert compared([], pairs, fraction=True) == {}


@given(st.integers(0, 10**6), st.integers(2, 5), st.booleans())
def test_marks_and_tests_agree_whatever_is_missing(seed: int, methods: int, lower: bool) -> None:
    """Never a tie where a difference is shown, nor "worse" where it is in favour; a method that loses
    few records may still be best."""
    rng = np.random.default_rng(seed)
    values = (rng.random((40, methods)) < rng.random(methods)).astype(float)
    values[rng.random(values.shape) < rng.choice([0.0, 0.02, 0.3])] = np.nan
    tests = compared([scores(values)], [*itertools.combinations(range(methods), 2)], fraction=True)
    marks = standing([scores(values)], range(methods), tests, lower=lower)
    best = [i for i, mark in marks.items() if mark == "best"]
    for (i, j), found in tests.items():
        for winner, other, lead in ((i, j, found.value), (j, i, -found.value)):
            if winner in best and other not in best and found.p < ALPHA:
                assert marks[other] in ("worse", "better", "few")
                ahead = (lead < 0) if lower else (lead > 0)
                assert marks[other] != "better" or not ahead or len(best) > 1
                assert marks[other] != "worse" or ahead or len(best) > 1
    assert all(
        tests[min(b, o), max(b, o)].p >= ALPHA
        for b in best
        for o, mark in marks.items()
        if mark == "tied"
    )


def test_one_failed_record_does_not_make_the_best_a_tie() -> None:
    """exact 1, h2o 1 with one record missing, snapkv .5: h2o is best, and shown better than snapkv."""
    values = np.array([[1.0, 1.0, i % 2] for i in range(40)])
    values[3, 1] = np.nan
    tests = compared([scores(values)], [(1, 2), (1, 0), (2, 0)], fraction=True)
    assert standing([scores(values)], [1, 2], tests, lower=False) == {1: "best", 2: "worse"}
    values[:20, 1] = np.nan  # too many are missing for a best one
    tests = compared([scores(values)], [(1, 2)], fraction=True)
    assert standing([scores(values)], [1, 2], tests, lower=False) == {2: "best", 1: "better"}


@pytest.mark.parametrize("seed", range(6))
def test_self_bleu_is_nltks_of_each_text_against_all_others(seed):
    draw = random.Random(seed)
    words = ["dog", "cat", "the", "ran", "sat", ".", "a"][: 3 + seed]
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 30))) for _ in range(12)]
    texts += [texts[0], "unlike anything", ""]
    worded = [words_of(text) for text in texts]
    smooth = SmoothingFunction().method1
    for i, found in enumerate(self_bleu(texts)):
        others = worded[:i] + worded[i + 1 :]
        theirs = sentence_bleu(others, worded[i], smoothing_function=smooth)
        assert found == pytest.approx(float(theirs), rel=1e-12)


def test_a_single_text_has_no_self_bleu_and_two_alike_have_the_highest() -> None:
    assert np.isnan(self_bleu(["the dog ran off"])).all()
    assert self_bleu(["the dog ran off"] * 2) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("count", [1, 5, 6, 10, 33])
def test_the_interval_of_a_median_is_that_of_the_binomial_quantile(count: int) -> None:
    found = median_of(pd.Series(np.arange(1.0, count + 1)))
    k = int(binom.ppf(0.025, count, 0.5))
    assert found.value == (count + 1) / 2
    assert (found.low, found.high) == (k, count + 1 - k) if k else np.isnan(found.low)


def test_the_margin_of_an_average_is_that_of_its_datasets() -> None:
    parts = [(0.5, 100), (0.9, 400)]
    each = [margin_of([part], 0.3, total=False, unit=0.0) for part in parts]
    mean = margin_of(parts, 0.3, total=False, unit=0.0)
    assert mean == pytest.approx(np.hypot(*each) / 2)
    assert margin_of(parts, 0.3, total=True, unit=0.02) == pytest.approx(2 * mean + 0.01)
    p = (50 + 1) / 102
    assert each[0] == pytest.approx(1.959964 * np.sqrt(2 * 0.3 * p * (1 - p) / 100))


@pytest.mark.parametrize(
    "figures",
    [
        lambda: bench.interval_figures(400, (10, 20)),
        lambda: bench.difference_figures(400, (10, 20)),
        lambda: bench.skewed_figures(400, (10, 20)),
        lambda: bench.p_figures(400, (10, 20)),
        lambda: bench.margin_figures(200),
    ],
)
def test_the_worst_cells_keep_their_bounds(figures: Callable[[], Iterable[bench.Figure]]) -> None:
    """Within what 400 (200) simulated studies can show: 2.6 standard errors of a share at its bound."""
    for figure in figures():
        room = 2.6 * np.sqrt(figure.bound * (1 - figure.bound) / 200)
        share = figure.share - room if figure.most else figure.share + room
        assert bench.Figure(figure.what, share, figure.bound, figure.most).kept, str(figure)


def test_equal_methods_are_seldom_shown_to_differ_and_a_worse_one_is() -> None:
    rng = np.random.default_rng(12)
    equal = [bench.false_table(bench.answers(rng, 100, [0.6] * 7, 0.5)) for _ in range(60)]
    assert np.mean(equal) <= 0.15
    means = [0.6] * 6 + [0.5]
    found = [6 in bench.worse(bench.answers(rng, 300, means, 0.7)) for _ in range(12)]
    assert np.mean(found) >= 0.6
