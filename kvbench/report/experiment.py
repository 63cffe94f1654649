"""An experiment as the report sees it: arms (what is compared), tasks, and one frame of records."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbench.errors import printable
from kvbench.records.read import MANIFEST, Run, StoreError, load_runs
from kvbench.report.fields import checked, comparable, drawable, short_name
from kvbench.report.figures.style import order_of

BASELINE = "exact"
"""The method that others are compared with, where it was run."""

_NOT_IN_LABELS = frozenset(
    (
        "command",
        "device",
        "dry_run",
        "experiment",
        "hydra",
        "launcher",
        "limit",
        "lock_timeout",
        "logger",
        "name",
        "results_dir",
        "seed",
        "shard",
        "shards",
        "verbose",
    )
)
"""Config keys that say how a run was made rather than what was compared."""

_DATA = "data"
"""The key of an identity under which a task notes the content of its files."""

_LONGEST = 40
"""Characters of an option's value in a label."""


@dataclass(frozen=True)
class Arm:
    """One row of a comparison: a method with the options it was run with.

    Attributes:
        method: the method's name.
        options: what sets it apart from other runs of the same method, e.g. ``("rate 0.25",)``.
        rate: the fraction that the budget names (of the middle, or of the whole prompt), None where the
            method has no budget.
    """

    method: str
    options: tuple[str, ...] = ()
    rate: float | None = None

    @property
    def label(self) -> str:
        """What tables and figures call it."""
        return ", ".join((self.method, *self.options))

    @property
    def sort_key(self) -> tuple[tuple[int, str], float, tuple[tuple[str, float, str], ...]]:
        """The reference methods first, larger budgets before smaller ones; options by their number."""
        return order_of(self.method), -(self.rate or 0.0), tuple(map(_natural, self.options))


@dataclass(frozen=True)
class TaskMeta:
    """What a task says about its scores (manifest key ``task_meta``)."""

    version: int = 1
    score_unit: str = "fraction"
    lower_is_better: bool = False
    breakdown: tuple[str, ...] = ()
    figures: tuple[Mapping[str, Any], ...] = ()
    unit: str = "example_id"
    """Record field that names the independent unit, which intervals resample."""
    measures: tuple[str, ...] = ()
    """Record fields, scores all of them, that a table shows side by side."""

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> TaskMeta:
        """Read a manifest, with the defaults above for what it does not say."""
        meta = manifest.get("task_meta") or {}
        return TaskMeta(
            version=int(meta.get("version", 1)),
            score_unit=str(meta.get("score_unit", "fraction")),
            lower_is_better=bool(meta.get("lower_is_better", False)),
            breakdown=tuple(meta.get("breakdown") or ()),
            figures=tuple(meta.get("figures") or ()),
            unit=str(meta.get("unit", "example_id")),
            measures=tuple(meta.get("measures") or ()),
        )

    def figure(self, kind: str) -> Mapping[str, Any] | None:
        """The first figure asked for of this kind."""
        return next((spec for spec in self.figures if spec.get("kind") == kind), None)


@dataclass(frozen=True, eq=False)
class Group:
    """All records of one model on one task: what a table compares.

    Attributes:
        records: one row per (arm, seed, example), with the arm's label in the column ``arm`` and
            entries held per layer and KV head in ``entries_mean`` and ``entries_max``, and
            milliseconds of decoding per step in ``decode_ms``.
        arms: in table order.
        baseline: for each arm's label, the label of the exact arm it is compared with (None: it is
            one itself, or none was run).
    """

    model: str
    task: str
    meta: TaskMeta
    arms: tuple[Arm, ...]
    records: pd.DataFrame
    baseline: Mapping[str, str | None]
    manifests: tuple[Mapping[str, Any], ...] = field(repr=False, default=())

    @cached_property
    def compressed(self) -> frozenset[str]:
        """Labels of the arms that compete: those that save memory, and are no reference."""
        kept = self.records["arm"][self.records["saves_memory"].eq(False)]
        return frozenset(
            arm.label for arm in self.arms if arm.method != BASELINE and arm.label not in set(kept)
        )

    @property
    def left_out(self) -> list[str]:
        """Datasets of the task of which `limit` left nothing, whatever the run."""
        named = [manifest.get("datasets_left_out") or [] for manifest in self.manifests]
        shared = set(named[0]).intersection(*named[1:]) if named else set()
        return [name for name in (named[0] if named else []) if name in shared]

    @property
    def beyond_positions(self) -> tuple[int, int, int] | None:
        """Prompts longer than the model's positions: how many, tokens of the longest, the positions;
        None where there are none."""
        if "beyond_positions" not in self.records:
            return None
        over = self.records[self.records["beyond_positions"].eq(True)]
        numbers = [
            pd.to_numeric(over[name], errors="coerce").max()
            for name in ("prompt_tokens", "max_positions")
            if name in over
        ]
        if len(numbers) < 2 or not np.isfinite(numbers).all():
            return None
        return over["example_id"].nunique(), int(numbers[0]), int(numbers[1])

    @property
    def baseline_name(self) -> str | None:
        """What the comparison column is called."""
        return next((name.split(",")[0] for name in self.baseline.values() if name), None)


