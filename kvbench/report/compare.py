"""Two experiments side by side: the same methods on the same tasks, paired where examples are the same.

Runs are matched by the hash of everything that changes a score; those without a partner of the same hash
by model, task, method and rate, and of several such runs by the options that set them apart. Where each
folder has one model, they are matched although the models' names differ. Examples are the same when
prompt and expected answers are; of one with several seeds the mean score counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.records.read import StoreError
from kvbench.report.experiment import PROMPT, Experiment, Group
from kvbench.report.frame import AVERAGE, failures_of, failures_text, scores
from kvbench.report.labels import as_text
from kvbench.report.page import html
from kvbench.report.render import PAGE_MARK, csv, write_text
from kvbench.report.stats import ALPHA, holm
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
    paired = {side for match in matched for side in match}
    only = [
        {"run": f"{group.model} / {group.task} / {variant.label}", "in": name}
        for name, experiment in zip(names, (first, second), strict=True)
        for group, variant in sides_of(experiment)
        if (group, variant) not in paired
    ]
    groups = frame[last].groupby(["task", "model"], sort=False)
    tables = [_task_table(part) for _, part in groups]
    columns = Column("run"), Column("in", "only in")
    tables.append(Table("only", "Runs that one of them lacks", pd.DataFrame(only), columns))
    return Comparison(names, tuple(t for t in tables if len(t.frame)), in_percent(frame, _NUMBERS))


def sides_of(experiment: Experiment) -> list[Side]:
    return [(group, variant) for group in experiment.groups for variant in group.variants]


def matched_sides(first: Experiment, second: Experiment) -> list[tuple[Side, Side]]:
    """The variants of the two experiments that stand for the same run, in the order of the first one: by
    hash, label, method and rate, or method, where that names one variant on each side."""
    mine, theirs = sides_of(first), sides_of(second)
    one_model = (
        len({group.model for group, _ in mine}) == len({group.model for group, _ in theirs}) == 1
    )

    def names(side: Side) -> list[Any]:
        group, variant = side
        of_variant = group.records["variant"] == variant.label
        hashes = group.records.loc[of_variant, "config_hash"].dropna()
        task = ("" if one_model else group.model, group.task, group.meta.score_unit)
        method = (*task, variant.method)
        by_hash = (group.model, hashes.min()) if len(hashes) else side
        return [by_hash, (*task, variant.label), (*method, variant.rate), method]

    matched: dict[Side, Side] = {}
    for of_mine, of_theirs in zip(
        zip(*map(names, mine), strict=True), zip(*map(names, theirs), strict=True), strict=True
    ):
        counts = Counter(of_mine), Counter(of_theirs)
        partners = dict(zip(of_theirs, theirs, strict=True))
        for side, name in zip(mine, of_mine, strict=True):
            alone = counts[0][name] == counts[1][name] == 1 and side not in matched
            if alone and partners[name] not in matched.values():
                matched[side] = partners[name]
    return [(side, matched[side]) for side in mine if side in matched]


def _changes(first: Side, second: Side) -> pd.DataFrame:
    """A row per dataset, and for their average: means, the paired difference and its test, on how many
    examples the second is better or worse, and what each side cost."""
    both = _one_group(first, second)
    sign = -1.0 if both.meta.lower_is_better else 1.0
    rows = []
    for value, part in scores(both).groupby("value", sort=False):
        row: dict[str, Any] = {"model": both.model, "task": both.task, "dataset": value}
        row["unit"] = both.meta.score_unit
        for line in part.to_dict("records"):
            name = line["variant"] if line["measure"] == "score" else "difference"
            row |= {name: line["mean"], f"{name}_low": line["low"], f"{name}_high": line["high"]}
            row |= {"p": line["p"]} if name == "difference" else {}
        of_value = both.records["dataset"].map(as_text).eq(value)
        records = both.records if value == AVERAGE else both.records[of_value]
        good = records[records["status"] == "ok"]
        by_example = good.pivot(index="example_id", columns="variant", values="score")
        by_example = by_example.reindex(columns=list(SIDES)).dropna().astype(float)
        gains = sign * (by_example["second"] - by_example["first"])
        row |= {
            "common_examples": len(gains),
            "better": (gains > 0).sum(),
            "worse": (gains < 0).sum(),
        }
        for side in SIDES:
            own = good[good["variant"] == side]
            row[f"{side}_ratio"] = own["ratio"].mean()
            row[f"{side}_seconds"] = (own["compress_s"].fillna(0.0) + own["decode_s"]).median()
            row[f"{side}_failed"] = failures_text(failures_of(records[records["variant"] == side]))
        rows.append(row)
    return pd.DataFrame(rows).assign(variant=second[1].label, method=second[1].method)


def _one_group(first: Side, second: Side) -> Group:
    """The records of two variants as one group with the variants "first" and "second". Examples are the
    same where their prompts are; of one with several seeds the mean score counts."""
    (a, _), (b, _) = first, second
    parts = []
    for (group, variant), side in zip((first, second), SIDES, strict=True):
        part = group.records[group.records["variant"] == variant.label]
        key = part[["example_id", *PROMPT]].map(str).agg("\x00".join, axis=1)
        mean = part["score"].where(part["status"] == "ok").groupby(key).transform("mean")
        part = part.assign(example_id=key, variant=side, score=mean, seed=0, prompt_tail=None)
        part = part.sort_values("status", key=lambda s: s != "ok", kind="stable")
        parts.append(part.drop_duplicates("example_id").sort_index())
    shared = set(parts[0]["dataset"]) & set(parts[1]["dataset"])
    unit = b.meta.unit if all(b.meta.unit in part for part in parts) else "example_id"
    records = pd.concat([part[part["dataset"].isin(shared)] for part in parts], ignore_index=True)
    model = a.model if a.model == b.model else f"{a.model} → {b.model}"
    variants = tuple(Variant(side) for side in SIDES)
    meta = replace(b.meta, unit="unit")
    baseline = {SIDES[0]: None, SIDES[1]: SIDES[0]}
    return Group(model, b.task, meta, variants, records.assign(unit=records[unit]), baseline)


def _task_table(total: pd.DataFrame) -> Table:
    """The table of one task: every method's totals on both sides, and their difference."""
    unit, task, model = (total[key].iloc[0] for key in ("unit", "task", "model"))
    shown = (total["p"] < ALPHA).map({True: "shown", False: ""})
    text, signed = score_format(unit), score_format(unit, signed=True)
    columns = [
        Column("variant", "method"),
        Column("difference", "change", signed),
        Column("p", text=p_text),
        *(Column(side, text=text) for side in SIDES),
        Column("common_examples", "common", whole),
        *(Column(side, text=whole) for side in ("better", "worse")),
        *(Column(f"{side}_ratio", f"{side} ratio", number) for side in SIDES),
        *(Column(f"{side}_seconds", f"{side} seconds", number) for side in SIDES),
        *(Column(f"{side}_failed", f"{side} failed") for side in SIDES),
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
        subtitle="Changes are second minus first, paired where the examples are the same.",
        tables=comparison.tables,
    )
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_text(folder / "compare.html", page, PAGE_MARK),
        write_text(folder / "compare.csv", csv(comparison.frame), CSV_MARK),
    ]
