"""Two experiments side by side: the same methods on the same tasks, paired where examples are the same.

Runs are matched by the hash of everything that changes a score; those without a partner of the same hash
by model, task, method and rate, and of several such runs by the options that set them apart. Where each
folder has one model, they are matched although the models' names differ. Examples are the same when
prompt and expected answers are; of one with several seeds the mean score counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.records.read import StoreError
from kvbench.report.frame import AVERAGE, comparisons, failures_of, failures_text, scores
from kvbench.report.page import html
from kvbench.report.render import PAGE_MARK, csv, write_text
from kvbench.report.runs import (
    PROMPT,
    PROMPTS_OF_SEED,
    Experiment,
    Group,
    Variant,
    as_text,
    flat,
    natural_order,
    short_name,
)
from kvbench.report.stats import ALPHA, NOTHING, holm
from kvbench.report.table import (
    INTERVAL,
    LEGEND,
    METHOD,
    Column,
    Table,
    in_percent,
    number,
    p_text,
    score_format,
    unit_text,
    whole,
    wide,
    with_values,
)

SIDES = ("first", "second")
CHANGES = ("difference", "times")
_SCORES = [f"{key}{end}" for key in (*SIDES, "difference") for end in ("", "_low", "_high")]
CHANGE = (
    "change: second minus first, or second over first (of geometric means) where values are never"
    " negative, paired over the examples that both scored; p is adjusted by the discrete Holm method for"
    " all methods and tasks. Bold: p is below 0.05. seconds: median of compressing and decoding."
)
CSV_MARK = "model,task,dataset,unit,"
"""How compare.csv begins."""
Side = tuple[Group, Variant]


@dataclass(frozen=True)
class Comparison:
    """Two experiments beside each other: tables of each task and of runs that one lacks, and a row per
    variant and dataset."""

    names: tuple[str, str]
    tables: tuple[Table, ...]
    frame: pd.DataFrame


def comparison_of(first: Experiment, second: Experiment) -> Comparison:
    sides = [
        [(group, variant) for group in experiment.groups for variant in group.variants]
        for experiment in (first, second)
    ]
    matched = [match for match in matched_sides(*sides) if _datasets_of_both(*match)]
    if not matched:
        raise StoreError(
            f"{first.folder} and {second.folder} have no model, task and method in common on one"
            " dataset"
        )
    frame = pd.concat([_changes(*match) for match in matched], ignore_index=True)
    last = ~frame.duplicated(["model", "task", "variant"], keep="last")
    frame.loc[last, "p"] = holm(frame.loc[last, "p"], frame.loc[last, "discordant"])
    frame = frame.drop(columns="discordant")
    names = first.name, second.name
    if names[0] == names[1]:
        names = str(first.folder), str(second.folder)
    paired = {side for match in matched for side in match}
    only = [
        {"run": f"{group.model} / {group.task} / {variant.label}", "in": name}
        for name, own in zip(names, sides, strict=True)
        for group, variant in own
        if (group, variant) not in paired
    ]
    tables = [_task_table(part) for _, part in frame[last].groupby(["task", "model"], sort=False)]
    differing = pd.DataFrame(settings_that_differ(first, second))
    of_settings = Column("setting"), Column("values", " → ".join(SIDES))
    tables.insert(0, Table("settings", "Settings that differ", differing, of_settings))
    columns = Column("run"), Column("in", "only in")
    tables.append(Table("only", "Runs that one of them lacks", pd.DataFrame(only), columns))
    return Comparison(names, tuple(t for t in tables if len(t.frame)), in_percent(frame, _SCORES))


def settings_that_differ(first: Experiment, second: Experiment) -> list[dict[str, str]]:
    """The settings that have other values in one experiment than in the other: a row for each dotted
    key with the values of either, ``budget.rate``: 0.25 → 0.5. Of methods and models the names, of code
    the first digits of the commit."""

    def values_of(experiment: Experiment) -> dict[str, str]:
        values: dict[str, set[str]] = {}
        for run in experiment.runs:
            manifest = run.manifest
            named = {name: str(manifest.get(name)) for name in ("method", "model")}
            identity = {**(manifest.get("identity") or {}), **named}
            identity["code_revision"] = str(manifest.get("code_revision"))[:12]
            for key, value in flat(identity).items():
                values.setdefault(key, set()).add(value)
        return {key: ", ".join(sorted(own, key=natural_order)) for key, own in values.items()}

    sides = values_of(first), values_of(second)
    return [
        {"setting": key, "values": " → ".join(short_name(own.get(key, "unset")) for own in sides)}
        for key in dict.fromkeys([*sides[0], *sides[1]])
        if sides[0].get(key) != sides[1].get(key)
    ]


def matched_sides(mine: Sequence[Side], theirs: Sequence[Side]) -> list[tuple[Side, Side]]:
    """The variants of two experiments that stand for the same run, in the order of the first one: by
    hash, label, method and rate, or method, where that names one variant on each side."""
    one_model = all(len({group.model for group, _ in sides}) == 1 for sides in (mine, theirs))

    def names(side: Side) -> list[Any]:
        group, variant = side
        hashes = group.records["config_hash"][group.records["variant"] == variant.label].dropna()
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
    frame = scores(both)
    is_score = frame["measure"].eq("score")
    frame["shown"] = frame["variant"].where(is_score, frame["measure"])
    rows = wide(frame, ["value"], "shown", (*SIDES, *CHANGES), marks=False).set_index("value")
    rows["p"] = frame[~is_score].set_index("value")["p"]
    rows["discordant"] = comparisons(both).get((1, 0), NOTHING).discordant
    records = both.records.assign(value=both.records["dataset"].map(as_text))
    good = records[records["status"] == "ok"].dropna(subset=["score"])
    good = good.assign(seconds=good["compress_s"].fillna(0.0) + good["decode_s"])
    paired = good.pivot(index=["value", "example_id"], columns="variant", values="score")
    paired = paired.reindex(columns=list(SIDES)).dropna().astype(float)
    in_both = pd.MultiIndex.from_frame(good[["value", "example_id"]]).isin(paired.index)
    good = good[in_both]
    gains = (paired["second"] - paired["first"]) * (-1 if both.meta.lower_is_better else 1)
    counts = {"common_examples": gains == gains, "better": gains > 0, "worse": gains < 0}
    for name, is_so in counts.items():
        rows[name] = _with_all(is_so.groupby("value").sum(), "sum").reindex(
            rows.index, fill_value=0
        )
    for side in SIDES:
        own = good[good["variant"] == side].groupby("value")
        rows[f"{side}_ratio"] = _with_all(own["ratio"].mean(), "mean")
        rows[f"{side}_seconds"] = _with_all(own["seconds"].median(), "mean")
        every = records[records["variant"] == side]
        parts = [*every.groupby("value"), (AVERAGE, every)]
        rows[f"{side}_failed"] = pd.Series({v: failures_text(failures_of(p)) for v, p in parts})
    about = {"model": both.model, "task": both.task, "dataset": rows.index}
    about |= {"unit": both.meta.score_unit}
    rows = pd.concat([pd.DataFrame(about, index=rows.index), rows], axis=1)
    return rows.assign(variant=second[1].label, method=second[1].method)


def _with_all(of_datasets: pd.Series, how: str) -> pd.Series:
    """A number of each dataset, and that of their average or sum."""
    return pd.concat([of_datasets, pd.Series({AVERAGE: of_datasets.agg(how)})])


def _one_group(first: Side, second: Side) -> Group:
    """The records of two variants as one group with the variants "first" and "second"."""
    (a, _), (b, _) = first, second
    parts = []
    for (group, variant), side in zip((first, second), SIDES, strict=True):
        part = group.records[group.records["variant"] == variant.label]
        # Ids begin with the seed of their prompts where a side has several, which the other may lack.
        ids = [PROMPTS_OF_SEED.sub("", str(name)) for name in part["example_id"]]
        told = part.assign(example_id=ids)[["example_id", *PROMPT]]
        key = told.map(str).agg("\x00".join, axis=1)
        mean = part["score"].where(part["status"] == "ok").groupby(key).transform("mean")
        part = part.assign(example_id=key, variant=side, score=mean, seed=0, prompt_tail=None)
        part = part.sort_values("status", key=lambda s: s != "ok", kind="stable")
        parts.append(part.drop_duplicates("example_id").sort_index())
    shared = _datasets_of_both(first, second)
    unit = b.meta.unit if all(b.meta.unit in part for part in parts) else "example_id"
    records = pd.concat([part[part["dataset"].isin(shared)] for part in parts], ignore_index=True)
    model = a.model if a.model == b.model else f"{a.model} → {b.model}"
    meta = replace(b.meta, unit="unit")
    baseline = {SIDES[0]: None, SIDES[1]: SIDES[0]}
    variants = tuple(map(Variant, SIDES))
    records = records.assign(unit=records[unit])
    return Group(model, b.task, meta, variants, records, baseline)


def _datasets_of_both(first: Side, second: Side) -> set[Any]:
    one, other = (
        set(group.records["dataset"][group.records["variant"] == variant.label])
        for group, variant in (first, second)
    )
    return one & other


def _task_table(total: pd.DataFrame) -> Table:
    unit, task, model = (total[key].iloc[0] for key in ("unit", "task", "model"))
    text, signed = score_format(unit), score_format(unit, signed=True)
    columns = [
        METHOD,
        Column("difference", "change", signed),
        Column("times", "change, times", number),
        Column("p", text=p_text),
        *(Column(side, text=text, bounds=False) for side in SIDES),
        Column("common_examples", "common", whole),
        *(Column(side, text=whole) for side in ("better", "worse")),
        *(Column(f"{side}_ratio", f"{side} ratio", number) for side in SIDES),
        *(Column(f"{side}_seconds", f"{side} seconds", number) for side in SIDES),
        *(Column(f"{side}_failed", f"{side} failed") for side in SIDES),
    ]
    marks = (total["p"] < ALPHA).map({True: "shown", False: ""})
    few = [LEGEND["few"]] if total["p"].isna().any() else []
    return Table(
        f"compare-{task}-{model}",
        f"{task} on {model}: score{unit_text(unit)}",
        total.assign(**{f"{name}_mark": marks for name in CHANGES}),
        with_values(total, columns),
        (INTERVAL, CHANGE, *few),
    )


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
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
