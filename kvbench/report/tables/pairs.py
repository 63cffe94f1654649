"""Pairs of methods: can their difference be told from chance, and how many examples would show it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvbench.report.experiment import Group
from kvbench.report.labels import Variant
from kvbench.report.stats.estimate import Array, Estimate
from kvbench.report.stats.intervals import difference_intervals
from kvbench.report.stats.marks import common_means, paired_tests
from kvbench.report.stats.significance import ALPHA, POWER, units_needed, variances
from kvbench.report.table import Column, Table, unit_text
from kvbench.report.tables.strata import Scores, peers_of, strata_of

PLANNED = (0.02, 0.05)
"""Differences to plan for: points of a fraction, else shares of the better mean."""
_SHOWN = 15
"""Pairs of which a table shows all; of more, the neighbours in rank and those with the best."""

PAIRS_NOTE = (
    "The difference is paired, over examples that both scored, with its 95 % interval. p is of the exact"
    " paired test (McNemar's for right and wrong, else over the signs of the differences), and adjusted"
    " (Westfall and Young) for all pairs of compressed methods at the same rate on this model and task;"
    f" those below {ALPHA:.2f} are what the score table calls shown worse."
)
NEEDED_NOTE = (
    "Needed is a plan for more data, not a finding about these: examples per dataset at which the paired"
    f" test would show a true difference of the stated size with probability {POWER:.0%}, at 5 % divided"
    " by the number of pairs at the rate, from the variance of our paired differences; – where they do"
    " not vary."
).replace("80%", "80 %")


@dataclass(frozen=True)
class Gap:
    """A published difference of two methods, and the examples per dataset that would show it."""

    difference: float
    needed: float


@dataclass(frozen=True)
class VariantPair:
    """Two compressed variants of the same rate, the better one first, over all datasets.

    Attributes:
        difference: first minus second, paired.
        p, p_adjusted: of the paired test, and adjusted for all pairs of that rate.
        paired_deviation: of one example's paired difference, pooled over datasets.
        examples: independent units that both scored, of so many `datasets`.
        needed: by planned difference, units per dataset that would show it
            (`significance.units_needed`).
        neighbours: of adjacent rank. to_best: the first is the best of its rate.
        published: by the paper's model, the published difference (first minus second).
    """

    first: Variant
    second: Variant
    difference: Estimate
    p: float
    p_adjusted: float
    paired_deviation: float
    examples: int
    datasets: int
    needed: Mapping[float, float]
    neighbours: bool
    to_best: bool
    published: Mapping[str, Gap] = field(default_factory=dict)


def pairs_of(
    group: Group, published: Mapping[str, Mapping[str, float]] | None = None
) -> list[VariantPair]:
    """Every pair of compressed variants of the same rate, by rank; none where fewer than two have
    scores.

    Args:
        published: averages by the paper's model and method, in the shown unit (per cent where the
            score is a fraction).
    """
    strata = strata_of(group)
    return [
        pair for peers in peers_of(group) for pair in _among(group, strata, peers, published or {})
    ]


def _among(
    group: Group,
    strata: Sequence[Scores],
    peers: Sequence[int],
    published: Mapping[str, Mapping[str, float]],
) -> list[VariantPair]:
    """Pairs of variants that compete with each other."""
    scored = [i for i in peers if all((~np.isnan(one.values[:, i])).any() for one in strata)]
    if len(scored) < 2 or not strata:
        return []
    fraction = group.meta.score_unit == "fraction"
    sign = -1.0 if group.meta.lower_is_better else 1.0
    own = np.mean([np.nanmean(one.values[:, scored], axis=0) for one in strata], axis=0)
    means = common_means(strata, scored)
    if np.isnan(means).any():  # no example that all of them scored: each by its own mean
        means = own
    order = np.argsort(-sign * means, kind="stable")
    ranked = [scored[k] for k in order]
    tests = paired_tests(strata, ranked)
    found = difference_intervals(tests.strata, fraction=fraction)
    spread = variances(tests.strata)
    deviations = np.sqrt(spread.mean(0))
    counts = [(stratum.counts > 0).sum(0) for stratum in tests.strata]
    changed = [(stratum.sums != 0).sum(0) for stratum in tests.strata]
    differing = np.mean(
        [c / np.maximum(n, 1) for c, n in zip(changed, counts, strict=True)], axis=0
    )
    units = np.sum(counts, axis=0)
    unit = 1.0 if fraction else float(abs(own[order[0]]))
    scale = 100.0 if fraction else 1.0
    rank = {variant: place for place, variant in enumerate(ranked)}
    pairs = []
    for k, (i, j) in enumerate(tests.pairs):
        needed = partial(_needed, spread[:, k], float(differing[k]), alpha=ALPHA / len(tests.pairs))
        first, second = group.variants[i], group.variants[j]
        gaps = {
            model: averages[first.method] - averages[second.method]
            for model, averages in published.items()
            if first.method in averages and second.method in averages
        }
        pairs.append(
            VariantPair(
                first=first,
                second=second,
                difference=found[k],
                p=tests.p[k],
                p_adjusted=tests.adjusted[k],
                paired_deviation=float(deviations[k]),
                examples=int(units[k]),
                datasets=len(strata),
                needed={planned: needed(planned * unit) for planned in PLANNED},
                neighbours=rank[j] == rank[i] + 1,
                to_best=rank[i] == 0,
                published={model: Gap(gap, needed(gap / scale)) for model, gap in gaps.items()},
            )
        )
    return pairs


def _needed(variance: Array, share: float, effect: float, *, alpha: float) -> float:
    """Units per dataset that would show `effect`; as many more are taken to differ as it takes for the
    scores to differ by so much on average."""
    more = max(1.0, min(1.0, abs(effect)) / share) if share else 1.0
    return units_needed(variance * more, effect, alpha=alpha, differing=min(1.0, share * more))


def pairs_table(group: Group, pairs: Sequence[VariantPair]) -> Table:
    """Every pair; of many, readers see those with the best and those of neighbouring rank."""
    unit = group.meta.score_unit
    models = dict.fromkeys(model for pair in pairs for model in pair.published)
    each = " per dataset" if any(pair.datasets > 1 for pair in pairs) else ""

    def names(pair: VariantPair) -> str:
        return f"{pair.first.label} − {pair.second.label}"

    def needed(planned: float) -> Column:
        key = f"needed_per_dataset_for_{_planned_text(planned, unit, word=True)}"
        heading = f"needed{each} for {_planned_text(planned, unit)}"
        return Column(key, heading, "needed", of=lambda pair: pair.needed[planned])

    def published(model: str) -> Iterator[Column]:
        suffix, none = f" ({model})" if model else "", Gap(math.nan, math.nan)
        yield Column(
            f"published_difference{suffix}",
            f"published{suffix}",
            "published",
            unit,
            of=lambda pair: pair.published.get(model, none).difference,
        )
        yield Column(
            f"needed_per_dataset_published{suffix}",
            "needed for that",
            "needed",
            of=lambda pair: pair.published.get(model, none).needed,
        )

    return Table.of(
        f"{group.task}-{group.model}-pairs",
        f"{group.task} on {group.model}: which compressed methods are shown to differ"
        f"{unit_text(unit)}",
        (
            Column("model", of=lambda _: group.model),
            Column("task", of=lambda _: group.task),
            Column("first", of=lambda pair: pair.first.label),
            Column("second", of=lambda pair: pair.second.label),
            Column("methods", "methods", "label", saved=False, of=names),
            Column("difference", "difference", "difference", unit),
            Column("p", "p", "p"),
            Column("p_adjusted", "p, adjusted", "p"),
            Column("paired_deviation", "σ of a pair", "deviation", unit),
            Column("datasets"),
            Column("examples", "examples", "label"),
            *map(needed, PLANNED),
            Column("neighbours"),
            Column("to_best"),
            *(column for model in models for column in published(model)),
        ),
        pairs,
        (PAIRS_NOTE, NEEDED_NOTE),
        row=lambda pair: {"shown": len(pairs) <= _SHOWN or pair.neighbours or pair.to_best},
    )


def _planned_text(planned: float, unit: str, *, word: bool = False) -> str:
    """E.g. "2 points", or "2 %" of the better mean where the score is no fraction; `word`: 2_points."""
    text = f"{100 * planned:g} {'points' if unit == 'fraction' else '%'}"
    return text.replace(" ", "_").replace("%", "percent") if word else text
