"""Two figures with a panel for each method: heatmaps of scores, and which tokens each cache kept; each
as a picture for files and as what a page shows.

Of more methods than there are panels, both show the best ones at the lowest rate, and say which are left
out (`best_first`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvbench.errors import printable
from kvbench.records.figures import Heatmap
from kvbench.report.charts import Chart, number_of
from kvbench.report.drawing import (
    AXIS_LABELS,
    SMALL,
    TEXT,
    Drawn,
    label_axes,
    new_panels,
    score_axis,
    shown_name,
    stem,
    styled,
)
from kvbench.report.ratios import label_with_ratio, largest_first, rate_texts
from kvbench.report.runs import BASELINE, Group, Variant, as_text, words
from kvbench.report.style import style_of

MOST_PANELS = 16
MOST_LAYERS = 4
"""Layers that the figure of kept tokens shows of each method."""
FULL_SHADE = 9
"""Steps in which a page shows how much of a piece of a prompt is kept."""
MOST_BESIDE = 150
"""Characters of a prompt that a page shows at both ends and on both sides of the answer."""
MOST_NAMES = 12
"""Methods that a caption names as left out."""
FEW_CELLS = 64
"""A heatmap of up to this many cells has their numbers in it."""


def best_first(group: Group, labels: Collection[str]) -> list[Variant]:
    """The variants with these labels, in the order in which panels show them: the exact cache, then the
    compressed ones, lower rates before higher ones and better mean scores before worse ones."""
    means = group.good.groupby("variant")["score"].mean()
    sign = 1.0 if group.meta.lower_is_better else -1.0

    def place(variant: Variant) -> tuple[bool, float, float]:
        mean = sign * float(means.get(variant.label, math.nan))
        rate = math.inf if variant.rate is None else variant.rate
        return variant.method != BASELINE, rate, math.inf if math.isnan(mean) else mean

    return sorted((v for v in group.variants if v.label in labels), key=place)


def left_out_text(group: Group, ordered: list[Variant]) -> str:
    """A sentence that says by what order panels were chosen and which methods have none; empty where all
    have one."""
    if len(ordered) <= MOST_PANELS:
        return ""
    rates = [variant.at for variant in ordered if variant.at]
    lowest = max(rates, key=largest_first, default="")
    at_lowest = f" at the lowest rate ({rate_texts(group)[lowest]})" if rates else ""
    rest = [label_with_ratio(group, variant) for variant in ordered[MOST_PANELS:]]
    named = "; ".join(rest[:MOST_NAMES])
    if len(rest) > MOST_NAMES:
        named += f" and {len(rest) - MOST_NAMES} more"
    return f" The best{at_lowest} first. Left out: {named}."


def grid_of(group: Group, label: str, spec: Heatmap) -> pd.DataFrame:
    """Mean scores of one variant, [values of y, values of x], over the cells that any variant has; NaN
    where nothing was scored."""
    records = group.records.dropna(subset=[spec.x, spec.y])
    mine = group.good[group.good["variant"] == label]
    grid = mine.pivot_table(index=spec.y, columns=spec.x, values="score", aggfunc="mean")
    return grid.reindex(
        index=sorted(records[spec.y].unique()), columns=sorted(records[spec.x].unique())
    )


def heatmaps(group: Group, spec: Heatmap) -> Drawn | None:
    """Mean scores by two record fields, a panel for each variant, on one colour scale that all share;
    None where the records lack one of the fields."""
    if not {spec.x, spec.y} <= set(group.records):
        return None
    scale = 100.0 if group.percent else 1.0
    grids = {label: grid_of(group, label, spec) * scale for label in group.labels}
    grids = {label: grid for label, grid in grids.items() if grid.notna().any(axis=None)}
    ordered = best_first(group, grids)
    values = np.concatenate([grid.to_numpy(float).ravel() for grid in grids.values()])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if group.percent:
        low, high = 0.0, 100.0
    shown = {variant.label: grids[variant.label] for variant in ordered[:MOST_PANELS]}
    titles = {v.label: _panel_title(label_with_ratio(group, v)) for v in ordered[:MOST_PANELS]}
    labels = AXIS_LABELS.get(spec.x, words(spec.x)), AXIS_LABELS.get(spec.y, words(spec.y))

    @styled
    def draw() -> Figure:
        figure, axes = new_panels(len(shown), 4, (2.3, 2.05), (0.9, 0.6), sharex=True, sharey=True)
        for ax, (label, grid) in zip(axes, shown.items(), strict=True):
            image = _heat(ax, grid, low, high)
            ax.set_title(titles[label])
        bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
        bar.ax.set_ylabel(score_axis(group), fontsize=TEXT)
        assert bar.solids is not None
        bar.solids.set_rasterized(True)  # hundreds of shades, one picture
        label_axes(figure, axes, *labels)
        return figure

    first = next(iter(shown.values()))
    chart: Chart = {
        "kind": "heatmap",
        "panels": [
            {
                "name": group.names[label],
                "title": titles[label],
                "values": [[number_of(value) for value in row] for row in grid.to_numpy(float)],
            }
            for label, grid in shown.items()
        ],
        "x": [as_text(value) for value in first.columns],
        "y": [as_text(value) for value in first.index],
        "xlabel": labels[0],
        "ylabel": labels[1],
        "axis": score_axis(group),
        "limits": [number_of(low), number_of(high)],
    }
    title = f"{group.task}{group.protocol_in_title}: score by {words(spec.x)} and {words(spec.y)}"
    text = "Means on one colour scale; grey cells have no scored example."
    text += left_out_text(group, ordered)
    return Drawn(f"{stem(group)}-heatmap", title, text, draw, "heatmap", chart)


def _panel_title(label: str) -> str:
    """A variant's label above a narrow panel: the method in the first line, its options below."""
    method, _, options = label.partition(", ")
    return "\n".join(filter(None, (shown_name(method), shown_name(options))))


