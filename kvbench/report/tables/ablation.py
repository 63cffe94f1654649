"""Variants of a method against one of them, from records: effects, tables, words.

Drawn for the figure kind ``ablation`` of a task's meta, a mapping with

    y               record field, lower is better
    also            further such fields: the same effects by other metrics
    by, series      record fields that make up a cell (a panel, a marker); series may be None
    unit            record field that names the independent repetition; one draw of repetitions serves
                    all cells, whose errors are those of the same prompts
    reference       label of the variant that others are compared with
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

from kvbench.report.experiment import Group
from kvbench.report.figures.names import tick_text, words
from kvbench.report.stats.distributions import t_test
from kvbench.report.stats.estimate import LEVEL, Estimate, Stratum, estimates, widened
from kvbench.report.stats.significance import holm
from kvbench.report.table import Column, Table, long_table, number, percent_text
from kvbench.report.tables.published_files import published_frame
from kvbench.report.tables.strata import as_text

_PUBLISHED = "balancekv_figure3"


@dataclass(frozen=True)
class Effect:
    """One variant against the reference: relative change of y, e.g. 0.05 for 5 % more error.

    Attributes:
        part: what was changed. label: the variant.
        cells: by (by, series).
        overall: the geometric mean over cells.
        p: of no overall change (t-test over units), adjusted for the number of variants (Holm).
        seconds: median seconds of compression over the reference's.
    """

    part: str
    label: str
    cells: Mapping[tuple[Any, Any], Estimate]
    overall: Estimate
    p: float
    seconds: float

    @property
    def shown(self) -> bool:
        """Whether an overall change is shown, whatever was picked out of however many variants."""
        return self.p < 1 - LEVEL

    @property
    def better(self) -> int:
        """Cells whose interval lies below zero."""
        return sum(e.high < 0 for e in self.cells.values())

    @property
    def worse(self) -> int:
        """Cells whose interval lies above zero."""
        return sum(e.low > 0 for e in self.cells.values())


def metrics_of(group: Group, spec: Mapping[str, Any]) -> list[str]:
    """The metrics that records of the reference have, the one that is the score first."""
    ours = group.records[group.records["method"].eq(spec["reference"])]
    others = (y for y in spec.get("also", ()) if y in ours and ours[y].notna().any())
    return [spec["y"], *others]


def effects_of(group: Group, spec: Mapping[str, Any], y: str | None = None) -> list[Effect]:
    """Each pair's log ratio of `y` (a pair: one prompt, layer and draw), averaged within a cell, with
    a bootstrap interval over units; overall, the mean over cells.

    Cells hold the same units. They are resampled together, so that the interval of the mean over
    cells counts what a prompt does to all of them.
    """
    y = y or spec["y"]
    good = group.records[group.records["status"].eq("ok")].dropna(subset=[y])
    good = good.assign(
        log=np.log(pd.to_numeric(good[y]).clip(lower=1e-300)),
        series=good[spec["series"]] if spec.get("series") else "",
        pair=good["seed"].astype(str) + "/" + good["example_id"].astype(str),
        unit=good[spec["unit"]].astype(str),
    )
    parts = {label: part for part, labels in spec["parts"].items() for label in labels}
    labels = [label for label in parts if good["method"].eq(label).any()]
    every = sorted(good["unit"].unique())
    cells: dict[tuple[Any, Any], Stratum] = {}
    for (by, series), part in good.groupby([spec["by"], "series"]):
        table = part.pivot_table(index=["unit", "pair"], columns="method", values="log")
        ratios = table.reindex(columns=labels).sub(table[spec["reference"]], axis=0)
        of_unit = ratios.groupby(level=0)
        sums, counts = (x.reindex(every, fill_value=0.0) for x in (of_unit.sum(), of_unit.count()))
        # one name: the same units are drawn for every cell
        cells[by, series] = Stratum(spec["unit"], sums.to_numpy(float), counts.to_numpy(float))
    found = {cell: estimates([stratum]) for cell, stratum in cells.items()}
    overall = estimates(list(cells.values()))
    held = np.array([(stratum.counts > 0).sum(0) for stratum in cells.values()])
    units = dict(zip(cells, held, strict=True))
    seconds = good.groupby("method")["compress_s"].median()
    p = holm(_p_values(list(cells.values())))
    return [
        Effect(
            parts[label],
            label,
            {cell: _relative(of[i], int(units[cell][i])) for cell, of in found.items()},
            _relative(overall[i], int(held[:, i].min())),
            p[i],
            float(seconds[label] / seconds[spec["reference"]]),
        )
        for i, label in enumerate(labels)
    ]


def _p_values(cells: Sequence[Stratum]) -> list[float]:
    """Per column, that of a t-test of the units' means over cells against 0."""
    with np.errstate(invalid="ignore"):
        means = np.mean([cell.sums / cell.counts for cell in cells], axis=0)
    found = []
    for column in means.T:
        known = column[~np.isnan(column)]
        if len(known) < 2:
            found.append(math.nan)
        elif np.ptp(known) <= 1e-9 * np.abs(known).max():  # all alike: a t-test divides by zero
            found.append(float(known[0] == 0))
        else:
            found.append(t_test(known))
    return found


