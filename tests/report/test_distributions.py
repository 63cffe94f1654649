"""Quantiles and tails against scipy.stats."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kvbench.report.stats import distributions as ours


def test_quantiles_and_tails_are_those_of_scipy_stats() -> None:
    freedom = np.array([1.0, 2.0, 2.5, 7.0, 200.0])
    counts, coins = np.array([0, 2, 3, 10, 0]), np.array([0, 5, 6, 40, 1])
    z = np.array([-1.0, 0.0, 3.0, 9.0])
    for p in (0.025, 0.5, 0.975, 0.999):
        assert ours.normal_quantile(p) == pytest.approx(stats.norm.ppf(p), rel=1e-12)
        np.testing.assert_allclose(
            ours.t_quantile(p, freedom), stats.t.ppf(p, freedom), rtol=1e-9, atol=1e-12
        )
        np.testing.assert_allclose(
            ours.chi2_quantile(p, freedom), stats.chi2.ppf(p, freedom), rtol=1e-9
        )
    np.testing.assert_allclose(ours.normal_tail(z), stats.norm.sf(z), rtol=1e-12)
    np.testing.assert_allclose(
        ours.heads_at_most(counts, coins), stats.binom.cdf(counts, coins, 0.5), rtol=1e-12
    )
    values = np.random.default_rng(0).normal(0.4, 1.0, 9)
    assert ours.t_test(values) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue, rel=1e-9)


@pytest.mark.parametrize("count", [1, 5, 6, 10, 33])
def test_the_interval_of_a_median_is_that_of_the_binomial_quantile(count: int) -> None:
    import pandas as pd

    from kvbench.report.tables.timings import median_of

    found = median_of(pd.Series(np.arange(1.0, count + 1)))
    k = int(stats.binom.ppf(0.025, count, 0.5))
    assert found.low == k if k else np.isnan(found.low)
