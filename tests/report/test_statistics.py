"""What the report's intervals, marks and p-values promise, by exact sums and by simulation."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, multinomial, t

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
import bench_statistics as bench

from kvbench.report.ratios import enough, nonnegative_from, prompts_for_95
from kvbench.report.stats import (
    ALPHA,
    Estimate,
    Scores,
    attainable,
    compared,
    differences,
    holm,
    mean_intervals,
    means,
    median_of,
    standing,
)


def column(values: Any) -> np.ndarray:
    """One column of units."""
    return np.asarray(values, dtype=float).reshape(-1, 1)


@pytest.mark.parametrize("n", [5, *bench.SIZES])
def test_intervals_of_shares_are_wilsons_and_hold_them(n: int) -> None:
    """Coverage by the binomial distribution: no simulation, every count of right answers."""
    right = (np.arange(n)[:, None] < np.arange(n + 1)[None]).astype(float)
    found = mean_intervals([right], fraction=True)
    low, high = (np.array([getattr(one, name) for one in found]) for name in ("low", "high"))
    for p in bench.LEVELS:
        held = (low <= p) & (p <= high)
        assert binom.pmf(np.flatnonzero(held), n, p).sum() >= 0.92
    for k in {0, 1, n // 2, n}:
        theirs = binomtest(k, n).proportion_ci(method="wilsoncc")
        assert (low[k], high[k]) == pytest.approx((theirs.low, theirs.high))


@pytest.mark.parametrize("n", [10, 20, 50, 100])
def test_paired_shares_hold_the_truth_and_are_tested_by_mcnemars_exact_test(n: int) -> None:
    """Coverage and false positives by the trinomial distribution: every count of gains and losses."""
    counts = np.array([(b, c) for b in range(n + 1) for c in range(n + 1 - b)])
    columns = [np.r_[np.ones(b), -np.ones(c), np.zeros(n - b - c)] for b, c in counts]
    found = differences([np.stack(columns, axis=1)], reach=1.0)
    low, high, p = (np.array([getattr(one, key) for one in found]) for key in ("low", "high", "p"))
    for up, down in ((0.02, 0.02), (0.1, 0.1), (0.3, 0.1), (0.1, 0.0), (0.5, 0.5)):
        shares = np.c_[counts, n - counts.sum(1)]
        chances = multinomial.pmf(shares, n, (up, down, 1 - up - down))
        held = (low <= up - down) & (up - down <= high)
        assert chances[held].sum() >= 0.93
        assert up != down or chances[p < ALPHA].sum() <= 0.05
    b, c = 7, 2  # by hand: (b + 1) / (n + 2) and (c + 1) / (n + 2)
    one, up, down = found[counts.tolist().index([b, c])], 8 / (n + 2), 3 / (n + 2)
    half = t.ppf(0.975, n - 1) * np.sqrt((up + down - (up - down) ** 2) / n)
    assert (one.value, one.value - one.low) == pytest.approx((5 / n, half), rel=1e-3)
    assert one.p == pytest.approx(binomtest(b, b + c).pvalue)


def with_two_units(x: np.ndarray) -> float:
    """The variance of the mean of units without bounds, and of two more, as far from the mean as the
    farthest."""
    farthest = np.abs(x - x.mean()).max()
    return float(np.r_[x, x.mean() + farthest * np.array([-1, 1])].var() / len(x))


def test_other_scores_have_students_interval_on_two_more_units() -> None:
    """Errors on the logarithmic scale, so that none reaches below 0; their differences as they are."""
    errors = np.random.default_rng(0).lognormal(size=12)
    half = t.ppf(0.975, 11) * np.sqrt(with_two_units(errors))
    (found,) = mean_intervals([column(errors)], fraction=False)
    factor = np.exp(half / errors.mean())
    assert found[:3] == pytest.approx(
        (errors.mean(), errors.mean() / factor, errors.mean() * factor)
    )
    change = errors - 2
    half = t.ppf(0.975, 11) * np.sqrt(with_two_units(change))
    (found,) = differences([column(change)], reach=None)
    assert found[1:3] == pytest.approx((change.mean() - half, change.mean() + half))
    error = np.sqrt(with_two_units(change))
    assert found.p == pytest.approx(2 * t.sf(abs(change.mean()) / error, 11))


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=30))
def test_no_interval_of_what_cannot_be_negative_reaches_below_zero(values: list[float]) -> None:
    for fraction in (False, True):
        (found,) = mean_intervals([column(values) / (1e6 if fraction else 1)], fraction=fraction)
        assert not found.low < 0


def test_units_that_are_all_equal_have_no_interval_unless_they_are_fractions() -> None:
    """The exact cache over itself is 1 exactly; ten right answers of ten are not all there are."""
    for find in (lambda x: mean_intervals(x, fraction=False), lambda x: differences(x, reach=None)):
        (same,) = find([column(np.full(20, 1 / 3))])
        assert same.value == pytest.approx(1 / 3)
        assert np.isnan([same.low, same.high]).all()
    (right,) = mean_intervals([column(np.ones(20))], fraction=True)
    assert right.low < 0.9
    (unchanged,) = differences([column(np.zeros(20))], reach=1.0)
    assert unchanged.low < -0.05 < 0.05 < unchanged.high
    assert unchanged.p == 1


def test_an_average_of_datasets_by_welch_and_satterthwaite() -> None:
    """Each dataset has its own variance: of errors as it is seen, of answers from (x + 1) / (n + 2)."""
    rng = np.random.default_rng(3)
    changes = [rng.normal(0.2, 0.1, 9), rng.normal(0.4, 0.3, 30)]
    right = [np.r_[np.ones(3), np.zeros(1)], np.ones(40)]
    cases = [
        (changes, [with_two_units(x) for x in changes], False),
        (right, [(4 / 6) * (2 / 6) / 4, (41 / 42) * (1 / 42) / 40], True),
    ]
    for parts, each, fraction in cases:
        freedom = sum(each) ** 2 / sum(
            v**2 / (len(x) - 1) for v, x in zip(each, parts, strict=True)
        )
        half = t.ppf(0.975, freedom) * np.sqrt(sum(each)) / 2
        columns = [column(x) for x in parts]
        if fraction:
            (found,) = mean_intervals(columns, fraction=True)
        else:
            (found,) = differences(columns, reach=None)
        assert found.value == pytest.approx(np.mean([x.mean() for x in parts]))
        assert found.low == pytest.approx(max(0.0 if fraction else -9, found.value - half))
        assert found.high == pytest.approx(min(1.0 if fraction else 9, found.value + half))


@pytest.mark.parametrize(
    "find", [lambda x: mean_intervals(x, fraction=True), lambda x: differences(x, reach=1.0)]
)
def test_one_unit_has_none_and_missing_ones_are_left_out(find: Any) -> None:
    for count in (1, 2):
        (one,) = find([column(np.ones(count))])
        assert one.value == 1
        assert np.isnan([one.low, one.high]).all()
    values = np.r_[[np.nan, 0.0, np.nan], np.ones(12)]
    known = values[~np.isnan(values)]
    gaps, kept = (find([column(x)])[0][:3] for x in (values, known))
    assert gaps == kept
    assert np.isnan(find([column(values), column(values * np.nan)])[0].value)


@pytest.mark.parametrize("n", [9, 10])
def test_a_difference_is_tested_from_ten_prompts_on(n: int) -> None:
    for values, reach in ((np.ones(n), 1.0), (np.linspace(1, 2, n), None)):
        (found,) = differences([column(values)], reach=reach)
        assert np.isnan(found.p) if n < 10 else found.p < ALPHA


def scores(values: np.ndarray) -> Scores:
    none: tuple[dict[str, int], ...] = ({},) * values.shape[1]
    return Scores("d", values, np.ones(values.shape, dtype=bool), np.arange(len(values)), none)


def test_units_of_several_pairs_are_their_means_and_uneven_ones_a_ratio() -> None:
    values = np.array([[1.0], [0.0], [1.0], [1.0], [0.0], [np.nan]])
    of_pairs = Scores("d", values, values == values, np.array([0, 0, 1, 1, 2, 2]), ({},))
    even = np.r_[values[:4], [[0.0], [0.0]]]
    assert of_pairs.by_unit(even).ravel().tolist() == [0.5, 1.0, 0.0]
    uneven = of_pairs.by_unit(values)
    assert uneven.mean() == pytest.approx(3 / 5), "the mean over pairs"
    residuals = np.array([1.0, 2.0, 0.0]) - 3 / 5 * np.array([2, 2, 1])
    assert uneven.ravel() - 3 / 5 == pytest.approx(residuals * 3 / 5)


def test_uneven_prompts_of_errors_reach_no_lower_than_zero() -> None:
    """Linearized, a prompt of many small errors counts as less than none."""
    errors = np.array([[9.0], *[[0.01]] * 7])
    uneven = Scores("d", errors, errors == errors, np.array([0, *[1] * 6, 2]), ({},))
    assert uneven.by_unit(errors).min() < 0
    (found,) = means([uneven], fraction=False)
    assert 0 < found.low < found.value < found.high
    (found,) = means([replace(uneven, values=-errors)], fraction=False)
    assert found.low < found.value < 0


def test_holms_adjustment_by_hand_and_of_the_pairs_of_a_table() -> None:
    assert holm([0.01, 0.04, np.nan, 0.03]) == pytest.approx(
        [0.03, 0.06, np.nan, 0.06], nan_ok=True
    )
    rng = np.random.default_rng(5)
    values = (rng.random((60, 6)) < np.linspace(0.3, 0.9, 6)).astype(float)
    values[:7, 3] = np.nan
    pairs = list(itertools.combinations(range(6), 2))
    comparison = compared([scores(values)], pairs, fraction=True)
    alone = []
    for (i, j), one in comparison.items():
        alone += differences([column(values[:, i] - values[:, j])], reach=1.0)
        assert one[:3] == pytest.approx(alone[-1][:3]), (
            "an interval is its own, whatever else is in the table"
        )
        assert one.value == pytest.approx(np.nanmean(values[:, i] - values[:, j]))
    counts = [one.discordant for one in alone]
    adjusted = holm([one.p for one in alone], counts)
    assert [one.p for one in comparison.values()] == pytest.approx(adjusted)
    assert (adjusted <= holm([one.p for one in alone]) + 1e-12).all()
    assert comparison[0, 5].p < 0.001
    assert compared([], pairs, fraction=True) == {}


def test_a_pair_that_cannot_reach_a_p_does_not_count() -> None:
    """By hand: 2 / 32 of five discordant prompts, which a test of four cannot have, and a t test can."""
    assert attainable(5) == pytest.approx([2 / 32, 12 / 32, 1])
    assert list(attainable(0)) == [1.0]
    assert holm([2 / 32, 1.0], [5, 4]) == pytest.approx([2 / 32, 1.0])
    assert holm([2 / 32, 1.0], [5, 5]) == pytest.approx([4 / 32, 1.0])
    assert holm([2 / 32, 0.9], [5, np.nan]) == pytest.approx([4 / 32, 0.9])
    few = np.array([[1.0] * 3 + [0.0]] * 12)  # of twelve prompts three methods have all, one none
    found = compared([scores(few)], [*itertools.combinations(range(4), 2)], fraction=True)
    assert found[0, 3].p == pytest.approx(3 * 2.0**-11), "three of the six pairs can differ at all"


def test_datasets_of_one_size_are_tested_together_by_mcnemars_test() -> None:
    """Four of three prompts each, all lost: as twelve of one dataset; of other sizes a t test."""
    for parts, p in (([-np.ones((3, 1))] * 4, 2.0**-11), ([-np.ones((12, 1))], 2.0**-11)):
        (found,) = differences(parts, reach=1.0)
        assert (found.p, found.discordant) == (pytest.approx(p), 12)
    (uneven,) = differences([-np.ones((n, 1)) for n in (2, 3, 3, 4)], reach=1.0)
    assert np.isnan(uneven.discordant)


def test_what_is_never_negative_is_compared_by_the_ratio_of_geometric_means() -> None:
    """By hand, in whatever unit the scores are; a prompt that is 0 is left out and counted."""
    rng = np.random.default_rng(0)
    values = rng.lognormal(0, 1, (20, 1)) * np.exp(rng.normal([0.0, 1.5], 0.2, (20, 2)))
    logs = np.log(values[:, 0] / values[:, 1])
    half = t.ppf(0.975, 19) * np.sqrt(with_two_units(logs))
    (found,) = compared([scores(values)], [(0, 1)], fraction=False).values()
    expected = np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])
    assert found[:3] == pytest.approx(tuple(expected))
    assert (found.times, found.zeros, found.p < 1e-6) == (True, 0, True)
    (scaled,) = compared([scores(1e-4 * values)], [(0, 1)], fraction=False).values()
    assert scaled[:4] == pytest.approx(found[:4])
    assert found.reversed().value == pytest.approx(1 / found.value)
    values[0, 0] = 0.0
    (one,) = compared([scores(values)], [(0, 1)], fraction=False).values()
    assert (one.times, one.zeros) == (True, 1)
    assert one.value == pytest.approx(np.exp(logs[1:].mean()))
    values[:3, 0] = 0.0  # more than a tenth: the raw scale
    (raw,) = compared([scores(values)], [(0, 1)], fraction=False).values()
    assert (raw.times, raw.value) == (False, pytest.approx((values[:, 0] - values[:, 1]).mean()))
    values[:, 0] = 0.0  # as the error of the exact cache
    (none,) = compared([scores(values)], [(0, 1)], fraction=False).values()
    assert np.isnan(none[:4]).all()
    values[:, 0] = -1.0  # signed
    (signed,) = compared([scores(values)], [(0, 1)], fraction=False).values()
    assert not signed.times


@pytest.mark.parametrize(("right", "expected"), [(1.0, 57), (0.5, 57)])
def test_the_prompts_that_can_tell_that_95_percent_is_kept(right: float, expected: int) -> None:
    """Of a method that loses nothing, with answers that are all right or all half right."""
    found = prompts_for_95([scores(np.full((12, 1), right))], 0)
    assert found == pytest.approx(expected, abs=1)
    assert prompts_for_95([scores(np.full((80, 1), right))], 0) == 80
    assert prompts_for_95([scores(np.zeros((12, 1)))], 0) == math.inf


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


def test_beside_an_error_that_is_0_on_every_prompt_nothing_has_a_mark() -> None:
    """There is no ratio to it."""
    values = np.array([[0.0, 1 + i % 2] for i in range(40)])
    tests = compared([scores(values)], [(0, 1)], fraction=False)
    assert standing([scores(values)], [0, 1], tests, lower=True) == {0: "best", 1: ""}


CROSSINGS: list[tuple[list[float], float]] = [  # margins at the ratios .2, .3 and .5
    ([-0.1, 0.1, 0.2], 0.25),
    ([-0.3, -0.1, 0.3], 0.35),
    ([-0.3, 0.0, 0.3], 0.3),
    ([0.1, -0.1, 0.3], 0.35),  # what the lowest rate wins is chance
    ([0.0, 0.1, 0.2], 0.0),  # at the lowest rate, too
    ([0.3, 0.2, -0.1], np.inf),  # not within these rates
    ([-0.1, np.nan, 0.2], np.nan),
]


@pytest.mark.parametrize(("margins", "expected"), CROSSINGS, ids=range(len(CROSSINGS)))
def test_the_ratio_from_which_on_margins_are_nowhere_negative(
    margins: list[float], expected: float
) -> None:
    assert nonnegative_from([0.2, 0.3, 0.5], margins) == pytest.approx(expected, nan_ok=True)


def test_an_enough_ratio_has_the_crossings_of_the_bounds_and_says_what_is_beyond_the_rates() -> (
    None
):
    ratios = [0.5, 0.2, 0.3]
    within = [Estimate(0.3, 0.1, 0.5), Estimate(-0.1, -0.3, 0.1), Estimate(0.1, -0.1, 0.3)]
    found, mark = enough(ratios, within)
    assert (found[:3], mark) == ((pytest.approx(0.25), 0.0, pytest.approx(0.4)), "")
    found, mark = enough(ratios, [margin._replace(value=0.2) for margin in within])
    assert (found.value, mark) == (0.2, "at_most")
    found, mark = enough(ratios, [Estimate(-0.1, -0.3, 0.1), *[Estimate(-0.2, -0.3, -0.1)] * 2])
    assert (found[:3], mark) == ((0.5, pytest.approx(0.4), np.inf), "more_than")
    found, _ = enough([0.2, 0.3], [Estimate(-0.1), Estimate(0.1)])
    assert np.isnan(found[1:3]).all()
    found, _ = enough(ratios, [Estimate(-0.2, -0.3, -0.1)] * 3)
    assert np.isnan(found[1:3]).all(), "all of the interval is beyond"


@pytest.mark.parametrize("count", [1, 5, 6, 10, 33])
def test_the_interval_of_a_median_is_that_of_the_binomial_quantile(count: int) -> None:
    found = median_of(pd.Series(np.arange(1.0, count + 1)))
    k = int(binom.ppf(0.025, count, 0.5))
    assert found.value == (count + 1) / 2
    assert (found.low, found.high) == (k, count + 1 - k) if k else np.isnan(found.low)


@pytest.mark.parametrize(
    "figures",
    [
        lambda: bench.interval_figures(400, (10, 20)),
        lambda: bench.difference_figures(400, (10, 20)),
        lambda: bench.enough_figures(200),
    ],
)
def test_the_worst_cells_keep_their_bounds(figures: Callable[[], Iterable[bench.Figure]]) -> None:
    """Within what 400 (200) simulated studies can show: 2.6 standard errors of a share at its bound."""
    for figure in figures():
        room = 2.6 * np.sqrt(figure.bound * (1 - figure.bound) / 200)
        share = figure.share - room if figure.most else figure.share + room
        assert bench.Figure(figure.what, share, figure.bound, figure.most).kept, str(figure)


def test_equal_methods_are_seldom_marked_and_a_worse_one_is() -> None:
    rng = np.random.default_rng(12)
    equal = [bool(bench.marked([bench.answers(rng, 100, [0.6] * 7, 0.5)])) for _ in range(60)]
    assert np.mean(equal) <= 0.15
    means = [0.6] * 6 + [0.5]
    found = [6 in bench.marked([bench.answers(rng, 300, means, 0.7)]) for _ in range(12)]
    assert np.mean(found) >= 0.6
