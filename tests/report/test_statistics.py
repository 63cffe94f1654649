"""What the report's intervals, marks and p-values promise, by exact sums and by simulation."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from scipy.stats import binom, binomtest, multinomial, permutation_test, t

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
import bench_statistics as bench

from kvbench.report.stats import (
    Estimate,
    Stratum,
    adjusted_p_values,
    difference_intervals,
    estimates,
    holm,
    margin_of,
    mean_intervals,
    median_of,
    p_values,
    self_bleu,
    unpaired_difference,
    words_of,
)


def stratum(values: np.ndarray, name: str = "d") -> Stratum:
    values = values.reshape(len(values), -1)
    return Stratum(name, np.nan_to_num(values), (~np.isnan(values)).astype(float))


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


def test_intervals_of_paired_shares_hold_them_exactly() -> None:
    """Bonett and Price's interval at n = 20 by the trinomial distribution."""
    n = 20
    counts = [(b, c) for b in range(n + 1) for c in range(n + 1 - b)]
    columns = [np.r_[np.ones(b), -np.ones(c), np.zeros(n - b - c)] for b, c in counts]
    found = difference_intervals([stratum(np.stack(columns, axis=1))], fraction=True)
    for up, down in ((0.02, 0.02), (0.1, 0.1), (0.3, 0.1), (0.1, 0.0)):
        chances = multinomial.pmf(
            [(b, c, n - b - c) for b, c in counts], n, (up, down, 1 - up - down)
        )
        held = [one.low <= up - down <= one.high for one in found]
        assert chances[held].sum() >= 0.92
    b, c = 7, 2  # by hand: (b + 1) / (n + 2) and (c + 1) / (n + 2)
    one = found[counts.index((b, c))]
    up, down = 8 / 22, 3 / 22
    half = 1.959964 * np.sqrt((up + down - (up - down) ** 2) / 22)
    assert (one.value, one.low, one.high) == pytest.approx(
        (5 / 20, up - down - half, up - down + half)
    )


def test_other_scores_have_students_interval() -> None:
    errors = np.random.default_rng(0).lognormal(size=12)
    (found,) = mean_intervals([stratum(errors)], fraction=False)
    low, high = t.interval(0.95, 11, errors.mean(), errors.std(ddof=1) / np.sqrt(12))
    assert (found.low, found.high) == pytest.approx((low, high))


def test_units_count_not_records() -> None:
    """Three seeds of a method without draws are one run."""
    scores = (np.random.default_rng(1).random((30, 1)) < 0.7).astype(float)
    once = Stratum("d", scores, np.ones((30, 1)))
    thrice = Stratum("d", scores * 3, np.full((30, 1), 3.0))
    for find in (mean_intervals, difference_intervals):
        (a,), (b,) = find([once], fraction=True), find([thrice], fraction=True)
        assert (a.low, a.high) == pytest.approx((b.low, b.high))


def test_an_average_of_datasets_by_welch_and_satterthwaite() -> None:
    """Two datasets: the squared error is the mean of theirs over four; what each borrows of the pooled
    variance is two units' worth."""
    rng = np.random.default_rng(3)
    parts = [rng.normal(0.2, 0.1, 9), rng.normal(0.4, 0.3, 30)]
    squares = [((x - x.mean()) ** 2).sum() for x in parts]
    pooled = sum(squares) / 37
    each = [(s + 2 * pooled) / (n + 1) / n for s, n in zip(squares, (9, 30), strict=True)]
    freedom = sum(each) ** 2 / (each[0] ** 2 / 10 + each[1] ** 2 / 31)
    half = t.ppf(0.975, freedom) * np.sqrt(sum(each)) / 2
    (found,) = mean_intervals([stratum(x, str(i)) for i, x in enumerate(parts)], fraction=False)
    assert found.value == pytest.approx((parts[0].mean() + parts[1].mean()) / 2)
    assert found.high - found.value == pytest.approx(half)


def test_no_interval_has_no_width() -> None:
    for values in (np.zeros(25), np.ones(25)):
        (found,) = mean_intervals([stratum(values)], fraction=True)
        assert found.high - found.low > 0.1
        several = [stratum(values[:n], str(n)) for n in (2, 5, 25)]
        (found,) = mean_intervals(several, fraction=True)
        assert found.high - found.low > 0.2
    (same,) = difference_intervals([stratum(np.zeros(25))], fraction=True)
    assert same.low == pytest.approx(-same.high)
    assert same.high == pytest.approx(1.959964 * np.sqrt(2 / 27 / 27))


