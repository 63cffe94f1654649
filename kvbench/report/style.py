"""One colour and one marker per method, the same in every figure, table and page."""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """How a method looks: a colour that colour-blind readers can tell, a marker for print in grey."""

    color: str
    marker: str


INK, SOFT, LIGHT_GREY, GRID, GAPS = "#1c2430", "#5a6573", "#c4c4c4", "#dddddd", "#eeeeee"
"""Text and the exact cache; axes; methods beyond those in colour; lines and cells behind all."""
_DARK_GROUND = "#14181d"
"""That of a page (templates/page.css)."""
_CONTRAST = 4.0
"""The least contrast of a colour with the dark ground (WCAG's ratio; lines need 3, text 4.5)."""
_KNOWN = {
    "exact": Style(INK, "o"),
    "topk": Style("#AA4499", "p"),
    "local": Style("#8A8A8A", "v"),
    "streaming_llm": Style("#7A5C2E", "<"),
    "strided": Style("#999933", "H"),
    "fixed": Style("#44AA99", "d"),
    "uniform": Style("#56B4E9", "s"),
    "snapkv": Style("#009E73", "^"),
    "pyramidkv": Style("#0072B2", "P"),
    "h2o": Style("#882255", "X"),
    "solved": Style("#C1121F", "P"),
    "spatten": Style("#661100", "h"),
    "subgen": Style("#E69F00", "D"),
    "subgen_streaming": Style("#B59F2D", ">"),
    "balancekv": Style("#D55E00", "*"),
    "balancekv_turboquant": Style("#9C6644", "*"),
    "balancekv_wildcat": Style("#F4845F", "h"),
    "balancekv_needle": Style("#CC79A7", "p"),
    "balancekv_streaming": Style("#332288", "d"),
    "kvpress": Style("#6699CC", "+"),
    "minference": Style("#117733", "x"),
    "attention_matching": Style("#B5179E", "o"),
    "attention_matching_repeat": Style("#6A0136", "8"),
    "attention_matching_turboquant": Style("#E78AC3", "H"),
    "adakv": Style("#E07552", "s"),
    "expected_attention": Style("#852FDA", "D"),
    "kvzip": Style("#0E7C7B", "v"),
    "kvzip_plus": Style("#C2571A", "^"),
    "kvgrad": Style("#1B4DFF", "D"),
    "kvzip_turboquant": Style("#6B9E00", "d"),
    "pages": Style("#48AC39", "^"),
    "qjl": Style("#DA2F44", "v"),
    "recompress": Style("#156079", "X"),
    "rkv": Style("#7C1C9C", "p"),
    "turboquant": Style("#9966CC", ">"),
    "wildcat": Style("#229BC3", "s"),
}
OF_THE_PAPERS = ("balancekv", "subgen", "h2o")
"""The methods that the papers propose whose experiments kvbench reproduces."""
_COLORS = ("#332288", "#B59F2D", "#CC79A7", "#44AA99", "#661100", "#999933", "#6699CC")
_MARKERS = ("h", "p", ">", "d", "8", "H", "+", "x")


def style_of(method: str) -> Style:
    """The style of a method. Methods that ship with kvbench have one of their own; that of others is
    chosen by their name alone. A form of one that ships (snapkv_released) has its colour and another
    marker."""
    if method in _KNOWN:
        return _KNOWN[method]
    code, base = zlib.crc32(method.encode()), _base_of(method)
    color = _KNOWN[base].color if base else _COLORS[code % len(_COLORS)]
    return Style(color, _MARKERS[code // len(_COLORS) % len(_MARKERS)])


def _on_dark(color: str) -> str:
    """A colour as much lighter as `_CONTRAST` takes."""
    lighter = color
    for share in range(0, 101, 5):
        parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        lighter = "#" + "".join(f"{round(part + (255 - part) * share / 100):02x}" for part in parts)
        if (_luminance(lighter) + 0.05) / (_luminance(_DARK_GROUND) + 0.05) >= _CONTRAST:
            break
    return lighter


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


ON_DARK = {style.color.lower(): _on_dark(style.color) for style in _KNOWN.values()}
ON_DARK |= {color.lower(): _on_dark(color) for color in _COLORS}
ON_DARK |= {
    INK: "#e4e8ed",
    SOFT: "#9aa6b4",
    LIGHT_GREY: "#525c69",
    GRID: "#333b45",
    GAPS: "#2a323b",
}
"""The colour that each colour of a figure becomes on a dark ground."""


def _base_of(method: str) -> str:
    """The method that ships which this name begins with; empty where none does."""
    return max(
        (name for name in _KNOWN if f"{method}_".startswith(f"{name}_")), key=len, default=""
    )


def order_of(method: str) -> tuple[int, str]:
    """Sort key: the methods that ship in a fixed order, exact first, then others by name."""
    known, base = list(_KNOWN), _base_of(method)
    return (known.index(base) if base else len(known), method)