@dataclass(frozen=True)
class Ablation:
    """One option changed at a time: the effects of its variants by metric, the score's first.

    Attributes:
        spec: as the task asks for it.
        units: "8 prompts": what intervals resample.
    """

    group: Group
    spec: Mapping[str, Any]
    effects: Mapping[str, Sequence[Effect]]
    units: str

    @property
    def first(self) -> Sequence[Effect]:
        """The effects on the score's metric."""
        return self.effects[self.spec["y"]]

    @property
    def cells(self) -> int:
        """In how many cells a variant is compared."""
        return len(self.first[0].cells) if self.first else 0

    @property
    def crossed(self) -> str:
        """What makes up a cell."""
        return " x ".join(words(n) for n in (self.spec["by"], self.spec.get("series")) if n)


def ablation_of(group: Group) -> Ablation | None:
    """What the group's ``ablation`` figure asks for, if its task has one and the reference records."""
    spec = group.meta.figure("ablation")
    if spec is None or spec["y"] not in group.records:
        return None
    good = group.records[group.records["status"].eq("ok")]
    if not good["method"].eq(spec["reference"]).any():
        return None
    effects = {y: effects_of(group, spec, y) for y in metrics_of(group, spec)}
    return Ablation(group, spec, effects, units_text(group, spec))


def effect_table(ablation: Ablation) -> Table:
    """One row per variant: overall change, cells better and worse, seconds."""
    group, spec, units = ablation.group, ablation.spec, ablation.units
    others = {y: {e.label: e for e in of} for y, of in ablation.effects.items() if y != spec["y"]}

    def change_of(y: str) -> Column:
        found = others[y]
        heading = f"change of {words(y)}, %"
        return Column(y, heading, "change", of=lambda e: found[e.label].overall)

    return Table.of(
        f"{group.task}-{group.model}-ablation",
        f"{group.task} on {group.model}: change of {words(spec['y'])} against {spec['reference']}",
        (
            Column("variant", "variant", "label", of=lambda e: e.label),
            Column("changed", "changed", "label", of=lambda e: e.part),
            Column("change", "change, %", "change", of=lambda e: e.overall),
            Column("p", "p", "p"),
            Column("better", "better", "label", of=lambda e: f"{e.better}/{len(e.cells)}"),
            Column("worse", "worse", "label", of=lambda e: f"{e.worse}/{len(e.cells)}"),
            *map(change_of, others),
            Column("seconds", "seconds", "times"),
        ),
        ablation.first,
        (
            f"Geometric mean over {ablation.cells} cells ({ablation.crossed}), with 95 % bootstrap"
            f" intervals over {units}, the same ones drawn for every cell, widened by"
            " Student's t; negative is less error.",
            f"p: t-test over {units}, adjusted for {len(ablation.first)} variants (Holm); the"
            " intervals are not adjusted.",
            "better, worse: cells whose own interval excludes 0 (not adjusted for their number).",
            "seconds: median time of compression over that of the reference.",
        ),
        long=_every_effect(ablation),
    )


def _every_effect(ablation: Ablation) -> Table:
    """One row per variant, metric and cell, and one overall."""
    spec = ablation.spec
    lines = [
        {
            "model": ablation.group.model,
            "task": ablation.group.task,
            "metric": y,
            "part": e.part,
            "variant": e.label,
            spec["by"]: by,
            spec.get("series") or "series": one,
            "change": change,
            "p_holm": e.p if by == "all" else math.nan,
            "seconds_ratio": e.seconds,
        }
        for y, effects in ablation.effects.items()
        for e in effects
        for (by, one), change in {("all", "all"): e.overall, **e.cells}.items()
    ]
    return long_table(lines, change="change")


