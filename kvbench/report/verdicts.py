"""Sentences that sum up a table: which method is best at each rate, and which are shown to differ from
it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from kvbench.records.figures import Curve
from kvbench.report.experiment import BASELINE, Group
from kvbench.report.frame import totals
from kvbench.report.labels import words
from kvbench.report.ratios import (
    mean_over_rates,
    measures_several_rates,
    rate_text,
    ratios_of,
)
from kvbench.report.scaling import slopes
from kvbench.report.stats import FEWEST
from kvbench.report.table import score_format, value_text

MOST_RATES = 3
"""Rates that a verdict speaks of: the lowest ones."""
MOST_NAMES = 4
"""Methods that a list of a verdict names; it counts the others."""


def verdict(group: Group, frame: pd.DataFrame) -> str:
    """A line for each of the lowest rates, made of the marks and intervals of the total scores; empty
    where methods are not compared by a score."""
    curve = group.meta.figure(Curve)
    if group.meta.kind == "throughput":
        return ""
    if curve is not None and curve.y in group.records:
        return slope_verdict(slopes(group, curve))
    by_rate = sorted(group.peers, key=lambda peers: -(group.variants[peers[0]].rate or 0))
    total, change = totals(frame), totals(frame, "difference")
    lines = []
    for peers in by_rate[-MOST_RATES:]:
        scored = total.reindex([group.labels[i] for i in peers]).dropna(subset=["mean"])
        if len(scored):
            scored = scored.sort_values("mean", ascending=group.meta.lower_is_better, kind="stable")
            lines.append(_where(group, peers) + _verdict_on(group, scored, change))
    return "\n".join(lines)


def _where(group: Group, peers: Sequence[int]) -> str:
    """What a line begins with: the rate of these methods with their measured ratios, or the rates that
    their scores are means over; empty where they have none."""
    rate = group.variants[peers[0]].rate
    if rate is None:
        return ""
    if measures_several_rates(group):
        return f"{mean_over_rates(group).capitalize()}: "
    ratios = ratios_of(group, [group.labels[i] for i in peers])["ratio"]
    return f"At {rate_text(rate, ratios)}: "


def _verdict_on(group: Group, scored: pd.DataFrame, change: pd.DataFrame) -> str:
    """The line on the methods of one rate, without the rate.

    Args:
        scored: the totals of the methods that compete at it, best first.
        change: the total differences to the exact cache, by label.
    """
    marked: dict[str, list[str]] = {"best": [], "tied": [], "better": [], "worse": []}
    for label, marks in scored["mark"].items():
        for word in set(marks.split()) & set(marked):
            marked[word].append(str(label))
    first = marked["best"][0] if marked["best"] else str(scored.index[0])
    text = score_format(group.meta.score_unit)
    signed = score_format(group.meta.score_unit, signed=True)
    units = int(scored["units"].max())
    unit = "%" if group.percent else words(group.meta.score_unit)
    line = f"{group.names[first]} has {text(scored['mean'][first])} {unit} ({units} prompts)"
    if units < FEWEST:
        return f"{line}: too few prompts to say more."
    if first in change.index and not math.isnan(change["low"][first]):
        low, value, high = (signed(change[key][first]) for key in ("low", "mean", "high"))
        line += f", {value} [{low}, {high}] against {group.baseline_name or BASELINE}"
    alike = [label for label in marked["best"] if label != first] + marked["tied"]
    line += _listed(group, "shown better", marked["better"])
    line += _listed(group, "not shown to differ", alike)
    line += _listed(group, "shown worse", marked["worse"])
    return f"{line}."


def _listed(group: Group, heading: str, labels: Sequence[str]) -> str:
    """The part of a verdict that lists these methods; empty where there are none."""
    if not labels:
        return ""
    named = ", ".join(group.names[label] for label in labels[:MOST_NAMES])
    rest = len(labels) - MOST_NAMES
    return f"; {heading}: {named}" + (f" and {rest} more" if rest > 0 else "")


def slope_verdict(data: pd.DataFrame) -> str:
    """How many slopes of each method are as predicted, steeper or shallower; empty without a prediction.

    Args:
        data: what `kvbench.report.scaling.slopes` returned.
    """
    parts = []
    for label, rows in data.dropna(subset=["verdict"]).groupby("variant", sort=False):
        predicted = value_text(float(rows["expected"].iloc[0]), "")
        counts = rows["verdict"].value_counts().items()
        counted = ", ".join(f"{word} on {count} of {len(rows)}" for word, count in counts)
        parts.append(f"{label} (predicted {predicted}): {counted}")
    return f"Slopes: {'; '.join(parts)}." if parts else ""
