"""Two experiments side by side: the same methods on the same tasks, paired where examples are the same.

Runs are matched by model, task and method; of several runs of one method, by the options that set them
apart. Where each folder has one model, they are matched although their names differ. Examples are the
same when id, seed, prompt and expected answers are; where fewer than half of them are, in some dataset,
means are compared unpaired.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from kvbench.records.read import StoreError
from kvbench.report.experiment import Experiment, Group, TaskMeta
from kvbench.report.labels import Variant, flat
from kvbench.report.stats.estimate import Estimate, Stratum
from kvbench.report.stats.intervals import difference_intervals, mean_intervals, unpaired_difference
from kvbench.report.stats.significance import holm, p_values
from kvbench.report.table import NOTHING
from kvbench.report.tables.scores import AVERAGE
from kvbench.report.tables.strata import PROMPT, failures_of

_LEAST_COMMON = 0.5
"""Means are compared paired where this share of the smaller side's examples is in both."""


@dataclass(frozen=True)
class Change:
    """One method on one dataset (or over all of a task's) in both experiments; files have its fields.

    Attributes:
        difference: second minus first; over the examples that both scored where `paired`.
        p, p_holm: of the paired test, adjusted for all totals; NaN unpaired.
        better, worse: of the common examples, whose score rose or fell in the sense of the task.
        failed: of each: failed examples by status.
        ratio, seconds: of each: measured ratio, median seconds of compressing and decoding.
    """

    dataset: str
    first: Estimate
    second: Estimate
    difference: Estimate
    paired: bool
    p: float
    p_holm: float
    common_examples: int
    better: int
    worse: int
    failed: tuple[Mapping[str, int], Mapping[str, int]]
    ratio: tuple[float, float]
    seconds: tuple[float, float]


@dataclass(frozen=True)
class Flip:
    """An example whose score changed, with both answers."""

    dataset: str
    example_id: str
    method: str
    expected: str
    predictions: tuple[str, str]
    scores: tuple[float, float]


@dataclass(frozen=True)
class Match:
    """One variant in both experiments; the last change is the total."""

    label: str
    method: str
    changes: tuple[Change, ...]
    flips: tuple[Flip, ...]

    @property
    def total(self) -> Change:
        """Over all datasets that both have."""
        return self.changes[-1]


@dataclass(frozen=True)
class TaskComparison:
    """All variants that both experiments have on one task.

    Attributes:
        model: as both call it, or ``a -> b``.
    """

    model: str
    task: str
    unit: str
    lower_is_better: bool
    matches: tuple[Match, ...]


@dataclass(frozen=True)
class Setting:
    """A key of the manifests whose value changed, and the runs in which it did."""

    key: str
    first: str
    second: str
    runs: tuple[str, ...]
    everywhere: bool


@dataclass(frozen=True)
class Comparison:
    """What two experiments have in common and what differs.

    Attributes:
        names: what the two are called.
        settings: what changed between matched runs.
        only: of each, the runs that the other lacks.
    """

    names: tuple[str, str]
    tasks: tuple[TaskComparison, ...]
    settings: tuple[Setting, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]


def compare(first: Experiment, second: Experiment) -> Comparison:
    """Match the runs of two experiments and compare them.

    Raises:
        StoreError: they have no run in common.
    """
    groups = matched_groups(first, second)
    tasks: list[TaskComparison] = []
    pairs: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = []
    seen: tuple[set[str], set[str]] = (set(), set())
    for a, b in groups:
        if a.meta.score_unit != b.meta.score_unit:
            continue
        matches = []
        for x, y in matched_variants(a, b):
            matches.append(_match(a, x, b, y))
            where = f"{b.model} / {b.task} / {y.label}"
            pairs += [(where, *both) for both in _manifests(a, x, b, y)]
            seen[0].add(_run_name(a, x))
            seen[1].add(_run_name(b, y))
        if matches:
            model = a.model if a.model == b.model else f"{a.model} → {b.model}"
            meta = b.meta
            tasks.append(
                TaskComparison(model, b.task, meta.score_unit, meta.lower_is_better, tuple(matches))
            )
    if not tasks:
        raise StoreError(
            f"{first.folder} and {second.folder} have no model, task and method in common"
        )
    every = ([_run_name(g, v) for g in e.groups for v in g.variants] for e in (first, second))
    only = [
        tuple(n for n in names if n not in known) for names, known in zip(every, seen, strict=True)
    ]
    settings = tuple(_settings(pairs))
    return Comparison(_names(first, second), _adjusted(tasks), settings, (only[0], only[1]))


def _names(first: Experiment, second: Experiment) -> tuple[str, str]:
    """The folders' names, with their parents' where they are the same."""
    if first.name != second.name:
        return first.name, second.name
    a, b = (f"{e.folder.resolve().parent.name}/{e.name}" for e in (first, second))
    return (a, b) if a != b else (str(first.folder), str(second.folder))


