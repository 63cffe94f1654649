"""Two experiments side by side: the same methods on the same tasks, paired where examples are the same.

Runs are matched by model, task and method; of several runs of one method, by the options that set them
apart. Where each folder has one model, they are matched although their names differ. Examples are the
same when id, seed, prompt and expected answers are; where fewer than half of them are, in some dataset,
means are compared unpaired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbench.records.read import StoreError
from kvbench.report.experiment import PROMPT, Experiment, Group, Variant, flat
from kvbench.report.files import write_text
from kvbench.report.frame import estimate, failures_of, failures_text, scores, strata_of
from kvbench.report.page import html
from kvbench.report.render import csv, markdown, plain
from kvbench.report.stats import ALPHA, holm, p_values, unpaired_difference
from kvbench.report.table import (
    INTERVAL,
    Column,
    Table,
    in_percent,
    legend,
    number,
    p_text,
    score_format,
    unit_text,
    whole,
)

_LEAST_COMMON = 0.5
"""Means are compared paired where this share of the smaller side's examples is in both."""
_LONGEST = 160


@dataclass(frozen=True)
class Comparison:
    """What two experiments have in common and what differs: their names, tables, a row per variant and
    dataset, and of each the runs that the other lacks."""

    names: tuple[str, str]
    tables: tuple[Table, ...]
    frame: pd.DataFrame
    only: tuple[list[str], list[str]]


def compare(first: Experiment, second: Experiment) -> Comparison:
    """Match the runs of two experiments and compare them.

    Raises:
        StoreError: they have no run in common.
    """
    parts, changed = [], []
    seen: tuple[set[str], set[str]] = (set(), set())
    for a, b in matched_groups(first, second):
        for x, y in matched_variants(a, b):
            both = _both(a, x, b, y)
            parts.append(_changes(both).assign(variant=y.label, method=y.method))
            changed += _settings(a, x, b, y)
            for known, group, variant in zip(seen, (a, b), (x, y), strict=True):
                known.add(_run_name(group, variant))
    if not parts:
        raise StoreError(
            f"{first.folder} and {second.folder} have no model, task and method in common"
        )
    frame = pd.concat(parts, ignore_index=True)
    last = ~frame.duplicated(["model", "task", "variant"], keep="last")
    frame.loc[last, "p_adjusted"] = holm([float(p) for p in frame.loc[last, "p"]])
    every = ([_run_name(g, v) for g in e.groups for v in g.variants] for e in (first, second))
    only = [[n for n in of if n not in known] for of, known in zip(every, seen, strict=True)]
    names = first.name, second.name
    if names[0] == names[1]:
        names = str(first.folder), str(second.folder)
    tables = [_settings_table(changed)] if changed else []
    groups = frame.groupby(["task", "model"], sort=False)
    tables += [_task_table(part, last[part.index]) for _, part in groups]
    return Comparison(names, tuple(tables), in_percent(frame, _NUMBERS), (only[0], only[1]))


_NUMBERS = [
    f"{key}{end}" for key in ("first", "second", "difference") for end in ("", "_low", "_high")
]


def matched_groups(first: Experiment, second: Experiment) -> list[tuple[Group, Group]]:
    """Groups of the same unit, task and model, or task alone where each has one model."""
    alone = all(len({group.model for group in e.groups}) == 1 for e in (first, second))
    keys = {("" if alone else group.model, group.task): group for group in second.groups}
    found = [(a, keys.get(("" if alone else a.model, a.task))) for a in first.groups]
    return [(a, b) for a, b in found if b and a.meta.score_unit == b.meta.score_unit]


def matched_variants(a: Group, b: Group) -> list[tuple[Variant, Variant]]:
    """Variants of the same label; where a method has one variant in each, they are matched in any
    case."""
    found = []
    for x in a.variants:
        same = [y for y in b.variants if y.label == x.label]
        mine, theirs = ([v for v in g.variants if v.method == x.method] for g in (a, b))
        found += [(x, y) for y in same or (theirs if len(mine) == len(theirs) == 1 else [])]
    return found


