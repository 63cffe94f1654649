"""Statistics of scores: means with intervals, paired differences with p-values, marks, medians, margins.

In: strata, each the scores of one dataset's independent units (`Stratum`, `Scores`). Out: one `Estimate`
for each column of scores: the mean over strata of the strata's means, so that datasets count alike.

The interval and the p-value of a difference come from one t statistic. All differences that stand in one
table share one level (`compared`). So an interval excludes 0 exactly where p is below 5 %, and marks and
sentences of the report follow these p-values.

`scripts/benchmarks/bench_statistics.py` measures how often an interval holds the truth, and how often a
mark is wrong.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, gammaincinv, ndtr, ndtri, stdtr, stdtrit  # scipy.stats is slow

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Pair = tuple[int, int]

LEVEL = 0.95
ALPHA = 1 - LEVEL
FEWEST = 10
"""With fewer independent units (prompts) than this, the report says nothing about differences."""
MOST_LACKING = 0.1
"""Share of a dataset's examples that a variant may lack and be the best."""
RARE = 50
"""A sample of up to this many units often does not show a loss that happens in three of a hundred."""
FARTHEST = 1.5
"""How far from the mean units are added to a sample without bounds, in multiples of the distance of its
farthest unit (`_moments`)."""
DRAWS = 10_000
"""Draws of the largest |z| of a family of tests."""
_Z = float(ndtri((1 + LEVEL) / 2))


