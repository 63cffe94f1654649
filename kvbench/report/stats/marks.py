"""Which of the variants that compete is best, and which of the others are shown to be worse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvbench.report.stats.estimate import Array, Stratum, ratio
from kvbench.report.stats.significance import ALPHA, adjusted_p_values, p_values

if TYPE_CHECKING:
    from kvbench.report.tables.strata import Scores


@dataclass(frozen=True)
class PairTests:
    """Every pair of some variants, tested over the examples that both scored.

    Attributes:
        pairs: numbers of the two variants. strata: a column for each pair, the first minus the second.
        means: of these. p, adjusted: of the paired test, and adjusted for all these pairs.
    """

    pairs: tuple[tuple[int, int], ...]
    strata: tuple[Stratum, ...]
    means: Array
    p: Sequence[float]
    adjusted: Sequence[float]


@dataclass(frozen=True)
class Standing:
    """Variants by number: the best, those shown to be worse, and those that are neither."""

    best: frozenset[int] = frozenset()
    worse: frozenset[int] = frozenset()
    tied: frozenset[int] = frozenset()


def paired_tests(strata: Sequence[Scores], variants: Sequence[int]) -> PairTests:
    """Every pair of `variants`, in their order."""
    pairs = tuple(itertools.combinations(variants, 2))
    first, second = np.array(pairs).T
    parts = [one.stratum(one.values[:, first] - one.values[:, second]) for one in strata]
    means = [ratio(part.sums.sum(0), part.counts.sum(0)) for part in parts]
    p = p_values(parts)
    return PairTests(pairs, tuple(parts), np.mean(means, axis=0), p, adjusted_p_values(parts, p))


def standing(strata: Sequence[Scores], peers: Sequence[int], *, lower: bool) -> Standing:
    """How the variants `peers`, which compete with each other, stand on one dataset or on several.

    The best has the best mean. Means over different examples cannot be ranked: variants that lack
    a score are passed over where another has them all, and where each lacks some, the examples that all
    scored decide. Where every mean is 0 there is no best.

    Another variant is shown to be worse where its paired test against a best one, over the examples that
    both scored and adjusted for every pair of `peers`, rejects at 5 % and the difference is to its
    disadvantage. So among equal variants about one table in twenty shows any, whichever is best.

    Args:
        lower: whether lower scores are better.
    """
    sign = -1.0 if lower else 1.0
    lacking = [sum(int(np.isnan(one.values[:, i]).sum()) for one in strata) for i in peers]
    whole = [i for i, missing in zip(peers, lacking, strict=True) if not missing]
    scored = [i for i in peers if all((~np.isnan(one.values[:, i])).any() for one in strata)]
    ranked = whole or scored
    if len(scored) < 2 or not ranked:
        return Standing()
    means = sign * common_means(strata, ranked)
    if np.isnan(means).all() or not np.nan_to_num(means).any():
        return Standing()
    top = float(np.nanmax(means))
    best = {i for i, x in zip(ranked, means, strict=True) if math.isclose(x, top, rel_tol=1e-9)}
    tests = paired_tests(strata, scored)
    met, worse = set(), set()
    for (first, second), difference, p in zip(
        tests.pairs, map(float, tests.means), tests.adjusted, strict=True
    ):
        for winner, other, gain in (first, second, difference), (second, first, -difference):
            if winner in best and other not in best and not math.isnan(difference):
                met.add(other)
                if p < ALPHA and sign * gain > 0:
                    worse.add(other)
    return Standing(frozenset(best), frozenset(worse), frozenset(met - worse))


def common_means(strata: Sequence[Scores], columns: Sequence[int]) -> Array:
    """Mean over strata of the mean score, over the examples that all these variants scored."""
    means = []
    for one in strata:
        values = one.values[:, columns]
        kept = values[~np.isnan(values).any(axis=1)]
        means.append(kept.mean(0) if len(kept) else np.full(len(columns), np.nan))
    return np.asarray(np.mean(means, axis=0))
