"""Drawing with matplotlib: numbers with intervals against x (`lines`) and in named rows (`rows`), grids
of numbers (`grids`), and the files that a figure is (`Drawn`).

Figures are built as objects, without pyplot, of panels of a fixed size with the room around them that
their texts take (`panels_of`). A name that records hold is drawn as it is: "$" begins no formula.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator
from scipy.optimize import isotonic_regression

from kvbench.errors import one_line, printable
from kvbench.records.store import safe_name
from kvbench.report.runs import digest
from kvbench.report.stats import Array
from kvbench.report.style import GAPS, GRID, INK, LIGHT_GREY, ON_DARK, SOFT, style_of

FileType = Literal["svg", "png", "pdf"]
TEXT, SMALL = 8.5, 8.0
"""Font sizes of labels and titles, and of everything smaller, in points."""
WIDEST = 8.0
"""Inches of the widest figure with panels."""
DOTS_PER_INCH, MOST_PIXELS = 160, 32_000
"""Resolution of PNG files; the longest side that they may have."""
LONGEST_NAME = 60
"""Characters of a name that a figure shows."""
GAP = 0.008
"""Between the points of two lines at one x, as a share of the axis."""
_FAR = 0.8
"""To a line that ends within this share of the axes' width leads no line from its label."""
_LINE = 0.15
"""Inches of a line of text."""
_RC: Any = {
    "text.parse_math": False,
    "pdf.fonttype": 42,  # TrueType: many venues refuse Type 3 fonts
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "kvbench",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # others are narrower and fit
    "font.size": SMALL,
    "axes.titlesize": TEXT,
    "axes.labelsize": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), SOFT),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK),
}
styled = rc_context(_RC)
"""Sets matplotlib's settings while a figure is made: a decorator."""
_SVG = "http://www.w3.org/2000/svg"
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