def _heat(ax: Axes, grid: pd.DataFrame, low: float, high: float) -> Any:
    values = np.ma.masked_invalid(grid.to_numpy(float))
    ax.set_facecolor("#EEEEEE")
    image = ax.pcolormesh(
        values, edgecolors="white", linewidth=1, cmap="viridis", vmin=low, vmax=high
    )
    ax.set_ylim(len(grid), 0)
    for set_ticks, names in ((ax.set_xticks, grid.columns), (ax.set_yticks, grid.index)):
        step = math.ceil(len(names) / 8)  # at most about eight labels
        places = np.arange(0, len(names), step) + 0.5
        set_ticks(places, [shown_name(as_text(name)) for name in names[::step]])
    if max(len(as_text(name)) for name in grid.columns) > 4:
        ax.tick_params(axis="x", rotation=45)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    if values.size > FEW_CELLS:
        return image
    for (row, column), value in np.ndenumerate(grid.to_numpy(float)):
        if not math.isnan(value):
            color = "#FDFDFD" if value < (low + high) / 2 else "#111111"
            text = f"{value:.0f}" if high == 100 else f"{value:.2g}"
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5}
            ax.text(column + 0.5, row + 0.5, text, in_layout=False, color=color, **look)
    return image


def kept_figure(group: Group) -> Drawn | None:
    """Which tokens of one example's prompt each method kept, a panel of strips for each variant, some
    layers from top to bottom; None where no record says it (`kvbench.engine.kept.strips_of`).

    The example is the last of those that most variants have such a record of.
    """
    if "kept" not in group.records:
        return None
    # A number in 0.2.0's records of error_scaling.
    with_kept = group.records[[isinstance(kept, Mapping) for kept in group.records["kept"]]]
    with_kept = with_kept[with_kept["method"].ne(BASELINE)].drop_duplicates(
        ["seed", "example_id", "variant"]
    )
    if with_kept.empty:
        return None
    counts = with_kept.groupby(["seed", "example_id"], sort=False)["variant"].transform("size")
    example = with_kept[counts == counts.max()].iloc[-1]
    same = with_kept["seed"].eq(example["seed"]) & with_kept["example_id"].eq(example["example_id"])
    kept = with_kept[same].set_index("variant")["kept"]
    ordered = best_first(group, set(kept.index))
    shown = ordered[:MOST_PANELS]

    @styled
    def draw() -> Figure:
        most = max(min(MOST_LAYERS, len(kept[variant.label]["layers"])) for variant in shown)
        size = (7.4, 0.34 + 0.17 * most)
        figure, axes = new_panels(len(shown), 1, size, (0.0, 0.55), sharex=True)
        for ax, variant in zip(axes, shown, strict=True):
            _strips(ax, variant, kept[variant.label], label_with_ratio(group, variant))
        axes[-1].set_xlabel("token of the prompt", fontsize=TEXT)
        return figure

    about = f"Example {printable(str(example['example_id']))}. "
    caption = (
        f"{about}The x axis is the prompt, from its first token to its last. The height of a strip is"
        " the weight that a layer's cache gives to a piece of the prompt, per token and averaged over KV"
        " heads; full height is the number behind the name (the exact cache has 1 everywhere). Yellow:"
        " where the answer stands. Entries that stand for no single token are not shown."
    )
    on_page = (
        f"{about}The fuller the colour, the more of a piece of the prompt is kept, averaged over layers"
        " and KV heads; fullest: as much weight as the exact cache gives it, or more. Underlined: where"
        " the answer stands. Each strip is the whole prompt."
    )
    title = f"What each method kept: {group.task} on {group.model}{group.protocol_in_title}"
    left_out = left_out_text(group, ordered)
    chart: Chart = {
        "kind": "kept",
        "caption": on_page + left_out,
        "panels": [
            {
                "name": variant.without_rate,
                "title": label_with_ratio(group, variant),
                "color": style_of(variant.method).color,
                **_shades(kept[variant.label]),
            }
            for variant in shown
        ],
    }
    return Drawn(f"kept-{stem(group)}", title, caption + left_out, draw, "kept", chart)


