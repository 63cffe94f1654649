"""Two experiments side by side: the same methods on the same tasks, paired where examples are the same.

Runs are matched by the hash of everything that changes a score; those without a partner of the same hash
by model, task, method and rate, and of several such runs by the options that set them apart. Where each
folder has one model, they are matched although the models' names differ. Examples are the same when
prompt and expected answers are; of one with several seeds the mean score counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbench.records.read import StoreError
from kvbench.report.experiment import PROMPT, Experiment, Group
from kvbench.report.frame import AVERAGE, failures_of, failures_text, strata_of
from kvbench.report.labels import as_text
from kvbench.report.page import html
from kvbench.report.render import PAGE_MARK, csv, write_text
from kvbench.report.stats import (
    ALPHA,
    Scores,
    holm,
    means,
    paired,
)
from kvbench.report.table import (
    INTERVAL,
    LEGEND,
    Column,
    Table,
    in_percent,
    number,
    p_text,
    score_format,
    unit_text,
    whole,
    with_values,
)
from kvbench.report.variants import Variant

SIDES = ("first", "second")
_NUMBERS = [f"{key}{end}" for key in (*SIDES, "difference") for end in ("", "_low", "_high")]
CSV_MARK = "model,task,dataset,unit,"
"""How compare.csv begins."""
SUBTITLE = "Changes are second minus first, paired where the examples are the same."
Side = tuple[Group, Variant]


@dataclass(frozen=True)
class Comparison:
    """What two experiments have in common and what differs: their names, tables (of each
    task, of runs that one lacks), and a row per variant and dataset."""

    names: tuple[str, str]
    tables: tuple[Table, ...]
    frame: pd.DataFrame


def compare(first: Experiment, second: Experiment) -> Comparison:
    """Match the runs of two experiments and compare them.

    Raises:
        StoreError: they have no run in common.
    """
    matched = matched_sides(first, second)
    if not matched:
        raise StoreError(
            f"{first.folder} and {second.folder} have no model, task and method in common"
        )
    frame = pd.concat([_changes(*match) for match in matched], ignore_index=True)
    last = ~frame.duplicated(["model", "task", "variant"], keep="last")
    p = frame["p"].to_numpy(float, copy=True)
    p[last] = holm(p[last])
    frame = frame.assign(p=p)
    names = first.name, second.name
    if names[0] == names[1]:
        names = str(first.folder), str(second.folder)
    only = [
        {"run": f"{group.model} / {group.task} / {variant.label}", "in": name}
        for name, experiment, sides in zip(
            names, (first, second), zip(*matched, strict=True), strict=True
        )
        for group in experiment.groups
        for variant in group.variants
        if (group, variant) not in sides
    ]
    groups = frame[last].groupby(["task", "model"], sort=False)
    tables = [_task_table(part) for _, part in groups]
    columns = Column("run"), Column("in", "only in")
    tables.append(Table("only", "Runs that one of them lacks", pd.DataFrame(only), columns))
    return Comparison(names, tuple(t for t in tables if len(t.frame)), in_percent(frame, _NUMBERS))


def matched_sides(first: Experiment, second: Experiment) -> list[tuple[Side, Side]]:
    """The variants of the two experiments that stand for the same run, in the order of the first one."""
    left = [(group, variant) for group in second.groups for variant in group.variants]
    matched: dict[Side, Side] = {}
    for rule in (_same_hash, partial(_same_settings, one_model=_one_model(first, second))):
        for group in first.groups:
            for variant in group.variants:
                side = (group, variant)
                partners = [other for other in left if rule(side, other)]
                if side not in matched and partners:
                    matched[side] = partners[0]
                    left.remove(partners[0])
    order = [(group, variant) for group in first.groups for variant in group.variants]
    return [(side, matched[side]) for side in order if side in matched]


def _same_hash(side: Side, other: Side) -> bool:
    """Whether two variants have a run of the same settings, whatever their labels are."""
    hashes = [
        set(group.records.loc[group.records["variant"] == variant.label, "config_hash"].dropna())
        for group, variant in (side, other)
    ]
    same_model = side[0].model == other[0].model
    return same_model and not hashes[0].isdisjoint(hashes[1])


def _one_model(first: Experiment, second: Experiment) -> bool:
    """Whether each of two experiments has one model."""
    return all(len({group.model for group in e.groups}) == 1 for e in (first, second))


def _same_settings(side: Side, other: Side, *, one_model: bool) -> bool:
    """Whether two variants are the same method at the same rate on the same task, and have the same
    label where their groups have several of that method and rate."""
    (a, x), (b, y) = side, other
    if a.task != b.task or a.meta.score_unit != b.meta.score_unit:
        return False
    if not one_model and a.model != b.model:
        return False
    if x.label == y.label:
        return True
    mine, theirs = ([v for v in g.variants if v.method == x.method] for g in (a, b))
    same_rate = [v for v in mine if v.rate == x.rate], [v for v in theirs if v.rate == y.rate]
    alone = all(len(variants) == 1 for variants in same_rate) and x.rate == y.rate
    return x.method == y.method and (alone or len(mine) == len(theirs) == 1)


def _changes(first: Side, second: Side) -> pd.DataFrame:
    """A row per dataset, and for their average: means, the paired difference and its test."""
    (_, y), both = second, _one_group(first, second)
    strata = {dataset.value: [dataset] for dataset in strata_of(both)}
    if len(strata) > 1:
        strata[AVERAGE] = [dataset for members in strata.values() for dataset in members]
    rows = []
    for value, members in strata.items():
        of_value = both.records["dataset"].map(as_text).eq(value)
        records = both.records if value == AVERAGE else both.records[of_value]
        row: dict[str, Any] = {"model": both.model, "task": both.task, "dataset": value}
        row |= {"unit": both.meta.score_unit, **_paired(both, members)}
        for side in SIDES:
            row |= _side_costs(side, records[records["variant"] == side])
        rows.append(row)
    return pd.DataFrame(rows).assign(variant=y.label, method=y.method)


def _one_group(first: Side, second: Side) -> Group:
    """The records of two variants as one group with the variants "first" and "second". Examples are the
    same where their prompts are; of one with several seeds the mean score counts."""
    (a, _), (b, _) = first, second
    parts = []
    for (group, variant), side in zip((first, second), SIDES, strict=True):
        part = group.records[group.records["variant"] == variant.label]
        key = part["example_id"].map(str)
        for field in PROMPT:
            key = key + "\x00" + part[field].map(str)
        mean = part["score"].where(part["status"] == "ok").groupby(key).transform("mean")
        part = part.assign(example_id=key, variant=side, score=mean, seed=0, prompt_tail=None)
        part = part.sort_values("status", key=lambda s: s != "ok", kind="stable")
        parts.append(part.drop_duplicates("example_id").sort_index())
    shared = set(parts[0]["dataset"]) & set(parts[1]["dataset"])
    unit = b.meta.unit if all(b.meta.unit in part for part in parts) else "example_id"
    records = pd.concat([part[part["dataset"].isin(shared)] for part in parts], ignore_index=True)
    records["unit"] = records[unit]
    model = a.model if a.model == b.model else f"{a.model} → {b.model}"
    variants = tuple(Variant(side) for side in SIDES)
    baseline = {SIDES[0]: None, SIDES[1]: SIDES[0]}
    return Group(model, b.task, replace(b.meta, unit="unit"), variants, records, baseline)


def _paired(both: Group, strata: Sequence[Scores]) -> dict[str, Any]:
    """Means of both sides, the second minus the first with its test, and on how many examples the second
    is better or worse."""
    (difference,) = paired(strata, [(1, 0)], fraction=both.percent)
    row: dict[str, Any] = difference.named("difference") | {"p": difference.p}
    for side, mean in zip(SIDES, means(strata, fraction=both.percent), strict=True):
        row |= mean.named(side)
    sign = -1.0 if both.meta.lower_is_better else 1.0
    gains = sign * np.concatenate([data.values[:, 1] - data.values[:, 0] for data in strata])
    row["common_examples"] = int((~np.isnan(gains)).sum())
    row["better"], row["worse"] = int((gains > 0).sum()), int((gains < 0).sum())
    return row


def _side_costs(side: str, records: pd.DataFrame) -> dict[str, Any]:
    """Mean ratio, median seconds of compressing and decoding, and failures of one side."""
    good = records[records["status"] == "ok"]
    seconds = good["compress_s"].fillna(0.0) + good["decode_s"]
    return {
        f"{side}_ratio": good["ratio"].mean(),
        f"{side}_seconds": seconds.median(),
        f"{side}_failed": failures_text(failures_of(records)),
    }


def _task_table(total: pd.DataFrame) -> Table:
    """The table of one task: every method's totals on both sides, and their difference."""
    unit, task, model = (total[key].iloc[0] for key in ("unit", "task", "model"))
    shown = (total["p"] < ALPHA).map({True: "shown", False: ""})
    text, signed = score_format(unit), score_format(unit, signed=True)
    columns = [
        Column("variant", "method"),
        Column("difference", "change", signed),
        Column("p", text=p_text),
        Column("first", text=text),
        Column("second", text=text),
        Column("common_examples", "common", whole),
        Column("better", text=whole),
        Column("worse", text=whole),
        Column("first_ratio", "first ratio", number),
        Column("second_ratio", "second ratio", number),
        Column("first_seconds", "first seconds", number),
        Column("second_seconds", "second seconds", number),
        Column("first_failed", "first failed"),
        Column("second_failed", "second failed"),
    ]
    return Table(
        f"compare-{task}-{model}",
        f"{task} on {model}: score{unit_text(unit)}",
        total.assign(difference_mark=shown),
        with_values(total, columns),
        (
            INTERVAL,
            "change: second minus first, paired over the examples that both scored; p is adjusted by"
            " Holm's method for all methods and tasks. Bold: p is below 0.05. seconds: median of"
            " compressing and decoding.",
            *([LEGEND["few"]] if total["p"].isna().any() else []),
        ),
    )


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write compare.html and compare.csv; returns their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    page = html(
        "tables.html.j2",
        title=" → ".join(comparison.names),
        subtitle=SUBTITLE,
        tables=comparison.tables,
    )
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_text(folder / "compare.html", page, PAGE_MARK),
        write_text(folder / "compare.csv", csv(comparison.frame), CSV_MARK),
    ]
