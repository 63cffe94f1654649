"""The figures of a report: `forest` and `lines` draw numbers with intervals, the others what is neither.

Figures are built as objects, without pyplot. Names in them, whatever they hold, stand for themselves.
"""

from __future__ import annotations

import base64
import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kvbench.errors import one_line, printable
from kvbench.records.figures import Bars, Curve, Heatmap, Times
from kvbench.report.experiment import BASELINE, Group, as_text, natural_order
from kvbench.report.frame import totals
from kvbench.report.scaling import curves_of
from kvbench.report.style import style_of

Draw = Callable[[Axes, pd.DataFrame], None]
TEXT, SMALL = 9.0, 8.0
_DPI, _MOST_PIXELS = 160, 32_000
_MOST_PANELS, _MOST_LAYERS, _LONGEST_NAME, _MOST_LINES = 16, 4, 60, 8
_GREY, _LIGHT = "#666666", "#C4C4C4"
_BESIDE = 0.008
"""Of the axis, between points of two lines at one x."""
_RATIO = "measured ratio (bytes held / bytes of the exact cache)"
_AXES = {
    "length": "context length (tokens)",
    "depth": "depth (%)",
    "num_lines": "number of lines",
    "prompt_tokens": "prompt length (tokens)",
    "rate": "rate (fraction of the middle that is kept)",
}
_RC: Any = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvbench",
    "pdf.fonttype": 42,  # TrueType: many venues refuse Type 3 fonts
    "font.size": SMALL,
    "axes.titlesize": TEXT,
    "axes.labelsize": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
"""matplotlib's settings while a figure is made and written."""
_styled = rc_context(_RC)


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

    def say_above(self, sentence: str) -> None:
        """Put a sentence above the figure."""
        lines = textwrap.wrap(sentence, width=round(14 * self.figure.get_figwidth()))
        heading = self.figure.get_suptitle()
        self.figure.suptitle("\n".join([*lines, heading] if heading else lines), fontsize=7)

    def encoded(self, kind: str) -> bytes:
        """As svg, png or pdf (with embedded fonts); the same bytes for the same records."""
        buffer = io.BytesIO()
        dpi = min(_DPI, _MOST_PIXELS / max(self.figure.get_size_inches()))
        dated = {"svg": "Date", "pdf": "CreationDate", "png": "Software"}[kind]
        with rc_context(_RC), warnings.catch_warnings():  # of names that no font has, or no room
            warnings.filterwarnings("ignore", r"Glyph|constrained_layout not applied", UserWarning)
            self.figure.savefig(buffer, format=kind, dpi=dpi, metadata={dated: None})
        return buffer.getvalue()

    @property
    def address(self) -> str:
        """The SVG as an image's address."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.encoded('svg')).decode()}"


def figures_of(group: Group, frame: pd.DataFrame) -> list[Drawn]:
    """Every figure that the group's task asks for, and those that its records allow; the score against
    memory first."""
    if group.good["score"].notna().sum() == 0:
        return []
    if curve := group.meta.figure(Curve):
        return curve_figures(group, curve)
    if group.meta.figure(Times):  # seconds and bytes stand in their table
        return []
    wanted: list[tuple[str, Callable[[], Drawn | None]]] = [
        ("score by ratio", partial(memory, group, frame))
    ]
    heatmap, bar = group.meta.figure(Heatmap), group.meta.figure(Bars)
    if heatmap:
        wanted.append(("heatmap", partial(heatmaps, group, heatmap)))
    if bar:
        wanted.append(("bars", partial(bars, group, bar)))
    for by, part in frame[~frame["by"].isin(["", "dataset"])].groupby("by", sort=False):
        if part["value"].nunique() > 1:
            wanted.append((f"by {by}", partial(breakdown, group, part)))
    wanted.append(("kept tokens", partial(kept_figure, group)))
    drawn = [drawn_or_told(group, what, draw) for what, draw in wanted]
    return [one for one in drawn if one is not None]


def drawn_or_told(group: Group, what: str, draw: Callable[[], Drawn | None]) -> Drawn | None:
    """A figure; where records of somebody's make that impossible, an empty one with a line that says so:
    the rest of the report is wanted all the same."""
    try:
        return draw()
    except Exception as failure:  # noqa: BLE001 - whatever a record's values do to matplotlib
        figure, _ = new_panels(1, 1, (3, 1), (0, 0))
        name = f"{stem(group)}-{re.sub(r'[^a-z]+', '-', what)}"
        return Drawn(name, what, f"Not drawn: {one_line(failure)}.", figure)


def words(name: str) -> str:
    """A field's name in words."""
    return name.replace("_", " ")


