"""The interactive figure of a page: scores against the bytes held, drawn by Vega-Lite in the browser.

In: a group's records and its tidy frame. Out: a `Chart`, the data of one figure as JSON; the page's own
script (templates/charts.js) chooses rows of it, and Vega-Lite draws them. The package vl-convert-python
holds Vega-Lite; every page with a chart gets a copy of it, so that it opens without a network.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.report.drawing import score_axis
from kvbench.report.experiment import BASELINE, Group
from kvbench.report.labels import as_text, words
from kvbench.report.style import OF_THE_PAPERS, style_of

FIELDS = ("name", "rate", "part", "measure", "mean", "low", "high", "n", "ratio", "bytes")
"""Of a chart's rows: the method without its rate, the rate (null where it has none), the examples that
the score is of, what is measured, the mean with its interval in the shown unit, the number of examples,
the measured ratio of bytes and the bytes held, averaged over examples."""
COSTS = ["ratio", "cache_bytes"]
"""Record fields of what a method held."""
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


@dataclass(frozen=True)
class Chart:
    """The data of one interactive figure.

    Attributes:
        methods: name, colour and shape of each method, in table order, and whether it has a colour
            before others.
        rows: values of `FIELDS`; the script shows those of one part and measure.
        axis: what the scores are measured in, by measure.
        lower: whether lower scores are better.
        baseline: the name whose score is drawn as a line across.
    """

    methods: list[dict[str, Any]]
    rows: list[list[Any]]
    axis: dict[str, str]
    lower: bool
    baseline: str = BASELINE

    def as_json(self) -> dict[str, Any]:
        """What the page's script reads."""
        return {**vars(self), "fields": FIELDS, "all": ALL}


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


def chart_of(group: Group, frame: pd.DataFrame) -> Chart | None:
    """The chart of one model and task; None where no method saves memory, or nothing was scored."""
    rows = [*_by_variant(group, frame), *_by_recorded_rate(group, frame)]
    known = [row for row in rows if row["mean"] is not None and row["ratio"] is not None]
    if not group.compressed & set(frame["variant"]) or not known:
        return None
    methods: dict[str, dict[str, Any]] = {}
    for variant in group.variants:
        style = style_of(variant.method)
        look: dict[str, Any] = {
            "color": style.color,
            "shape": SHAPES.get(style.marker, "circle"),
            "first": variant.method in OF_THE_PAPERS,
        }
        methods.setdefault(variant.without_rate, {"name": variant.without_rate} | look)
    axis = {row["measure"]: score_axis(group) for row in known}
    return Chart(
        list(methods.values()),
        [[row[field] for field in FIELDS] for row in known],
        axis,
        group.meta.lower_is_better,
    )


def _by_variant(group: Group, frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows for the scores and differences of every variant, over all examples and over each part. Ratio
    and bytes are means over the same examples."""
    totals_by_variant = group.good.groupby("variant")[COSTS].mean()
    recorded = _recorded_rates(frame)
    shown = frame[frame["measure"].isin(["score", "difference"])]
    shown = shown[shown["by"].ne("rate")]
    if len(recorded):  # of these a mean over all rates says nothing
        shown = shown[~shown["variant"].isin(group.compressed)]
    last = shown[shown["by"].eq("dataset")].drop_duplicates(["variant", "measure"], keep="last")
    rows = []
    for index, row in shown.iterrows():
        measure = "score" if row["measure"] == "score" else f"difference to {BASELINE}"
        part = f"{words(str(row['by']))} {row['value']}"
        if row["by"] == "measure":
            measure, part = f"{measure}: {row['value']}", ALL
        elif index in last.index:
            part = ALL
        label = row["variant"]
        if part == ALL:
            costs = totals_by_variant.reindex([label]).iloc[0]
        else:
            costs = _mean_costs(group, row["by"]).reindex([(label, row["value"])]).iloc[0]
        rate = row["rate"] if label in group.compressed else None
        rows.append(_row(group, row, part, measure) | _costs_in_row(rate, costs))
    return rows


def _by_recorded_rate(group: Group, frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows for the scores of every compressed variant at each rate, where one run measures several."""
    recorded = _recorded_rates(frame)
    if recorded.empty:
        return []
    rows = []
    for _, row in recorded[recorded["variant"].isin(group.compressed)].iterrows():
        costs = _mean_costs(group, "rate").reindex([(row["variant"], row["value"])]).iloc[0]
        rows.append(_row(group, row, ALL, "score") | _costs_in_row(float(row["value"]), costs))
    return rows


@lru_cache(maxsize=16)
def _mean_costs(group: Group, by: str) -> pd.DataFrame:
    """The means of `COSTS` by variant and by the value, as text, of a record field."""
    return group.good.groupby(["variant", group.good[by].map(as_text)])[COSTS].mean()


def _costs_in_row(rate: float | None, costs: pd.Series) -> dict[str, float | None]:
    """Those of `FIELDS` that say how much a method held."""
    ratio, bytes_held = (_number(costs[name]) for name in COSTS)
    return {"rate": _number(rate), "ratio": ratio, "bytes": bytes_held}


def _recorded_rates(frame: pd.DataFrame) -> pd.DataFrame:
    """The scores by the rate that records bear; empty where they bear one, or none."""
    rates = frame[frame["by"].eq("rate") & frame["measure"].eq("score")]
    return rates if rates["value"].nunique() > 1 else rates.iloc[:0]


def _row(group: Group, row: pd.Series, part: str, measure: str) -> dict[str, Any]:
    scale = 100.0 if group.percent else 1.0
    numbers = {key: _number(scale * row[key]) for key in ("mean", "low", "high")}
    about = {"name": group.names[row["variant"]], "part": part, "measure": measure}
    return about | numbers | {"n": int(row["n"])}


def _number(value: Any) -> float | None:
    """Six digits of a number, as JSON can hold it."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
