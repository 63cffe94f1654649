"""The charts of a page, which Vega-Lite draws in the browser.

A `Chart` is JSON of one of three kinds: "scores" (`scores_chart`: against the bytes held or a record
field, as the reader chooses), and "panels" and "heatmap", which figures have beside their picture. The
page's own script (templates/charts.js) makes Vega-Lite's specification of it. The package
vl-convert-python holds Vega-Lite; every page with a chart gets a copy: it opens without a network.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.report.drawing import score_axis
from kvbench.report.frame import tidy
from kvbench.report.ratios import HELD, held_by, weighed
from kvbench.report.runs import BASELINE, Group, words
from kvbench.report.style import OF_THE_PAPERS, style_of
from kvbench.report.table import in_percent

Chart = dict[str, Any]
"""JSON that the page's script draws; ``kind`` says how."""
FIELDS = ("name", "rate", "by", "part", "measure", "mean", "low", "high", "n", "ratio", "bytes")
"""Of the rows of a chart of scores: the method without its rate, the rate (null where it has none), the
record field and its value whose examples the score is of, what is measured, the mean with its interval
in the shown unit, the number of examples, the measured ratio of bytes and the bytes held, averaged over
examples."""
ALL = "all examples"
SHAPES = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "v": "triangle-down",
    "<": "triangle-left",
    ">": "triangle-right",
    "D": "diamond",
    "d": "M0,-1L.6,0L0,1L-.6,0Z",
    "P": "cross",
    "+": "M-.2,-1L.2,-1L.2,-.2L1,-.2L1,.2L.2,.2L.2,1L-.2,1L-.2,.2L-1,.2L-1,-.2L-.2,-.2Z",
    "X": "M-1,-.6L-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0Z",
    "x": "M-1,-.8L-.8,-1L0,-.2L.8,-1L1,-.8L.2,0L1,.8L.8,1L0,.2L-.8,1L-1,.8L-.2,0Z",
    "*": "M0,-1L.25,-.33L.95,-.31L.4,.13L.59,.81L0,.42L-.59,.81L-.4,.13L-.95,-.31L-.25,-.33Z",
    "p": "M0,-1L.95,-.31L.59,.81L-.59,.81L-.95,-.31Z",
    "h": "M0,-1L.87,-.5L.87,.5L0,1L-.87,.5L-.87,-.5Z",
    "H": "M-1,0L-.5,-.87L.5,-.87L1,0L.5,.87L-.5,.87Z",
    "8": "M-.4,-1L.4,-1L1,-.4L1,.4L.4,1L-.4,1L-1,.4L-1,-.4Z",
}
"""Vega's shape for each marker of `kvbench.report.style`: a name of its own, or a path."""


@cache
def vega_script() -> str:
    """The source of Vega-Lite, which the page's script calls as ``vegaEmbed``.

    It takes seconds to bundle; a copy is kept in the user's cache where that can be written.
    """
    package = f"vl-convert-python-{version('vl-convert-python')}"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"
    kept = folder / f"vega-embed-{package}.js"
    with suppress(OSError):
        return kept.read_text(encoding="utf-8")
    import vl_convert

    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # Its names are the names of a module, which those of the page's other scripts must not meet.
    script = f"(() => {{\n{bundle}\n}})();"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        beside = kept.with_suffix(f".{os.getpid()}")
        beside.write_text(script, encoding="utf-8")
        beside.replace(kept)
    return script


def looks_of(group: Group) -> list[dict[str, Any]]:
    """Name, colour and shape of each method, in table order, and whether it comes first in colour."""
    looks = {}
    for variant in group.variants:
        style = style_of(variant.method)
        looks[variant.without_rate] = {
            "name": variant.without_rate,
            "color": style.color,
            "shape": SHAPES.get(style.marker, "circle"),
            "first": variant.method in OF_THE_PAPERS,
        }
    return list(looks.values())


def scores_chart(group: Group) -> Chart | None:
    """The scores of one model and task against the bytes held, and against each field that splits the
    examples; None where no method saves memory and nothing splits them."""
    known = [row for row in _score_rows(group) if row["mean"] is not None]
    memory = bool(group.compressed & set(tidy(group)["variant"]))
    memory = memory and any(row["ratio"] is not None for row in known)
    parts = {row["part"] for row in known} - {ALL}
    if not memory and len(parts) < 2:
        return None
    return {
        "kind": "scores",
        "memory": memory,
        "methods": looks_of(group),
        "rows": [[row[field] for field in FIELDS] for row in known],
        "fields": FIELDS,
        "all": ALL,
        "axis": {row["measure"]: score_axis(group) for row in known},
        "lower": group.meta.lower_is_better,
        "baseline": BASELINE,
    }


def _score_rows(group: Group) -> list[dict[str, Any]]:
    """Rows for the scores and differences of every variant, over all examples and over each part; of
    compressed variants whose runs measure several rates for the score at each rate instead, since a
    mean over all rates says nothing. Ratio and bytes are means over the same examples."""
    frame = tidy(group)
    shown = frame[frame["measure"].isin(["score", "difference", "times"])]
    at_rates = shown[shown["by"].eq("rate") & shown["measure"].eq("score")]
    shown = shown[shown["by"].ne("rate")]
    if at_rates["value"].nunique() > 1:
        compressed, of_all = shown["variant"].isin(group.compressed), shown["by"].eq("dataset")
        at_rates = at_rates[at_rates["variant"].isin(group.compressed)]
        shown = pd.concat([shown[~compressed & of_all], at_rates])
    last = shown[shown["by"].eq("dataset")].drop_duplicates(["variant", "measure"], keep="last")
    costs_of_all = weighed(group.records, ["variant"], HELD).to_dict("index")
    rows = []
    for row in in_percent(shown).assign(is_all=shown.index.isin(last.index)).to_dict("records"):
        label, by, value = row["variant"], row["by"], row["value"]
        measure = {"difference": f"difference to {BASELINE}", "times": f"times {BASELINE}"}.get(
            row["measure"], "score"
        )
        rate = row["rate"] if label in group.compressed else None
        part = str(value)
        if by == "measure":
            measure = f"{measure}: {value}"
        elif by == "rate":
            rate = float(value)
        if by in ("measure", "rate") or row["is_all"]:
            part = ALL
        if part == ALL and by != "rate":
            costs = costs_of_all.get(label, {})
        else:
            costs = held_by(group, by).get((label, value), {})
        ratio, held = (number_of(costs.get(name)) for name in HELD)
        rows.append(
            {
                "name": group.names[label],
                "rate": number_of(rate),
                "by": "" if part == ALL else words(by),
                "part": part,
                "measure": measure,
                **{key: number_of(row[key]) for key in ("mean", "low", "high")},
                "n": int(row["n"]),
                "ratio": ratio,
                "bytes": held,
            }
        )
    return rows


def number_of(value: Any) -> float | None:
    """Six digits of a number; null for what JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
