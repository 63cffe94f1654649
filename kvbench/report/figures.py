"""Which figures a report has of one model and task, and what each shows.

In: a group. Out: `Drawn`, a figure with its caption and what a page shows of it. The drawing itself is
in `kvbench.report.drawing` and `kvbench.report.panels`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvbench.records.figures import Bars, Heatmap
from kvbench.report.charts import looks_of, number_of
from kvbench.report.drawing import (
    AXIS_LABELS,
    Drawn,
    forest,
    lines,
    score_axis,
    shown_name,
    stem,
)
from kvbench.report.frame import tidy, totals
from kvbench.report.panels import heatmaps, kept_figure
from kvbench.report.ratios import (
    at_rate,
    headings,
    held_by,
    mean_over_rates,
    measures_several_rates,
    rate_texts,
)
from kvbench.report.runs import BASELINE, Group, as_text, natural_order, words
from kvbench.report.style import OF_THE_PAPERS
from kvbench.report.table import in_percent

MOST_LINES = 8
"""Methods of a figure that have a colour, beside the exact cache; the others are grey."""
RULE_OF_COLOURS = (
    f"In colour: {MOST_LINES} methods, BalanceKV, SubGen and H2O before others, then those of the best"
    " mean over all points of the figure. The others are grey."
)
RATIO_AXIS = "measured ratio (bytes held / bytes of the exact cache)"
PANEL_FIELDS = ("panel", "name", "line", "x", "mean", "low", "high")
"""Of the rows of a chart of panels: the panel's title, the method without its rate (null for what is no
method), the line that joins the points, then the point."""
GREY = "#666666"
ABOUT_ONE_RATIO = 1.5
"""Where the largest ratio is at most this many times the smallest, methods hold about as much."""


def figures_of(group: Group) -> list[Drawn]:
    """Every figure that the group's task asks for, and those that its records allow; the score against
    memory first. None where nothing was scored, and of a throughput probe, whose table has it all."""
    if group.good["score"].notna().sum() == 0 or group.meta.kind == "throughput":
        return []
    frame = tidy(group)
    drawn = [memory(group)]
    if heatmap := group.meta.figure(Heatmap):
        drawn.append(heatmaps(group, heatmap))
    if bar := group.meta.figure(Bars):
        drawn.append(bars(group, bar))
    for _, part in frame[~frame["by"].isin(["", "dataset"])].groupby("by", sort=False):
        if part["value"].nunique() > 1:
            drawn.append(breakdown(group, part))
    drawn.append(kept_figure(group))
    return [figure for figure in drawn if figure is not None]


def memory(group: Group) -> Drawn | None:
    """Score (or error) against the measured ratio of bytes, a line for each method, the exact cache as a
    line across, the Pareto set ringed and joined. Where all methods hold about as much, a row for each
    instead. None where no method saves memory."""
    rows, lower = memory_rows(group), group.meta.lower_is_better
    others = rows[rows["label"] != BASELINE]
    if not set(rows["variant"]) & group.compressed:
        return None
    points = list(zip(others["x"], others["mean"], strict=True))
    rows["ringed"] = False
    rows.loc[others.index, "ringed"] = pareto(points, lower=lower)
    text = "Mean scores with 95 % intervals, at the measured ratio."
    one_point_each = not rows["label"].duplicated().any()
    if one_point_each and others["x"].max() <= ABOUT_ONE_RATIO * others["x"].min():
        rows = rows.sort_values("mean", ascending=lower, kind="stable")
        named = rows.assign(row=rows["label"] + rows["x"].map(lambda x: f"  ({x:.2f})"))
        draw = partial(forest, named, f"{score_axis(group)}; beside the name the ratio")
    else:
        text += (
            " The dashed line with its band is the exact cache. Ringed and joined points are the Pareto"
            " set: no other point has both fewer bytes and a better mean. Points of about the same ratio"
            " are drawn side by side."
        )
        grey = rest_of(rows[rows["label"] != BASELINE], lower=lower)
        if grey:
            text += f" {RULE_OF_COLOURS}"
        draw = partial(
            lines,
            {"": rows},
            RATIO_AXIS,
            score_axis(group),
            log="xy" if lower and (rows["mean"] > 0).all() else "x",
            baseline=BASELINE,
            grey=grey,
            also=partial(frontier, grey=grey),
        )
    title = f"{group.task}{group.protocol_in_title}: score against memory"
    return Drawn(f"{stem(group)}-ratio", title, text, draw, kind="memory")


def frontier(ax: Axes, rows: pd.DataFrame, grey: Collection[str] = ()) -> None:
    """Join the ringed points by steps: the best mean that so many bytes buy. The legend does not name
    grey methods: their ringed points have their name beside them."""
    best = rows[rows["ringed"]].sort_values("x")
    look: dict[str, Any] = {"color": GREY, "linestyle": ":", "linewidth": 1.1, "zorder": 1.5}
    ax.step(best["x"], best["mean"], where="post", **look)
    beside: dict[str, Any] = {"xytext": (6, 4), "textcoords": "offset points", "fontsize": 7}
    for row in best[best["label"].isin(grey)].to_dict("records"):
        ax.annotate(shown_name(row["label"]), (row["x"], row["mean"]), color=GREY, **beside)


def memory_rows(group: Group) -> pd.DataFrame:
    """Scores with ``x``, the measured ratio, and ``label``: a row for each variant, or for each variant
    and rate where one run measures several rates."""
    frame = tidy(group)
    by_rate = frame[(frame["by"] == "rate") & (frame["measure"] == "score")]
    if by_rate["value"].nunique() > 1:
        points = zip(by_rate["variant"], by_rate["value"], strict=True)
        x = [held_by(group, "rate").get(point, {}).get("ratio", math.nan) for point in points]
        rows = in_percent(by_rate).assign(x=x, label=by_rate["variant"])
    else:
        total, ratios = totals(frame), totals(frame, "ratio")["mean"]
        label = total["variant"].map(group.names)
        rows = in_percent(total).assign(x=ratios, label=label)
    return rows.dropna(subset=["mean", "x"])


def pareto(points: Sequence[tuple[float, float]], *, lower: bool) -> list[bool]:
    """For each point (bytes, score) whether no other point is at least as good in both and better in
    one."""
    costs = [(cost, score if lower else -score) for cost, score in points]
    return [
        not any(a <= cost and b <= loss and (a, b) != (cost, loss) for a, b in costs)
        for cost, loss in costs
    ]


def rest_of(rows: pd.DataFrame, *, lower: bool) -> list[str]:
    """The labels that a figure of at most `MOST_LINES` coloured lines draws in grey: `RULE_OF_COLOURS`.
    The rows, without the exact cache, have ``label``, ``method`` and ``mean``."""
    means = rows.groupby("label", sort=False)["mean"].mean().dropna()
    ranked = means.sort_values(ascending=lower, kind="stable").index
    first = set(rows["label"][rows["method"].isin(OF_THE_PAPERS)])
    return sorted(ranked, key=lambda label: label not in first)[MOST_LINES:]


def breakdown(group: Group, part: pd.DataFrame) -> Drawn:
    """Scores against a record field at the lowest rate, a line for each method; where the field's values
    are no numbers, points."""
    lowest = part["rate"].min()
    several = part["rate"].nunique() > 1
    part = part[part["measure"].eq("score") & (part["rate"].eq(lowest) | part["rate"].isna())]
    by, ticks = str(part["by"].iloc[0]), list(part["value"].unique())
    rows = in_percent(part)
    rows = rows.assign(x=part["value"].map(ticks.index), label=part["variant"].map(group.names))
    grey = rest_of(rows[rows["label"] != BASELINE], lower=group.meta.lower_is_better)
    text = "Mean and 95 % interval over examples. Values are evenly spaced."
    if measures_several_rates(group) and by != "rate":
        text += f" Each is a {mean_over_rates(group)}."
    elif by != "rate" and not np.isnan(lowest):
        at = next(variant.at for variant in group.variants if variant.rate == lowest)
        text += f" At {rate_texts(group)[at]}" + (", the lowest." if several else ".")
    if grey:
        text += f" {RULE_OF_COLOURS}"
    draw = partial(
        lines,
        {"": rows},
        AXIS_LABELS.get(by, words(by)),
        score_axis(group),
        ticks=_rate_ticks(group, ticks) if by == "rate" else ticks,
        joined=all(tick[:1].isdigit() for tick in ticks),
        grey=grey,
    )
    title = f"{group.task}{group.protocol_in_title}: score by {words(by)}"
    return Drawn(f"{stem(group)}-by-{by}", title, text, draw, kind="breakdown")


def bars(group: Group, spec: Bars) -> Drawn | None:
    """Mean and standard deviation of scores over repetitions, by the record field `spec.x`.

    A repetition is one value of `spec.repeat`, within which scores are averaged; the draws that a method
    makes in one run (record field ``draw``) are repetitions like those of seeds. Methods that keep the
    whole cache are left out, as their error is rounding.
    """
    good = group.good[group.good["saves_memory"].ne(False)]
    if good.empty or spec.x not in good:
        return None
    repeat = good[spec.repeat if spec.repeat in good else "seed"].astype(str)
    if spec.repeat == "seed" and "draw" in good:
        repeat = repeat + "/" + good["draw"].astype(str)
    good = good.assign(repeat=repeat)
    good["panel"] = good[spec.facet].map(as_text) if spec.facet in good else ""
    keys = ["panel", "method", "variant", spec.x]
    means = good.groupby([*keys, "repeat"], sort=False)["score"].mean()
    rows = means.groupby(level=keys, sort=False).agg(["mean", "std"]).reset_index()
    rows = rows.sort_values(
        "variant", key=lambda variants: variants.map(group.labels.index), kind="stable"
    )
    ticks = sorted(rows[spec.x].unique(), reverse=spec.x == "rate")
    rows = rows.assign(
        label=rows["variant"],
        x=rows[spec.x].map(ticks.index),
        low=rows["mean"] - rows["std"],
        high=rows["mean"] + rows["std"],
    )
    parts = sorted(rows.groupby("panel"), key=lambda part: natural_order(part[0]))
    field = words(spec.facet or "")
    panels = {f"{field} {value!s}" if value else "": part for value, part in parts}
    xlabel, ylabel = AXIS_LABELS.get(spec.x, words(spec.x)), spec.ylabel or "score"
    names = [as_text(tick) for tick in ticks]
    if spec.x == "rate":
        names = _rate_ticks(group, names)
    draw = partial(lines, panels, xlabel, ylabel, ticks=names, joined=False)
    text = (
        f"Means; error bars: one standard deviation over {repeat.nunique()} {words(spec.repeat)}s."
    )
    title = f"{group.task}{group.protocol_in_title}: {ylabel} by {words(spec.x)}"
    chart = _panels_chart(group, panels, xlabel, ylabel, ticks=names)
    return Drawn(f"{stem(group)}-bars", title, text, draw, "bars", chart)


def _rate_ticks(group: Group, rates: Sequence[str]) -> list[str]:
    """The names of ticks that are rates: the rate, and below it the ratios that were measured at it."""
    texts = rate_texts(group)
    named = headings([at_rate(float(rate)) for rate in rates], texts)
    return [name.removeprefix("rate ").replace(", ", "\n") for name in named]


def _panels_chart(
    group: Group,
    panels: Mapping[str, pd.DataFrame],
    xlabel: str,
    ylabel: str,
    *,
    ticks: Sequence[str],
) -> dict[str, Any]:
    """What a page shows of panels that `lines` draws; `ticks` are the names of x = 0, 1, ..."""
    rows = []
    for title, frame in panels.items():
        for row in frame.dropna(subset=["mean"]).to_dict("records"):
            numbers = [number_of(row[key]) for key in ("mean", "low", "high")]
            rows.append(
                [title, group.names[row["label"]], row["label"], ticks[int(row["x"])], *numbers]
            )
    return {
        "kind": "panels",
        "methods": looks_of(group),
        "rows": rows,
        "fields": PANEL_FIELDS,
        "xlabel": xlabel,
        "ylabel": ylabel,
        "log": False,
        "ticks": list(ticks),
        "lower": group.meta.lower_is_better,
    }