def matched_groups(first: Experiment, second: Experiment) -> list[tuple[Group, Group]]:
    """Groups of the same task and model, or of the same task where each has one model."""
    alone = all(len({group.model for group in e.groups}) == 1 for e in (first, second))
    keys = {("" if alone else group.model, group.task): group for group in second.groups}
    found = [(a, keys.get(("" if alone else a.model, a.task))) for a in first.groups]
    return [(a, b) for a, b in found if b is not None]


def matched_variants(a: Group, b: Group) -> list[tuple[Variant, Variant]]:
    """Variants of the same label; where a method has one variant in each, they are matched in any
    case."""
    found = []
    for x in a.variants:
        same = [y for y in b.variants if y.label == x.label]
        mine = [variant for variant in a.variants if variant.method == x.method]
        theirs = [variant for variant in b.variants if variant.method == x.method]
        if not same and len(mine) == len(theirs) == 1:
            same = theirs
        found += [(x, y) for y in same]
    return found


def _run_name(group: Group, variant: Variant) -> str:
    return f"{group.model} / {group.task} / {variant.label}"


def _match(a: Group, x: Variant, b: Group, y: Variant) -> Match:
    one, other = keyed_records(a, x, b, y)
    names = sorted(set(one["dataset"].astype(str)) & set(other["dataset"].astype(str)))
    unit = b.meta.unit if b.meta.unit in one and b.meta.unit in other else "example_id"
    changes = [_change(one, other, [name], unit, b.meta) for name in names]
    if len(names) != 1:
        changes.append(_change(one, other, names, unit, b.meta))
    return Match(y.label, y.method, tuple(changes), tuple(_flips(one, other, y.label)))


def keyed_records(a: Group, x: Variant, b: Group, y: Variant) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The records of two variants, each with ``good``, the score where there is one, and a column
    ``key`` that is equal where the example is.

    Seeds are part of it where the two have one in common; else a seed may stand for the methods'
    draws alone, and the prompt tells: repeats of one prompt are one example with their mean score.
    """
    one = a.records[a.records["variant"] == x.label]
    other = b.records[b.records["variant"] == y.label]
    seeds = bool(set(one["seed"]) & set(other["seed"]))
    keyed = []
    for part in (one, other):
        keys = part["example_id"].map(str)
        for field in (*PROMPT, *(["seed"] if seeds else [])):
            keys = keys + "\x00" + part[field].map(str)
        good = part["score"].where(part["status"] == "ok").astype(float)
        part = part.assign(key=keys, good=good.groupby(keys).transform("mean"))
        part = part.sort_values("status", key=lambda status: status != "ok", kind="stable")
        keyed.append(part.drop_duplicates("key").sort_index())
    return keyed[0], keyed[1]


def _change(
    one: pd.DataFrame, other: pd.DataFrame, names: Sequence[str], unit: str, meta: TaskMeta
) -> Change:
    strata: tuple[list[Stratum], list[Stratum], list[Stratum]] = ([], [], [])
    better = worse = common = 0
    enough = bool(names)
    sign = -1.0 if meta.lower_is_better else 1.0
    fraction = meta.score_unit == "fraction"
    for name in names:
        mine, theirs = (part[part["dataset"].astype(str) == name] for part in (one, other))
        both = mine.merge(theirs[["key", "good"]], on="key", suffixes=("", "_b"))
        both = both.dropna(subset=["good", "good_b"])
        gain = sign * (both["good_b"] - both["good"])
        better, worse = better + int((gain > 0).sum()), worse + int((gain < 0).sum())
        common += len(both)
        smaller = min(int(part["good"].notna().sum()) for part in (mine, theirs))
        enough &= len(both) > 0 and len(both) >= _LEAST_COMMON * smaller
        strata[0].append(_stratum(f"first {name}", mine, mine["good"], unit))
        strata[1].append(_stratum(f"second {name}", theirs, theirs["good"], unit))
        strata[2].append(_stratum(f"both {name}", both, both["good_b"] - both["good"], unit))
    # where a dataset has no score at all, there is no mean over all of them
    scored = [bool(side) and all(len(one.sums) for one in side) for side in strata[:2]]
    first, second = (
        mean_intervals(side, fraction=fraction)[0] if known else NOTHING
        for side, known in zip(strata[:2], scored, strict=True)
    )
    if not all(scored):
        difference = NOTHING
    elif enough:
        difference = difference_intervals(strata[2], fraction=fraction)[0]
    else:
        difference = unpaired_difference(first, second)
    sides = [part[part["dataset"].astype(str).isin(names)] for part in (one, other)]
    return Change(
        dataset=names[0] if len(names) == 1 else AVERAGE,
        first=first,
        second=second,
        difference=difference,
        paired=enough,
        p=p_values(strata[2])[0] if enough else math.nan,
        p_holm=math.nan,
        common_examples=common,
        better=better,
        worse=worse,
        failed=(failures_of(sides[0]), failures_of(sides[1])),
        ratio=_both(sides, lambda part: part["ratio"].mean()),
        seconds=_both(
            sides, lambda part: (part["compress_s"].fillna(0.0) + part["decode_s"]).median()
        ),
    )


def _both(sides: Sequence[pd.DataFrame], number: Any) -> tuple[float, float]:
    first, second = (float(number(part[part["status"] == "ok"])) for part in sides)
    return first, second


def _stratum(name: str, records: pd.DataFrame, values: pd.Series, unit: str) -> Stratum:
    """One column; rows without a value are left out."""
    known = values.notna()
    codes, units = pd.factorize(records.loc[known, unit].astype(str), sort=True)
    sums, counts = np.zeros((len(units), 1)), np.zeros((len(units), 1))
    np.add.at(sums[:, 0], codes, values[known].to_numpy(float))
    np.add.at(counts[:, 0], codes, 1.0)
    return Stratum(name, sums, counts)


def _flips(one: pd.DataFrame, other: pd.DataFrame, label: str) -> list[Flip]:
    """Examples with an answer whose score is not what it was, the largest changes first."""
    both = one.merge(other[["key", "good", "prediction"]], on="key", suffixes=("", "_b"))
    both = both.dropna(subset=["good", "good_b", "prediction", "prediction_b"])
    both = both[both["good"] != both["good_b"]]
    both = both.assign(size=(both["good_b"] - both["good"]).abs())
    both = both.sort_values("size", ascending=False, kind="stable")
    rows: Iterable[Any] = both[list(_FLIP)].itertuples(index=False)
    return [
        Flip(
            dataset=str(row.dataset),
            example_id=str(row.example_id),
            method=label,
            expected=" | ".join(map(str, row.answers)) if isinstance(row.answers, list) else "",
            predictions=(str(row.prediction), str(row.prediction_b)),
            scores=(float(row.good), float(row.good_b)),
        )
        for row in rows
    ]


_FLIP = ("dataset", "example_id", "answers", "prediction", "prediction_b", "good", "good_b")
"""Columns of two experiments' common examples that a `Flip` is made of."""