@dataclass(frozen=True)
class Drawn:
    """A figure and the words that go with it.

    Attributes:
        name: file name stem, unique within an experiment.
        caption: what is shown, how it was measured, what the marks mean.
        draw: draws it, once it is asked for; takes ``above``.
        in_wandb: whether W&B has it, too.
        above: a sentence that stands above it.
    """

    name: str
    title: str
    caption: str
    draw: Callable[..., Figure]
    in_wandb: bool = False
    above: str = ""

    @cached_property
    def figure(self) -> Figure:
        """The figure that `draw` draws. Where a record's values make that impossible, nothing but a note
        of it, so that the rest of the report is still written."""
        try:
            return self.draw(above=self.above)
        except Exception as failure:  # noqa: BLE001 - whatever a record's values do to matplotlib
            text = textwrap.fill(f"Not drawn: {one_line(failure)}", width=70)
            figure = Figure(figsize=(5, 1), facecolor="white")
            figure.text(0.5, 0.5, text, ha="center", va="center")
        return figure

    @property
    def width(self) -> int:
        """Pixels (CSS) that the figure is wide at its own size."""
        return round(96 * self.figure.get_figwidth())

    @cached_property
    def svg(self) -> str:
        """The figure as SVG, for a page and as a file."""
        return self.encoded("svg").decode()

    def encoded(self, file_type: FileType) -> bytes:
        """The figure's file: SVG with its text as text, PNG, or PDF with embedded fonts; the same bytes
        for the same records."""
        buffer = io.BytesIO()
        dpi = min(DOTS_PER_INCH, MOST_PIXELS / max(self.figure.get_size_inches()))
        with rc_context(_RC), warnings.catch_warnings():
            # matplotlib warns of names that no font has, and of axes without room
            warnings.filterwarnings("ignore", r"Glyph|constrained_layout not applied", UserWarning)
            if file_type == "png":  # savefig would lay out and draw twice
                self.figure.set_dpi(dpi)
                FigureCanvasAgg(self.figure).print_png(buffer, metadata={"Software": None})
            elif file_type == "pdf":
                about: Any = {"CreationDate": None}
                self.figure.savefig(buffer, format="pdf", dpi=dpi, metadata=about)
            else:
                self.figure.patch.set_visible(False)
                FigureCanvasSVG(self.figure).print_svg(buffer, metadata={"Date": None})
                self.figure.patch.set_visible(True)
                return self._for_pages(buffer.getvalue())
        return buffer.getvalue()

    def _for_pages(self, raw: bytes) -> bytes:
        """matplotlib's SVG with a title and a description; with ids and classes that no other figure of
        a page has; and with the colours of `ON_DARK` where the reader's ground is dark."""
        root = ElementTree.fromstring(raw)
        for metadata in root.findall(f"{{{_SVG}}}metadata"):
            root.remove(metadata)
        used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', raw.decode()))
        own = f"f{digest(self.name)}-"
        classes: dict[str, str] = {}
        for element in root.iter():
            element.tail = None  # blanks between elements are a third of the file
            if element.get("id") not in used:
                element.attrib.pop("id", None)
            if style := element.attrib.pop("style", None):
                element.set("class", classes.setdefault(style, f"{own}{len(classes)}"))
            for key, value in element.items():
                if key == "id":
                    element.set(key, own + value)
                elif key.endswith("href") or key == "clip-path":
                    element.set(key, re.sub(r"^#|(?<=^url\()#", f"#{own}", value))
                elif key in ("d", "x", "y", "transform") and not element.tag.endswith("image"):
                    shorter = re.sub(r"\d+\.\d{3,}", _two_digits, value)
                    element.set(key, " ".join(shorter.split()))
        look = "svg *{stroke-linejoin:round;stroke-linecap:butt}"
        dark = ""
        for style, name in classes.items():
            on_dark = re.sub("#[0-9a-f]{6}", lambda color: ON_DARK.get(color[0], color[0]), style)
            look += f".{name}{{{style}}}"
            dark += f".{name}{{{on_dark}}}" if on_dark != style else ""
        for element in root.iter(f"{{{_SVG}}}style"):
            element.text = f"{look}@media screen and (prefers-color-scheme:dark){{{dark}}}"
        root.set("role", "img")
        for place, (tag, text) in enumerate((("title", self.title), ("desc", self.caption))):
            child = ElementTree.Element(f"{{{_SVG}}}{tag}")
            child.text = printable(text)
            root.insert(place, child)
        return ElementTree.tostring(root, encoding="utf-8")

    def file(self, file_type: FileType) -> str:
        """The path of its file in the experiment's folder."""
        return f"figures/{safe_name(self.name)}.{file_type}"

    def write(self, folder: Path, file_type: FileType) -> Path:
        path = folder / self.file(file_type)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.svg.encode() if file_type == "svg" else self.encoded(file_type))
        return path


def _two_digits(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}"


