"""What figures are made of: canvas, axes, legend, names; and their files.

Figures are built as objects, without pyplot and without changing matplotlib's settings.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import Formatter, FuncFormatter, LogLocator, NullFormatter
from numpy.typing import ArrayLike

from kvbench.errors import printable
from kvbench.report.figures.style import Style
from kvbench.report.figures.vector import Canvas, add_spot, svg_of
from kvbench.report.files import file_stem, write_bytes
from kvbench.report.stats.estimate import Estimate

TEXT, SMALL = 9.0, 8.0
_DPI = 160
_MOST_PIXELS = 32_000
"""Along either side of a figure; the drawing library has a limit."""
GREY = "#666666"
MOST_IN_LEGEND = 10
_LONGEST_TICK = 60
_GRID = "#DDDDDD"


@dataclass(frozen=True)
class Drawn:
    """A figure and the words that go with it.

    Attributes:
        name: file name stem, unique within an experiment.
        caption: what is shown, how it was measured, what the marks mean.
        finding: what it says in numbers, as its text alternative.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    finding: str = ""

    @cached_property
    def png(self) -> bytes:
        """The figure as PNG; the same bytes for the same records."""
        return self._bytes("png", {"Software": None})

    @cached_property
    def pdf(self) -> bytes:
        """The figure as PDF with embedded fonts, without a date."""
        return self._bytes("pdf", {"CreationDate": None, "Creator": None, "Producer": None})

    @cached_property
    def svg(self) -> str:
        """The figure as an element of the page."""
        with self._laid_out():
            return svg_of(self.figure, self.name, f"{self.title}. {self.finding or self.caption}")

    def _bytes(self, kind: str, metadata: Mapping[str, Any]) -> bytes:
        buffer = io.BytesIO()
        dpi = min(_DPI, _MOST_PIXELS / max(self.figure.get_size_inches()))
        # TrueType: many venues refuse Type 3 fonts
        with self._laid_out(), rc_context({"pdf.fonttype": 42}):
            self.figure.savefig(buffer, format=kind, dpi=dpi, metadata=dict(metadata))
        return buffer.getvalue()

    @contextmanager
    def _laid_out(self) -> Iterator[None]:
        """Lay out once, it takes long; what "none" leaves beside a colour bar lays out nothing."""
        show_as_text(self.figure)
        with warnings.catch_warnings():  # of names that no font has, or no room: no use to anybody
            warnings.filterwarnings("ignore", r"Glyph|constrained_layout not applied", UserWarning)
            engine = self.figure.get_layout_engine()
            if isinstance(engine, ConstrainedLayoutEngine):
                for ax in self.figure.axes:  # a title is where it is put: no search for room
                    ax.set_title("", loc="right", y=1.0)
                engine.execute(self.figure)
                self.figure.set_layout_engine("none")
            yield


def save_figures(figures: Sequence[Drawn], folder: Path) -> list[Path]:
    """Write every figure as PNG and PDF into a folder."""
    paths = []
    for drawn in figures:
        for suffix, content in ((".png", drawn.png), (".pdf", drawn.pdf)):
            paths.append(write_bytes(folder / f"{file_stem(drawn.name)}{suffix}", content))
    return paths


def new_figure(width: float, height: float) -> Figure:
    figure = Canvas(figsize=(width, height), layout="constrained", facecolor="white")
    figure.spots = []
    FigureCanvasAgg(figure)
    return figure


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
    figure = new_figure(around[0] + size[0] * columns, around[1] + size[1] * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False, **share).flat)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def show_as_text(figure: Figure) -> None:
    """Let every name in the figure, whatever is in it, stand for itself: no formulas, one line each."""
    for text in _texts(figure):
        text.set_text(_as_label(text.get_text()))
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            formatter = axis.get_major_formatter()
            if isinstance(formatter, FuncFormatter):  # what names for ticks become
                axis.set_major_formatter(_Labels(formatter))


def _texts(artist: Artist) -> Iterator[Text]:
    """Every text in an artist but those beside ticks, which formatters write when they are drawn."""
    if isinstance(artist, Text):
        yield artist
    elif isinstance(artist, Axis):
        yield from (artist.label, artist.offsetText)
    else:
        for child in artist.get_children():
            yield from _texts(child)


def _as_label(text: str) -> str:
    """A text that matplotlib shows as it is; unchanged if it is one already."""
    return "\n".join(map(printable, re.sub(r"(?<!\\)\$", r"\$", text).split("\n")))


class _Labels(Formatter):
    """Another formatter's texts as labels beside an axis, which a long one would leave no room."""

    def __init__(self, inner: Formatter) -> None:
        self._inner = inner

    def __call__(self, x: float, pos: int | None = None) -> str:
        """As `Formatter`."""
        text = self._inner(x, pos)
        return _as_label(text if len(text) <= _LONGEST_TICK else f"{text[: _LONGEST_TICK - 1]}…")