def _adjusted(tasks: Sequence[TaskComparison]) -> tuple[TaskComparison, ...]:
    """The totals' p-values adjusted for their number."""
    p = iter(holm([match.total.p for task in tasks for match in task.matches]))

    def adjusted(match: Match) -> Match:
        return replace(match, changes=(*match.changes[:-1], replace(match.total, p_holm=next(p))))

    return tuple(replace(task, matches=tuple(map(adjusted, task.matches))) for task in tasks)


def _manifests(
    a: Group, x: Variant, b: Group, y: Variant
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The manifests of the runs of two variants: of the same seed, else in order."""
    sides = []
    for group, variant in ((a, x), (b, y)):
        codes = set(group.records.loc[group.records["variant"] == variant.label, "config_hash"])
        found = [m for m in group.manifests if m.get("config_hash") in codes]
        sides.append(sorted(found, key=lambda m: str(m.get("seed"))))
    return list(zip(*sides, strict=False))


def _settings(pairs: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> list[Setting]:
    """What changed between matched runs: config, versions, code, hardware."""
    changed: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for where, first, second in pairs:
        before, after = _facts(first), _facts(second)
        for key in dict.fromkeys([*before, *after]):
            values = before.get(key, "–"), after.get(key, "–")
            if values[0] != values[1]:
                changed[key, *values][where] = None
    runs = len({where for where, _, _ in pairs})
    return [Setting(*key, tuple(where), len(where) == runs) for key, where in changed.items()]


def _facts(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What a manifest says a run was made with, as dotted keys."""
    config = manifest.get("config") or manifest.get("identity") or {}
    others = {"methods", "method", "hydra"}  # a job's other methods are no part of this run
    own = {key: value for key, value in config.items() if key not in others}
    method, identity = str(manifest.get("method")), manifest.get("identity") or {}
    mine = (config.get("methods") or {}).get(method) or identity.get("method")
    if isinstance(mine, Mapping):
        own[f"methods.{method}"] = mine
    keys = ("seed", "code_revision", "versions", "hardware", "command")
    found = flat(own, everything=True)
    found |= flat({k: manifest[k] for k in keys if manifest.get(k) is not None}, everything=True)
    return {
        k: v for k, v in found.items() if k not in ("experiment_name", "results_dir", "dry_run")
    }
