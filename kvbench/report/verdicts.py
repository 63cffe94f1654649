"""Sentences that sum up a table: which methods are best at each rate, all of them where several are,
which differ significantly from them, and which ratios are enough."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from kvbench.report.experiment import BASELINE, Group
from kvbench.report.frame import tidy, totals
from kvbench.report.labels import words
from kvbench.report.ratios import (
    RATIO_AT_95,
    largest_first,
    mean_over_rates,
    measures_several_rates,
    rate_text,
    ratios_of,
)
from kvbench.report.stats import FEWEST
from kvbench.report.table import LIMITS, MISSING, number, score_format

MOST_RATES = 3
"""Rates that a verdict speaks of: the lowest ones."""
MOST_NAMES = 4
"""Methods that a list of a verdict names; it counts the others."""


def verdict(group: Group) -> str:
    """A line for each of the lowest rates, made of the marks and intervals of the total scores, and one
    on the ratios that are enough; empty where methods are not compared by a score."""
    if group.meta.kind == "throughput":
        return ""
    return "\n".join([*_at_rates(group)[-MOST_RATES:], *_enough(group)])


def headlines(group: Group, name: str) -> list[str]:
    """What the top of a report says of one of several tasks or models, whose name a line begins with:
    the verdict at the middle rate, and on the ratios that are enough."""
    lines = _at_rates(group)
    chosen = [*lines[(len(lines) - 1) // 2 :][:1], *_enough(group)]
    return [f"{name}: {line[0].lower()}{line[1:]}" for line in chosen]


def _at_rates(group: Group) -> list[str]:
    """A line on the methods at each rate, the largest first."""
    by_rate = sorted(
        group.peers, key=lambda peers: largest_first(group.variants[peers[0]].at or "rate 0")
    )
    frame = tidy(group)
    total = totals(frame)
    change = pd.concat([totals(frame, measure) for measure in ("difference", "times")])
    lines = []
    for peers in by_rate:
        scored = total.reindex([group.labels[i] for i in peers]).dropna(subset=["mean"])
        if len(scored):
            scored = scored.sort_values("mean", ascending=group.meta.lower_is_better, kind="stable")
            at, where = group.variants[peers[0]].at, ""
            if at and measures_several_rates(group):
                where = f"{mean_over_rates(group).capitalize()}: "
            elif at:
                ratios = ratios_of(group, [group.labels[i] for i in peers])["ratio"]
                where = f"At {rate_text(at, ratios)}: "
            lines.append(where + _verdict_on(group, scored, change))
    return lines


def _enough(group: Group) -> list[str]:
    """The line on the ratios that are enough, where there are any."""
    found = totals(tidy(group), RATIO_AT_95)
    if not len(found):
        return []
    kept = found[found["mark"].ne("more_than")].sort_values("mean", kind="stable")
    missed = [name for name in found["variant"] if name not in kept.index]
    parts = []
    for row in kept.to_dict("records"):
        low, value, high = (number(row[key]) for key in ("low", "mean", "high"))
        interval = "" if low == MISSING else f" [{low}, {high}]"
        parts.append(
            f"from ratio {LIMITS.get(row['mark'], '')}{value}{interval} on by {row['variant']}"
        )
    line = f"95 % of the {group.baseline_name} cache's score is"
    if parts:
        line += f" kept {listed(parts)}"
    if missed:
        line += f"{'; it is' if parts else ''} not kept within these rates by {listed(missed)}"
    return [f"{line}."]


def _verdict_on(group: Group, scored: pd.DataFrame, change: pd.DataFrame) -> str:
    """The line on the methods of one rate, without the rate: `scored` are their totals, best first."""
    marked: dict[str, list[str]] = {"best": [], "tied": [], "better": [], "worse": []}
    for label, marks in scored["mark"].items():
        for word in set(marks.split()) & set(marked):
            marked[word].append(str(label))
    first = marked["best"][0] if marked["best"] else str(scored.index[0])
    text = score_format(group.meta.score_unit)
    signed = score_format(group.meta.score_unit, signed=True)
    score, units = text(scored["mean"][first]), int(scored["units"].max())
    apart = marked["better"] + marked["worse"]
    same = [str(label) for label, mean in scored["mean"].items() if text(mean) == score]
    equal = [first, *(label for label in same if label not in (first, *apart))]
    unit = "%" if group.percent else words(group.meta.score_unit)
    line = f"{_named(group, equal)} {'has' if len(equal) == 1 else 'have'} {score} {unit}"
    line += f" ({units} prompts)"
    if units < FEWEST:
        return f"{line}: too few prompts to say more."
    if first in change.index and not math.isnan(change["low"][first]):
        is_ratio = change["measure"][first] == "times"
        written = number if is_ratio else signed
        low, value, high = (written(change[key][first]) for key in ("low", "mean", "high"))
        interval = f" [{low}, {high}]" if len(equal) == 1 else ""
        against = "times that of" if is_ratio else "against"
        line += f", {value}{interval} {against} {group.baseline_name or BASELINE}"
    alike = [label for label in marked["best"] + marked["tied"] if label not in equal]
    for heading, labels in (
        ("significantly better", marked["better"]),
        ("not significantly different", alike),
        ("significantly worse", marked["worse"]),
    ):
        line += f"; {heading}: {_named(group, labels)}" if labels else ""
    return f"{line}."


def _named(group: Group, labels: Sequence[str]) -> str:
    return listed([group.names[label] for label in labels])


def listed(names: Sequence[str]) -> str:
    """At most `MOST_NAMES` names in a sentence, and how many others there are."""
    *some, last = names
    if len(names) > MOST_NAMES:
        some, last = list(names[:MOST_NAMES]), f"{len(names) - MOST_NAMES} more"
    return f"{', '.join(some)} and {last}" if some else last