@dataclass(frozen=True, eq=False)
class Experiment:
    """Everything below one experiment folder."""

    name: str
    folder: Path
    runs: tuple[Run, ...]
    groups: tuple[Group, ...]


def load_experiment(folder: Path) -> Experiment:
    """Read all runs of an experiment.

    Raises:
        StoreError: the folder is missing, holds no runs, or a run is broken.
    """
    runs = load_runs(folder)
    if not runs:
        inner = sorted({path.parents[3].name for path in folder.glob(f"*/*/*/*/{MANIFEST}")})
        hint = f"; experiments in it: {', '.join(inner)}" if inner else ""
        raise StoreError(
            f"no runs in {folder}: expected <model>/<task>/<method>-<hash8>/{MANIFEST}{hint}"
        )
    name = printable(folder.resolve().name)
    return Experiment(name, folder, tuple(runs), tuple(group_runs(runs)))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs of the same model and task together: by model, what is scored before what is probed.

    Where a task's numbers are not about the model (`task_meta.subject`), its subject stands for it.
    """
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        subject = (run.manifest.get("task_meta") or {}).get("subject")
        model = short_name(str(subject or run.manifest.get("model")))
        groups[model, short_name(str(run.manifest.get("task")))].append(run)
    found = [_group(*key, members) for key, members in groups.items()]
    return sorted(found, key=lambda g: (g.model, g.meta.score_unit != "fraction", g.task))


def _natural(option: str) -> tuple[str, float, str]:
    """``kernel_size 5`` before ``kernel_size 15``."""
    name, _, value = option.rpartition(" ")
    try:
        return name, float(value), ""
    except ValueError:
        return name, math.inf, value


def by_measure(group: Group) -> Group:
    """The group with each of its task's measures in turn as the score: a row per record and measure,
    which the column ``measure`` names."""
    parts = [
        group.records.assign(measure=name, score=group.records[name])
        for name in group.meta.measures
        if name in group.records
    ]
    return replace(group, records=pd.concat(parts, ignore_index=True)) if parts else group


def _entries(records: pd.DataFrame, which: str) -> list[float]:
    """The records' ``entries`` as one number each: "mean" or "max" over layers and heads."""
    found = []
    for entries in records["entries"]:
        value = entries.get(which) if isinstance(entries, dict) else None
        found.append(float(value) if isinstance(value, int | float) else math.nan)
    return found


def _decode_ms(records: pd.DataFrame, runs: Sequence[Run], arms: Sequence[Arm]) -> pd.Series:
    """Per step of decoding; NaN where there was none. The first new token comes from the prompt's own
    pass or, where the question is read after compression, from a step that reads it."""
    after = {
        arm.label
        for run, arm in zip(runs, arms, strict=True)
        if (run.manifest.get("config") or {}).get("compress_after") == "context"
    }
    steps = pd.to_numeric(records["new_tokens"]) - 1 + records["arm"].isin(after)
    return 1000 * pd.to_numeric(records["decode_s"]) / steps.where(steps > 0)


