"""Variants of a method against one of them, from records: effects, figure, tables, words.

Drawn for the figure kind ``ablation`` of a task's meta, a mapping with

    y               record field, lower is better
    by, series      record fields that make up a cell (a panel, a marker); series may be None
    unit            record field that names the independent repetition, which intervals resample
    reference       label of the arm that others are compared with
    parts           {what was changed: labels of its variants}
    grid            {block size: label}, for a table laid out as Figure 3 of BalanceKV
    grid_y          record field that this table shows in place of y
    grid_note       in what its settings are those of the published figure, and in what not
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist

from kvbench.report.data import Group
from kvbench.report.drawing import Drawn, label_axes, new_figure, stem, style_axes, tick_text
from kvbench.report.paper import published_frame
from kvbench.report.stats import Estimate, Stratum, estimates, widened
from kvbench.report.tables import as_text
from kvbench.report.views import View, number

_SERIES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#000000", "v"))
_PUBLISHED = "balancekv_figure3"


@dataclass(frozen=True)
class Effect:
    """One variant against the reference: relative change of y, e.g. 0.05 for 5 % more error.

    Attributes:
        part: what was changed. label: the variant.
        cells: by (by, series).
        overall: the geometric mean over cells.
        seconds: median seconds of compression over the reference's.
    """

    part: str
    label: str
    cells: Mapping[tuple[Any, Any], Estimate]
    overall: Estimate
    seconds: float

    @property
    def better(self) -> int:
        """Cells whose interval lies below zero."""
        return sum(e.high < 0 for e in self.cells.values())

    @property
    def worse(self) -> int:
        """Cells whose interval lies above zero."""
        return sum(e.low > 0 for e in self.cells.values())


def ablation_of(group: Group) -> Mapping[str, Any] | None:
    """The group's ``ablation`` figure, if its task asks for one and the reference has records."""
    spec = group.meta.figure("ablation")
    if spec is None or spec["y"] not in group.records:
        return None
    good = group.records[group.records["status"].eq("ok")]
    return spec if good["method"].eq(spec["reference"]).any() else None


def effects_of(group: Group, spec: Mapping[str, Any]) -> list[Effect]:
    """Each pair's log ratio of y (a pair: one prompt, layer and draw), averaged within a cell, with
    a bootstrap interval over units; overall, the mean over cells."""
    good = group.records[group.records["status"].eq("ok")].dropna(subset=[spec["y"]])
    good = good.assign(
        log=np.log(pd.to_numeric(good[spec["y"]]).clip(lower=1e-300)),
        series=good[spec["series"]] if spec.get("series") else "",
        pair=good["seed"].astype(str) + "/" + good["example_id"].astype(str),
    )
    parts = {label: part for part, labels in spec["parts"].items() for label in labels}
    labels = [label for label in parts if good["method"].eq(label).any()]
    cells: dict[tuple[Any, Any], Stratum] = {}
    for (by, series), part in good.groupby([spec["by"], "series"]):
        table = part.pivot_table(index=[spec["unit"], "pair"], columns="method", values="log")
        ratios = table.reindex(columns=labels).sub(table[spec["reference"]], axis=0)
        units = ratios.groupby(level=0)
        name = f"{spec['by']} {by}"  # the same units are drawn for every series
        cells[by, series] = Stratum(
            name, units.sum().to_numpy(float), units.count().to_numpy(float)
        )
    found = {cell: estimates([stratum]) for cell, stratum in cells.items()}
    overall = estimates(list(cells.values()))
    least = min(len(stratum.sums) for stratum in cells.values())
    seconds = good.groupby("method")["compress_s"].median()
    return [
        Effect(
            parts[label],
            label,
            {cell: _relative(of[i], len(cells[cell].sums)) for cell, of in found.items()},
            _relative(overall[i], least),
            float(seconds[label] / seconds[spec["reference"]]),
        )
        for i, label in enumerate(labels)
    ]


