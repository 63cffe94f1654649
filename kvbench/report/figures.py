"""Which figures a report has of one model and task, and what each shows.

In: a group. Out: `Drawn`, a figure with its caption. A new figure is a function here and its line in
`figures_of`; how numbers are drawn is in `kvbench.report.drawing`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from kvbench.errors import printable
from kvbench.records.figures import Bars, Heatmap
from kvbench.report.drawing import (
    SMALL,
    Drawn,
    grids,
    interval_bar,
    lines,
    panels_of,
    ring,
    rows,
    shown_name,
    styled,
)
from kvbench.report.frame import tidy, totals_at_rates
from kvbench.report.ratios import (
    at_rate,
    label_with_ratio,
    largest_first,
    mean_over_rates,
    measures_several_rates,
    rate_texts,
    ratios_of,
)
from kvbench.report.runs import BASELINE, Group, Variant, as_text, listed, natural_order, words
from kvbench.report.style import INK, OF_THE_PAPERS, style_of
from kvbench.report.table import in_percent

MOST_LINES, MOST_PANELS = 8, 12
"""Methods of a figure that have a colour, beside the exact cache; panels of one."""
MOST_LEFT_OUT = 12
"""Methods that a caption names as left out."""
RULE_OF_COLOURS = (
    f"In colour: {MOST_LINES} methods, BalanceKV, SubGen and H2O before others, then those of the best"
    " mean over all points of the figure. The others are grey."
)
RATIO_AXIS = "bytes held / bytes of the exact cache (below: the rate)"
ABOUT_ONE_RATIO = 1.5
"""Where the largest ratio is at most this many times the smallest, methods hold about as much."""
PARETO = "no other has both fewer bytes and a better mean"
BAR = "95 % interval"
AXIS_LABELS = {
    "length": "context length (tokens)",
    "depth": "depth (%)",
    "num_lines": "number of lines",
    "prompt_tokens": "prompt length (tokens)",
    "rate": "rate (share of the middle that is kept); below it the measured ratio",
}
"""Labels of axes that show a record field, where its name does not say enough."""


def figures_of(group: Group) -> list[Drawn]:
    """Every figure that the group's task asks for, and those that its records allow; the score against
    memory first. None where nothing was scored, and of a throughput probe, whose table has it all."""
    if group.good["score"].notna().sum() == 0 or group.meta.kind == "throughput":
        return []
    frame = tidy(group)
    drawn = [memory([group])]
    if heatmap := group.meta.figure(Heatmap):
        drawn.append(heatmaps(group, heatmap))
    if bar := group.meta.figure(Bars):
        drawn.append(bars(group, bar))
    for _, part in frame[~frame["by"].isin(["", "dataset"])].groupby("by", sort=False):
        if part["value"].nunique() > 1:
            drawn.append(breakdown(group, part))
    drawn.append(kept_tokens(group))
    return [figure for figure in drawn if figure is not None]


def memory(groups: Sequence[Group]) -> Drawn | None:
    """Scores (or errors) against the measured ratio of bytes: of one model and task, or of several with
    one unit of scores, a panel for each. None where no method saves memory."""
    unit = groups[0].meta.score_unit
    some = [group for group in groups if group.meta.score_unit == unit]
    panels = {}
    for group in some[:MOST_PANELS]:
        panel = in_percent(totals_at_rates(group).rename(columns={"ratio": "x"}))
        panel = panel.dropna(subset=["mean", "x"])
        if set(panel["variant"]) & group.compressed:
            one_model = len({group.model for group in some}) == 1
            one_task = len({group.task for group in some}) == 1
            names = [group.task] * (not one_task) + [group.model] * (not one_model)
            panels["\n".join(names)] = panel
    if not panels:
        return None
    first = some[0]
    draw, text = against_bytes(panels, score_axis(first), lower=first.meta.lower_is_better)
    if len(some) == 1:
        title = f"{first.title}: score against memory"
        return Drawn(f"{stem(first)}-ratio", title, text, draw, in_wandb=True)
    title = f"Score against memory: {len(panels)} tasks or models"
    return Drawn("overview-ratio", title, text, draw, in_wandb=True)


def against_bytes(
    panels: Mapping[str, pd.DataFrame], axis: str, *, lower: bool = False
) -> tuple[Callable[[], Figure], str]:
    """Scores against the measured ratio, a line for each method, the exact cache as a line across, the
    Pareto set ringed. Where each method has one point at about the same ratio, a row for each instead.

    Args:
        panels: by title, rows with ``label``, ``method``, ``x`` (the ratio), ``at`` (the rate, such as
            "rate 0.25"), ``mean``, ``low`` and ``high``.
        axis: what is measured.

    Returns:
        What draws it, and its caption.
    """
    every = pd.concat(panels.values())
    others = every[every["label"] != BASELINE]
    ringed = {}
    for title, frame in panels.items():
        points = frame[frame["label"] != BASELINE]
        ratios = points["x"].round(2)  # as they are written: a thousandth is no saving
        best = pareto(list(zip(ratios, points["mean"], strict=True)), lower=lower)
        ringed[title] = frame.assign(ringed=frame.index.isin(points.index[best]))
    explained: dict[str, Any] = {PARETO: ring()}
    text = (
        "Mean scores with 95 % intervals, at the measured ratio of bytes. Ringed: the Pareto set."
    )
    one_point_each = not any(frame["label"].duplicated().any() for frame in panels.values())
    if one_point_each and others["x"].max() <= ABOUT_ONE_RATIO * others["x"].min():
        means = every.groupby("label")["mean"].mean()
        for title, frame in ringed.items():
            frame = frame.assign(order=frame["label"].map(means))
            frame = frame.sort_values("order", ascending=lower, kind="stable")
            if len(panels) == 1:
                frame["label"] += frame["x"].map(lambda x: f"  ({x:.2f})")
            ringed[title] = frame
        beside = "; beside the name the ratio" if len(panels) == 1 else ""
        explained[BAR] = interval_bar("_")
        return partial(rows, ringed, f"{axis}{beside}", explained=explained), text
    grey = rest_of(others, lower=lower)
    text += " Points of about the same ratio are drawn side by side."
    text += f" {RULE_OF_COLOURS}" if grey else ""
    draw = partial(
        lines,
        ringed,
        RATIO_AXIS,
        axis,
        ticks=ratio_ticks,
        log="xy" if lower and (every["mean"] > 0).all() else "x",
        baseline=BASELINE,
        grey=grey,
        explained=explained | {BAR: interval_bar("|")},
    )
    return draw, text


def ratio_ticks(frame: pd.DataFrame) -> dict[float, str]:
    """The ratios at which an axis has ticks: of each rate the median of its methods', named by both, and
    the smallest and largest of all where they are not near to one of these."""
    points = frame[frame["label"] != BASELINE]
    of_rates = points[points["at"].ne("")].groupby("at")["x"].median()
    places = {float(x): f"{x:.2g}\n{str(at).rpartition(' ')[2]}" for at, x in of_rates.items()}
    low, high = float(points["x"].min()), float(points["x"].max())
    near = 0.14 * math.log(high / low) if high > low else 0.0
    for x in (low, high):
        if all(abs(math.log(x / other)) > near for other in places):
            places[x] = f"{x:.2g}"
    return dict(sorted(places.items()))


def pareto(points: Sequence[tuple[float, float]], *, lower: bool) -> list[bool]:
    """For each point (bytes, score) whether no other point is at least as good in both and better in
    one."""
    costs = [(cost, score if lower else -score) for cost, score in points]
    return [
        not any(a <= cost and b <= loss and (a, b) != (cost, loss) for a, b in costs)
        for cost, loss in costs
    ]


def rest_of(points: pd.DataFrame, *, lower: bool) -> list[str]:
    """The labels that a figure of at most `MOST_LINES` coloured lines draws in grey: `RULE_OF_COLOURS`.
    The rows, without the exact cache, have ``label``, ``method`` and ``mean``."""
    means = points.groupby("label", sort=False)["mean"].mean().dropna()
    ranked = means.sort_values(ascending=lower, kind="stable").index
    first = set(points["label"][points["method"].isin(OF_THE_PAPERS)])
    return sorted(ranked, key=lambda label: label not in first)[MOST_LINES:]


def breakdown(group: Group, part: pd.DataFrame) -> Drawn:
    """Scores against a record field at the lowest rate, a line for each method; where the field's values
    are no numbers, points."""
    lowest = part["rate"].min()
    several = part["rate"].nunique() > 1
    part = part[part["measure"].eq("score") & (part["rate"].eq(lowest) | part["rate"].isna())]
    by, values = str(part["by"].iloc[0]), list(part["value"].unique())
    points = in_percent(part)
    points = points.assign(
        x=part["value"].map(values.index), label=part["variant"].map(group.names)
    )
    grey = rest_of(points[points["label"] != BASELINE], lower=group.meta.lower_is_better)
    text = "Mean and 95 % interval over examples. Values are evenly spaced."
    if measures_several_rates(group) and by != "rate":
        text += f" Each is a {mean_over_rates(group)}."
    elif by != "rate" and not np.isnan(lowest):
        at = next(variant.at for variant in group.variants if variant.rate == lowest)
        text += f" At {rate_texts(group)[at]}" + (", the lowest." if several else ".")
    if grey:
        text += f" {RULE_OF_COLOURS}"
    names = _numbered(_rate_ticks(group, values) if by == "rate" else values)
    draw = partial(
        lines,
        {"": points},
        AXIS_LABELS.get(by, words(by)),
        score_axis(group),
        ticks=lambda _: names,
        joined=all(value[:1].isdigit() for value in values),
        grey=grey,
        explained={BAR: interval_bar("|")},
    )
    title = f"{group.title}: score by {words(by)}"
    return Drawn(f"{stem(group)}-by-{by}", title, text, draw)


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
    points = means.groupby(level=keys, sort=False).agg(["mean", "std"]).reset_index()
    points = points.sort_values(
        "variant", key=lambda variants: variants.map(group.labels.index), kind="stable"
    )
    ticks = sorted(points[spec.x].unique(), reverse=spec.x == "rate")
    points = points.assign(
        label=points["variant"],
        x=points[spec.x].map(ticks.index),
        low=points["mean"] - points["std"],
        high=points["mean"] + points["std"],
    )
    parts = sorted(points.groupby("panel"), key=lambda part: natural_order(part[0]))
    field = words(spec.facet or "")
    panels = {f"{field} {value!s}" if value else "": part for value, part in parts}
    xlabel, ylabel = AXIS_LABELS.get(spec.x, words(spec.x)), spec.ylabel or "score"
    texts = [as_text(tick) for tick in ticks]
    names = _numbered(_rate_ticks(group, texts) if spec.x == "rate" else texts)
    spread = f"one standard deviation over {repeat.nunique()} {words(spec.repeat)}s"
    look: dict[str, Any] = {"ticks": lambda _: names, "joined": False}
    look |= {"explained": {spread: interval_bar("|")}}
    draw = partial(lines, panels, xlabel, ylabel, **look)
    title = f"{group.title}: {ylabel} by {words(spec.x)}"
    return Drawn(f"{stem(group)}-bars", title, f"Means; error bars: {spread}.", draw)


def _numbered(names: Sequence[str]) -> dict[float, str]:
    """Ticks at 0, 1, ... with these names."""
    return {float(place): name for place, name in enumerate(names)}


def _rate_ticks(group: Group, rates: Sequence[str]) -> list[str]:
    """The names of ticks that are rates: the rate, and below it the median of the ratios at it."""
    ratios = ratios_of(group).groupby("at")["ratio"].median()
    ratios = ratios.reindex([at_rate(float(rate)) for rate in rates])
    return [
        rate if math.isnan(x) else f"{rate}\n{x:.2g}" for rate, x in zip(rates, ratios, strict=True)
    ]


def heatmaps(group: Group, spec: Heatmap) -> Drawn | None:
    """Mean scores by two record fields, a panel for each variant, on one colour scale that all share;
    None where the records lack one of the fields."""
    if not {spec.x, spec.y} <= set(group.records):
        return None
    of_variants = {label: grid_of(group, label, spec) for label in group.labels}
    of_variants = {k: grid for k, grid in of_variants.items() if grid.notna().any(axis=None)}
    shown, left_out = best_first(group, of_variants)
    panels = {
        title.replace(", ", "\n"): of_variants[variant.label].rename(index=as_text, columns=as_text)
        for title, variant in shown.items()
    }
    labels = AXIS_LABELS.get(spec.x, words(spec.x)), AXIS_LABELS.get(spec.y, words(spec.y))
    limits = scale_of(group, list(of_variants.values()))
    draw = partial(grids, panels, *labels, limits)
    title = f"{group.title}: score by {words(spec.x)} and {words(spec.y)}"
    text = f"Means, {score_axis(group)}, on one colour scale; grey cells have no scored example."
    text += left_out
    return Drawn(f"{stem(group)}-heatmap", title, text, draw, in_wandb=True)


def grid_of(group: Group, label: str, spec: Heatmap) -> pd.DataFrame:
    """Mean scores of one variant as figures show them, [values of y, values of x], over the cells that
    any variant has; NaN where nothing was scored."""
    records = group.records.dropna(subset=[spec.x, spec.y])
    mine = group.good[group.good["variant"] == label]
    grid = mine.pivot_table(index=spec.y, columns=spec.x, values="score", aggfunc="mean")
    grid = grid.reindex(
        index=sorted(records[spec.y].unique()), columns=sorted(records[spec.x].unique())
    )
    return grid * (100.0 if group.percent else 1.0)


def scale_of(group: Group, made: Sequence[pd.DataFrame]) -> tuple[float, float]:
    """The ends of the colour scale that all grids of a group share."""
    if group.percent:
        return 0.0, 100.0
    values = np.concatenate([grid.to_numpy(float).ravel() for grid in made])
    return float(np.nanmin(values)), float(np.nanmax(values))


def best_first(group: Group, labels: Collection[str]) -> tuple[dict[str, Variant], str]:
    """By title the variants with these labels that have a panel: the exact cache, then the compressed
    ones, lower rates before higher ones and better mean scores before worse ones; and a sentence on
    those that have none, empty where all have one."""
    means = group.good.groupby("variant")["score"].mean()
    sign = 1.0 if group.meta.lower_is_better else -1.0

    def place(variant: Variant) -> tuple[bool, float, float]:
        mean = sign * float(means.get(variant.label, math.nan))
        rate = math.inf if variant.rate is None else variant.rate
        return variant.method != BASELINE, rate, math.inf if math.isnan(mean) else mean

    ordered = sorted((v for v in group.variants if v.label in labels), key=place)
    titled = {label_with_ratio(group, variant): variant for variant in ordered}
    shown, rest = list(titled)[:MOST_PANELS], list(titled)[MOST_PANELS:]
    text = ""
    if rest:
        rates = [variant.at for variant in ordered if variant.at]
        lowest = max(rates, key=largest_first, default="")
        at_lowest = f" at the lowest rate ({rate_texts(group)[lowest]})" if rates else ""
        named = listed(rest, MOST_LEFT_OUT, "; ")
        text = f" The best{at_lowest} first. Left out: {named}."
    return {title: titled[title] for title in shown}, text


@dataclass(frozen=True)
class Kept:
    """The tokens that variants kept of one example's prompt, which is the last of those that most
    variants have such a record of.

    Attributes:
        by_title: the variant of each panel, and the field ``kept`` of its record
            (`kvbench.engine.kept.strips_of`).
        left_out: a sentence on the variants without a panel (`best_first`).
    """

    example_id: str
    by_title: Mapping[str, tuple[Variant, Mapping[str, Any]]]
    left_out: str


def kept_of(group: Group) -> Kept | None:
    if "kept" not in group.records:
        return None
    # A number in 0.2.0's records of error_scaling.
    known = group.records[[isinstance(kept, Mapping) for kept in group.records["kept"]]]
    known = known[known["method"].ne(BASELINE)]
    known = known.drop_duplicates(["seed", "example_id", "variant"])
    if known.empty:
        return None
    counts = known.groupby(["seed", "example_id"], sort=False)["variant"].transform("size")
    example = known[counts == counts.max()].iloc[-1]
    same = known["seed"].eq(example["seed"]) & known["example_id"].eq(example["example_id"])
    by_label = {str(row["variant"]): row["kept"] for row in known[same].to_dict("records")}
    shown, left_out = best_first(group, by_label)
    by_title = {title: (variant, by_label[variant.label]) for title, variant in shown.items()}
    return Kept(printable(str(example["example_id"])), by_title, left_out)


def kept_tokens(group: Group) -> Drawn | None:
    """Which tokens of one prompt each method kept, a panel of strips for each variant, some layers from
    top to bottom; None where no record says it."""
    kept = kept_of(group)
    if kept is None:
        return None
    text = (
        f"Example {kept.example_id}. The x axis is the prompt, from its first token to its last. The"
        " fuller the colour, the more of a piece of the prompt a layer keeps, averaged over KV heads;"
        " fullest: as much weight as the exact cache gives it, or more. Entries that stand for no single"
        f" token are not shown.{kept.left_out}"
    )
    title = f"What each method kept: {group.title}"
    draw = partial(strips, kept.by_title)
    return Drawn(f"kept-{stem(group)}", title, text, draw)


@styled
def strips(panels: Mapping[str, tuple[Variant, Mapping[str, Any]]], *, above: str = "") -> Figure:
    """A panel for each variant, a strip for each layer: how much it holds of each piece of a prompt."""
    xlabel = "token of the prompt; between the lines stands the answer"
    around: dict[str, Any] = {"xlabel": xlabel, "names": ["layer 10"], "above": above}
    figure, axes = panels_of(list(panels), (5.2, 0.45), sharex=True, ticks=["1000"], **around)
    for ax, (title, (variant, kept)) in zip(axes, panels.items(), strict=True):
        layers = sorted((int(name), weights) for name, weights in kept["layers"].items())
        shades = np.nan_to_num(np.array([w for _, w in layers], float) / 100).clip(0, 1)
        color = np.array(to_rgb(style_of(variant.method).color))
        image = np.concatenate([np.broadcast_to(color, (*shades.shape, 3)), shades[..., None]], 2)
        end = shades.shape[1] * kept["width"]
        look: dict[str, Any] = {"aspect": "auto", "interpolation": "none"}
        ax.imshow(image, extent=(0, end, len(layers), 0), **look)
        for token in kept.get("answer") or ():
            ax.axvline(token, color=INK, linewidth=0.8)
        ax.set_xlim(0, kept["tokens"])
        ends = {0: layers[0][0], len(layers) - 1: layers[-1][0]}
        ax.set_yticks([row + 0.5 for row in ends], [f"layer {layer}" for layer in ends.values()])
        ax.tick_params(axis="y", length=0, labelsize=SMALL - 1.5)
        ax.spines[["top", "right"]].set_visible(True)
        ax.set_title("")
        ax.set_title(shown_name(title), loc="left", pad=3)
    return figure


def stem(group: Group) -> str:
    """The beginning of the file names of a group's figures."""
    names = (re.sub(r"[^\w.]+", "-", name).strip("-")[:80] for name in (group.task, group.model))
    return "-".join(names)


def score_axis(group: Group) -> str:
    return "score (%)" if group.percent else words(group.meta.score_unit)