def stem(group: Group) -> str:
    """The beginning of the names of a group's figures."""
    return "-".join(
        re.sub(r"[^\w.]+", "-", name).strip("-")[:80] for name in (group.task, group.model)
    )


def _score(group: Group) -> str:
    return "score (%)" if group.percent else words(group.meta.score_unit)


def new_panels(
    count: int, columns: int, size: tuple[float, float], around: tuple[float, float], **share: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of so many axes, side by side in at most so many columns.

    Args:
        size: inches of each panel. around: inches beside and above all of them.
        share: for `Figure.subplots`.
    """
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    width, height = around[0] + size[0] * columns, around[1] + size[1] * rows
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **share).flat)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def _shown(text: str) -> str:
    """A name as figures show it: one line, not too long."""
    return printable(text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…")


def _label(figure: Figure, axes: Sequence[Axes], x: str, y: str) -> None:
    """Labels of the axes, shared where there are several; a legend above them all."""
    if len(axes) == 1:
        axes[0].set_xlabel(x, fontsize=TEXT)
        axes[0].set_ylabel(y, fontsize=TEXT)
    else:
        figure.supxlabel(x, fontsize=TEXT)
        figure.supylabel(y, fontsize=TEXT)
    named: dict[str, Any] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            drawn = handle[0] if isinstance(handle, ErrorbarContainer) else handle
            named.setdefault(str(name), drawn)
    if named:
        longest = max(map(len, named))
        columns = max(1, min(6, len(named), int(figure.get_figwidth() * 15 / (longest + 6))))
        place: dict[str, Any] = {"loc": "outside upper center", "ncols": columns, "fontsize": SMALL}
        figure.legend(list(named.values()), list(named), frameon=False, **place)


def _errorbar(ax: Axes, at: Any, rows: pd.DataFrame, *, across: bool, **more: Any) -> None:
    """Means with their intervals; `across`: intervals lie along x."""
    mean, low, high = (rows[key].to_numpy(float) for key in ("mean", "low", "high"))
    x, y = (mean, at) if across else (at, mean)
    style = style_of(str(rows["method"].iloc[0]))
    size = {"*": 8.5, "P": 6.0, "X": 6.0}.get(style.marker, 4.8)
    look: dict[str, Any] = {"color": style.color, "marker": style.marker, "markersize": size}
    spread = np.nan_to_num(np.clip([mean - low, high - mean], 0, None))  # 0 where none is known
    look |= {"elinewidth": 0.9, "xerr" if across else "yerr": spread}
    ax.errorbar(x, y, **look | more)


@_styled
def forest(frame: pd.DataFrame, xlabel: str) -> Figure:
    """Numbers with intervals in named rows: columns ``row``, ``method``, ``mean``, ``low``, ``high``."""
    names = list(frame["row"])
    figure, (ax,) = new_panels(1, 1, (5.6, 0.4 + 0.21 * len(names)), (1.2, 0.5))
    for place, row in enumerate(frame.index):
        _errorbar(ax, [place], frame.loc[[row]], across=True, linestyle="none")
    ax.set_yticks(range(len(names)), [_shown(name) for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="x")
    _label(figure, [ax], xlabel, "")
    return figure


@_styled
def lines(
    panels: Mapping[str, pd.DataFrame],
    xlabel: str,
    ylabel: str,
    *,
    columns: int = 3,
    log: str = "",
    ticks: Sequence[str] = (),
    baseline: str = "",
    joined: bool = True,
    grey: Sequence[str] = (),
    also: Draw | None = None,
) -> Figure:
    """Numbers with intervals against x, a line for each label, a panel for each frame.

    Args:
        panels: by title, frames with ``label``, ``method``, ``x``, ``mean``, ``low``, ``high``;
            ``ringed`` for points in a ring.
        log: the axes that are logarithmic, "x", "y" or "xy". ticks: names of x = 0, 1, ...
        baseline: the label whose first number is a line across the others, with its interval.
        joined: a line through the means.
        grey: labels whose lines are thin, without intervals and named by their number alone. The
            others' points at about one x stand beside each other.
        also: draws more, given the axes and the frame.
    """
    size = (5.6, 3.4) if len(panels) == 1 else (3.0, 2.4)
    figure, axes = new_panels(len(panels), columns, size, (1.0, 0.9), sharey=True)
    for ax, (title, frame) in zip(axes, panels.items(), strict=True):
        for row in frame[frame["label"] == baseline].head(1).to_dict("records"):
            color = style_of(row["method"]).color
            ax.axhline(row["mean"], color=color, linestyle="--", linewidth=1, label=baseline)
            if row["low"] == row["low"]:
                ax.axhspan(row["low"], row["high"], color=color, alpha=0.08, linewidth=0)
        known = (
            frame[frame["label"] != baseline]
            .dropna(subset=["mean"])
            .sort_values("x", kind="stable", ignore_index=True)
        )
        labels = sorted(known["label"].unique(), key=lambda label: label in grey)
        wide = 0.0 if joined else 0.8 / max(1, len(labels))
        beside = _beside(known[~known["label"].isin(grey)], wide, log="x" in log)
        for label in labels:
            rows = known[known["label"] == label]
            at, named = rows["x"].to_numpy(float), _shown(str(label))
            line: dict[str, Any] = {"linewidth": 1.4} if joined else {"linestyle": "none"}
            if label in grey:
                line |= {
                    "linewidth": 0.8,
                    "color": _LIGHT,
                    "marker": ".",
                    "yerr": None,
                    "zorder": 1,
                }
                named = f"{len(grey)} others"
            else:
                at = beside[rows.index].to_numpy(float)
            _errorbar(ax, at, rows, across=False, label=named, **line)
            if "ringed" in rows:
                of = rows["ringed"].to_numpy(bool)
                ring: dict[str, Any] = {"s": 80, "facecolors": "none", "edgecolors": "0.25"}
                ax.scatter(at[of], rows["mean"][of], linewidths=0.8, zorder=5, **ring)
        if "x" in log:
            ax.set_xscale("log", base=2)
            few = frame["x"].max() < 4 * frame["x"].min()
            _plain_ticks(ax.xaxis, LogLocator(base=2, subs=(1.0, 1.5) if few else (1.0,)))
        if "y" in log:
            ax.set_yscale("log")
            _plain_ticks(ax.yaxis, LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        if ticks:
            ax.set_xticks(range(len(ticks)), [_shown(tick) for tick in ticks])
        if also:
            also(ax, frame)
        ax.set_title(_shown(title))
        ax.grid(axis="y")
    _label(figure, axes, xlabel, ylabel)
    return figure


def _beside(points: pd.DataFrame, step: float, *, log: bool) -> pd.Series:
    """x of the points of several labels, sorted by it, those at about one x side by side, so that none
    hides another's interval; where one label has several of these, as they are.

    Args:
        step: how far apart; 0: `_BESIDE` of the axis.
    """
    x = points["x"].map(math.log) if log else points["x"].astype(float)
    step = step or _BESIDE * (x.max() - x.min())
    about = x.groupby((x.diff() > step).cumsum())
    labels = pd.Series(points["label"].factorize()[0], x.index)
    place, count = (labels.groupby(about.ngroup()).transform(how) for how in ("rank", "nunique"))
    moved = about.transform("mean") + step * (place - (count + 1) / 2)
    moved = moved.where(count == about.transform("size"), x)
    return moved.map(math.exp) if log else moved


def _plain_ticks(axis: Any, locator: LogLocator) -> None:
    axis.set_major_locator(locator)
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _scaled(group: Group, rows: pd.DataFrame, **more: Any) -> pd.DataFrame:
    """Rows of a tidy frame in the shown unit, with further columns."""
    scale = 100.0 if group.percent else 1.0
    return rows.assign(**{key: scale * rows[key] for key in ("mean", "low", "high")}, **more)


def memory(group: Group, frame: pd.DataFrame) -> Drawn | None:
    """Score (or error) against the measured ratio of bytes, a line per method, the exact cache as a line
    across, the Pareto set ringed; where all hold about as much, a row per method. None where nothing
    saves memory."""
    rows, lower = memory_rows(group, frame), group.meta.lower_is_better
    others = rows[rows["label"] != BASELINE]
    if not set(rows["variant"]) & group.compressed:
        return None
    points = list(zip(others["x"], others["mean"], strict=True))
    rows["ringed"] = False
    rows.loc[others.index, "ringed"] = pareto(points, lower=lower)
    text = "Means with 95 % intervals and the ratio that was measured."
    if not rows["label"].duplicated().any() and others["x"].max() <= 1.5 * others["x"].min():
        rows = rows.sort_values("mean", ascending=lower, kind="stable")
        named = rows.assign(row=rows["label"] + rows["x"].map(lambda x: f"  ({x:.2f})"))
        figure = forest(named, f"{_score(group)}; beside the name the ratio")
    else:
        log = "xy" if lower and (rows["mean"] > 0).all() else "x"
        text += (
            " Dashed with its band: exact. Ringed: the Pareto set, no other point has fewer bytes"
        )
        text += " and a better mean. Points of about one ratio stand side by side."
        grey = rest_of(rows, {BASELINE, *rows["label"][rows["ringed"]]}, lower=lower)
        if grey:
            text += (
                f" In colour, {_MOST_LINES}: exact, methods with a point in the Pareto set, then those"
                " with the best mean over all their points."
            )
        figure = lines({"": rows}, _RATIO, _score(group), log=log, baseline=BASELINE, grey=grey)
    return Drawn(f"{stem(group)}-ratio", f"{group.task}: score against memory", text, figure)


def memory_rows(group: Group, frame: pd.DataFrame) -> pd.DataFrame:
    """Total scores with ``x``, the measured ratio: by the rates that records bear, else by variant."""
    mine = frame[(frame["by"] == "rate") & (frame["measure"] == "score")]
    if mine["value"].nunique() > 1:
        ratio = group.good.groupby(["variant", group.good["rate"].map(as_text)])["ratio"].mean()
        held = [ratio.get(key) for key in zip(mine["variant"], mine["value"], strict=True)]
        rows = _scaled(group, mine, x=held, label=mine["variant"])
    else:
        total, x = totals(frame), totals(frame, "ratio")["mean"]
        rows = _scaled(group, total, x=x, label=total["variant"].map(group.names))
    return rows.dropna(subset=["mean", "x"])


def pareto(points: Sequence[tuple[float, float]], *, lower: bool) -> list[bool]:
    """Which of (bytes, score) no other equals or beats in both and beats in one.

    Args:
        lower: whether lower scores are better.
    """
    costs = [(cost, score if lower else -score) for cost, score in points]
    return [
        not any(a <= cost and b <= loss and (a, b) != (cost, loss) for a, b in costs)
        for cost, loss in costs
    ]


def rest_of(rows: pd.DataFrame, first: Collection[str] = (), *, lower: bool) -> list[str]:
    """The labels that a figure of at most `_MOST_LINES` coloured lines does not colour: those of `first`
    go before others, better means over all points before worse ones.

    Args:
        lower: whether lower scores are better.
    """
    means = rows.groupby("label", sort=False)["mean"].mean().dropna()
    ranked = means.sort_values(ascending=lower, kind="stable").index
    return sorted(ranked, key=lambda label: label not in first)[_MOST_LINES:]


def breakdown(group: Group, part: pd.DataFrame) -> Drawn:
    """Score against a record field at the lowest rate, a line per method (points where values are no
    numbers)."""
    lowest = part["rate"].min()
    part = part[part["measure"].eq("score") & (part["rate"].eq(lowest) | part["rate"].isna())]
    by, ticks = str(part["by"].iloc[0]), list(part["value"].unique())
    label = part["variant"].map(group.names)
    rows = _scaled(group, part, x=part["value"].map(ticks.index), label=label)
    joined = all(tick[:1].isdigit() for tick in ticks)
    grey = rest_of(rows, lower=group.meta.lower_is_better)
    xlabel = _AXES.get(by, words(by))
    return Drawn(
        f"{stem(group)}-by-{by}",
        f"{group.task}: score by {words(by)}",
        "Mean and 95 % interval over examples. Values are evenly spaced."
        + (f" At rate {lowest:g}." if lowest == lowest else "")
        + (f" In colour: the {_MOST_LINES} best means." if grey else ""),
        lines({"": rows}, xlabel, _score(group), ticks=ticks, joined=joined, grey=grey),
    )


def grid_of(group: Group, label: str, spec: Heatmap) -> pd.DataFrame:
    """y x x means of one variant over the cells that any variant has; NaN where nothing was scored."""
    records = group.records.dropna(subset=[spec.x, spec.y])
    mine = group.good[group.good["variant"] == label]
    grid = mine.pivot_table(index=spec.y, columns=spec.x, values="score", aggfunc="mean")
    return grid.reindex(
        index=sorted(records[spec.y].unique()), columns=sorted(records[spec.x].unique())
    )


@_styled
def heatmaps(group: Group, spec: Heatmap) -> Drawn | None:
    """The first variants on one colour scale, which all of them share."""
    if not {spec.x, spec.y} <= set(group.records):
        return None
    scale = 100.0 if group.percent else 1.0
    grids = {label: grid_of(group, label, spec) * scale for label in group.labels}
    grids = {label: grid for label, grid in grids.items() if grid.notna().any(axis=None)}
    values = np.concatenate([grid.to_numpy(float).ravel() for grid in grids.values()])
    low, high = (0.0, 100.0) if group.percent else (np.nanmin(values), np.nanmax(values))
    shown = list(grids)[:_MOST_PANELS]
    figure, axes = new_panels(len(shown), 4, (2.3, 2.05), (0.9, 0.6), sharex=True, sharey=True)
    for ax, label in zip(axes, shown, strict=True):
        image = _heat(ax, grids[label], float(low), float(high))
        ax.set_title(_shown(label))
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02)
    bar.ax.set_ylabel(_score(group), fontsize=TEXT)
    assert bar.solids is not None
    bar.solids.set_rasterized(True)  # hundreds of shades, one picture
    _label(figure, axes, *(_AXES.get(name, words(name)) for name in (spec.x, spec.y)))
    title = f"{group.task}: score by {words(spec.x)} and {words(spec.y)}"
    text = "Means on one colour scale; grey cells have no scored example."
    if len(grids) > len(shown):
        text += f" Of {len(grids)} variants."
    return Drawn(f"{stem(group)}-heatmap", title, text, figure)


def _heat(ax: Axes, grid: pd.DataFrame, low: float, high: float) -> Any:
    """One variant's cells; the numbers in them where there are few."""
    values = np.ma.masked_invalid(grid.to_numpy(float))
    ax.set_facecolor("#EEEEEE")
    limits: dict[str, Any] = {"cmap": "viridis", "vmin": low, "vmax": high}
    image = ax.pcolormesh(values, edgecolors="white", linewidth=1, **limits)
    ax.set_ylim(len(grid), 0)
    for set_ticks, names in ((ax.set_xticks, grid.columns), (ax.set_yticks, grid.index)):
        step = math.ceil(len(names) / 8)  # at most about eight labels
        places = np.arange(0, len(names), step) + 0.5
        set_ticks(places, [_shown(as_text(name)) for name in names[::step]])
    if max(len(as_text(name)) for name in grid.columns) > 4:
        ax.tick_params(axis="x", rotation=45)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    for (row, column), value in np.ndenumerate(grid.to_numpy(float)) if values.size <= 64 else ():
        if not math.isnan(value):
            color = "#FDFDFD" if value < (low + high) / 2 else "#111111"
            text = f"{value:.0f}" if high == 100 else f"{value:.2g}"
            look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5}
            ax.text(column + 0.5, row + 0.5, text, in_layout=False, color=color, **look)
    return image