def draw_estimates(
    ax: Axes,
    at: ArrayLike,
    estimates: Sequence[Estimate],
    style: Style,
    *,
    scale: float = 1.0,
    horizontal: bool = False,
    size: float = 1.0,
    line: float = 0.0,
    says: Sequence[str] = (),
    **more: Any,
) -> None:
    """Estimates with their intervals, as every figure draws them.

    Args:
        at: places along the other axis. scale: what values are multiplied by (100 for per cent).
        horizontal: intervals lie along x.
        size: of the marker, times its usual size. line: width of a line through them; 0: none.
        says: what the page says at each of them.
        more: for `Axes.errorbar`.
    """
    values = scale * np.array([e.value for e in estimates], dtype=float)
    bounds = scale * np.array([[e.low, e.high] for e in estimates], dtype=float).reshape(-1, 2).T
    spread = np.clip([values - bounds[0], bounds[1] - values], 0, None)
    along = np.asarray(at, dtype=float)
    x, y = (values, along) if horizontal else (along, values)
    ax.errorbar(
        x,
        y,
        **{"xerr" if horizontal else "yerr": spread},
        color=style.color,
        marker=style.marker,
        markersize=size * marker_size(style.marker),
        linestyle="-" if line else "none",
        linewidth=line,
        **{"elinewidth": 0.9, "capsize": 0} | more,
    )
    for here, there, text in zip(x, y, says, strict=False):
        if math.isfinite(here) and math.isfinite(there):
            add_spot(ax, float(here), float(there), text)


def label_axes(figure: Figure, axes: Sequence[Axes], x: str, y: str) -> None:
    """Labels on the axes of a single panel, shared labels beside several."""
    if len(axes) == 1:
        axes[0].set_xlabel(x, fontsize=TEXT)
        axes[0].set_ylabel(y, fontsize=TEXT)
    else:
        figure.supxlabel(x, fontsize=TEXT)
        figure.supylabel(y, fontsize=TEXT)


def style_axes(ax: Axes, grid: Literal["x", "y"] = "y") -> None:
    ax.tick_params(labelsize=SMALL, length=2.5, color=GREY)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(GREY)
    ax.grid(axis=grid, color=_GRID, linewidth=0.6)
    ax.set_axisbelow(True)


def name_lines(figure: Figure, axes: Sequence[Axes]) -> None:
    """Name the lines: a legend of at most ten entries, in as many columns as fit into the figure (at
    most five); of more lines, names at their ends."""
    handles = handles_of(axes)
    if len(handles) > MOST_IN_LEGEND:
        for ax in axes:
            label_ends(ax)
        return
    for columns in range(min(len(handles), 5), 0, -1):
        legend = figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside upper center",
            ncols=columns,
            frameon=False,
            fontsize=SMALL,
            columnspacing=1.3,
            handletextpad=0.5,
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def list_rows(ax: Axes, names: Sequence[str], foot: float = 0.4) -> None:
    """Named rows from the top, with a grid of their values."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - foot, foot - 1)
    style_axes(ax, grid="x")


def write_beside(ax: Axes, text: str, place: tuple[float, float]) -> None:
    """A text to the right of the axes; `place`: as a share of their width, and a row."""
    ax.annotate(
        text,
        place,
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=SMALL,
        annotation_clip=False,
    )


def handles_of(axes: Sequence[Axes]) -> dict[str, Any]:
    """What the legend of several axes shows, by label."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            line = handle[0] if isinstance(handle, ErrorbarContainer) else handle
            found.setdefault(str(label), line)
    return found


def label_ends(ax: Axes) -> None:
    """Name each line, or group of bars, to the right of the axes at the height where it ends."""
    ends = []
    right, _ = max(ax.get_xlim()), ax.get_ylim()  # settles the limits, which the places depend on
    for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
        if isinstance(handle, BarContainer):
            bar = handle.patches[-1]
            x, y, color = bar.get_x() + bar.get_width() / 2, bar.get_height(), bar.get_facecolor()
        else:
            drawn: Any = handle[0] if isinstance(handle, ErrorbarContainer) else handle
            points = np.array(drawn.get_data(), dtype=float).T
            points = points[np.isfinite(points).all(1)]
            if not len(points):
                continue
            (x, y), color = points[-1], drawn.get_color()
            x = min(x, right)  # of a line across all of the axes
        height = (ax.transScale + ax.transLimits).transform((x, y))[1]
        ends.append((height, (x, y), label, color))
    ends.sort(key=lambda end: end[0])
    tall = ax.get_position().height * ax.get_figure(root=True).get_figheight() * 72  # type: ignore[union-attr]
    heights = _apart([end[0] for end in ends], 1.15 * SMALL / tall)
    for height, (_, place, label, color) in zip(heights, ends, strict=True):
        ax.annotate(
            label,
            place,
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            fontsize=SMALL,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6},
        )


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved as little as it takes to be `gap` apart, about where they were."""
    groups: list[list[float]] = []  # each: its centre, how many
    for height in heights:
        groups.append([min(max(height, 0.0), 1.0), 1])
        while (
            len(groups) > 1
            and groups[-1][0] - groups[-2][0] < gap * (groups[-1][1] + groups[-2][1]) / 2
        ):
            centre, count = groups.pop()
            before, others = groups[-1]
            groups[-1] = [(before * others + centre * count) / (others + count), others + count]
    return [
        centre + (i - (count - 1) / 2) * gap for centre, count in groups for i in range(int(count))
    ]


def marker_size(marker: str) -> float:
    """Stars and crosses look smaller than they are."""
    return {"*": 8.5, "P": 6.0, "X": 6.0}.get(marker, 4.8)


def plain_ticks(axis: Axis, locator: LogLocator) -> None:
    """Ticks of a logarithmic axis as plain numbers."""
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
