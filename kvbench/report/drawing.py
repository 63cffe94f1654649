"""Drawing with matplotlib, for files and W&B: figures with panels, numbers with intervals in rows
(`forest`) and against x (`lines`), and what a figure's file is made of (`Drawn`).

Figures are built as objects, without pyplot. A name that records hold is drawn as it is, whatever it
holds: "$" begins no formula.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kvbench.errors import one_line, printable
from kvbench.records.store import safe_name
from kvbench.report.runs import Group, words
from kvbench.report.style import style_of

FigureKind = Literal["memory", "heatmap", "bars", "breakdown", "kept"]
FileType = Literal["png", "pdf"]
Draw = Callable[[Axes, pd.DataFrame], None]
TEXT, SMALL = 9.0, 8.0
"""Font sizes of labels and titles, and of everything smaller, in points."""
DOTS_PER_INCH, MOST_PIXELS = 160, 32_000
"""Resolution of PNG files; the longest side that they may have."""
LONGEST_NAME = 60
"""Characters of a name that a figure shows."""
AXIS_LABELS = {
    "length": "context length (tokens)",
    "depth": "depth (%)",
    "num_lines": "number of lines",
    "prompt_tokens": "prompt length (tokens)",
    "rate": "rate (share of the middle that is kept); below it the measured ratio",
}
"""Labels of axes that show a record field, where its name does not say enough."""
LIGHT_GREY = "#C4C4C4"
GAP = 0.008
"""Between the points of two lines at one x, as a share of the axis."""
_RC: Any = {
    "text.parse_math": False,
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
styled = rc_context(_RC)
"""Sets matplotlib's settings while a figure is made: a decorator."""


@dataclass(frozen=True)
class Drawn:
    """A figure and the words that go with it.

    Attributes:
        name: file name stem, unique within an experiment.
        caption: what is shown, how it was measured, what the marks mean.
        draw: draws it, once it is asked for.
        kind: what sort of figure it is; "memory" shows the score against the bytes held.
        chart: what a page shows of it; None where the chart of scores shows it (`scores_chart`).
        above: a sentence that stands above it.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]
    kind: FigureKind
    chart: Mapping[str, Any] | None = None
    above: str = ""

    def file(self, file_type: FileType) -> str:
        """The path of its file in the experiment's folder."""
        return f"figures/{safe_name(self.name)}.{file_type}"

    @property
    def has_file(self) -> bool:
        """Whether every report has its file: not of what a page says in words (kept tokens) or draws as
        one choice of many (a breakdown), which are files where all are asked for."""
        return self.kind not in ("kept", "breakdown")

    @cached_property
    def figure(self) -> Figure:
        """What `draw` draws. Where a record's values make that impossible, nothing but a note of it, so
        that the rest of the report is still written."""
        try:
            figure = self.draw()
        except Exception as failure:  # noqa: BLE001 - whatever a record's values do to matplotlib
            text = textwrap.fill(f"Not drawn: {one_line(failure)}", width=70)
            figure = Figure(figsize=(5, 1), facecolor="white")
            figure.text(0.5, 0.5, text, ha="center", va="center")
        if self.above:
            lines = textwrap.wrap(self.above, width=round(14 * figure.get_figwidth()))
            figure.suptitle("\n".join(lines), fontsize=7)
        return figure

    def encoded(self, file_type: FileType) -> bytes:
        """The figure's file (PDF with embedded fonts); the same bytes for the same records."""
        buffer = io.BytesIO()
        dpi = min(DOTS_PER_INCH, MOST_PIXELS / max(self.figure.get_size_inches()))
        with rc_context(_RC), warnings.catch_warnings():
            # matplotlib warns of names that no font has, and of axes without room
            warnings.filterwarnings("ignore", r"Glyph|constrained_layout not applied", UserWarning)
            if file_type == "pdf":
                self.figure.savefig(buffer, format="pdf", dpi=dpi, metadata={"CreationDate": None})
            else:  # savefig would lay out and draw twice
                self.figure.set_dpi(dpi)
                FigureCanvasAgg(self.figure).print_png(buffer, metadata={"Software": None})
        return buffer.getvalue()


def stem(group: Group) -> str:
    """What the file names of a group's figures begin with."""
    names = (re.sub(r"[^\w.]+", "-", name).strip("-")[:80] for name in (group.task, group.model))
    return "-".join(names)


def score_axis(group: Group) -> str:
    return "score (%)" if group.percent else words(group.meta.score_unit)


