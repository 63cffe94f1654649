"""What the report's intervals, marks and p-values promise, by exact sums and by simulation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, binomtest, multinomial, t

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
import bench_statistics as bench

from kvbench.report.stats.estimate import Estimate, Stratum
from kvbench.report.stats.intervals import difference_intervals, mean_intervals, unpaired_difference


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
    equal = [bench.worse(bench.answers(rng, 100, [0.6] * 7, 0.5)) for _ in range(300)]
    assert np.mean([bool(marked) for marked in equal]) <= 0.09
    means = [0.6] * 6 + [0.5]
    found = [6 in bench.worse(bench.answers(rng, 300, means, 0.7)) for _ in range(100)]
    assert np.mean(found) >= 0.85


@pytest.mark.slow
def test_every_figure_of_the_benchmark_keeps_its_bound() -> None:
    missed = [str(figure) for figure in bench.figures(2000) if not figure.kept]
    assert not missed