def grid_table(ablation: Ablation, folder: Path) -> Table | None:
    """Error and seconds by block size and rate, laid out as Figure 3, the published beside ours."""
    group, spec = ablation.group, ablation.spec
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
    lines: list[list[str]] = []
    series = good[spec["series"]] if spec.get("series") else pd.Series("all", good.index)
    for layer in sorted(series.unique()):
        named = f"ours, {words(spec.get('series') or 'layers')} {as_text(layer)}"
        for size, label in sorted(grid.items(), reverse=True):
            by = good[good["method"].eq(label) & series.eq(layer)].groupby(spec["by"])
            errors = [f"{by[y].mean()[r]:.4f} ± {by[y].std()[r]:.4f}" for r in rates]
            seconds = [number(float(by["compress_s"].median()[r])) for r in rates]
            lines.append([named, str(size), *errors, *seconds])
    for layer in sorted(published["layer"].unique()):
        for size in sorted(grid, reverse=True):
            found = [
                number(float(theirs.get((layer, quantity, size, float(r)), math.nan)))
                for quantity in ("relative_error", "runtime_s")
                for r in rates
            ]
            lines.append([f"published, layer {layer}", str(size), *found])
    named_rates = [f"rate {tick_text(float(r), 'rate')}" for r in rates]
    heads = [
        "layer",
        "block size",
        *(f"{w}, {r}" for w in ("error", "seconds") for r in named_rates),
    ]
    return Table.of(
        f"{group.task}-{group.model}-figure3",
        f"{group.task} on {group.model}: block size x rate, as in Figure 3 of BalanceKV",
        [Column(head, head, "label") for head in heads],
        [dict(zip(heads, line, strict=True)) for line in lines],
        (
            "Ours: mean ± standard deviation over prompts and draws (over layers if they share a row),"
            " median seconds of one layer's compression. What can be compared is how the numbers change"
            " with block size and rate.",
            *([str(spec["grid_note"])] if "grid_note" in spec else []),
        ),
        filed=False,
    )


def ablation_findings(ablation: Ablation) -> list[str]:
    """What was found, from the numbers alone."""
    spec, first = ablation.spec, ablation.first
    if not first:
        return []
    cells, units = ablation.cells, ablation.units
    found = [
        f"One option changed at a time against {spec['reference']}; change of error as a geometric mean "
        f"over {cells} cells ({ablation.crossed}), 95 % intervals over {units}. More and "
        f"less error are told by a t-test over {units}, adjusted for {len(first)} variants (Holm)."
    ]
    if units.startswith("1 "):
        found.append(f"One repetition, {units}, determines nothing: there are no intervals.")
    for y, of in ablation.effects.items():
        ordered = sorted(of, key=lambda e: e.overall.value)
        kinds = (
            ("Less", [e for e in ordered if e.shown and e.overall.value < 0]),
            ("No difference shown in", [e for e in ordered if not e.shown]),
            ("More", [e for e in ordered if e.shown and e.overall.value >= 0]),
        )
        for kind, chosen in kinds:
            if chosen:
                named = "; ".join(f"{e.label} {_percent_text(e.overall)} %" for e in chosen)
                found.append(f"{kind} {words(y)}: {named}.")
    free = [
        e
        for e in sorted(first, key=lambda e: e.overall.value)
        if e.shown and e.overall.value < 0 and not e.worse and e.better and e.seconds <= 1.1
    ]
    if not free:
        return [*found, "No variant is shown better overall, worse in no cell, and as fast."]
    named = "; ".join(
        f"{e.label} ({_percent_text(e.overall)} %, better in {e.better} of {cells} cells, worse in none,"
        f" {number(e.seconds)} times the seconds)"
        for e in free
    )
    confirm = " See it confirmed on other data before using it." if len(first) > 1 else ""
    return [*found, f"Better at no cost on these tensors: {named}.{confirm}"]


def _relative(log_ratio: Estimate, units: int) -> Estimate:
    if units < 2:
        return Estimate(math.expm1(log_ratio.value), math.nan, math.nan)
    log_ratio = widened(log_ratio, units)
    return Estimate(*(math.expm1(x) for x in (log_ratio.value, log_ratio.low, log_ratio.high)))


def units_text(group: Group, spec: Mapping[str, Any]) -> str:
    """E.g. "8 prompts" or "1 prompt": what intervals resample."""
    mine = group.records[group.records["method"].eq(spec["reference"])]
    count = mine[mine["status"].eq("ok")][spec["unit"]].nunique()
    return f"{count} {words(spec['unit'])}{'' if count == 1 else 's'}"


def _percent_text(estimate: Estimate) -> str:
    low, value, high = map(percent_text, (estimate.low, estimate.value, estimate.high))
    return f"{value} (no interval)" if math.isnan(estimate.low) else f"{value} [{low}, {high}]"
