"""One colour and one marker per method, the same in every figure, table and page."""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """How a method looks: colour-blind safe colour, and a marker for print in grey."""

    color: str
    marker: str


_KNOWN = {
    "exact": Style("#000000", "o"),
    "local": Style("#AAAAAA", "v"),
    "streaming_llm": Style("#7A5C2E", "<"),
    "uniform": Style("#56B4E9", "s"),
    "snapkv": Style("#009E73", "^"),
    "pyramidkv": Style("#0072B2", "P"),
    "h2o": Style("#882255", "X"),
    "subgen": Style("#E69F00", "D"),
    "balancekv": Style("#D55E00", "*"),
}
_COLORS = ("#332288", "#DDCC77", "#CC79A7", "#44AA99", "#661100", "#999933", "#6699CC")
_MARKERS = ("h", "p", ">", "d", "8", "H", "+", "x")


def style_of(method: str) -> Style:
    """The style of `method`: reserved for the papers' methods, else chosen by the name alone."""
    if method in _KNOWN:
        return _KNOWN[method]
    code = zlib.crc32(method.encode())
    return Style(_COLORS[code % len(_COLORS)], _MARKERS[code // len(_COLORS) % len(_MARKERS)])


def order_of(method: str) -> tuple[int, str]:
    """Sort key: the papers' methods in a fixed order, exact first, then others by name."""
    known = list(_KNOWN)
    return (known.index(method) if method in known else len(known), method)