def bars(group: Group, spec: Bars) -> Drawn | None:
    """Mean and standard deviation over repetitions (values of `spec.repeat`, within each the mean; a
    record field ``draw``, a method's draws in one run, is part of the seed). Methods that keep the whole
    cache are left out: their error is rounding."""
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
    rows = rows.sort_values("variant", key=lambda of: of.map(group.labels.index), kind="stable")
    ticks = sorted(rows[spec.x].unique(), reverse=spec.x == "rate")
    rows = rows.assign(
        label=rows["variant"],
        x=rows[spec.x].map(ticks.index),
        low=rows["mean"] - rows["std"],
        high=rows["mean"] + rows["std"],
    )
    named = f"{words(spec.facet or '')} "
    parts = sorted(rows.groupby("panel"), key=lambda part: natural_order(part[0]))
    panels = {named + str(one) if one else "": part for one, part in parts}
    ylabel, names = spec.ylabel or "score", [as_text(tick) for tick in ticks]
    figure = lines(panels, _AXES.get(spec.x, words(spec.x)), ylabel, ticks=names, joined=False)
    text = f"Means; lines: the standard deviation over {repeat.nunique()} {words(spec.repeat)}s."
    return Drawn(f"{stem(group)}-bars", f"{group.task}: {ylabel} by {words(spec.x)}", text, figure)