def _shades(kept: Mapping[str, Any]) -> dict[str, Any]:
    """How a page shows what one variant kept.

    Returns:
        ``strip``: for each piece of the prompt its shade, 0 to `FULL_SHADE`, and whether the answer
        stands in it. ``words``: text, shade and the same of successive parts; a gap's shade is None.
    """
    weights = np.mean([np.array(layer, float) for layer in kept["layers"].values()], axis=0) / 100
    shades = np.ceil(FULL_SHADE * np.nan_to_num(weights).clip(0, 1)).astype(int)
    start, end = kept.get("answer") or (0, 0)
    first_tokens = np.arange(len(shades)) * kept["width"]
    has_answer = (first_tokens < end) & (first_tokens + kept["width"] > start)
    texts = [str(text) for text in kept.get("texts") or ()][: len(shades)]
    return {
        "strip": list(zip(shades.tolist(), has_answer.tolist(), strict=True)),
        "words": _words(texts, shades, has_answer, kept["width"]),
    }


def _words(
    texts: Sequence[str], shades: Any, has_answer: Any, width: int
) -> list[tuple[str, int | None, bool]]:
    """The beginning of a prompt, what is around the answer, and the end (`MOST_BESIDE`), in parts of one
    shade; gaps say how many tokens they are."""
    ends = np.cumsum([len(text) for text in texts])
    starts = ends - [len(text) for text in texts]
    shown = (starts < MOST_BESIDE) | (ends > ends[-1:].sum() - MOST_BESIDE)
    answer = np.flatnonzero(has_answer[: len(texts)])
    if answer.size:
        near = ends > starts[answer[0]] - MOST_BESIDE
        shown |= near & (starts < ends[answer[-1]] + MOST_BESIDE)
    parts: list[tuple[str, int | None, bool]] = []
    keys = [(int(shades[i]), bool(has_answer[i])) if shown[i] else None for i in range(len(texts))]
    for key, same in groupby(range(len(texts)), keys.__getitem__):
        places = list(same)
        if key is None:
            parts.append((f" … {len(places) * width} tokens … ", None, False))
        else:
            text = "".join(texts[i] for i in places).replace("\n", "↵ ")
            parts.append((text, *key))
    return parts


def _strips(ax: Axes, variant: Variant, kept: dict[str, Any], title: str) -> None:
    """Draw what a variant's layers hold of each piece of the prompt, one strip below the other."""
    weights = pd.DataFrame({int(k): np.array(layer) / 100 for k, layer in kept["layers"].items()})
    weights = weights.sort_index(axis=1).iloc[:, :: math.ceil(weights.shape[1] / MOST_LAYERS)]
    highest = max(1.0, float(weights.to_numpy().max()))
    edges = [*weights.index * kept["width"], kept["tokens"]]
    color = style_of(variant.method).color
    for row, layer in enumerate(weights):
        heights = weights[layer].to_numpy() / highest * 0.86 - row
        ax.stairs(heights, edges, baseline=-row, fill=True, color=color, linewidth=0)
    if kept.get("answer"):
        ax.axvspan(*kept["answer"], facecolor="#F3D04E", alpha=0.55, linewidth=0, zorder=0)
    ax.set_xlim(0, kept["tokens"])
    ax.set_ylim(1 - weights.shape[1], 1)
    ax.set_yticks([0.43 - row for row in range(weights.shape[1])], [f"layer {i}" for i in weights])
    ax.tick_params(axis="y", length=0, labelsize=SMALL - 1.5)
    ax.set_title(f"{shown_name(title)}   ×{highest:.1f}", loc="left", pad=2)
