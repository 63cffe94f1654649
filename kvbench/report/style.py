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
    "hf_dynamic": Style("#4D4D4D", "8"),
    "hf_static": Style("#7F7F7F", "H"),
    "hf_quantized": Style("#C4C4C4", "x"),
    "topk": Style("#AA4499", "p"),
    "local": Style("#AAAAAA", "v"),
    "streaming_llm": Style("#7A5C2E", "<"),
    "strided": Style("#999933", "H"),
    "fixed": Style("#44AA99", "d"),
    "uniform": Style("#56B4E9", "s"),
    "snapkv": Style("#009E73", "^"),
    "kvpress_snapkv": Style("#88C8A9", "8"),
    "pyramidkv": Style("#0072B2", "P"),
    "pyramidkv_released": Style("#44AA99", "8"),
    "h2o": Style("#882255", "X"),
    "spatten": Style("#661100", "h"),
    "subgen": Style("#E69F00", "D"),
    "subgen_streaming": Style("#DDCC77", ">"),
    "balancekv": Style("#D55E00", "*"),
    "balancekv_released": Style("#8F3A00", "h"),
    "balancekv_needle": Style("#CC79A7", "p"),
    "balancekv_streaming": Style("#332288", "d"),
    "kvpress": Style("#6699CC", "+"),
    "minference": Style("#117733", "x"),
    "minference_snapkv": Style("#2BD38F", "x"),
    "minference_pyramidkv": Style("#3F51D8", "+"),
    "adakv": Style("#E07552", "s"),
    "balancekv_wildcat": Style("#DA2FDA", "h"),
    "expected_attention": Style("#852FDA", "D"),
    "kvzip": Style("#0E7C7B", "v"),
    "pages": Style("#48AC39", "^"),
    "qjl": Style("#DA2F44", "v"),
    "qjl_released": Style("#505995", "P"),
    "recompress": Style("#156079", "X"),
    "recompress_kvpress_decoding": Style("#477915", "d"),
    "rkv": Style("#7C1C9C", "p"),
    "rkv_released": Style("#A96060", "<"),
    "turboquant": Style("#9966CC", ">"),
    "turboquant_paper_2_5": Style("#2222C3", "8"),
    "turboquant_paper_3_5": Style("#DA2F85", "H"),
    "wildcat": Style("#229BC3", "s"),
    "wildcat_released": Style("#B8917A", "h"),
    "wildcat_released_constant": Style("#72A960", "D"),
}
_COLORS = ("#332288", "#DDCC77", "#CC79A7", "#44AA99", "#661100", "#999933", "#6699CC")
_MARKERS = ("h", "p", ">", "d", "8", "H", "+", "x")


def style_of(method: str) -> Style:
    """The style of `method`: reserved for the methods that ship, else chosen by the name alone."""
    if method in _KNOWN:
        return _KNOWN[method]
    code = zlib.crc32(method.encode())
    return Style(_COLORS[code % len(_COLORS)], _MARKERS[code // len(_COLORS) % len(_MARKERS)])


def order_of(method: str) -> tuple[int, str]:
    """Sort key: the methods that ship in a fixed order, exact first, then others by name."""
    known = list(_KNOWN)
    return (known.index(method) if method in known else len(known), method)