def test_one_unit_has_none_and_missing_ones_are_left_out() -> None:
    for find in (mean_intervals, difference_intervals):
        (one,) = find([stratum(np.array([1.0]))], fraction=True)
        assert one.value == 1
        assert np.isnan([one.low, one.high]).all()
        values = np.array([1.0, np.nan, 0.0, 1.0, 1.0, np.nan])
        gaps, kept = (
            find([stratum(x)], fraction=True) for x in (values, values[~np.isnan(values)])
        )
        assert gaps == kept
        assert np.isnan(find([stratum(values), stratum(values * np.nan)], fraction=True)[0].value)


def test_unpaired_shares_have_newcombes_interval() -> None:
    """His example (1998): 56 of 70 and 48 of 80 differ by .2 [.0524, .3339]."""
    sides = [np.r_[np.ones(k), np.zeros(n - k)] for k, n in ((48, 80), (56, 70))]
    first, second = (mean_intervals([stratum(side)], fraction=True)[0] for side in sides)
    found = unpaired_difference(first, second)
    assert isinstance(found, Estimate)
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


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
    for _ in range(5_000):
        flipped = [(rng.choice((-1, 1), len(part)) * part).mean() for part in parts]
        count += abs(np.mean(flipped)) >= seen
    (p,) = p_values([stratum(part, f"d{i}") for i, part in enumerate(parts)])
    assert p == pytest.approx(count / 5_000, abs=0.02)


def test_alike_variants_have_p_one_and_none_is_none() -> None:
    zero, empty = stratum(np.zeros(9)), stratum(np.full(9, np.nan))
    assert p_values([zero]) == [1.0]
    assert math.isnan(p_values([zero, empty])[0])


def test_holm_by_hand() -> None:
    nan = float("nan")
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, nan, 0.6])[0] == 1.0
    assert math.isnan(holm([0.5, nan, 0.6])[1])
    assert holm([]) == []


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


@pytest.mark.parametrize("seed", range(6))
def test_self_bleu_is_nltks_of_each_text_against_all_others(seed):
    draw = random.Random(seed)
    words = ["dog", "cat", "the", "ran", "sat", ".", "a"][: 3 + seed]
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 30))) for _ in range(12)]
    texts += [texts[0], "unlike anything"]
    worded = [words_of(text) for text in texts]
    smooth = SmoothingFunction().method1
    for i, found in enumerate(self_bleu(texts)):
        others = worded[:i] + worded[i + 1 :]
        theirs = sentence_bleu(others, worded[i], smoothing_function=smooth)
        assert found == pytest.approx(float(theirs), rel=1e-12)


def test_texts_that_repeat_each_other_are_least_diverse():
    same = "It was cold, and the wind blew all day."
    assert self_bleu([same] * 3) == pytest.approx([1.0] * 3)
    assert self_bleu(["one two three four five", "six seven eight nine ten"]) == [0.0, 0.0]
    assert math.isnan(self_bleu([same])[0])
    assert self_bleu(["", same, same])[0] == 0.0


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
        lambda: bench.p_figures(400, (5, 20)),
        lambda: bench.margin_figures(200),
    ],
)
def test_the_worst_cells_keep_their_bounds(figures: Callable[[], Iterable[bench.Figure]]) -> None:
    """Within what 400 (200) simulated studies can tell: 2.6 standard errors of a share at its bound."""
    for figure in figures():
        room = 2.6 * np.sqrt(figure.bound * (1 - figure.bound) / 200)
        share = figure.share - room if figure.most else figure.share + room
        assert bench.Figure(figure.what, share, figure.bound, figure.most).kept, str(figure)


def test_equal_methods_are_seldom_marked_and_a_worse_one_is() -> None:
    rng = np.random.default_rng(12)
    equal = [bench.worse(bench.answers(rng, 100, [0.6] * 7, 0.5)) for _ in range(60)]
    assert np.mean([bool(marked) for marked in equal]) <= 0.15
    means = [0.6] * 6 + [0.5]
    found = [6 in bench.worse(bench.answers(rng, 300, means, 0.7)) for _ in range(12)]
    assert np.mean(found) >= 0.6


@pytest.mark.slow
def test_every_figure_of_the_benchmark_keeps_its_bound() -> None:
    missed = [str(figure) for figure in bench.figures(2000) if not figure.kept]
    assert not missed
