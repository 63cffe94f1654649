"""A figure as inline SVG for the page: matplotlib draws it, the page's own colours replace ink and paper
and spots over the points say their numbers on hover and focus.

Matplotlib and not plotly: plotly's script alone is larger than a whole page may be.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from kvbench.report.figures.style import PALETTE

_POINTS_PER_INCH = 72
_RADIUS = 7.0
_INK = {"#000000": "currentColor"} | dict.fromkeys(
    ("#222222", "#333333", "#666666", "#888888"), "var(--soft)"
)
_PAPER = {"#ffffff": "var(--ground)", "#dddddd": "var(--line)", "#eeeeee": "var(--track)"}


@dataclass(frozen=True)
class Spot:
    """Where the page says something: a point, or a box, in data coordinates of its axes.

    Attributes:
        text: e.g. ``snapkv, 200 lines: 98.0 [94.9, 99.2]``.
        size: width and height of a box around (x, y); None for a point.
    """

    ax: Axes
    x: float
    y: float
    text: str
    size: tuple[float, float] | None = None


class Canvas(Figure):
    """A figure that knows the spots on it."""

    spots: list[Spot]


def add_spot(
    ax: Axes, x: float, y: float, text: str, size: tuple[float, float] | None = None
) -> None:
    """Let the page say `text` at a place; other forms of the figure do not change."""
    figure = ax.get_figure(root=True)
    if isinstance(figure, Canvas):
        figure.spots.append(Spot(ax, x, y, text, size))


def svg_of(figure: Figure, name: str, label: str) -> str:
    """The figure, laid out already, as one ``<svg>`` element.

    Args:
        name: unique on the page; ids within the figure are made from it.
        label: what the figure shows, as its text alternative.
    """
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        # not savefig, which draws everything once more before
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :].rpartition("</svg>")[0]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # the same in every figure
    text = re.sub(r"font-family:[^;\"]*; ?", "", text)
    text = re.sub(r' ?transform="rotate\(-?0 [^)]*\)"', "", text)
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{2,}", _shorter, tag[0]), text)
    text = re.sub(r"(?<=[>z])\s+(?=<)|\s+(?=[LCQz] )|\s+(?=z)", "", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    text = re.sub(r'(?<= d=")M [^"]*', _straight, text)
    text = _without_bare_groups(re.sub(r"<defs>\s*</defs>", "", text))
    text = re.sub(r"((?:fill|stroke|color): )(#[0-9a-f]{6})", _colored, text)
    text = re.sub(
        r' clip-path="[^"]*"( style="[^"]*stroke: var\(--ground\)")', r"\1", text
    )  # cells
    width, height = figure.get_size_inches() * _POINTS_PER_INCH
    opening = (
        f'<svg viewBox="0 0 {width:.1f} {height:.1f}" role="group" aria-label="'
        f'{html.escape(label)}">'
    )
    spots = figure.spots if isinstance(figure, Canvas) else ()
    return f"{opening}{text.partition('>')[2].strip()}{_spots(figure, spots, height)}</svg>"


def _without_bare_groups(text: str) -> str:
    """``<g>`` without attributes says nothing, and there are hundreds."""
    bare: list[bool] = []

    def kept(tag: re.Match[str]) -> str:
        if tag[0] != "</g>":
            bare.append(tag[0] == "<g>")
            return "" if bare[-1] else tag[0]
        return "" if bare.pop() else tag[0]

    return re.sub(r"<g\b[^>]*>|</g>", kept, text)


def _straight(path: re.Match[str]) -> str:
    """Lines along an axis, of which bars and steps are made, by one coordinate."""
    parts, at = [], ["", ""]
    for command, *place in re.findall(r"([A-Za-z])((?: -?[\d.]+)*)", path[0]):
        numbers = place[0].split()
        if command == "L" and len(numbers) == 2 and at[1] == numbers[1]:
            parts.append(f"H{numbers[0]}")
        elif command == "L" and len(numbers) == 2 and at[0] == numbers[0]:
            parts.append(f"V{numbers[1]}")
        else:
            parts.append(command + " ".join(numbers))
        at = numbers[-2:] if len(numbers) > 1 else ["", ""]
    return "".join(parts)


def _shorter(number: re.Match[str]) -> str:
    """One decimal: a tenth of a point."""
    return f"{float(number[0]):.1f}".removesuffix(".0")


def _colored(found: re.Match[str]) -> str:
    """Ink and paper in the page's colours, methods in theirs, lifted where the page is dark; what
    encodes a number stays as it is."""
    key, color = found[1], found[2]
    if color in PALETTE:
        return f"{key}color-mix(in srgb,{color},white var(--lift))"
    return key + (_INK | _PAPER).get(color, color)


def _spots(figure: Figure, spots: Sequence[Spot], height: float) -> str:
    scale = _POINTS_PER_INCH / figure.dpi
    parts: list[str] = []
    for spot in spots:
        x, y = spot.ax.transData.transform((spot.x, spot.y)) * scale
        shape = f'<circle cx="{x:.1f}" cy="{height - y:.1f}" r="{_RADIUS:g}"/>'
        if spot.size is not None:
            half = spot.size[0] / 2, spot.size[1] / 2
            corners = [
                spot.ax.transData.transform((spot.x + sign * half[0], spot.y + sign * half[1]))
                * scale
                for sign in (-1, 1)
            ]
            left, right = sorted(corner[0] for corner in corners)
            low, high = sorted(corner[1] for corner in corners)
            shape = (
                f'<rect x="{left:.1f}" y="{height - high:.1f}" width="{right - left:.1f}"'
                f' height="{high - low:.1f}"/>'
            )
        first = "0" if not parts else "-1"
        parts.append(
            f'<g class="spot" tabindex="{first}" role="img"><title>{html.escape(spot.text)}</title>'
            f"{shape}</g>"
        )
    return "".join(parts)
