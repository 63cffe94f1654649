"""An experiment as the report sees it: variants (what is compared), tasks, and one frame of records."""

from __future__ import annotations

import math
import re
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
from kvbench.report.labels import Variant, variants_of
from kvbench.report.stats.diversity import self_bleu

BASELINE = "exact"
"""The method that others are compared with, where it was run."""


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
            breakdown=tuple(name for name in meta.get("breakdown") or () if name != "dataset"),
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
        records: one row per (variant, seed, example), with the variant's label in the column
            ``variant`` and entries held per layer and KV head in ``entries_mean`` and
            ``entries_max``, milliseconds of decoding per step in ``decode_ms``, and of answers that were
            drawn how alike they are to the variant's others of the data set in ``self_bleu``.
        variants: in table order.
        baseline: for each variant's label, the label of the exact variant it is compared with
            (None: it is one itself, or none was run).
    """

    model: str
    task: str
    meta: TaskMeta
    variants: tuple[Variant, ...]
    records: pd.DataFrame
    baseline: Mapping[str, str | None]
    manifests: tuple[Mapping[str, Any], ...] = field(repr=False, default=())

    @cached_property
    def compressed(self) -> frozenset[str]:
        """Labels of the variants that compete: those that save memory, and are no reference."""
        kept = set(self.records["variant"][self.records["saves_memory"].eq(False)].unique())
        return frozenset(
            variant.label
            for variant in self.variants
            if variant.method != BASELINE and variant.label not in kept
        )

    @cached_property
    def datasets(self) -> list[Any]:
        """In the task's order, which is its paper's: tasks give an example of each in turn. Those that
        are all named by a number (20 lines, 100 lines) are in its order."""
        names = list(self.records["dataset"].unique())
        numbers = [re.match(r"(\d+)[ _]", str(name)) for name in names]
        if all(numbers):
            names.sort(key=lambda name: int(re.split("[ _]", str(name))[0]))
        return names

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
        named = over.reindex(columns=["prompt_tokens", "max_positions"])
        numbers = named.apply(pd.to_numeric, errors="coerce").max().tolist()
        if not np.isfinite(numbers).all():
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
    values = [e.get(which) if isinstance(e, dict) else None for e in records["entries"]]
    return [float(value) if isinstance(value, int | float) else math.nan for value in values]


def _decode_ms(
    records: pd.DataFrame, runs: Sequence[Run], variants: Sequence[Variant]
) -> pd.Series:
    """Per step of decoding; NaN where there was none. The first new token comes from the prompt's own
    pass or, where the question is read after compression, from a step that reads it."""
    after = {
        variant.label
        for run, variant in zip(runs, variants, strict=True)
        if (run.manifest.get("config") or {}).get("compress_after") == "context"
    }
    steps = pd.to_numeric(records["new_tokens"]) - 1 + records["variant"].isin(after)
    return 1000 * pd.to_numeric(records["decode_s"]) / steps.where(steps > 0)


def _self_bleu(records: pd.DataFrame, runs: Sequence[Run]) -> pd.Series:
    """Of each answer (`self_bleu`), where a temperature says that answers were drawn; else NaN."""
    found = pd.Series(np.nan, index=records.index)
    options = [(run.manifest.get("config") or {}).get("sampling") or {} for run in runs]
    if not any(given.get("temperature") for given in options) or "prediction" not in records:
        return found
    answered = records[records["prediction"].map(lambda text: isinstance(text, str))]
    for _, alike in answered.groupby(["variant", "dataset", "seed"], sort=False)["prediction"]:
        found.loc[alike.index] = np.array(self_bleu(list(alike)))
    return found


def _group(model: str, task: str, runs: Sequence[Run]) -> Group:
    variants = variants_of(runs)
    meta = TaskMeta.of(runs[-1].manifest)
    if meta.unit == "example_id" and any("context_id" in run.records for run in runs):
        meta = replace(meta, unit="context_id")  # answers of one context are not independent
    compared = (*meta.breakdown, meta.unit)
    frames = [
        checked(run, meta.figures, compared).assign(variant=variant.label)
        for run, variant in zip(runs, variants, strict=True)
    ]
    frames = [frame.dropna(axis=1, how="all") for frame in frames if len(frame)]
    records = pd.concat(frames, ignore_index=True) if frames else runs[0].records.assign(variant="")
    for name in runs[0].records.columns.difference(records.columns):
        records[name] = np.nan
    records = records.drop_duplicates(["variant", "seed", "example_id"], ignore_index=True)
    records = comparable(records, meta.figures, compared).assign(
        entries_mean=_entries(records, "mean"),
        entries_max=_entries(records, "max"),
        decode_ms=_decode_ms(records, runs, variants),
        self_bleu=_self_bleu(records, runs),
    )
    if meta.unit in records:  # a record that names no unit is its own
        records[meta.unit] = records[meta.unit].where(
            records[meta.unit].notna(), records["example_id"]
        )
    unique = tuple(sorted(set(variants), key=lambda variant: variant.sort_key))
    return Group(
        model=model,
        task=task,
        meta=replace(meta, figures=drawable(meta.figures, records)),
        variants=unique,
        records=records,
        baseline=_baselines(unique),
        manifests=tuple(run.manifest for run in runs),
    )


def _baselines(variants: Sequence[Variant]) -> dict[str, str | None]:
    """For each variant the exact variant that shares most of its options; None where none was run:
    no other method takes its place."""
    exact = [variant for variant in variants if variant.method == BASELINE]

    def nearest(variant: Variant) -> str | None:
        if variant in exact or not exact:
            return None
        return max(exact, key=lambda other: len(set(other.options) & set(variant.options))).label

    return {variant.label: nearest(variant) for variant in variants}
