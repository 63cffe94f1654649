"""The one number of a sweep over rates: the ratio from which on a method keeps 95 % of the exact cache's
score.

Its margin at a rate is the paired mean of its score less 95 % of the exact cache's, over the same
examples and with the same interval as every difference (`kvbench.report.stats`). Between neighbouring
rates the margin is a straight line over the measured ratio. The number is the smallest ratio from which
on it is nowhere negative: what a lower rate wins where a higher one loses is chance, and does not count.
The bounds of its interval are where the upper and the lower bound of the margin do the same.

What lies beyond the rates that were run is not guessed at. Lower is better, a difference or an error
have no 95 %, and an exact cache that scores nothing has nothing to keep: there is no number then.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvbench.report.experiment import Group
from kvbench.report.ratios import measures_several_rates
from kvbench.report.stats import Estimate, Scores, paired

MEASURE = "ratio_at_95"
"""The measure's name in the tidy frame, in files and in W&B."""
SHARE = 0.95
AT_MOST, MORE_THAN = "at_most", "more_than"


class EnoughRatio(NamedTuple):
    """The ratio that is enough, in [smallest, largest] of the measured ratios.

    Attributes:
        low, high: of its interval; 0 where the smallest ratio may be enough, infinite where the largest
            may not be. NaN where the margins have no intervals, and where all of it is beyond the rates,
            as the mark says.
        mark: "at_most" where the smallest ratio is enough, "more_than" where the largest is not, which
            `value` then is; else empty.
    """

    value: float
    low: float
    high: float
    mark: str


def crossing(ratios: ArrayLike, margins: ArrayLike) -> float:
    """The ratio from which on margins at these ascending ratios are nowhere negative: 0 where none is,
    infinite where the last one is; NaN where a margin is not known."""
    x, y = np.asarray(ratios, dtype=float), np.asarray(margins, dtype=float)
    if np.isnan(y).any():
        return math.nan
    below = np.flatnonzero(y < -1e-12)
    if not len(below):
        return 0.0
    i = below[-1]
    if i == len(y) - 1:
        return math.inf
    return float(x[i] + (x[i + 1] - x[i]) * y[i] / (y[i] - y[i + 1]))


def enough(ratios: Sequence[float], margins: Sequence[Estimate]) -> EnoughRatio:
    """The ratio that is enough, given the margin at each of these measured ratios."""
    order = np.argsort(ratios, kind="stable")
    x = np.asarray(ratios, dtype=float)[order]
    value, low, high = np.array([margin[:3] for margin in margins])[order].T
    at = crossing(x, value)
    mark = AT_MOST if at == 0 else MORE_THAN if math.isinf(at) else ""
    low_end, high_end = crossing(x, high), crossing(x, low)
    if math.isinf(low_end) or high_end == 0:
        low_end = high_end = math.nan
    return EnoughRatio(float(np.clip(at, x[0], x[-1])), low_end, high_end, mark)


def enough_ratios(group: Group, strata: Sequence[Scores]) -> dict[str, EnoughRatio]:
    """The ratio that is enough of each method, by its name without the rate; none where no method was
    run at two rates.

    Args:
        strata: the datasets over which differences of total scores are averaged.
    """
    if not group.percent or group.meta.lower_is_better or measures_several_rates(group):
        return {}
    ratios = group.good.groupby("variant")["ratio"].mean()
    labels = [label for label in group.labels if ratios.get(label, math.nan) < 1]
    pairs = [
        (group.labels.index(label), group.labels.index(baseline))
        for label in labels
        if (baseline := group.baseline[label])
    ]
    points: dict[str, list[tuple[float, Estimate]]] = defaultdict(list)
    for pair, margin in zip(pairs, paired(strata, pairs, fraction=True, share=SHARE), strict=True):
        method, exact = pair
        exact_scores = any(np.nansum(dataset.values[:, exact]) > 0 for dataset in strata)
        if exact_scores and not math.isnan(margin.value):
            label = group.labels[method]
            points[group.names[label]].append((float(ratios[label]), margin))
    if max(map(len, points.values()), default=0) < 2:
        return {}
    return {name: enough(*zip(*each, strict=True)) for name, each in points.items()}