def ablation_figure(group: Group, spec: Mapping[str, Any]) -> Drawn:
    """Change of y in per cent: a row per variant, a panel per `by`, a marker per `series`."""
    effects = effects_of(group, spec)
    panels = sorted({by for e in effects for by, _ in e.cells}, reverse=spec["by"] == "rate")
    series = sorted({s for e in effects for _, s in e.cells})
    places = _places(effects)
    height = max(places) + 1
    figure = new_figure(1.7 + 2.6 * len(panels), 1.1 + 0.205 * height)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    limit = _limit(effects)
    lowest = max(0.0, *(-e.low for effect in effects for e in effect.cells.values()))
    for ax, panel in zip(axes, panels, strict=True):
        ax.axvline(0, color="#666666", linewidth=0.9)
        for k, one in enumerate(series):
            color, marker = _SERIES[k % len(_SERIES)]
            shift = (k - (len(series) - 1) / 2) * 0.6 / len(series)
            for place, effect in zip(places, effects, strict=True):
                estimate = effect.cells.get((panel, one))
                if estimate is None or math.isnan(estimate.value):
                    continue
                y = place + shift
                label = f"{_words(spec['series'])} {as_text(one)}" if spec.get("series") else None
                if 100 * estimate.value > limit:
                    ax.plot(limit, y, marker=">", color=color, markersize=4, clip_on=False)
                    text = f"{100 * estimate.value:+.0f} %"
                    ax.annotate(
                        text,
                        (limit, y),
                        xytext=(-5, 0),
                        textcoords="offset points",
                        ha="right",
                        va="center",
                        fontsize=6,
                        color=color,
                    )
                    continue
                ax.errorbar(
                    100 * estimate.value,
                    y,
                    xerr=[
                        [max(0.0, 100 * (estimate.value - estimate.low))],
                        [max(0.0, 100 * (estimate.high - estimate.value))],
                    ],
                    color=color,
                    marker=marker,
                    markersize=3.4,
                    elinewidth=1.0,
                    linestyle="none",
                    label=label,
                )
        ax.set_title(f"{_words(spec['by'])} {tick_text(panel, spec['by'])}", fontsize=9)
        ax.set_xlim(-min(limit, 105 * lowest) - 1, limit * 1.04)
        style_axes(ax, grid="x")
    for place, before in zip(places[1:], places, strict=False):
        if place - before > 1:
            for ax in axes:
                ax.axhline((place + before) / 2, color="#DDDDDD", linewidth=0.6)
    axes[0].set_yticks(places, [effect.label for effect in effects])
    axes[0].set_ylim(height - 0.3, -0.8)
    what = _words(spec["y"])
    label_axes(figure, list(axes), f"change of {what} against {spec['reference']} (%)", "")
    handles: dict[str, Artist] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(label), handle[0])
    if handles:
        figure.legend(
            handles=[handles[label] for label in sorted(handles)],
            labels=sorted(handles),
            loc="outside upper center",
            ncols=len(handles),
            frameon=False,
            fontsize=8,
        )
    return Drawn(
        f"{stem(group)}-ablation",
        f"{group.task}: one option changed at a time",
        f"Change of {what} against {spec['reference']} on the same tensors (left is better), geometric"
        f" mean with 95 % bootstrap intervals over {_units(group, spec)}; a triangle at the edge stands"
        " for a larger change.",
        figure,
    )


def effect_view(group: Group, spec: Mapping[str, Any]) -> View:
    """One row per variant: overall change, cells better and worse, seconds."""
    effects = effects_of(group, spec)
    cells = len(effects[0].cells) if effects else 0
    return View(
        name=f"{group.task}-{group.model}-ablation",
        title=f"{group.task} on {group.model}: change of {_words(spec['y'])} against"
        f" {spec['reference']}",
        columns=("variant", "changed", "change, %", "better", "worse", "seconds"),
        rows=tuple(
            (
                e.label,
                e.part,
                _percent_text(e.overall),
                f"{e.better}/{len(e.cells)}",
                f"{e.worse}/{len(e.cells)}",
                f"{number(e.seconds)} x",
            )
            for e in effects
        ),
        notes=(
            f"Geometric mean over {cells} cells ({' x '.join(_cell_fields(spec))}), with 95 % bootstrap"
            f" intervals over {_units(group, spec)}, widened by Student's t; negative is"
            " less error.",
            "better, worse: cells whose own interval excludes 0 (not adjusted for their number).",
            "seconds: median time of compression over that of the reference.",
        ),
    )


def effect_frame(group: Group, spec: Mapping[str, Any]) -> pd.DataFrame:
    """Effects in long form: one row per variant and cell, and one overall."""
    lines = []
    for e in effects_of(group, spec):
        every: list[tuple[Any, Any, Estimate]] = [("all", "all", e.overall)]
        every += [(by, series, estimate) for (by, series), estimate in e.cells.items()]
        lines += [
            {
                "model": group.model,
                "task": group.task,
                "part": e.part,
                "variant": e.label,
                spec["by"]: by,
                spec.get("series") or "series": series,
                "change": estimate.value,
                "change_low": estimate.low,
                "change_high": estimate.high,
                "seconds_ratio": e.seconds,
            }
            for by, series, estimate in every
        ]
    return pd.DataFrame(lines)