def new_panels(
    count: int, columns: int, size: tuple[float, float], around: tuple[float, float], **share: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` axes in at most `columns` columns, and these axes. `size` is the width and
    height of each panel, `around` the room beside and above all, in inches; `share` is for
    `Figure.subplots`."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    width, height = around[0] + size[0] * columns, around[1] + size[1] * rows
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, **share).flat)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def shown_name(text: str) -> str:
    return printable(text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…")


def label_axes(figure: Figure, axes: Sequence[Axes], x: str, y: str) -> None:
    """Label the axes, once for all where there are several, and put one legend above them."""
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
    """Draw means with their intervals, along x where `across`, else along y; `at` is where the points
    lie on the other axis, `more` goes before the method's own style."""
    mean, low, high = (rows[key].to_numpy(float) for key in ("mean", "low", "high"))
    x, y = (mean, at) if across else (at, mean)
    style = style_of(str(rows["method"].iloc[0]))
    size = {"*": 8.5, "P": 6.0, "X": 6.0}.get(style.marker, 4.8)
    look: dict[str, Any] = {"color": style.color, "marker": style.marker, "markersize": size}
    spread = np.nan_to_num(np.clip([mean - low, high - mean], 0, None))  # 0 where none is known
    look |= {"elinewidth": 0.9, "xerr" if across else "yerr": spread}
    ax.errorbar(x, y, **look | more)


@styled
def forest(frame: pd.DataFrame, xlabel: str) -> Figure:
    """Numbers with intervals, a named row for each: columns ``row`` (the name), ``method``, ``mean``,
    ``low``, ``high``."""
    names = list(frame["row"])
    figure, (ax,) = new_panels(1, 1, (5.6, 0.4 + 0.21 * len(names)), (1.2, 0.5))
    for place, row in enumerate(frame.index):
        _errorbar(ax, [place], frame.loc[[row]], across=True, linestyle="none")
    ax.set_yticks(range(len(names)), [shown_name(name) for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="x")
    label_axes(figure, [ax], xlabel, "")
    return figure


@styled
def lines(
    panels: Mapping[str, pd.DataFrame],
    xlabel: str,
    ylabel: str,
    *,
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
            ``ringed`` says which points have a ring around them.
        log: the axes that are logarithmic, "x", "y" or "xy".
        ticks: names of x = 0, 1, ..., of one line or several.
        baseline: the label whose first number is drawn as a dashed line across all x.
        joined: whether a line joins the means of a label.
        grey: labels that are drawn thin and grey, without intervals; the legend has their number.
        also: draws further lines, given the axes and the panel's frame.
    """
    size = (5.6, 3.4) if len(panels) == 1 else (3.0, 2.4)
    figure, axes = new_panels(len(panels), 3, size, (1.0, 0.9), sharey=True)
    for ax, (title, frame) in zip(axes, panels.items(), strict=True):
        is_baseline = frame["label"] == baseline
        for row in frame[is_baseline].head(1).to_dict("records"):
            color = style_of(row["method"]).color
            ax.axhline(row["mean"], color=color, linestyle="--", linewidth=1, label=baseline)
            if not math.isnan(row["low"]):
                ax.axhspan(row["low"], row["high"], color=color, alpha=0.08, linewidth=0)
        known = frame[~is_baseline].dropna(subset=["mean"])
        known = known.sort_values("x", kind="stable", ignore_index=True)
        in_colour = known[~known["label"].isin(grey)]
        step = 0.0 if joined else 0.8 / max(1, known["label"].nunique())
        places = _beside(in_colour, step, log="x" in log)
        for label, rows in in_colour.groupby("label", sort=False):
            x = places[rows.index].to_numpy(float)
            look: dict[str, Any] = {"linewidth": 1.4} if joined else {"linestyle": "none"}
            _errorbar(ax, x, rows, across=False, label=shown_name(str(label)), **look)
            if "ringed" in rows:
                ringed = rows["ringed"].to_numpy(bool)
                ring: dict[str, Any] = {"s": 80, "facecolors": "none", "edgecolors": "0.25"}
                ax.scatter(x[ringed], rows["mean"][ringed], linewidths=0.8, zorder=5, **ring)
        for _, rows in known[known["label"].isin(grey)].groupby("label", sort=False):
            look = {"color": LIGHT_GREY, "marker": ".", "yerr": None, "zorder": 1}
            look |= {"linewidth": 0.8} if joined else {"linestyle": "none"}
            x = rows["x"].to_numpy(float)
            _errorbar(ax, x, rows, across=False, label=f"{len(grey)} others", **look)
        if "x" in log:
            ax.set_xscale("log", base=2)
            few = frame["x"].max() < 4 * frame["x"].min()
            _plain_ticks(ax.xaxis, LogLocator(base=2, subs=(1.0, 1.5) if few else (1.0,)))
        if "y" in log:
            ax.set_yscale("log")
            _plain_ticks(ax.yaxis, LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        if ticks:
            names = ["\n".join(map(shown_name, tick.split("\n"))) for tick in ticks]
            ax.set_xticks(range(len(ticks)), names)
        if also:
            also(ax, frame)
        ax.set_title(shown_name(title))
        ax.grid(axis="y")
    label_axes(figure, axes, xlabel, ylabel)
    return figure


def _beside(points: pd.DataFrame, step: float, *, log: bool) -> pd.Series:
    """New x of points, moved so that those of several labels at about one x stand side by side and none
    hides another's interval. Points stay where they are if one label has several at about that x.

    Args:
        points: rows with ``x`` and ``label``, sorted by x.
        step: the distance between neighbours, and how close "about one x" is; 0: `GAP` of the axis.
        log: whether the axis is logarithmic.
    """
    x = points["x"].map(math.log) if log else points["x"].astype(float)
    step = step or GAP * (x.max() - x.min())
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