def _run_name(group: Group, variant: Variant) -> str:
    return f"{group.model} / {group.task} / {variant.label}"


def _both(a: Group, x: Variant, b: Group, y: Variant) -> Group:
    """The records of two variants as one group, whose examples are the same where the prompts are.

    Seeds are part of it where the two have one in common; else a seed may stand for the methods'
    draws alone, and the prompt tells: repeats of one prompt are one example with their mean score.
    """
    sides = [g.records[g.records["variant"] == v.label] for g, v in ((a, x), (b, y))]
    seeds = bool(set(sides[0]["seed"]) & set(sides[1]["seed"]))
    shared = set(sides[0]["dataset"].astype(str)) & set(sides[1]["dataset"].astype(str))
    keyed = []
    for part, side in zip(sides, ("first", "second"), strict=True):
        key = part["example_id"].map(str)
        for field in PROMPT:
            key = key + "\x00" + part[field].map(str)
        part = part.assign(example_id=key, id=part["example_id"], variant=side, prompt_tail=None)
        if not seeds:
            good = part["score"].where(part["status"] == "ok").astype(float)
            part = part.assign(score=good.groupby(key).transform("mean"), seed=0)
            part = part.sort_values("status", key=lambda s: s != "ok", kind="stable")
            part = part.drop_duplicates("example_id").sort_index()
        keyed.append(part[part["dataset"].astype(str).isin(shared)])
    unit = b.meta.unit if b.meta.unit in keyed[0] and b.meta.unit in keyed[1] else "example_id"
    keyed = [part.assign(unit=part[unit]) for part in keyed]
    model = a.model if a.model == b.model else f"{a.model} → {b.model}"
    pair = Variant("first"), Variant("second")
    records = pd.concat(keyed, ignore_index=True)
    meta = replace(b.meta, unit="unit")
    return Group(model, b.task, meta, pair, records, {"first": None, "second": "first"})


def _changes(both: Group) -> pd.DataFrame:
    """A row per dataset, and for their average: means, the paired difference and its test."""
    frame, strata = scores(both), strata_of(both)
    sign = -1.0 if both.meta.lower_is_better else 1.0
    rows = []
    for value, part in frame.groupby("value", sort=False):
        used = [one for one in strata if one.name == f"dataset {value}"] or strata
        by = part.set_index(["measure", "variant"])
        first, second = (estimate(by.loc[("score", side)]) for side in ("first", "second"))
        gains = [sign * (one.values[:, 1] - one.values[:, 0]) for one in used]
        common = [int((~np.isnan(gain)).sum()) for gain in gains]
        smaller = [int((~np.isnan(one.values)).sum(0).min()) for one in used]
        paired = all(n > 0 and n >= _LEAST_COMMON * m for n, m in zip(common, smaller, strict=True))
        difference = estimate(by.loc[("difference", "second")])
        named = [replace(one, name=one.name.replace("dataset", "both", 1)) for one in used]
        columns = [one.stratum(one.values[:, [1]] - one.values[:, [0]]) for one in named]
        names = {one.name.removeprefix("dataset ") for one in used}
        here = both.records[both.records["dataset"].astype(str).isin(names)]
        row: dict[str, Any] = {
            "model": both.model,
            "task": both.task,
            "dataset": value,
            "unit": both.meta.score_unit,
            **first.named("first"),
            **second.named("second"),
            **(difference if paired else unpaired_difference(first, second)).named("difference"),
            "paired": paired,
            "p": p_values(columns)[0] if paired else np.nan,
            "p_adjusted": np.nan,
            "common_examples": sum(common),
            "better": sum(int((gain > 0).sum()) for gain in gains),
            "worse": sum(int((gain < 0).sum()) for gain in gains),
        }
        for side in ("first", "second"):
            mine = here[here["variant"] == side]
            good = mine[mine["status"] == "ok"]
            seconds = good["compress_s"].fillna(0.0) + good["decode_s"]
            row |= {f"{side}_ratio": good["ratio"].mean(), f"{side}_seconds": seconds.median()}
            row[f"{side}_failed"] = failures_text(failures_of(mine))
        rows.append(row)
    return pd.DataFrame(rows)


