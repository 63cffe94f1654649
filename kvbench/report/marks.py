"""Marks of the variants that are ranked: which is best, and which ones a test shows to differ from
it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kvbench.report.stats import ALPHA, FEWEST, NOTHING, Estimate, Flags, Pair, Scores

MOST_LACKING = 0.1
"""The share of a dataset's examples that a variant may lack and still be ranked best."""


def standing(
    strata: Sequence[Scores], peers: Sequence[int], tests: Mapping[Pair, Estimate], *, lower: bool
) -> dict[int, str]:
    """Rank the variants of `peers` over these datasets, and mark each one.

    "best" has the best mean over the examples that all rankable variants scored (`_rankable`); there is
    none where every mean is 0. The others are marked by their test against the best: "worse" or "better"
    where its p-value is below 5 %, else "tied", and "few" where there are too few units for a test.
    Where there are too few at all, every mark is "few". A variant may be "better" than the best if it is
    not rankable, or scored examples that others lack. Empty where there is nothing to rank.
    `tests` is what `kvbench.report.stats.compared` returned for every pair of `peers`."""
    sign = -1.0 if lower else 1.0
    scored = [
        i for i in peers if all((~np.isnan(dataset.values[:, i])).any() for dataset in strata)
    ]
    ranked = _rankable(strata, scored)
    if len(scored) < 2 or not ranked:
        return {}
    common = [dataset.values[_scored_by(dataset, ranked)][:, ranked] for dataset in strata]
    means = sign * np.mean([values.mean(0) for values in common], axis=0)
    if not means.any():
        return {}
    if _units(strata, ranked) < FEWEST:
        return dict.fromkeys(scored, "few")
    top = float(means.max())
    best = {i for i, x in zip(ranked, means, strict=True) if math.isclose(x, top, rel_tol=1e-9)}
    marks = dict.fromkeys(best, "best")
    for other in (i for i in scored if i not in best):
        against = [_against(strata, winner, other, tests, sign) for winner in sorted(best)]
        by_precedence = [mark for mark in ("few", "worse", "better", "tied") if mark in against]
        if by_precedence:
            marks[other] = by_precedence[0]
    return marks


def _scored_by(scores: Scores, variants: Sequence[int]) -> Flags:
    return np.asarray(~np.isnan(scores.values[:, variants]).any(axis=1))


def _units(strata: Sequence[Scores], variants: Sequence[int]) -> int:
    return sum(len(set(dataset.units[_scored_by(dataset, variants)])) for dataset in strata)


def _rankable(strata: Sequence[Scores], scored: Sequence[int]) -> list[int]:
    """The variants that may be best: those that lack at most `MOST_LACKING` of every dataset's examples,
    or all if there are none such. (A method that fails on hard examples has a good mean over the rest.)
    Empty if a dataset has no example that all of them scored."""
    nearly_all = [
        i
        for i in scored
        if all(np.isnan(dataset.values[:, i]).mean() <= MOST_LACKING for dataset in strata)
    ]
    ranked = nearly_all or list(scored)
    return ranked if all(_scored_by(dataset, ranked).any() for dataset in strata) else []


def _against(
    strata: Sequence[Scores],
    winner: int,
    other: int,
    tests: Mapping[Pair, Estimate],
    sign: float,
) -> str:
    """The mark of `other` by its test against `winner`; empty where there was no test."""
    swapped = (winner, other) not in tests
    change = tests.get((other, winner) if swapped else (winner, other), NOTHING)
    if math.isnan(change.value):
        return ""
    if _units(strata, [winner, other]) < FEWEST:
        return "few"
    if not change.p < ALPHA:
        return "tied"
    lead = -sign * change.lead if swapped else sign * change.lead
    return "worse" if lead > 0 else "better"
