"""Pairs of methods: can their difference be told from chance, and how many examples would show it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd

from kvbench.report.experiment import Arm, Group
from kvbench.report.stats.estimate import Array, Estimate, Stratum
from kvbench.report.stats.intervals import difference_intervals
from kvbench.report.stats.marks import common_means, paired_tests
from kvbench.report.stats.significance import ALPHA, POWER, units_needed, variances
from kvbench.report.tables.scores import Scores, peers_of, strata_of
from kvbench.report.views import MISSING, View, estimate_text, shown_text, unit_text, value_text

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
class ArmPair:
    """Two compressed arms of the same rate, the better one first, over all datasets.

    Attributes:
        difference: first minus second, paired.
        p, adjusted: of the paired test, and adjusted for all pairs of that rate.
        deviation: standard deviation of one example's paired difference, pooled over datasets.
        examples, datasets: independent units that both scored, and datasets they are from.
        needed: by planned difference, units per dataset that would show it
            (`significance.units_needed`).
        neighbours: of adjacent rank. to_best: the first is the best of its rate.
        published: by the paper's model, the published difference (first minus second).
    """

    first: Arm
    second: Arm
    difference: Estimate
    p: float
    adjusted: float
    deviation: float
    examples: int
    datasets: int
    needed: Mapping[float, float]
    neighbours: bool
    to_best: bool
    published: Mapping[str, Gap] = field(default_factory=dict)


def pairs_of(
    group: Group, published: Mapping[str, Mapping[str, float]] | None = None
) -> list[ArmPair]:
    """Every pair of compressed arms of the same rate, by rank; none where fewer than two have scores.

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
) -> list[ArmPair]:
    """Pairs of arms that compete with each other."""
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
    differing = _shares_differing(tests.strata).mean(0)
    units = _units(tests.strata)
    unit = 1.0 if fraction else float(abs(own[order[0]]))
    scale = 100.0 if fraction else 1.0
    rank = {arm: place for place, arm in enumerate(ranked)}
    pairs = []
    for k, (i, j) in enumerate(tests.pairs):
        needed = partial(_needed, spread[:, k], float(differing[k]), alpha=ALPHA / len(tests.pairs))
        first, second = group.arms[i], group.arms[j]
        gaps = {
            model: averages[first.method] - averages[second.method]
            for model, averages in published.items()
            if first.method in averages and second.method in averages
        }
        pairs.append(
            ArmPair(
                first=first,
                second=second,
                difference=found[k],
                p=tests.p[k],
                adjusted=tests.adjusted[k],
                deviation=float(deviations[k]),
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
    """Units per dataset that would show `effect`. Scores that differ in fewer units than a share of
    `effect` cannot differ by so much on average: then as many more are taken to."""
    more = max(1.0, min(1.0, abs(effect)) / share) if share else 1.0
    return units_needed(variance * more, effect, alpha=alpha, differing=min(1.0, share * more))


def _shares_differing(strata: Sequence[Stratum]) -> Array:
    """[strata, columns] share of units whose difference is not 0."""
    return np.array([(s.sums != 0).sum(0) / np.maximum((s.counts > 0).sum(0), 1) for s in strata])


def _units(strata: Sequence[Stratum]) -> Array:
    """Per column, how many units have a difference."""
    return np.sum([(stratum.counts > 0).sum(0) for stratum in strata], axis=0)


def pairs_frame(group: Group, pairs: Sequence[ArmPair]) -> pd.DataFrame:
    """Every pair as numbers; fractions as per cent."""
    unit = group.meta.score_unit
    scale = 100.0 if unit == "fraction" else 1.0
    lines = []
    for pair in pairs:
        line: dict[str, object] = {
            "model": group.model,
            "task": group.task,
            "first": pair.first.label,
            "second": pair.second.label,
            "difference": pair.difference.value * scale,
            "difference_low": pair.difference.low * scale,
            "difference_high": pair.difference.high * scale,
            "p": pair.p,
            "p_adjusted": pair.adjusted,
            "paired_deviation": pair.deviation * scale,
            "datasets": pair.datasets,
            "examples": pair.examples,
            **{
                f"needed_per_dataset_for_{_planned_text(planned, unit, word=True)}": needed
                for planned, needed in pair.needed.items()
            },
            "neighbours": pair.neighbours,
            "to_best": pair.to_best,
        }
        for model, gap in pair.published.items():
            suffix = f" ({model})" if model else ""
            line[f"published_difference{suffix}"] = gap.difference
            line[f"needed_per_dataset_published{suffix}"] = gap.needed
        lines.append(line)
    return pd.DataFrame(lines)


def pairs_view(group: Group, pairs: Sequence[ArmPair]) -> View:
    """Pairs as text: those with the best and those of neighbouring rank where there are many."""
    unit = group.meta.score_unit
    shown = pairs if len(pairs) <= _SHOWN else [p for p in pairs if p.neighbours or p.to_best]
    models = list(dict.fromkeys(model for pair in pairs for model in pair.published))
    several = any(pair.datasets > 1 for pair in pairs)
    header = ["methods", "difference", "p", "p, adjusted", "σ of a pair", "examples"]
    each = " per dataset" if several else ""
    header += [f"needed{each} for {_planned_text(planned, unit)}" for planned in PLANNED]
    for model in models:
        header += [f"published{f' ({model})' if model else ''}", "needed for that"]
    rows = []
    for pair in shown:
        cells = [
            f"{pair.first.label} − {pair.second.label}",
            estimate_text(pair.difference, unit, signed=True),
            p_text(pair.p),
            p_text(pair.adjusted),
            value_text(pair.deviation, unit),
            str(pair.examples),
            *(count_text(pair.needed[planned]) for planned in PLANNED),
        ]
        for model in models:
            gap = pair.published.get(model)
            if gap is None:
                cells += [MISSING, MISSING]
            else:
                cells += [_published(gap.difference, unit), count_text(gap.needed)]
        rows.append(tuple(cells))
    return View(
        name=f"{group.task}-{group.model}-pairs",
        title=f"{group.task} on {group.model}: which compressed methods are shown to differ"
        f"{unit_text(unit)}",
        columns=tuple(header),
        rows=tuple(rows),
        notes=(PAIRS_NOTE, NEEDED_NOTE),
    )


def _planned_text(planned: float, unit: str, *, word: bool = False) -> str:
    """E.g. "2 points", or "2 %" of the better mean where the score is no fraction; `word`: 2_points."""
    text = f"{100 * planned:g} {'points' if unit == 'fraction' else '%'}"
    return text.replace(" ", "_").replace("%", "percent") if word else text


def p_text(p: float) -> str:
    """A p-value to two digits."""
    if math.isnan(p):
        return MISSING
    return "<0.001" if p < 0.001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def count_text(count: float) -> str:
    """A number of examples; infinite where there is nothing to find."""
    if math.isnan(count):
        return MISSING
    return "∞" if math.isinf(count) else f"{count:,.0f}"


def _published(difference: float, unit: str) -> str:
    """To two decimals, as papers print scores."""
    if unit != "fraction":
        return shown_text(difference, unit, signed=True)
    return MISSING if math.isnan(difference) else f"{difference:+.2f}".replace("-", "−")