def _task_table(part: pd.DataFrame, last: pd.Series) -> Table:
    """Every method's total."""
    unit, task, model = (part[key].iloc[0] for key in ("unit", "task", "model"))
    total = part[last]
    marks = ["shown" if p < ALPHA else "" for p in total["p_adjusted"]]
    paired = ["" if known else " unpaired" for known in total["paired"]]
    total = total.assign(difference_mark=[a + b for a, b in zip(marks, paired, strict=True)])
    text, signed = (score_format(unit, signed=s) for s in (False, True))
    counts = {"common_examples": "common", "better": "better", "worse": "worse"}
    sides = [
        f"{side}_{key}" for key in ("ratio", "seconds", "failed") for side in ("first", "second")
    ]
    costs = [
        Column(key, key.replace("_", " "), str if "failed" in key else number) for key in sides
    ]
    return Table(
        f"compare-{task}-{model}",
        f"{task} on {model}: score{unit_text(unit)}",
        total,
        (
            Column("variant", "method"),
            Column("first", text=text),
            Column("second", text=text),
            Column("difference", "change", signed),
            Column("p_adjusted", "p, adjusted", p_text),
            *(Column(key, name, whole) for key, name in counts.items()),
            *costs,
        ),
        (
            INTERVAL,
            "change: second minus first, paired over the examples that both scored; bold where p of the"
            " exact paired test, adjusted by Holm's method for all methods and tasks, is below 0.05."
            " seconds: median of compressing and decoding.",
            *legend(total),
        ),
    )


def _settings(a: Group, x: Variant, b: Group, y: Variant) -> list[dict[str, str]]:
    """What changed between matched runs of the same seed, else in order."""
    sides = []
    for group, variant in ((a, x), (b, y)):
        codes = set(group.records.loc[group.records["variant"] == variant.label, "config_hash"])
        found = [m for m in group.manifests if m.get("config_hash") in codes]
        sides.append([_facts(m) for m in sorted(found, key=lambda m: str(m.get("seed")))])
    return [
        {"key": key, "first": one.get(key, "–"), "second": two.get(key, "–"), "run": y.label}
        for one, two in zip(*sides, strict=False)
        for key in dict.fromkeys([*one, *two])
        if one.get(key) != two.get(key)
    ]


def _settings_table(changed: Sequence[Mapping[str, str]]) -> Table:
    keys = ["key", "first", "second"]
    frame = (
        pd.DataFrame(changed).groupby(keys, sort=False)["run"].agg(lambda x: ", ".join(x.unique()))
    )
    columns = [Column(key) for key in keys] + [Column("run", "of")]
    title = "What changed in the runs that both have"
    return Table("settings", title, frame.reset_index(), tuple(columns))


def _facts(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What a manifest says a run was made with, as dotted keys; long values cut."""
    config = manifest.get("config") or manifest.get("identity") or {}
    others = ("methods", "method", "hydra", "experiment_name", "results_dir", "dry_run")
    own = {key: value for key, value in config.items() if key not in others}
    own["options"] = (config.get("methods") or {}).get(str(manifest.get("method"))) or {}
    made = ("seed", "code_revision", "versions", "hardware", "command")
    found = flat({**own, **{k: manifest[k] for k in made if k in manifest}}, everything=True)
    return {key: v if len(v) <= _LONGEST else f"{v[:_LONGEST]}…" for key, v in found.items()}


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write compare.html, compare.md and compare.csv; returns their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    only = [(n, lines) for n, lines in zip(comparison.names, comparison.only, strict=True) if lines]
    title = " → ".join(comparison.names)
    text = f"# {plain(title)}\n\n" + "\n".join(map(markdown, comparison.tables))
    for name, lines in only:
        text += f"\n{plain(f'Only in {name}:')}\n\n" + "".join(f"- {plain(run)}\n" for run in lines)
    page = html("tables.html.j2", title=title, tables=comparison.tables, only=only)
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_text(folder / "compare.html", page),
        write_text(folder / "compare.md", text),
        write_text(folder / "compare.csv", csv(comparison.frame)),
    ]
