"""Pairs of methods: can their difference be told from chance, and how many examples would show it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from kvbench.report.data import Arm, Group
from kvbench.report.stats import (
    LEVEL,
    POWER,
    Array,
    Estimate,
    Stratum,
    estimates,
    holm,
    p_values,
    units_needed,
    variances,
)
from kvbench.report.tables import Scores, common_means, peers_of, strata_of
from kvbench.report.views import MISSING, View, estimate_text, shown_text, unit_text, value_text

_SHOWN = 15
"""Pairs of which a table shows all; of more, the neighbours in rank and those with the best."""

PAIRS_NOTE = (
    "The difference is paired, over examples that both scored, with its 95 % bootstrap interval. p is"
    " of a two-sided randomisation test (signs of the paired differences), adjusted by Holm's method"
    " for all pairs of compressed methods at the same rate on this model and task."
)
NEEDED_NOTE = (
    f"Needed: examples per dataset at which a two-sided {LEVEL:.0%} interval of the paired difference"
    f" excludes 0 with probability {POWER:.0%}, were the true difference the one seen here (or the"
    " published one), from the variance of our paired differences; normal approximation."
).replace("%", " %")


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
        p, adjusted: of the paired randomisation test, and adjusted for the number of pairs.
        deviation: standard deviation of one example's paired difference, pooled over datasets.
        examples, datasets: independent units that both scored, and datasets they are from.
        needed: units per dataset that would show this difference (`stats.units_needed`).
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
    needed: float
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
    found = [pair for peers in peers_of(group) for pair in _among(group, strata, peers)]
    adjusted = holm([pair.p for pair in found])
    scale = 100.0 if group.meta.score_unit == "fraction" else 1.0
    return [
        replace(
            pair,
            adjusted=p,
            published={
                model: _gap(averages, pair, scale)
                for model, averages in (published or {}).items()
                if pair.first.method in averages and pair.second.method in averages
            },
        )
        for pair, p in zip(found, adjusted, strict=True)
    ]


def _among(group: Group, strata: Sequence[Scores], peers: Sequence[int]) -> list[ArmPair]:
    """Pairs of arms that compete with each other."""
    scored = [i for i in peers if all((~np.isnan(one.values[:, i])).any() for one in strata)]
    if len(scored) < 2 or not strata:
        return []
    sign = -1.0 if group.meta.lower_is_better else 1.0
    means = sign * common_means(strata, scored)
    if np.isnan(means).any():  # no example that all of them scored: each by its own mean
        means = sign * np.mean(
            [np.nanmean(one.values[:, scored], axis=0) for one in strata], axis=0
        )
    ranked = [scored[k] for k in np.argsort(-means, kind="stable")]
    index = list(itertools.combinations(range(len(ranked)), 2))
    first, second = ([ranked[pair[k]] for pair in index] for k in (0, 1))
    differences = [one.stratum(one.values[:, first] - one.values[:, second]) for one in strata]
    found = estimates(differences)
    p = p_values(differences)
    spread = variances(differences)
    units = _units(differences)
    return [
        ArmPair(
            first=group.arms[ranked[a]],
            second=group.arms[ranked[b]],
            difference=found[k],
            p=p[k],
            adjusted=math.nan,
            deviation=math.sqrt(float(np.mean(spread[:, k]))),
            examples=int(units[k]),
            datasets=len(strata),
            needed=units_needed(spread[:, k], found[k].value),
            neighbours=b == a + 1,
            to_best=a == 0,
        )
        for k, (a, b) in enumerate(index)
    ]


def _units(strata: Sequence[Stratum]) -> Array:
    """Per column, how many units have a difference."""
    return np.sum([(stratum.counts > 0).sum(0) for stratum in strata], axis=0)


def _gap(averages: Mapping[str, float], pair: ArmPair, scale: float) -> Gap:
    difference = averages[pair.first.method] - averages[pair.second.method]
    needed = units_needed([pair.deviation**2] * pair.datasets, difference / scale)
    return Gap(difference, needed)


def pairs_frame(group: Group, pairs: Sequence[ArmPair]) -> pd.DataFrame:
    """Every pair as numbers; fractions as per cent."""
    scale = 100.0 if group.meta.score_unit == "fraction" else 1.0
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
            "p_holm": pair.adjusted,
            "paired_deviation": pair.deviation * scale,
            "datasets": pair.datasets,
            "examples": pair.examples,
            "needed_per_dataset": pair.needed,
            "needed": pair.needed * pair.datasets,
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
    header.append("needed per dataset" if several else "needed")
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
            count_text(pair.needed),
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
        title=f"{group.task} on {group.model}: which compressed methods can be told apart"
        f"{unit_text(unit)}",
        columns=tuple(header),
        rows=tuple(rows),
        notes=(PAIRS_NOTE, NEEDED_NOTE),
    )


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
