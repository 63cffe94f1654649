"""Figures from records: heatmaps, error bars, scaling curves, throughput; PNG and PDF.

Figures are built as objects, without pyplot and without changing matplotlib's settings.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kvbench.report.data import Arm, Group
from kvbench.report.files import write_bytes
from kvbench.report.style import style_of
from kvbench.report.tables import Row, ScoreTable, Timing, as_text
from kvbench.report.views import value_text

_TEXT, _SMALL = 9.0, 8.0
_DPI = 160
_GREY = "#666666"
_GRID = "#DDDDDD"
_HEAT = "viridis"
_MISSING = "#EEEEEE"
_MAX_PANELS = 16


@dataclass(frozen=True)
class Drawn:
    """A figure and the words that go with it.

    Attributes:
        name: file name stem, unique within an experiment.
        caption: what is shown, how it was measured, what the marks mean.
    """

    name: str
    title: str
    caption: str
    figure: Figure

    @cached_property
    def png(self) -> bytes:
        """The figure as PNG; the same bytes for the same records."""
        return self._bytes("png", {"Software": None})

    @cached_property
    def pdf(self) -> bytes:
        """The figure as PDF with embedded fonts, without a date."""
        return self._bytes("pdf", {"CreationDate": None, "Creator": None, "Producer": None})

    def _bytes(self, kind: str, metadata: Mapping[str, Any]) -> bytes:
        if self.figure.get_layout_engine() is not None:  # lay out once: it is what takes long
            self.figure.draw_without_rendering()
            self.figure.set_layout_engine("none")
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format=kind, dpi=_DPI, metadata=dict(metadata))
        return buffer.getvalue()


def save_figures(figures: Sequence[Drawn], folder: Path) -> list[Path]:
    """Write every figure as PNG and PDF."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for drawn in figures:
        for suffix, content in ((".png", drawn.png), (".pdf", drawn.pdf)):
            paths.append(write_bytes(folder / f"{drawn.name}{suffix}", content))
    return paths


def figures_of(group: Group, tables: Sequence[ScoreTable]) -> list[Drawn]:
    """Every figure that the group's task asks for, and those that its records allow.

    Args:
        tables: the group's score table by dataset, then those by other fields.
    """
    figures: list[Drawn] = []
    if not ((group.records["status"] == "ok") & group.records["score"].notna()).any():
        return figures
    heat, bar_spec = group.meta.figure("heatmap"), group.meta.figure("bars")
    if heat:
        figures += heatmaps(group, heat)
    if bar_spec:
        figures += bars(group, bar_spec)
    if group.meta.figure("throughput"):
        return figures
    for table in tables[1:]:
        if len(table.columns) > 1 and not (bar_spec and table.by == bar_spec.get("x")):
            figures.append(breakdown(group, table))
    table = tables[0]
    if any(row.total.difference for row in table.rows):
        figures.append(differences(table))
    if len({arm.rate for arm in group.arms if arm.rate is not None}) > 1:
        figures.append(score_against_ratio(group, table))
    return figures


def heatmaps(group: Group, spec: Mapping[str, Any]) -> list[Drawn]:
    """All methods side by side (one figure per rate where there are many), and each alone."""
    grids = {arm.label: grid_of(group, arm, spec) for arm in group.arms}
    grids = {label: grid for label, grid in grids.items() if grid.size}
    low, high = _scale(group, grids)
    unit = _axis_unit(group)
    arms = [arm for arm in group.arms if arm.label in grids]
    caption = (
        f"Mean {spec.get('value', 'score')} by {_words(spec['x'])} and {_words(spec['y'])} on one"
        " colour scale; grey cells have no scored example."
    )
    figures = []
    pages = _pages(group, arms)
    for suffix, page in pages:
        columns = min(4, len(page))
        rows = math.ceil(len(page) / columns)
        figure = _new(0.9 + 2.3 * columns, 0.6 + 2.05 * rows)
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for ax, arm in zip(axes.flat, page, strict=False):
            _heat(ax, grids[arm.label], low, high, group)
            ax.set_title(arm.label, fontsize=_TEXT)
        for ax in list(axes.flat)[len(page) :]:
            ax.remove()
        figure.supxlabel(_axis(spec["x"]), fontsize=_TEXT)
        figure.supylabel(_axis(spec["y"]), fontsize=_TEXT)
        image = figure.axes[0].images[0]
        bar = figure.colorbar(image, ax=list(figure.axes), fraction=0.03, pad=0.02)
        _style_bar(bar.ax, f"{spec.get('value', 'score')}{unit}")
        figures.append(
            Drawn(
                f"{_stem(group)}-heatmap{suffix}",
                f"{group.task}: {spec.get('value', 'score')} by {_words(spec['x'])} and"
                f" {_words(spec['y'])}",
                caption,
                figure,
            )
        )
    return figures