def shown_name(text: str) -> str:
    return printable(text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…")


def panels_of(
    titles: Sequence[str],
    size: tuple[float, float],
    *,
    xlabel: str,
    ylabel: str = "",
    names: Sequence[str] = ("0.0001",),
    ticks: Sequence[str] = ("0",),
    turned: bool = False,
    ends: Sequence[str] = (),
    legend: Mapping[str, Any] | None = None,
    explained: Mapping[str, Any] | None = None,
    above: str = "",
    **share: Any,
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, and the panels' axes.

    Args:
        size: the width and height of a panel, in inches.
        xlabel, ylabel: labels that stand once for all panels.
        names, ticks: texts beside the y axis and below the x axis, which is `turned` upwards or not.
        ends: texts to the right of each panel.
        legend, explained: handles by name that stand above and below all panels.
        above: a sentence above all.
        share: for `Figure.subplots`.
    """
    count, titles = len(titles), [_shown_lines(title) for title in titles]
    title = _LINE * max(text.count("\n") + 1 for text in titles) + 0.06 if any(titles) else 0.12
    below = 0.1 + (_width(ticks) if turned else _LINE * (1 + max(t.count("\n") for t in ticks)))
    left = 0.14 + _width(names) + (_LINE + 0.06 if ylabel else 0)
    right = 0.36 + _width(ends) if ends else 0.14
    between = right + 0.1 if share.get("sharey") else right + left
    columns = int((WIDEST - left - right + between) / (size[0] + between))
    columns = max(1, min(count, columns))
    num_rows = math.ceil(count / columns)
    width = left + columns * (size[0] + between) - between + right
    sentences = textwrap.wrap(above, width=round(14 * width))
    named, marks = (_in_columns(entries or {}, width) for entries in (legend, explained))
    top = title + named.height + 0.13 * len(sentences)
    bottom = below + (_LINE + 0.04) + marks.height
    between_rows = title + 0.1 + (0 if share.get("sharex") else below)
    height = top + num_rows * (size[1] + between_rows) - between_rows + bottom
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    grid = {"left": left / width, "right": 1 - right / width}
    grid |= {"top": 1 - top / height, "bottom": bottom / height}
    grid |= {"wspace": between / size[0], "hspace": between_rows / size[1]}
    made = figure.subplots(num_rows, columns, squeeze=False, gridspec_kw=grid, **share)
    axes = list(made.flat)
    for ax in axes[count:]:
        ax.remove()
    for place, (ax, text) in enumerate(zip(axes[:count], titles, strict=True)):
        ax.set_title(text)
        if place + columns >= count:  # the lowest of its column, though not always in the last row
            ax.tick_params(axis="x", labelbottom=True)
    middle: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": TEXT}
    across, up = (grid["left"] + grid["right"]) / 2, (grid["bottom"] + grid["top"]) / 2
    at = bottom - below - _LINE / 2 - 0.02
    figure.text(across, at / height, xlabel, **middle)
    figure.text((_LINE / 2 + 0.04) / width, up, ylabel, rotation=90, **middle)
    figure.text(0.5, 1, "\n".join(sentences), ha="center", va="top", fontsize=7)
    for entries, place_of, y in (
        (named, "upper", 1 - 0.13 * len(sentences) / height),
        (marks, "lower", 0.0),
    ):
        if entries.named:
            look: dict[str, Any] = {"ncols": entries.columns, "borderaxespad": 0.2}
            look |= {"handletextpad": 0.5, "loc": f"{place_of} center", "bbox_to_anchor": (0.5, y)}
            handles = list(entries.named.values())
            texts = [shown_name(name) for name in entries.named]
            figure.legend(handles, texts, fontsize=SMALL, **look)
    return figure, axes[:count]


class _Legend(NamedTuple):
    named: Mapping[str, Any]
    columns: int
    height: float


def _in_columns(named: Mapping[str, Any], width: float) -> _Legend:
    columns = max(1, min(6, len(named), int(width / (_width(named) + 0.55))))
    rows_of_it = math.ceil(len(named) / columns)
    return _Legend(named, columns, 0.19 * rows_of_it + 0.08 if named else 0.0)


def _width(texts: Iterable[str]) -> float:
    """Inches of the widest of these texts."""
    font = FontProperties(family=_RC["font.sans-serif"][0], size=SMALL)
    lines = (line for text in texts for line in _shown_lines(text).split("\n"))
    sizes = (text_to_path.get_text_width_height_descent(line, font, False)[0] for line in lines)
    return max(sizes, default=0.0) / 72


def _shown_lines(text: str) -> str:
    return "\n".join(map(shown_name, text.split("\n")))


_RING: dict[str, Any] = {"markersize": 9, "markerfacecolor": "none", "markeredgecolor": SOFT}


def ring() -> Line2D:
    """The ring around points of the Pareto set, for what is explained below panels."""
    return Line2D([], [], marker="o", linestyle="none", **_RING)


def interval_bar(marker: str) -> Line2D:
    """An interval, "|" or "_", for what is explained below panels."""
    return Line2D([], [], marker=marker, linestyle="none", color=SOFT, markersize=9)


def _errorbar(ax: Axes, at: Any, part: pd.DataFrame, *, across: bool, **more: Any) -> None:
    """Draw means with their intervals, along x where `across`, else along y; `at` is where the points
    lie on the other axis, `more` goes before the method's own style. Rows that are ``ringed`` have a
    ring around their point."""
    mean, low, high = (part[key].to_numpy(float) for key in ("mean", "low", "high"))
    x, y = (mean, at) if across else (at, mean)
    look = _look(str(part["method"].iloc[0]))
    spread = np.nan_to_num(np.clip([mean - low, high - mean], 0, None))  # 0 where none is known
    look |= {"elinewidth": 0.9, "xerr" if across else "yerr": spread}
    look |= {"ecolor": to_rgba(look["color"], 1 if across else 0.5)}
    ax.errorbar(x, y, **look | more)
    ringed = part["ringed"].to_numpy(bool) if "ringed" in part else np.zeros(len(part), bool)
    if ringed.any():
        ax.plot(np.array(x)[ringed], np.array(y)[ringed], "o", zorder=5, **_RING)


def _look(method: str) -> dict[str, Any]:
    style = style_of(method)
    size = {"*": 8.0, "P": 6.0, "X": 6.0}.get(style.marker, 4.8)
    return {"color": style.color, "marker": style.marker, "markersize": size}


@styled
def rows(
    panels: Mapping[str, pd.DataFrame],
    xlabel: str,
    *,
    explained: Mapping[str, Any],
    above: str = "",
) -> Figure:
    """Numbers with intervals, a row for each name, a panel for each frame.

    Args:
        panels: by title, frames with ``label`` (the name), ``method``, ``mean``, ``low``, ``high`` and
            perhaps ``ringed``. Rows stand in the order in which the first panel has them.
        explained: marks that stand below the panels, by what they mean.
        above: a sentence above all.
    """
    names = list(dict.fromkeys(name for frame in panels.values() for name in frame["label"]))
    size = (2.9 if len(panels) == 1 else 1.6, 0.1 + 0.17 * len(names))
    around: dict[str, Any] = {"xlabel": xlabel, "names": names, "explained": explained}
    figure, axes = panels_of(list(panels), size, above=above, sharex=True, sharey=True, **around)
    for ax, frame in zip(axes, panels.values(), strict=True):
        for row, name in zip(frame.index, frame["label"], strict=True):
            one = frame.loc[[row]]
            _errorbar(ax, [names.index(name)], one, across=True, linestyle="none")
        ax.set_yticks(range(len(names)), [shown_name(name) for name in names])
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.grid(axis="x")
    return figure


@styled
def lines(
    panels: Mapping[str, pd.DataFrame],
    xlabel: str,
    ylabel: str,
    *,
    ticks: Callable[[pd.DataFrame], Mapping[float, str]],
    explained: Mapping[str, Any],
    log: str = "",
    baseline: str = "",
    joined: bool = True,
    grey: Collection[str] = (),
    above: str = "",
) -> Figure:
    """Numbers with intervals against x, a line for each label, a panel for each frame. In up to two
    panels the labels stand at the ends of their lines, in others and without lines in a legend.

    Args:
        panels: by title, frames with ``label``, ``method``, ``x``, ``mean``, ``low``, ``high`` and
            perhaps ``ringed``.
        ticks: the places of a panel's ticks on the x axis, with their names.
        explained: marks that stand below the panels, by what they mean.
        log: the axes that are logarithmic, "x", "y" or "xy".
        baseline: the label whose first number is drawn as a dashed line across all x.
        joined: whether a line joins the means of a label.
        grey: labels that are drawn thin and grey, without intervals; their number stands below.
        above: a sentence above all.
    """
    every = pd.concat(panels.values()).dropna(subset=["mean"])
    named: dict[str, Any] = {}
    for label, method in every.drop_duplicates("label")[["label", "method"]].to_numpy():
        if label not in grey:
            look = _look(method) | {"linewidth": 1.3 if joined else 0}
            look |= {"marker": "", "linestyle": "--"} if label == baseline else {}
            named[label] = Line2D([], [], **look)
    below = dict(explained)
    if every["low"][every["label"] == baseline].notna().any():
        below[f"95 % interval of {baseline}"] = Patch(color=style_of(baseline).color, alpha=0.15)
    if grey:
        below[f"{len(grey)} others"] = Line2D([], [], color=LIGHT_GREY, marker=".")
    at_ends = joined and len(panels) <= 2
    height = max(1.9, 1.3 * SMALL / 72 * len(named)) if at_ends else 1.6
    width = {1: 2.6, 2: 2.1}[len(panels)] if at_ends else 3.6 if len(panels) == 1 else 1.7
    names = [ticks(frame) for frame in panels.values()]
    texts = [text for each in names for text in each.values()]
    turned = not log and _width(texts) > width / max(map(len, names))
    figure, axes = panels_of(
        list(panels),
        (width, height),
        xlabel=xlabel,
        ylabel=ylabel,
        names=["100" if every["mean"].max() > 1 else "0.001" if "y" in log else "0.00"],
        ticks=texts,
        turned=turned,
        ends=list(named) if at_ends else (),
        legend={} if at_ends else named,
        explained=below,
        above=above,
        sharey=True,
    )
    drawn: list[tuple[pd.DataFrame, pd.DataFrame]] = []
    for ax, frame in zip(axes, panels.values(), strict=True):
        is_baseline = frame["label"] == baseline
        if "x" in log:
            ax.set_xscale("log")
        if "y" in log:
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter(NullFormatter())
        for row in frame[is_baseline].head(1).to_dict("records"):
            color = style_of(row["method"]).color
            ax.axhline(row["mean"], color=color, linestyle="--", linewidth=1)
            if not math.isnan(row["low"]):
                ax.axhspan(row["low"], row["high"], color=color, alpha=0.08, linewidth=0)
        known = frame[~is_baseline].dropna(subset=["mean"])
        known = known.sort_values("x", kind="stable", ignore_index=True)
        in_colour = known[~known["label"].isin(grey)]
        step = 0.0 if joined else 0.8 / max(1, in_colour["label"].nunique())
        places = _beside(in_colour, step, log="x" in log)
        for _, part in in_colour.groupby("label", sort=False):
            look = {"linewidth": 1.3} if joined else {"linestyle": "none"}
            _errorbar(ax, places[part.index].to_numpy(float), part, across=False, **look)
        for _, part in known[known["label"].isin(grey)].groupby("label", sort=False):
            look = {"color": LIGHT_GREY, "marker": ".", "yerr": None, "zorder": 1}
            look |= {"linewidth": 0.8} if joined else {"linestyle": "none"}
            _errorbar(ax, part["x"].to_numpy(float), part, across=False, **look)
        drawn.append((known, in_colour.assign(x=places)))
    # Names stand where the points do, so they wait for the points of all panels, which share an axis.
    for ax, frame, names_of, (known, in_colour) in zip(
        axes, panels.values(), names, drawn, strict=True
    ):
        on_front = known[known["label"].isin(grey) & known.get("ringed", False)]
        _name_points(ax, on_front.groupby("label", sort=False).tail(1))
        texts = list(names_of.values())
        if log:
            ax.autoscale_view()
            at = [(x, max(every["mean"].max(), 1e-9)) for x in names_of]
            in_axes = (ax.transScale + ax.transLimits).transform(at)
            texts = _without_overlap(texts, in_axes[:, 0] * width)
        ax.set_xticks(list(names_of), [_shown_lines(text) for text in texts])
        ax.tick_params(axis="x", rotation=90 if turned else 0)
        ax.xaxis.set_minor_locator(NullLocator())
        ax.grid(axis="y")
        if at_ends:
            ends = in_colour.groupby("label", sort=False).tail(1)
            exact = frame[frame["label"] == baseline].head(1)
            ends = pd.concat([ends, exact.assign(x=ax.get_xlim()[1])])
            _name_ends(ax, ends, 1.3 * SMALL / 72 / height, dashed=baseline)
    return figure


def _without_overlap(texts: Iterable[str], places: Array) -> list[str]:
    """These texts, centred at places in inches, without all but their first line, or empty, where they
    would touch one to the right of them."""
    shown: list[str] = []
    left = math.inf
    for text, place in reversed(list(zip(texts, places, strict=True))):
        for shorter in (text, text.split("\n")[0], ""):
            half = _width([shorter]) / 2
            if not shorter or place + half + 0.06 <= left:
                break
        shown.append(shorter)
        left = place - half if shorter else left
    return shown[::-1]


def _name_points(ax: Axes, points: pd.DataFrame) -> None:
    """Write the label of each point below it, towards the middle of the axes; one whose place is taken
    stands a line lower."""
    ax.autoscale_view()
    taken: list[tuple[bool, float]] = []
    for row in points.sort_values("mean", ascending=False).to_dict("records"):
        x, y = (ax.transScale + ax.transLimits).transform((row["x"], row["mean"]))
        line = 1.1 * 7 / 72 / (ax.get_position().height * ax.get_figure().get_figheight())  # type: ignore[union-attr]
        is_right, place = bool(x > 0.5), y - line
        while any(side == is_right and abs(place - other) < line for side, other in taken):
            place -= line
        taken.append((is_right, place))
        ax.text(
            x - 0.02 if is_right else x + 0.02,
            place,
            shown_name(row["label"]),
            fontsize=7,
            color=SOFT,
            ha="right" if is_right else "left",
            va="center",
            transform=ax.transAxes,
        )


def _name_ends(ax: Axes, ends: pd.DataFrame, step: float, *, dashed: str) -> None:
    """Write the labels of lines that end in these points to the right of the axes, one above the other,
    at least `step` apart, as a share of the axes' height. A thin line leads to each from an end near by;
    a marker says which it is."""
    limits = ax.get_xlim(), ax.get_ylim()
    to_axes = ax.transScale + ax.transLimits
    ends = ends.sort_values("mean")
    at = to_axes.transform(ends[["x", "mean"]].to_numpy(float))
    order = step * np.arange(len(at))
    beside = isotonic_regression(at[:, 1] - order).x if len(at) else order
    beside = beside.clip(0, max(0.0, 1 - order[-1:].sum())) + order
    right = 1 + 0.12 / ax.get_position().width / ax.get_figure().get_figwidth()  # type: ignore[union-attr]
    beyond: dict[str, Any] = {"transform": ax.transAxes, "clip_on": False}
    for row, (x, y), place in zip(ends.to_dict("records"), at, beside, strict=True):
        look = _look(row["method"]) | {"markersize": 4.8}
        if x > _FAR:
            ax.plot([x, right], [y, place], color=look["color"], linewidth=0.5, **beyond)
        if row["label"] != dashed:
            ax.plot([right], [place], **look, **beyond)
        name = shown_name(row["label"])
        ax.text(2 * right - 1, place, name, va="center", transform=ax.transAxes)
    ax.set_xlim(limits[0])
    ax.set_ylim(limits[1])


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


@styled
def grids(
    panels: Mapping[str, pd.DataFrame],
    xlabel: str,
    ylabel: str,
    limits: tuple[float, float],
    *,
    above: str = "",
) -> Figure:
    """Numbers by two fields, as colours and in figures, a panel for each frame, whose index is y and
    whose columns are x (texts), all on one scale from the lower to the upper limit."""
    first = next(iter(panels.values()))
    low, high = limits
    size = max(0.29 * first.shape[1], _width(panels)), 0.18 * first.shape[0]
    turned = _width(first.columns) > 0.26
    around: dict[str, Any] = {"xlabel": xlabel, "ylabel": ylabel, "turned": turned}
    around |= {"names": list(first.index), "ticks": list(first.columns), "above": above}
    figure, axes = panels_of(list(panels), size, sharex=True, sharey=True, **around)
    for ax, grid in zip(axes, panels.values(), strict=True):
        numbers = grid.to_numpy(float)
        ax.set_facecolor(GAPS)
        look: dict[str, Any] = {"cmap": "viridis", "vmin": low, "vmax": high, "linewidth": 0}
        ax.pcolormesh(np.ma.masked_invalid(numbers), **look)
        ax.set_ylim(len(grid), 0)
        for set_ticks, names in ((ax.set_xticks, grid.columns), (ax.set_yticks, grid.index)):
            set_ticks(np.arange(len(names)) + 0.5, [shown_name(name) for name in names])
        ax.tick_params(axis="x", rotation=90 if turned else 0)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        for (row, column), value in np.ndenumerate(numbers):
            if not math.isnan(value):
                text = f"{value:.0f}" if high == 100 else f"{value:.2g}"
                color = "#fdfdfe" if value < (low + high) / 2 else "#0a0a0b"
                look = {"ha": "center", "va": "center", "fontsize": 7, "color": color}
                ax.text(column + 0.5, row + 0.5, text, **look)
    return figure