def curve_figures(group: Group, spec: Curve) -> list[Drawn]:
    """The curves, a panel per data set, with the slopes of the papers' bounds."""
    if spec.y not in group.good:
        return []
    rows = pd.concat([curve.frame for curve in curves_of(group, spec)])
    panels = {str(facet): part for facet, part in rows.groupby("facet", sort=False)}

    def guides(ax: Axes, rows: pd.DataFrame) -> None:
        bounds, first = ax.get_ylim(), rows.iloc[0]
        x = np.array([first["x"], rows["x"].max()])
        look: dict[str, Any] = {"color": _GREY, "linestyle": "--", "linewidth": 0.9}
        for slope in spec.guides:
            ax.plot(x, first["mean"] * (x / x[0]) ** slope, **look)
        ax.set_ylim(bounds)

    axes = spec.xlabel or words(spec.x), spec.ylabel or words(spec.y)
    title = f"{group.task}: {words(spec.y)} against {words(spec.x)}"
    text = "Means with 95 % intervals; dashed in grey: slopes of the papers' bounds."
    figure = lines(panels, *axes, log="xy", also=guides)
    return [Drawn(f"{stem(group)}-scaling", title, text, figure)]


@_styled
def kept_figure(group: Group) -> Drawn | None:
    """What each method kept of one example (see `kvbench.engine.kept.strips_of`), the latest of those
    that most methods say it of: a row of strips per variant, some layers from top to bottom. None where
    no record says it."""
    if "kept" not in group.records:
        return None
    said = group.records.dropna(subset=["kept"])
    said = said[said["method"].ne(BASELINE)].drop_duplicates(["seed", "example_id", "variant"])
    if said.empty:
        return None
    counts = said.groupby(["seed", "example_id"], sort=False)["variant"].transform("size")
    last = said[counts == counts.max()].iloc[-1]
    said = said[said["seed"].eq(last["seed"]) & said["example_id"].eq(last["example_id"])]
    notes = said.set_index("variant")["kept"]
    shown = [variant for variant in group.variants if variant.label in notes.index][:_MOST_PANELS]
    most = max(min(_MOST_LAYERS, len(notes[variant.label]["layers"])) for variant in shown)
    figure, axes = new_panels(len(shown), 1, (7.4, 0.34 + 0.17 * most), (0.0, 0.55), sharex=True)
    for ax, variant in zip(axes, shown, strict=True):
        kept = notes[variant.label]
        held = pd.DataFrame({int(k): np.array(layer) / 100 for k, layer in kept["layers"].items()})
        held = held.sort_index(axis=1).iloc[:, :: math.ceil(held.shape[1] / _MOST_LAYERS)]
        top = max(1.0, float(held.to_numpy().max()))
        color, edges = style_of(variant.method).color, [*held.index * kept["width"], kept["tokens"]]
        for row, layer in enumerate(held):
            heights = held[layer].to_numpy() / top * 0.86 - row
            ax.stairs(heights, edges, baseline=-row, fill=True, color=color, linewidth=0)
        if kept.get("answer"):
            ax.axvspan(*kept["answer"], facecolor="#F3D04E", alpha=0.55, linewidth=0, zorder=0)
        ax.set_xlim(0, kept["tokens"])
        ax.set_ylim(1 - held.shape[1], 1)
        ax.set_yticks([0.43 - row for row in range(held.shape[1])], [f"layer {i}" for i in held])
        ax.tick_params(axis="y", length=0, labelsize=SMALL - 1.5)
        ax.set_title(f"{_shown(variant.label)}   ×{top:.1f}", loc="left", pad=2)
    axes[-1].set_xlabel("token of the prompt", fontsize=TEXT)
    caption = (
        f"Example {printable(str(last['example_id']))}. From left to right the prompt's tokens; height:"
        " the weight that a layer's cache holds of each piece, per token and mean over KV heads (full"
        " height is the number beside the name; the exact cache holds 1 everywhere). Marked: where the"
        " answer stands. Entries that are no single token's are not shown."
    )
    title = f"What each method kept: {group.task} on {group.model}"
    return Drawn(f"kept-{stem(group)}", title, caption, figure)