class Estimate(NamedTuple):
    """A mean with its 95 % interval, and the p-value of the hypothesis that there is no difference; NaN
    where one of them is not known."""

    value: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan

    def named(self, name: str) -> dict[str, float]:
        """Value and bounds as fields of a file, which begin with `name`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


NOTHING = Estimate(math.nan)


@dataclass(frozen=True)
class Stratum:
    """Scores of one dataset: rows are units (independent prompts), columns are variants.

    Attributes:
        sums, counts: [units, variants] sum of a unit's scores and how many there are (0 = missing).
    """

    sums: Array
    counts: Array

    @property
    def mean(self) -> Array:
        """The mean of every column; NaN where there is no score."""
        return ratio(self.sums.sum(0), self.counts.sum(0))


@dataclass(frozen=True)
class Scores:
    """Scores of one part of the examples, as every comparison takes them.

    Attributes:
        by, value: the record field that splits the examples, and the value it has in this part.
        values: [pairs, variants], NaN where missing; a pair is one (seed, example). A variant that
            was not run with a seed has its mean over its own seeds there, where the prompt is the same.
        given: [pairs, variants] whether the variant was to score the pair itself.
        units: [pairs] number of the independent unit that each pair belongs to.
        statuses: for each variant, how many examples failed, by status.
    """

    by: str
    value: str
    values: Array
    given: Flags
    units: NDArray[np.intp]
    statuses: tuple[Mapping[str, int], ...]

    def stratum(self, values: Array) -> Stratum:
        """Columns [pairs, k] summed within each unit."""
        order = np.argsort(self.units, kind="stable")
        starts = np.unique(self.units[order], return_index=True)[1]
        values = values[order]
        known = ~np.isnan(values)
        sums, counts = np.where(known, values, 0.0), known.astype(float)
        if len(starts) < len(order):
            sums, counts = (np.add.reduceat(part, starts, axis=0) for part in (sums, counts))
        return Stratum(sums, counts)


def ratio(sums: ArrayLike, counts: ArrayLike) -> Array:
    """Means where there are scores, NaN elsewhere."""
    sums, counts = np.asarray(sums, dtype=float), np.asarray(counts, dtype=float)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


class _Moments(NamedTuple):
    """For each column, the mean over strata, its variance and Satterthwaite's degrees of freedom (0
    where no stratum has two units); `smoothed` is the mean including the two units that are added."""

    mean: Array
    variance: Array
    freedom: Array
    smoothed: Array


Ends = tuple[ArrayLike, ArrayLike]


def _moments(strata: Sequence[Stratum], ends: Sequence[Ends] | None) -> _Moments:
    """Mean and variance of each column, with two units added to each stratum.

    Strata are not pooled: each has the variance of its own units and of the two added ones, as in the
    intervals of Agresti and Caffo (2000) and Bonett and Price (2012), where x right answers of n count
    as (x + 1) / (n + 2). So a stratum whose few units happen to agree still has a variance, and one
    that has not shown its rare large losses yet is not taken to have none.

    Args:
        ends: where the two added units of each stratum lie. None, for scores without bounds: on either
            side of the stratum's mean, `FARTHEST` times as far as its farthest unit (where all units
            are equal: as their distance from 0). The tail of a skewed sample is then not taken to end
            with the farthest unit seen; for normal samples intervals become 20 to 40 % wider.
    """
    parts = []
    for place, stratum in enumerate(strata):
        known, mean = stratum.counts > 0, stratum.mean
        n = known.sum(0).astype(float)
        residuals = (stratum.sums - mean * stratum.counts) * ratio(n, stratum.counts.sum(0))
        squares = np.square(np.where(known, residuals, 0.0)).sum(0)
        if ends is None:
            units = np.where(known, ratio(stratum.sums, stratum.counts), mean)
            distance = np.abs(units - mean).max(0, initial=0.0)
            all_equal = distance <= 1e-9 * np.abs(mean)
            distance = FARTHEST * np.where(all_equal, np.abs(mean), distance)
            low, high = mean - distance, mean + distance
        else:
            low, high = (np.asarray(end, dtype=float) for end in ends[place])
        smoothed = (n * mean + low + high) / (n + 2)
        about = np.square(low - smoothed) + np.square(high - smoothed)
        variance = (squares + n * np.square(mean - smoothed) + about) / (n + 2)
        parts.append((mean, ratio(variance, n), np.maximum(n - 1, 1), smoothed, n))
    mean, variance, freedom, smoothed, n = (np.array(part) for part in zip(*parts, strict=True))
    total = variance.sum(0)
    freedom_of_mean = ratio(
        np.square(total), (np.square(variance) * ratio(np.ones_like(freedom), freedom)).sum(0)
    )
    freedom_of_mean = np.where(total > 0, freedom_of_mean, freedom.sum(0))
    freedom_of_mean = np.where((n > 1).any(0), freedom_of_mean, 0.0)
    return _Moments(mean.mean(0), total / len(strata) ** 2, freedom_of_mean, smoothed.mean(0))


def mean_intervals(strata: Sequence[Stratum], *, fraction: bool) -> list[Estimate]:
    """The mean score of each column with its interval; none (NaN) below two units.

    Scores of a fraction lie in [0, 1]; those of one stratum get Wilson's interval on the effective
    number of units p (1 - p) / variance of the mean, as is usual for surveys (Korn and Graubard 1998):
    of 0/1 scores this is Wilson's interval itself, of others it has Student's t. Counts of three or
    fewer successes or failures take the Poisson bound (Brown, Cai and DasGupta 2001), without which it
    covers only 90 % at n = 10, p = .99. Averages of strata, and other scores, get Student's t interval
    with Satterthwaite's degrees of freedom.
    """
    moments = _moments(strata, [(0.0, 1.0)] * len(strata) if fraction else None)
    mean = moments.mean
    if fraction and len(strata) == 1:
        sums, counts = strata[0].sums, strata[0].counts
        zero_one = ((sums == 0) | (sums == counts)).all(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            units = moments.smoothed * (1 - moments.smoothed) / moments.variance
            low, high = wilson(mean, units, np.where(zero_one, _Z, _quantile(moments, ALPHA)))
    else:
        half = _quantile(moments, ALPHA) * np.sqrt(moments.variance)
        least, most = (0.0, 1.0) if fraction else (-math.inf, math.inf)
        low, high = np.maximum(mean - half, least), np.minimum(mean + half, most)
    return _estimates(moments, low, high, np.full(len(mean), np.nan))


def wilson(p: Array, units: Array, quantile: Array | float) -> tuple[Array, Array]:
    """Wilson's bounds of proportions, with the Poisson bound for three or fewer successes or failures.

    Args:
        p: proportions.
        units: the number of units of each proportion (need not be whole).
    """
    square = quantile**2 / units
    centre = (p + square / 2) / (1 + square)
    half = np.sqrt(square * p * (1 - p) + square**2 / 4) / (1 + square)
    low, high = (_poisson_bound(share, units) for share in (p, 1 - p))
    return np.minimum(centre - half, low), np.maximum(centre + half, 1 - high)


def _poisson_bound(p: Array, units: Array) -> Array:
    """The lower bound of a proportion whose count is at most three; 1 (none) for larger counts."""
    count = np.round(p * units, 9)
    small = (count > 0) & (count <= 3)
    bound = gammaincinv(np.where(small, count, 1.0), 1 - LEVEL) / units
    return np.asarray(np.where(small, bound, np.where(count == 0, 0.0, 1.0)))


def _quantile(moments: _Moments, level: float) -> Array:
    return np.asarray(stdtrit(np.maximum(moments.freedom, 1.0), 1 - level / 2))


def _estimates(moments: _Moments, low: Array, high: Array, p: Array) -> list[Estimate]:
    known = moments.freedom > 0
    rows = zip(moments.mean, *(np.where(known, x, np.nan) for x in (low, high, p)), strict=True)
    return [Estimate(*map(float, row)) for row in rows]


def independent(tests: int = 1) -> Array:
    """The distribution of the largest |z| of this many independent tests: [DRAWS], sorted."""
    shares = (np.arange(DRAWS) + 0.5) / DRAWS
    return np.asarray(ndtri((1 + shares ** (1 / tests)) / 2))


ALONE = independent()


def differences(
    strata: Sequence[Stratum],
    *,
    fraction: bool,
    family: Array = ALONE,
    reach: ArrayLike = 1.0,
) -> list[Estimate]:
    """The mean paired difference of each column with its interval and p-value; none (NaN) below two
    units.

    Student's t with Satterthwaite's degrees of freedom and two units added to each stratum (`_moments`).
    Intervals are wider than needed where scores are partial credit.

    Args:
        fraction: whether scores are in [0, 1].
        family: the distribution of the largest |z| of all tests of one table (`together`,
            `independent`). In 95 of 100 tables all intervals then hold the truth, and no pair that does
            not differ has a p-value below 5 %.
        reach: for each column, how far apart two scores may be (`compared` takes the largest score
            seen, as an answer that fails loses all that it had). In strata of up to `RARE` units the
            added units lie that far above and below 0; in larger strata they lie nearer, but never
            nearer than the root mean square of the differences seen.
    """
    ends = None
    if fraction:
        distances = [
            _typical_distance(stratum, np.asarray(reach, dtype=float)) for stratum in strata
        ]
        ends = [(-distance, distance) for distance in distances]
    moments = _moments(strata, ends)
    error = np.sqrt(moments.variance)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.where(moments.mean == 0, 0.0, np.abs(moments.mean) / error)
    p = 2 * stdtr(np.maximum(moments.freedom, 1.0), -size)
    larger = 1 - np.searchsorted(family, -ndtri(p / 2), side="left") / DRAWS
    half = _quantile(moments, float(2 * ndtr(-family[-round(ALPHA * DRAWS)]))) * error
    low, high = moments.mean - half, moments.mean + half
    if fraction:
        low, high = np.maximum(low, -1.0), np.minimum(high, 1.0)
    return _estimates(moments, low, high, np.where(np.isnan(size), np.nan, np.maximum(p, larger)))


def _typical_distance(stratum: Stratum, reach: Array) -> Array:
    """How far above and below 0 two units are added to the differences of a stratum (`differences`)."""
    units = np.nan_to_num(ratio(stratum.sums, stratum.counts))
    seen = np.sqrt(np.nan_to_num(ratio(np.square(units).sum(0), (units != 0).sum(0))))
    count = np.maximum((stratum.counts > 0).sum(0), 1)
    return np.asarray(np.maximum(seen, np.minimum(1.0, RARE / count) * reach))


def together(strata: Sequence[Scores], pairs: Sequence[Pair]) -> Array:
    """The distribution of the largest |z| of these pairs of variants if none of them differs: [DRAWS],
    sorted.

    Normal draws with the variants' covariance over units (Hothorn, Bretz and Westfall 2008). Pairs that
    share a variant, and variants that answer alike, therefore widen the intervals by less than as many
    independent tests would.
    """
    parts = []
    for dataset in strata:
        part = dataset.stratum(dataset.values)
        parts.append(ratio(part.sums - part.mean * part.counts, part.counts.sum(0)))
    residuals = np.nan_to_num(np.concatenate(parts))
    covariance, largest = residuals.T @ residuals, np.zeros(DRAWS)
    seed = []
    for dataset in strata:
        name = f"{dataset.by} {dataset.value}".strip()
        seed += [zlib.crc32(name.encode()), len(dataset.values)]
    drawn = np.random.default_rng(seed).multivariate_normal(
        np.zeros(len(covariance)), covariance, DRAWS, method="eigh", check_valid="ignore"
    )
    for i, j in pairs:
        both = covariance[i, i] + covariance[j, j]
        variance = both - 2 * covariance[i, j]
        if variance > 1e-12 * both:
            change = np.abs(drawn[:, i] - drawn[:, j]) / math.sqrt(variance)
            np.maximum(largest, change, out=largest)
    return np.sort(largest) if len(pairs) > 1 and largest.any() else ALONE


def compared(
    strata: Sequence[Scores], pairs: Sequence[Pair], *, fraction: bool
) -> dict[Pair, Estimate]:
    """The first minus the second variant of every pair, over the examples that both scored, with
    intervals and p-values that hold for all pairs together."""
    if not pairs or not strata:
        return {}
    first, second = np.array(pairs).T
    parts = [
        dataset.stratum(dataset.values[:, first] - dataset.values[:, second]) for dataset in strata
    ]
    family = together(strata, pairs)
    reach = largest_scores(strata, pairs)
    changes = differences(parts, fraction=fraction, family=family, reach=reach)
    return dict(zip(pairs, changes, strict=True))


def largest_scores(strata: Sequence[Scores], pairs: Sequence[Pair]) -> Array:
    """For each pair the largest score of its two variants, which is the most that one can lose to the
    other; 1 where every score is 0."""
    largest = np.max(
        [np.nan_to_num(dataset.values).max(0, initial=0.0) for dataset in strata], axis=0
    )
    first, second = np.array(pairs).T
    reach = np.maximum(largest[first], largest[second])
    return np.where(reach > 0, reach, 1.0)


def standing(
    strata: Sequence[Scores], peers: Sequence[int], tests: Mapping[Pair, Estimate], *, lower: bool
) -> dict[int, str]:
    """The mark of each variant of `peers`, which compete with each other over these datasets.

    "best"; "worse" or "better" where a test shows the variant to be that, compared with the best;
    "tied" where it shows neither; "few" where there are too few units to test.

    The best has the best mean over the examples that all rankable variants scored (`_rankable`). Where
    every mean is 0 there is no best. Another variant is shown to be worse, or better, where its p-value
    against a best one is below 5 %. "better" is possible where a variant was left out of the ranking, or
    scored examples that others did not.

    Args:
        tests: what `compared` returned for every pair of `peers`.
        lower: whether lower scores are better.

    Returns:
        Marks by index of the variant; none where nothing can be ranked.
    """
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
    top = float(means.max())
    best = {i for i, x in zip(ranked, means, strict=True) if math.isclose(x, top, rel_tol=1e-9)}
    marks = dict.fromkeys(best, "best")
    for other in (i for i in scored if i not in best):
        against = [_against(strata, winner, other, tests, sign) for winner in sorted(best)]
        shown = [mark for mark in ("few", "worse", "better", "tied") if mark in against]
        if shown:
            marks[other] = shown[0]
    return marks


def _scored_by(scores: Scores, variants: Sequence[int]) -> Flags:
    """The pairs of (seed, example) that all of these variants scored."""
    return np.asarray(~np.isnan(scores.values[:, variants]).any(axis=1))


def _rankable(strata: Sequence[Scores], scored: Sequence[int]) -> list[int]:
    """The variants that may be best: those that lack at most one in ten of every dataset's examples,
    since a method that fails where it is hard has a good mean over the rest; all if there are none."""
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
    """The mark of `other` compared with `winner` (`standing`); empty where nothing is known."""
    turned = (winner, other) not in tests
    change = tests.get((other, winner) if turned else (winner, other), NOTHING)
    if math.isnan(change.value):
        return ""
    both = [_scored_by(dataset, [winner, other]) for dataset in strata]
    if (
        sum(len(set(dataset.units[rows])) for dataset, rows in zip(strata, both, strict=True))
        < FEWEST
    ):
        return "few"
    if not change.p < ALPHA:
        return "tied"
    lead = -sign * change.value if turned else sign * change.value
    return "worse" if lead > 0 else "better"


def median_of(values: pd.Series) -> Estimate:
    """The median of the values that are not NaN, with an interval between two order statistics.

    Of n values the k-th and the (n + 1 - k)-th lie on either side of the true median with a
    probability of at least `LEVEL`, whatever the distribution, where k is the largest number for
    which fewer than k of n fair coins come up heads with a probability of at most (1 - LEVEL) / 2:
    the second and the ninth of ten. Below six values there is no such interval.
    """
    known = np.sort(values.astype(float).dropna())
    if not len(known):
        return NOTHING
    heads = bdtr(np.arange(len(known), dtype=float), len(known), 0.5)
    middle, k = float(np.median(known)), int((heads < (1 - LEVEL) / 2).sum())
    return Estimate(middle, float(known[k - 1]), float(known[-k])) if k else Estimate(middle)


def margin_of(parts: Sequence[tuple[float, int]], f: float, *, total: bool, unit: float) -> float:
    """How far apart two honest runs' means over datasets, or sums over datasets, may be.

    Args:
        parts: for each dataset the mean score, as a fraction, and its number of examples.
        f: the share of examples that a second run in effect answers anew.
        total: whether the means are summed, in place of averaged.
        unit: the value of the last printed digit, as a fraction.
    """
    variance = 0.0
    for mean, n in parts:
        if math.isnan(mean) or n == 0:
            return math.nan
        p = (mean * n + 1) / (n + 2)  # of a mean of 0 or 1, too, some answers may change
        variance += 2 * f * p * (1 - p) / n
    return _Z * math.sqrt(variance) / (1 if total else len(parts)) + unit / 2


_LONGEST_GRAM = 4
"""n-grams of 1 up to this many words count alike, as in BLEU-4."""
_ABSENT = 0.1
"""The number of matches taken for an n-gram length that has none, so that the other lengths still count
(method 1 of Chen and Cherry, 2014)."""


def words_of(text: str) -> list[str]:
    """Words and punctuation marks, as they are written."""
    return re.findall(r"\w+|[^\w\s]", text)


def self_bleu(texts: Sequence[str]) -> list[float]:
    """For each text its BLEU-4, 0 to 1, with all other texts as references; NaN for a single text.

    The mean of these is Self-BLEU (arXiv 1802.01886): the lower, the more diverse the texts. H2O (arXiv
    2306.14048, appendix C.1) names the measure without saying the length of n-grams, the smoothing or
    what a word is; chosen here are BLEU-4, 0.1 matches for a length that has none, and `words_of`.

    For each n-gram only the two largest counts over all texts are kept: the largest count among the
    other texts is the first of them or, for the text that has the first, the second.
    """
    if len(texts) < 2:
        return [math.nan for _ in texts]
    worded = [words_of(text) for text in texts]
    logs, empty = np.zeros(len(texts)), np.zeros(len(texts), dtype=bool)
    for n in range(1, _LONGEST_GRAM + 1):
        counted = [Counter(zip(*(words[k:] for k in range(n)), strict=False)) for words in worded]
        counts: dict[tuple[str, ...], list[int]] = {}
        for grams in counted:
            for gram, count in grams.items():
                counts[gram] = sorted([*counts.get(gram, (0, 0)), count])[-2:]
        for i, grams in enumerate(counted):
            matches = sum(min(c, counts[g][c < counts[g][1]]) for g, c in grams.items())
            empty[i] |= n == 1 and not matches
            logs[i] += math.log((matches or _ABSENT) / max(1, sum(grams.values()))) / _LONGEST_GRAM
    for i, words in enumerate(worded):  # the other text of the nearest length, the shorter of two
        others = [len(other) for k, other in enumerate(worded) if k != i]
        reference = min(others, key=lambda length: (abs(length - len(words)), length))
        logs[i] += min(0.0, 1 - reference / max(1, len(words)))
    return [float(x) for x in np.where(empty, 0.0, np.exp(logs))]
