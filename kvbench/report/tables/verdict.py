"""What an experiment found on a task, in words made from its numbers: differences that a test shows.

Compressed methods are compared with each other as the marks of the tables say, and with the exact cache
by the same paired test, adjusted (Westfall and Young) for the methods of a rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from kvbench.report.experiment import Group
from kvbench.report.labels import Variant
from kvbench.report.stats.estimate import ratio
from kvbench.report.stats.marks import common_means, standing
from kvbench.report.stats.significance import ALPHA, adjusted_p_values, p_values
from kvbench.report.table import value_text
from kvbench.report.tables.strata import Scores, peers_of, strata_of

_NAMED = 4
"""Of more methods a sentence names the first and says how many others."""


def verdict_of(group: Group) -> str:
    """One sentence for each rate, each a line; empty where nothing is compared."""
    strata = strata_of(group)
    found = []
    for peers in peers_of(group):
        scored = [i for i in peers if all((~np.isnan(one.values[:, i])).any() for one in strata)]
        text = _sentence(group, strata, scored) if strata and scored else ""
        if text:
            whole = f"{_where(group, scored)}{text}."
            found.append(whole[:1].upper() + whole[1:])
    return "\n".join(found)


def _where(group: Group, peers: Sequence[int]) -> str:
    """The rate that these variants share: asked for, or gone through within a run."""
    rate = group.variants[peers[0]].rate
    if "rate" in group.records and group.records["rate"].nunique() > 1:
        within = pd.to_numeric(group.records["rate"], errors="coerce").dropna()
        return f"on average over rates {within.max():g} to {within.min():g} "
    return "" if rate is None else f"at rate {rate:g} "


def _sentence(group: Group, strata: Sequence[Scores], peers: Sequence[int]) -> str:
    lower = group.meta.lower_is_better
    means = common_means(strata, peers)
    if np.isnan(means).any():  # no example that all of them scored: each by its own
        means = np.mean([np.nanmean(one.values[:, peers], axis=0) for one in strata], axis=0)
    by = dict(zip(peers, map(float, means), strict=True))
    order = sorted(peers, key=lambda i: by[i] if lower else -by[i])
    stand = standing(strata, peers, lower=lower)
    leaders = [i for i in order if i in stand.best | stand.tied or len(peers) == 1]
    others = [i for i in order if i not in leaders]
    names = {i: _name(group.variants[i]) for i in peers}
    label = group.baseline[group.variants[peers[0]].label]
    if label is None or group.meta.score_unit != "fraction":
        parts = _by_themselves(group, names, by, leaders, others)
    else:
        base = [variant.label for variant in group.variants].index(label)
        parts = _against(label.split(",")[0], names, _losses(strata, peers, base), leaders, others)
    if len(leaders) > 1:
        others_named = _listed([names[i] for i in leaders[1:]])
        parts.append(f"nothing separates {names[leaders[0]]} from {others_named}")
    return "; ".join(parts)


def _name(variant: Variant) -> str:
    """The method, in brackets what else than the rate sets it apart."""
    options = variant.options_without_rate
    return f"{variant.method} ({', '.join(options)})" if options else variant.method


def _losses(
    strata: Sequence[Scores], peers: Sequence[int], base: int
) -> dict[int, tuple[float, bool]]:
    """What each of `peers` loses to the baseline (a gain is negative), and whether that is shown."""
    parts = [one.stratum(one.values[:, [base]] - one.values[:, peers]) for one in strata]
    means = np.mean([ratio(part.sums.sum(0), part.counts.sum(0)) for part in parts], axis=0)
    adjusted = adjusted_p_values(parts, p_values(parts))
    return {i: (float(mean), p < ALPHA) for i, mean, p in zip(peers, means, adjusted, strict=True)}


def _against(
    base: str,
    names: Mapping[int, str],
    losses: Mapping[int, tuple[float, bool]],
    leaders: Sequence[int],
    others: Sequence[int],
) -> list[str]:
    """The leaders beside the exact cache, then everybody else."""
    same = [i for i in leaders if not losses[i][1]]
    less = [i for i in leaders if losses[i][1] and losses[i][0] > 0]
    more = [i for i in leaders if losses[i][1] and losses[i][0] <= 0]
    parts = []
    if same:
        is_are = "is" if len(same) == 1 else "are"
        parts.append(f"{_named(names, same)} {is_are} not shown to differ from {base}")
    for members, verb, preposition in (more, "gain", "over"), (less, "lose", "to"):
        if members:
            points = _span([abs(losses[i][0]) for i in members])
            verb += "s" if len(members) == 1 else ""
            parts.append(f"{_named(names, members)} {verb} {points} {preposition} {base}")
    shown = [i for i in others if losses[i][1] and losses[i][0] > 0]
    if shown:
        to = "" if less else f" to {base}"
        fewest = _span([losses[i][0] for i in shown])
        if len(shown) > _NAMED - 1 and len(shown) == len(others):
            who = "every other method" if leaders else "every method"
            least = value_text(min(losses[i][0] for i in shown), "fraction")
            parts.append(f"{who} loses {least} points or more{to}")
        else:
            verb = "loses" if len(shown) == 1 else "lose"
            parts.append(f"{_named(names, shown)} {verb} {fewest}{to}")
    rest = [i for i in others if i not in shown]
    if rest and leaders:
        is_are = "is" if len(rest) == 1 else "are"
        parts.append(f"{_named(names, rest)} {is_are} shown worse than {names[leaders[0]]}")
    elif rest:
        parts.append(f"{_named(names, rest)}: no difference to {base} is shown")
    return parts


def _by_themselves(
    group: Group,
    names: Mapping[int, str],
    by: Mapping[int, float],
    leaders: Sequence[int],
    others: Sequence[int],
) -> list[str]:
    """Who is best, and from where on the others are."""
    unit, lower = group.meta.score_unit, group.meta.lower_is_better
    what = "score" if unit == "fraction" else unit.replace("_", " ")
    percent = " %" if unit == "fraction" else ""
    if not leaders:
        return [f"no {what} tells the methods apart"] if len(others) > 1 else []
    best = "lowest" if lower else "highest"
    first = value_text(by[leaders[0]], unit)
    parts = [f"{names[leaders[0]]} has the {best} {what} ({first}{percent})"]
    if others:
        nearest = value_text(by[others[0]], unit)
        bound = "or more" if lower else "or less"
        who = "the others" if len(leaders) == 1 else _named(names, others)
        parts.append(
            f"{who} are shown worse ({nearest}{percent} {bound})"
            if len(others) > 1
            else f"{names[others[0]]} is shown worse ({nearest}{percent})"
        )
    return parts


def _span(losses: Sequence[float]) -> str:
    low, high = (value_text(end(losses), "fraction") for end in (min, max))
    return f"{low} points" if low == high else f"{low} to {high} points"


def _named(names: Mapping[int, str], members: Sequence[int]) -> str:
    return _listed([names[i] for i in members])


def _listed(texts: Sequence[str]) -> str:
    """``a, b and c``; of many the first and how many more."""
    if len(texts) > _NAMED:
        return f"{texts[0]} and {len(texts) - 1} others"
    return " and ".join(part for part in (", ".join(texts[:-1]), texts[-1]) if part)