def heatmap_alone(group: Group, arm: Arm, spec: Mapping[str, Any]) -> Drawn:
    """One arm's heatmap, on the scale that all arms share."""
    low, high = _scale(group, {a.label: grid_of(group, a, spec) for a in group.arms})
    figure = _new(4.4, 3.2)
    ax = figure.subplots()
    image = _heat(ax, grid_of(group, arm, spec), low, high, group)
    ax.set_title(f"{group.task}, {group.model}: {arm.label}", fontsize=_TEXT)
    ax.set_xlabel(_axis(spec["x"]), fontsize=_TEXT)
    ax.set_ylabel(_axis(spec["y"]), fontsize=_TEXT)
    bar = figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03)
    _style_bar(bar.ax, f"{spec.get('value', 'score')}{_axis_unit(group)}")
    return Drawn(
        f"{_stem(group)}-heatmap-{_slug(arm.label)}", f"{group.task}: {arm.label}", "", figure
    )


def bars(group: Group, spec: Mapping[str, Any]) -> list[Drawn]:
    """Bars per method and x, one panel per facet: mean and standard deviation over seeds.

    A record field ``draw`` (several draws of a method in one run) counts as part of the seed.
    Methods that keep the whole cache are left out: their error is rounding.
    """
    value = spec.get("value", "score")
    x, facet = spec["x"], spec.get("facet")
    good = group.records[group.records["status"].eq("ok") & group.records["saves_memory"].ne(False)]
    if good.empty:
        return []
    repeat = good["seed"].astype(str) + ("/" + good["draw"].astype(str) if "draw" in good else "")
    good = good.assign(
        value=pd.to_numeric(good[value if value in good else "score"]), repeat=repeat
    )
    facets = sorted(good[facet].unique()) if facet else [None]
    ticks = sorted(good[x].unique(), reverse=x == "rate")
    columns = min(3, len(facets))
    rows = math.ceil(len(facets) / columns)
    figure = _new(1.0 + 2.9 * columns, 0.9 + 2.4 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    arms = [arm for arm in group.arms if (good["arm"] == arm.label).any()]
    width = 0.8 / len(arms)
    for ax, name in zip(axes.flat, facets, strict=False):
        part = good if name is None else good[good[facet] == name]
        for i, arm in enumerate(arms):
            repeats = part[part["arm"] == arm.label].groupby([x, "repeat"])["value"].mean()
            means, spread = repeats.groupby(x).mean(), repeats.groupby(x).std()
            at = np.arange(len(ticks)) + (i - (len(arms) - 1) / 2) * width
            ax.bar(
                at,
                means.reindex(ticks),
                width * 0.92,
                yerr=spread.reindex(ticks).fillna(0.0),
                color=style_of(arm.method).color,
                label=arm.label,
                error_kw={"elinewidth": 0.9, "capsize": 1.6, "ecolor": "#333333"},
            )
        ax.set_xticks(np.arange(len(ticks)), [_tick(tick, x) for tick in ticks])
        _style_axes(ax)
        if name is not None:
            ax.set_title(f"{_words(facet or '')} {as_text(name)}", fontsize=_TEXT)
    for ax in list(axes.flat)[len(facets) :]:
        ax.remove()
    ylabel = str(spec.get("ylabel", _words(value)))
    _label_axes(figure, list(axes.flat)[: len(facets)], _axis(x), ylabel)
    _legend(figure, axes.flat[0], len(arms))
    seeds = good["repeat"].nunique()
    caption = "Mean over prompts; " + (
        f"error bars are the standard deviation over {seeds} seeds."
        if seeds > 1
        else "one seed, so no error bars."
    )
    title = f"{group.task}: {ylabel} by {_words(x)}"
    return [Drawn(f"{_stem(group)}-bars", title, caption, figure)]


def breakdown(group: Group, table: ScoreTable) -> Drawn:
    """Score against a record field, one line per method, a panel per rate."""
    panels = _pages(group, list(group.arms), per_rate=True)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = _new(1.0 + (5.2 if columns == 1 else 3.2 * columns), 0.9 + 2.7 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    at = np.arange(len(table.columns))
    scale = _percent(table.unit)
    for ax, (suffix, arms) in zip(axes.flat, panels, strict=False):
        shown = [row for row in table.rows if row.arm in arms]
        for i, row in enumerate(shown):
            scores = [row.cells[c].score for c in table.columns]
            shift = (i - (len(shown) - 1) / 2) * 0.5 / len(shown)
            values = scale * np.array([s.value for s in scores])
            spread = scale * np.array([[s.value - s.low for s in scores],
                                       [s.high - s.value for s in scores]])  # fmt: skip
            style = style_of(row.arm.method)
            ax.errorbar(
                at + shift,
                values,
                np.clip(spread, 0, None),
                color=style.color,
                marker=style.marker,
                markersize=_marker_size(style.marker),
                linewidth=1.3,
                elinewidth=0.8,
                capsize=1.5,
                label=row.arm.label if len(panels) == 1 else row.arm.method,
                clip_on=False,
            )
        ax.set_xticks(at, list(table.columns))
        if table.unit == "fraction":
            ax.set_ylim(0, 103)
        if len(panels) > 1:
            ax.set_title(suffix.lstrip("-").replace("-", " "), fontsize=_TEXT)
        _style_axes(ax)
    for ax in list(axes.flat)[len(panels) :]:
        ax.remove()
    _label_axes(
        figure, list(axes.flat)[: len(panels)], _axis(table.by), f"score{_axis_unit(group)}"
    )
    _legend(figure, axes.flat[0], len(panels[0][1]))
    return Drawn(
        f"{_stem(group)}-by-{_slug(table.by)}",
        f"{group.task}: score by {_words(table.by)}",
        "Mean and 95 % bootstrap interval over examples. Values are evenly spaced, and points set"
        " apart sideways so that their intervals can be told apart.",
        figure,
    )


def differences(table: ScoreTable) -> Drawn:
    """Paired difference to the baseline with its interval, one line per arm."""
    rows = [row for row in table.rows if row.total.difference is not None]
    scale = _percent(table.unit)
    figure = _new(6.2, 0.9 + 0.27 * len(rows))
    ax = figure.subplots()
    ax.axvline(0, color=_GREY, linewidth=0.9)
    for i, row in enumerate(reversed(rows)):
        difference = row.total.difference
        if difference is None or math.isnan(difference.value):
            continue
        style = style_of(row.arm.method)
        ax.errorbar(
            scale * difference.value,
            i,
            xerr=[
                [max(0.0, scale * (difference.value - difference.low))],
                [max(0.0, scale * (difference.high - difference.value))],
            ],
            color=style.color,
            marker=style.marker,
            markersize=_marker_size(style.marker),
            elinewidth=1.6,
            capsize=2.5,
        )
        ax.annotate(
            value_text(difference.value, table.unit, signed=True),
            (1.01, i),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=_SMALL,
            annotation_clip=False,
        )
    ax.set_yticks(range(len(rows)), [row.arm.label for row in reversed(rows)])
    ax.set_ylim(-0.6, len(rows) - 0.4)
    unit = " (percentage points)" if table.unit == "fraction" else f" ({_words(table.unit)})"
    better = "left" if table.lower_is_better else "right"
    ax.set_xlabel(f"difference to {table.baseline}{unit}; {better} is better", fontsize=_TEXT)
    _style_axes(ax, grid="x")
    return Drawn(
        f"{_slug(table.task)}-{_slug(table.model)}-difference",
        f"{table.task}: paired difference to {table.baseline}",
        "Over examples that both scored, with 95 % bootstrap intervals.",
        figure,
    )


def score_against_ratio(group: Group, table: ScoreTable) -> Drawn:
    """Score against the measured ratio of bytes, one line per method; the baseline as a band."""
    figure = _new(6.2, 3.7)
    ax = figure.subplots()
    scale = _percent(table.unit)
    lines: dict[str, list[Row]] = {}
    for row in table.rows:
        if not math.isnan(row.total.score.value):
            lines.setdefault(row.arm.method, []).append(row)
    for method, rows in lines.items():
        style = style_of(method)
        ordered = sorted(rows, key=lambda row: row.ratio)
        scores = [row.total.score for row in ordered]
        if group.baseline[ordered[0].arm.label] is None:
            ax.axhline(scale * scores[0].value, color=style.color, linestyle="--", linewidth=1)
            ax.axhspan(
                scale * scores[0].low, scale * scores[0].high, color=style.color, alpha=0.07, lw=0
            )
        ax.errorbar(
            [row.ratio for row in ordered],
            [scale * s.value for s in scores],
            [
                [max(0.0, scale * (s.value - s.low)) for s in scores],
                [max(0.0, scale * (s.high - s.value)) for s in scores],
            ],
            color=style.color,
            marker=style.marker,
            markersize=_marker_size(style.marker),
            linewidth=1.5,
            elinewidth=0.8,
            capsize=2,
            label=method,
        )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set_xlabel("measured ratio (bytes held / bytes of the exact cache)", fontsize=_TEXT)
    ax.set_ylabel(f"score{_axis_unit(group)}", fontsize=_TEXT)
    _style_axes(ax)
    _legend(figure, ax, len(lines))
    return Drawn(
        f"{_stem(group)}-ratio",
        f"{group.task}: score against memory",
        "Mean score with 95 % bootstrap intervals against the ratio that was measured, not the one"
        " that was asked for; dashed with its band: the baseline.",
        figure,
    )


def throughput(group: Group, timings: Sequence[Timing]) -> Drawn:
    """Prefill + compress and decode seconds, and tokens per second, per arm."""
    settings = list(dict.fromkeys(timing.setting for timing in timings))
    arms = [arm for arm in group.arms if any(t.arm == arm for t in timings)]
    figure = _new(9.0, 1.1 + max(1.6, 0.26 * len(arms) * len(settings)))
    left, right = figure.subplots(1, 2, sharey=True)
    labels = []
    for i, timing in enumerate(reversed(timings)):
        color = style_of(timing.arm.method).color
        prefill, decode = timing.prefill_s[1], timing.decode_s[1]
        left.barh(i, prefill, 0.68, color=color, alpha=0.4, edgecolor=color)
        left.barh(i, decode, 0.68, left=prefill, color=color, edgecolor=color)
        right.barh(i, timing.decode_tokens_per_s, 0.68, color=color)
        if math.isfinite(timing.decode_tokens_per_s):
            right.annotate(
                value_text(timing.decode_tokens_per_s, ""),
                (timing.decode_tokens_per_s, i),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=_SMALL,
            )
        labels.append(timing.arm.label + (f" ({timing.setting})" if len(settings) > 1 else ""))
    left.set_yticks(range(len(labels)), labels)
    left.set_xlabel("seconds: prefill + compress (pale), decode (full)", fontsize=_TEXT)
    right.set_xlabel("new tokens per second while decoding", fontsize=_TEXT)
    right.margins(x=0.12)
    for ax in (left, right):
        _style_axes(ax, grid="x")
    return Drawn(
        f"{_stem(group)}-throughput",
        f"{group.task}: time",
        f"Medians over {timings[0].runs if timings else 0} runs"
        + (f"; prompt + new tokens: {settings[0]}." if len(settings) == 1 else "."),
        figure,
    )


def _new(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _label_axes(figure: Figure, axes: Sequence[Axes], x: str, y: str) -> None:
    """Labels on the axes of a single panel, shared labels beside several."""
    if len(axes) == 1:
        axes[0].set_xlabel(x, fontsize=_TEXT)
        axes[0].set_ylabel(y, fontsize=_TEXT)
    else:
        figure.supxlabel(x, fontsize=_TEXT)
        figure.supylabel(y, fontsize=_TEXT)


def _style_axes(ax: Axes, grid: Literal["x", "y"] = "y") -> None:
    ax.tick_params(labelsize=_SMALL, length=2.5, color=_GREY)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(_GREY)
    ax.grid(axis=grid, color=_GRID, linewidth=0.6)
    ax.set_axisbelow(True)


def _style_bar(ax: Axes, label: str) -> None:
    ax.tick_params(labelsize=_SMALL, length=2.5, color=_GREY)
    ax.set_ylabel(label, fontsize=_TEXT)


def _legend(figure: Figure, ax: Axes, count: int) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        [handle[0] if isinstance(handle, ErrorbarContainer) else handle for handle in handles],
        labels,
        loc="outside upper center",
        ncols=min(count, 5),
        frameon=False,
        fontsize=_SMALL,
        columnspacing=1.3,
        handletextpad=0.5,
    )


def grid_of(group: Group, arm: Arm, spec: Mapping[str, Any]) -> pd.DataFrame:
    """y x x means of one arm over the cells that any arm has; NaN where nothing was scored."""
    x, y, value = spec["x"], spec["y"], spec.get("value", "score")
    records = group.records.dropna(subset=[x, y])
    mine = records[(records["arm"] == arm.label) & (records["status"] == "ok")]
    if mine.empty:
        return pd.DataFrame()
    grid = mine.assign(value=pd.to_numeric(mine[value])).pivot_table(
        index=y, columns=x, values="value", aggfunc="mean"
    )
    return grid.reindex(index=sorted(records[y].unique()), columns=sorted(records[x].unique()))


def _scale(group: Group, grids: Mapping[str, pd.DataFrame]) -> tuple[float, float]:
    """The colour scale that every arm shares."""
    if group.meta.score_unit == "fraction":
        return 0.0, 1.0
    values = np.concatenate([grid.to_numpy(float).ravel() for grid in grids.values()])
    return float(np.nanmin(values)), float(np.nanmax(values))


def _heat(ax: Axes, grid: pd.DataFrame, low: float, high: float, group: Group) -> Any:
    scale = _percent(group.meta.score_unit)
    values = grid.to_numpy(float) * scale
    ax.set_facecolor(_MISSING)
    image = ax.imshow(
        np.ma.masked_invalid(values),
        aspect="auto",
        cmap=_HEAT,
        vmin=low * scale,
        vmax=high * scale,
        interpolation="nearest",
    )
    ax.set_xticks(np.arange(-0.5, values.shape[1]), minor=True)
    ax.set_yticks(np.arange(-0.5, values.shape[0]), minor=True)
    ax.grid(which="minor", color="white", linewidth=1)
    ax.tick_params(which="minor", length=0)
    _thin_ticks(ax, "x", [as_text(c) for c in grid.columns])
    _thin_ticks(ax, "y", [as_text(c) for c in grid.index])
    ax.tick_params(labelsize=_SMALL, length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if values.size <= 64:
        middle = (low + high) / 2 * scale
        for (row, column), value in np.ndenumerate(values):
            if not math.isnan(value):
                ax.text(
                    column,
                    row,
                    f"{value:.0f}" if scale == 100 else f"{value:.2g}",
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white" if value < middle else "black",
                )
    return image


def _thin_ticks(ax: Axes, axis: Literal["x", "y"], labels: Sequence[str]) -> None:
    """At most about eight labels."""
    step = math.ceil(len(labels) / 8)
    at = range(0, len(labels), step)
    set_ticks = ax.set_xticks if axis == "x" else ax.set_yticks
    set_ticks(list(at), [labels[i] for i in at])
    if axis == "x" and max(map(len, labels), default=0) > 4:
        ax.tick_params(axis="x", rotation=45)


def _pages(
    group: Group, arms: Sequence[Arm], per_rate: bool = False
) -> list[tuple[str, list[Arm]]]:
    """Arms split by rate, each with the baselines, where one picture cannot hold them all."""
    rates = sorted({a.rate for a in arms if a.rate is not None and a.options}, reverse=True)
    if len(rates) < 2 or (not per_rate and len(arms) <= _MAX_PANELS):
        return [("", list(arms))]
    return [
        (
            f"-rate-{rate:g}",
            [a for a in arms if a.rate == rate or group.baseline[a.label] is None],
        )
        for rate in rates
    ]


def _percent(unit: str) -> float:
    return 100.0 if unit == "fraction" else 1.0


def _axis_unit(group: Group) -> str:
    return " (%)" if group.meta.score_unit == "fraction" else f" ({_words(group.meta.score_unit)})"


_AXES = {
    "length": "context length (tokens)",
    "depth": "depth (%)",
    "num_lines": "number of lines",
    "prompt_tokens": "prompt length (tokens)",
    "rate": "rate (fraction of the middle that is kept)",
    "layer": "layer",
}


def _axis(name: str) -> str:
    return _AXES.get(name, _words(name))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _tick(value: object, axis: str) -> str:
    if axis == "rate" and isinstance(value, float) and 0 < value < 1 and (1 / value).is_integer():
        return f"1/{int(1 / value)}"
    return as_text(value)


def _marker_size(marker: str) -> float:
    """Stars and crosses look smaller than they are."""
    return {"*": 8.5, "P": 6.0, "X": 6.0}.get(marker, 4.8)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._" else "-" for c in name).strip("-")


def _stem(group: Group) -> str:
    return f"{_slug(group.task)}-{_slug(group.model)}"