def _group(model: str, task: str, runs: Sequence[Run]) -> Group:
    arms = arms_of(runs)
    meta = TaskMeta.of(runs[-1].manifest)
    compared = (*meta.breakdown, meta.unit)
    frames = [
        checked(run, meta.figures, compared).assign(arm=arm.label)
        for run, arm in zip(runs, arms, strict=True)
    ]
    frames = [frame.dropna(axis=1, how="all") for frame in frames if len(frame)]
    records = pd.concat(frames, ignore_index=True) if frames else runs[0].records.assign(arm="")
    for name in runs[0].records.columns.difference(records.columns):
        records[name] = np.nan
    records = records.drop_duplicates(["arm", "seed", "example_id"], ignore_index=True)
    records = comparable(records, meta.figures, compared).assign(
        entries_mean=_entries(records, "mean"),
        entries_max=_entries(records, "max"),
        decode_ms=_decode_ms(records, runs, arms),
    )
    if meta.unit in records:  # a record that names no unit is its own
        records[meta.unit] = records[meta.unit].where(
            records[meta.unit].notna(), records["example_id"]
        )
    unique = tuple(sorted(set(arms), key=lambda arm: arm.sort_key))
    return Group(
        model=model,
        task=task,
        meta=replace(meta, figures=drawable(meta.figures, records)),
        arms=unique,
        records=records,
        baseline=_baselines(unique),
        manifests=tuple(run.manifest for run in runs),
    )


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """One arm per run; runs that differ by nothing but their seed share one.

    Of several runs of one method, the keys in which they differ tell them apart. Where a method
    keeps the whole cache, its budget does not count.
    """
    by_method: dict[str, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        by_method[short_name(str(run.manifest.get("method")))].append(index)
    arms: dict[int, Arm] = {}
    for method, indices in by_method.items():
        whole = all(_keeps_all(runs[i].records) for i in indices)
        configs = {i: _told_of(runs[i].manifest) for i in indices}
        if whole:
            configs = {i: _without_budget(config) for i, config in configs.items()}
        varied = _varied(list(configs.values()))
        shown = {key: _short([config.get(key) for config in configs.values()]) for key in varied}
        for i, config in configs.items():
            options = tuple(
                short_name(f"{key.split('.')[-1]} {shown[key][config.get(key)]}") for key in varied
            )
            arms[i] = Arm(method, options, None if whole else _rate_of(runs[i].manifest))
        if not whole:
            _tell_twins_apart(arms, runs, indices)
    return [arms[i] for i in range(len(runs))]


def _rate_of(manifest: Mapping[str, Any]) -> float | None:
    """The share that the run's budget names: of the whole prompt, or of its middle."""
    budget = _identity(manifest).get("budget") or {}
    named = (budget.get(name) for name in ("total_rate", "rate"))
    share = next((share for share in named if share is not None), None)
    return None if share is None else float(share)


def _told_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What may tell a run from another: its options, and one digest for the content of its data."""
    identity = dict(_identity(manifest))
    data = identity.pop(_DATA, None)
    told = flat(identity)
    if data:
        told[_DATA] = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:8]
    return told


def _varied(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys in which configs differ; the data's digest only where nothing else says it."""
    keys = sorted(set().union(*configs))
    varied = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    if _DATA not in varied:
        return varied
    others = [key for key in varied if key != _DATA]
    found = {tuple(config.get(key) for key in others) for config in configs}
    every = {tuple(config.get(key) for key in varied) for config in configs}
    return others if len(found) == len(every) else varied


def _short(values: Sequence[str | None]) -> dict[str | None, str]:
    """What labels say of an option's values: of paths the last part, of long ones the beginning; where
    that would make two of them one, the whole, or a digest of it."""
    short = {value: _in_short(value) for value in values}
    if len(set(short.values())) == len(short):
        return short
    return {value: "unset" if value is None else short_name(value, _LONGEST) for value in values}


def _in_short(value: str | None) -> str:
    if value is None:
        return "unset"
    try:
        several = json.loads(value)
    except ValueError:
        several = value
    if isinstance(several, list) and several and all(isinstance(part, str) for part in several):
        value = " ".join(part.rsplit("/", 1)[-1] for part in several)
    elif isinstance(several, str):
        value = value.rsplit("/", 1)[-1] or value
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"


def _tell_twins_apart(arms: dict[int, Arm], runs: Sequence[Run], indices: Sequence[int]) -> None:
    """Runs with one seed and one label but different hashes were made by different versions."""
    twins: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i in indices:
        twins[arms[i].label, str(runs[i].manifest.get("seed"))].append(i)
    for same in twins.values():
        if len(same) > 1:
            for i in same:
                tag = str(runs[i].manifest.get("config_hash"))
                arms[i] = Arm(arms[i].method, (*arms[i].options, tag), arms[i].rate)


def _baselines(arms: Sequence[Arm]) -> dict[str, str | None]:
    """For each arm the exact arm that shares most of its options; None where none was run: no other
    method is what one would compare with."""
    exact = [arm for arm in arms if arm.method == BASELINE]
    found: dict[str, str | None] = dict.fromkeys(arm.label for arm in arms)
    for arm in arms if exact else ():
        nearest = max(exact, key=lambda other: len(set(other.options) & set(arm.options)))
        found[arm.label] = None if arm in exact else nearest.label
    return found


def _identity(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was hashed: whatever changes a score of this run; else the whole config."""
    return manifest.get("identity") or manifest.get("config") or {}


def _keeps_all(records: pd.DataFrame) -> bool:
    saves = records["saves_memory"].dropna()
    return bool(len(saves)) and not saves.astype(bool).any()


def _without_budget(config: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in config.items() if not key.startswith("budget.")}


def flat(
    config: Mapping[str, Any], prefix: str = "", *, everything: bool = False
) -> dict[str, str]:
    """Dotted keys to values as text; unless `everything`, only keys that belong in a label."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if key in _NOT_IN_LABELS and not everything:
            continue
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.", everything=everything)
        else:
            found[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return found