def grid_view(group: Group, spec: Mapping[str, Any], folder: Path) -> View | None:
    """Error and seconds by block size and rate, laid out as Figure 3, the published beside ours."""
    good = group.records[group.records["status"].eq("ok")]
    grid = {int(size): label for size, label in spec["grid"].items()}
    grid = {size: label for size, label in grid.items() if good["method"].eq(label).any()}
    if not grid:
        return None
    y = spec.get("grid_y", spec["y"])
    if y not in good:
        return None
    published = published_frame(folder, _PUBLISHED)
    theirs = published.set_index(["layer", "quantity", "block_size", "rate"])["value"]
    rates = sorted(good[spec["by"]].unique(), reverse=True)
    rows = []
    series = good[spec["series"]] if spec.get("series") else pd.Series("all", good.index)
    for layer in sorted(series.unique()):
        for size, label in sorted(grid.items(), reverse=True):
            mine = good[good["method"].eq(label) & series.eq(layer)]
            by = mine.groupby(spec["by"])
            rows.append(
                (
                    f"ours, {_words(spec.get('series') or 'layers')} {as_text(layer)}",
                    str(size),
                    *(f"{by[y].mean()[r]:.4f} ± {by[y].std()[r]:.4f}" for r in rates),
                    *(number(float(by["compress_s"].median()[r])) for r in rates),
                )
            )
    for layer in sorted(published["layer"].unique()):
        for size in sorted(grid, reverse=True):
            found = [
                [theirs.get((layer, quantity, size, float(r)), math.nan) for r in rates]
                for quantity in ("relative_error", "runtime_s")
            ]
            rows.append(
                (
                    f"published, layer {layer}",
                    str(size),
                    *(number(float(value)) for values in found for value in values),
                )
            )
    return View(
        name=f"{group.task}-{group.model}-figure3",
        title=f"{group.task} on {group.model}: block size x rate, as in Figure 3 of BalanceKV",
        columns=(
            "layer",
            "block size",
            *(f"error, rate {tick_text(float(r), 'rate')}" for r in rates),
            *(f"seconds, rate {tick_text(float(r), 'rate')}" for r in rates),
        ),
        rows=tuple(rows),
        notes=(
            "Ours: mean ± standard deviation over prompts and draws (over layers if they share a row),"
            " median seconds of one layer's compression. What can be compared is how the numbers change"
            " with block size and rate.",
            *([str(spec["grid_note"])] if "grid_note" in spec else []),
        ),
    )


def ablation_findings(group: Group, spec: Mapping[str, Any]) -> list[str]:
    """What was found, from the numbers alone."""
    effects = effects_of(group, spec)
    if not effects:
        return []
    cells = len(effects[0].cells)
    found = [
        f"One option changed at a time against {spec['reference']}; change of {_words(spec['y'])} as a "
        f"geometric mean over {cells} cells ({' x '.join(_cell_fields(spec))}), 95 % intervals over "
        f"{_units(group, spec)}."
    ]
    ordered = sorted(effects, key=lambda e: e.overall.value)
    for words, chosen in (
        ("Less error", [e for e in ordered if e.overall.high < 0]),
        ("No difference shown", [e for e in ordered if e.overall.low <= 0 <= e.overall.high]),
        ("More error", [e for e in ordered if e.overall.low > 0]),
    ):
        if chosen:
            named = "; ".join(f"{e.label} {_percent_text(e.overall)} %" for e in chosen)
            found.append(f"{words}: {named}.")
    free = [
        e for e in ordered if e.overall.high < 0 and not e.worse and e.better and e.seconds <= 1.1
    ]
    if free:
        named = "; ".join(
            f"{e.label} ({_percent_text(e.overall)} %, better in {e.better} of {cells} cells, worse in"
            f" none, {number(e.seconds)} times the seconds)"
            for e in free
        )
        chosen_of = (
            ""
            if len(effects) < 4
            else (
                f" The best of {len(effects)} variants on the same data looks better than it is: see it"
                " confirmed on other data before using it."
            )
        )
        found.append(f"Better at no cost on these tensors: {named}.{chosen_of}")
    else:
        found.append("No variant is better overall, worse in no cell, and as fast.")
    return found


def _relative(log_ratio: Estimate, units: int) -> Estimate:
    log_ratio = widened(log_ratio, units)
    return Estimate(*(math.expm1(x) for x in (log_ratio.value, log_ratio.low, log_ratio.high)))


def _places(effects: Sequence[Effect]) -> list[float]:
    """Rows from the top, a gap of half a row between parts."""
    places: list[float] = []
    for i, effect in enumerate(effects):
        new = i > 0 and effect.part != effects[i - 1].part
        places.append(0.0 if not places else places[-1] + (1.6 if new else 1.0))
    return places


def _limit(effects: Sequence[Effect]) -> float:
    """The axis reaches what nine cells in ten reach, in per cent."""
    values = [100 * abs(e.value) for effect in effects for e in effect.cells.values()]
    values = [value for value in values if math.isfinite(value)]
    return max(5.0, float(np.quantile(values, 0.9)) * 1.25) if values else 5.0


def _cell_fields(spec: Mapping[str, Any]) -> list[str]:
    return [_words(name) for name in (spec["by"], spec.get("series")) if name]


def _units(group: Group, spec: Mapping[str, Any]) -> str:
    """E.g. "8 prompts": what intervals resample."""
    mine = group.records[group.records["method"].eq(spec["reference"])]
    count = mine[mine["status"].eq("ok")][spec["unit"]].nunique()
    return f"{count} {_words(spec['unit'])}s"


def _percent_text(estimate: Estimate) -> str:
    low, value, high = (
        f"{100 * x:+.1f}".replace("-", "−") for x in (estimate.low, estimate.value, estimate.high)
    )
    return f"{value} [{low}, {high}]"


def _words(name: str) -> str:
    return name.replace("_", " ")
