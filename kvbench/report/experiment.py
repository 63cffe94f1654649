"""An experiment as the report sees it: variants (what is compared), tasks, and one frame of records."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from kvbench.errors import first_line, printable
from kvbench.records.figures import Figure, figures_in
from kvbench.records.read import (
    COMMON_FIELDS,
    MANIFEST,
    Run,
    StoreError,
    load_run,
    load_runs,
)
from kvbench.report.labels import digest, flat, short_name, shortest
from kvbench.report.sections import on_the_same_prompts, sections_of
from kvbench.report.stats import self_bleu
from kvbench.report.style import order_of

F = TypeVar("F")
BASELINE = "exact"
"""The method that others are compared with, where it was run."""
PROMPT = ("prompt_tokens", "prompt_tail", "answers")
"""Fields that are the same where two records of one id are about the same example."""


@dataclass(frozen=True)
class Variant:
    """One row of a comparison: a method with the options it was run with.

    Attributes:
        options: what sets it apart from other runs of the same method, e.g. ``("rate 0.25",)``.
        rate: the fraction that the budget names (of the middle, or of the whole prompt), None where the
            method has no budget.
    """

    method: str
    options: tuple[str, ...] = ()
    rate: float | None = None

    @property
    def label(self) -> str:
        """The name in tables and figures."""
        return ", ".join((self.method, *self.options))

    @property
    def without_rate(self) -> str:
        """The label but for the rate."""
        options = (o for o in self.options if not o.startswith(("rate ", "total_rate ")))
        return ", ".join((self.method, *options))

    @property
    def sort_key(self) -> tuple[Any, ...]:
        """The reference methods first, larger budgets before smaller ones; options by their number."""
        options = [natural_order(o.rpartition(" ")[2], o.rpartition(" ")[0]) for o in self.options]
        return order_of(self.method), -(self.rate or 0.0), options


@dataclass(frozen=True)
class TaskMeta:
    """What a task says about its scores (manifest key ``task_meta``).

    Attributes:
        breakdown: record fields that tables split by. measures: record fields, scores all of them,
            that a table shows side by side.
        unit: record field that names the independent unit, which intervals resample.
    """

    score_unit: str = "fraction"
    lower_is_better: bool = False
    breakdown: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    unit: str = "example_id"
    measures: tuple[str, ...] = ()

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> TaskMeta:
        """Read a manifest, with the defaults above for what it does not say."""
        meta = manifest.get("task_meta") or {}
        given: dict[str, Any] = {f.name: meta[f.name] for f in fields(TaskMeta) if f.name in meta}
        for key in ("breakdown", "measures"):
            given[key] = tuple(name for name in given.get(key) or () if name != "dataset")
        return TaskMeta(**given | {"figures": figures_in(meta)})

    def figure(self, kind: type[F]) -> F | None:
        """The first figure asked for of this type."""
        return next((one for one in self.figures if isinstance(one, kind)), None)


@dataclass(frozen=True, eq=False)
class Group:
    """All records of one model on one task with one choice of its settings: what a table compares.

    Attributes:
        task: its name; of runs with other settings than those of the first ones, with these settings.
        records: one row per (variant, seed, example), with the variant's label in the column
            ``variant`` and entries held per layer and KV head in ``entries_mean`` and
            ``entries_max``, and of answers that were drawn how alike they are to the variant's others of
            the data set in ``self_bleu``.
        variants: in table order.
        baseline: for each variant's label, the label of the exact variant it is compared with
            (None: it is one itself, or none was run).
        left_out: methods that were run on other prompts than these.
    """

    model: str
    task: str
    meta: TaskMeta
    variants: tuple[Variant, ...]
    records: pd.DataFrame
    baseline: Mapping[str, str | None]
    manifests: tuple[Mapping[str, Any], ...] = field(repr=False, default=())
    left_out: tuple[str, ...] = ()

    @cached_property
    def labels(self) -> list[str]:
        """Of the variants."""
        return [variant.label for variant in self.variants]

    @property
    def names(self) -> dict[str, str]:
        """By label what figures call the variants: the label but for the rate."""
        return {variant.label: variant.without_rate for variant in self.variants}

    @cached_property
    def compressed(self) -> frozenset[str]:
        """Labels of the variants that compete: those that save memory, and are no reference."""
        kept = set(self.records["variant"][self.records["saves_memory"].eq(False)])
        return frozenset(v.label for v in self.variants if v.method != BASELINE) - kept

    @cached_property
    def peers(self) -> list[list[int]]:
        """Indices of variants that compete with each other: compressed, at the same rate."""
        found: dict[float | None, list[int]] = {}
        for i, variant in enumerate(self.variants):
            if variant.label in self.compressed:
                found.setdefault(variant.rate, []).append(i)
        return list(found.values())

    @cached_property
    def datasets(self) -> list[Any]:
        """In the task's order, which is its paper's: tasks give an example of each in turn. Those that
        are all named by a number (20 lines, 100 lines) are in its order."""
        names = list(self.records["dataset"].unique())
        numbered = all(re.match(r"\d+[ _]", str(name)) for name in names)
        return sorted(names, key=natural_order) if numbered else names

    @property
    def baseline_name(self) -> str | None:
        """The exact cache as the comparison column names it."""
        return next((name.split(",")[0] for name in self.baseline.values() if name), None)

    @property
    def percent(self) -> bool:
        """Whether scores are fractions, which readers see as per cent."""
        return self.meta.score_unit == "fraction"

    @cached_property
    def good(self) -> pd.DataFrame:
        """The records with status ok."""
        return self.records[self.records["status"].eq("ok")]


@dataclass(frozen=True, eq=False)
class Experiment:
    """Everything below one experiment folder."""

    name: str
    folder: Path
    runs: tuple[Run, ...]
    groups: tuple[Group, ...]

    @property
    def small(self) -> list[str]:
        """The sentences that say what small runs reduce; none where settings are the paper's."""
        configs = [run.manifest.get("config") or {} for run in self.runs]
        sentences = [config.get("small") for config in configs]
        return list(dict.fromkeys(str(text) for text in sentences if text))


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
    """Runs of the same model and task together, and of the same settings of the task: models in the
    order in which their first runs were started, then what is scored before what is probed.

    Where a task's numbers are not about the model (`task_meta.subject`), its subject stands for it.

    Raises:
        StoreError: a score of a fraction is none.
    """
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    starts: dict[str, str] = {}
    for run in runs:
        subject = (run.manifest.get("task_meta") or {}).get("subject")
        model = short_name(str(subject or run.manifest.get("model")))
        groups[model, short_name(str(run.manifest.get("task")))].append(run)
        for start in (run.manifest, *run.manifest.get("earlier_starts", ())):
            started = str(start.get("started"))
            starts[model] = min(started, starts.get(model, started))
    found = [
        _group(model, ", ".join(filter(None, (task, name))), members)
        for (model, task), every in groups.items()
        for name, members in sections_of(every).items()
    ]
    return sorted(found, key=lambda g: (starts[g.model], g.model, not g.percent, g.task))


def _group(model: str, task: str, every: Sequence[Run]) -> Group:
    runs, left_out = on_the_same_prompts(every)
    variants = variants_of(runs)
    try:
        meta = TaskMeta.of(runs[-1].manifest)
    except ValueError as error:
        raise StoreError(f"{runs[-1].folder / MANIFEST}: {first_line(error)}") from error
    if meta.unit == "example_id" and any("context_id" in run.records for run in runs):
        meta = replace(meta, unit="context_id")  # answers of one context are not independent
    frames = []
    for run, variant in zip(runs, variants, strict=True):
        outside = run.records[run.records["score"].lt(-1e-9) | run.records["score"].gt(1 + 1e-9)]
        if meta.score_unit == "fraction" and len(outside):
            name, score = outside[["example_id", "score"]].iloc[0]
            raise StoreError(
                f"{run.folder}: example {name!r:.80} has score {score:g}; allowed: 0 to 1, as the"
                " task's scores are fractions"
            )
        seed = run.records["seed"].fillna(run.manifest.get("seed") or 0)
        frames.append(run.records.assign(variant=variant.label, seed=seed))
    whole = [frame.dropna(axis=1, how="all") for frame in frames if len(frame)] or frames
    records = pd.concat(whole, ignore_index=True)
    records = records.reindex(columns=list(dict.fromkeys([*records, *runs[0].records.columns])))
    records = records.drop_duplicates(["variant", "seed", "example_id"], ignore_index=True)
    records = records.assign(
        **_entries(records),
        dataset=[short_name(d) if isinstance(d, str) else d for d in records["dataset"]],
        self_bleu=_self_bleu(records, runs),
    )
    if meta.unit in records:  # a record that names no unit is its own
        records[meta.unit] = records[meta.unit].fillna(records["example_id"])
    unique = tuple(sorted(set(variants), key=lambda variant: variant.sort_key))
    manifests = tuple(run.manifest for run in runs)
    others = tuple(dict.fromkeys(left_out))
    return Group(model, task, meta, unique, records, _baselines(unique), manifests, others)


def _self_bleu(records: pd.DataFrame, runs: Sequence[Run]) -> pd.Series:
    """Of each answer (`self_bleu`), where a temperature says that answers were drawn; else NaN."""
    found = pd.Series(np.nan, index=records.index)
    options = [(run.manifest.get("config") or {}).get("sampling") or {} for run in runs]
    if any(given.get("temperature") for given in options):
        answered = records[records["prediction"].map(lambda text: isinstance(text, str))]
        for _, alike in answered.groupby(["variant", "dataset", "seed"], sort=False)["prediction"]:
            found.loc[alike.index] = np.array(self_bleu(list(alike)))
    return found


def _baselines(variants: Sequence[Variant]) -> dict[str, str | None]:
    """For each variant the exact variant that shares most of its options; None where none was run:
    no other method takes its place."""
    exact = [variant for variant in variants if variant.method == BASELINE]
    found: dict[str, str | None] = dict.fromkeys(variant.label for variant in variants)
    for one in variants if exact else ():
        if one not in exact:
            options = set(one.options)
            nearest = max(exact, key=lambda other: len(set(other.options) & options))
            found[one.label] = nearest.label
    return found


def variants_of(runs: Sequence[Run]) -> list[Variant]:
    """One variant per run; runs that differ by nothing but their seed share one.

    Of several runs of one method, the keys in which they differ tell them apart. Where a method
    keeps the whole cache, its budget does not count.
    """
    by_method: dict[str, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        by_method[short_name(str(run.manifest.get("method")))].append(index)
    variants: dict[int, Variant] = {}
    for method, indices in by_method.items():
        saves = [runs[i].records["saves_memory"].dropna() for i in indices]
        whole = all(len(each) and not each.astype(bool).any() for each in saves)
        made = {}
        for i in indices:
            identity = dict(
                runs[i].manifest.get("identity") or runs[i].manifest.get("config") or {}
            )
            if identity.get("data"):  # digests of files: one of all
                identity["data"] = digest(json.dumps(identity["data"], sort_keys=True))
            told = flat(identity).items()
            made[i] = {k: v for k, v in told if not (whole and k.startswith("budget."))}
        keys = sorted(set().union(*made.values()))
        varied = [key for key in keys if len({one.get(key) for one in made.values()}) > 1]
        shown = {key: shortest([one.get(key) for one in made.values()]) for key in varied}
        for i, one in made.items():
            options = (f"{key.split('.')[-1]} {shown[key][one.get(key)]}" for key in varied)
            rate = None if whole else _rate_of(runs[i].manifest)
            variants[i] = Variant(method, tuple(map(short_name, options)), rate)
        # runs with one seed and one label but different hashes were made by different versions
        named = {i: (variants[i].label, str(runs[i].manifest.get("seed"))) for i in indices}
        shared = Counter(named.values())
        for i in (i for i in indices if shared[named[i]] > 1 and not whole):
            tag = str(runs[i].manifest.get("config_hash"))
            variants[i] = replace(variants[i], options=(*variants[i].options, tag))
    return [variants[i] for i in range(len(runs))]


def _rate_of(manifest: Mapping[str, Any]) -> float | None:
    """The share that the run's budget names, of the whole prompt or of its middle; None where it names a
    number of entries."""
    budget = (manifest.get("identity") or manifest.get("config") or {}).get("budget") or {}
    share = budget.get("total_rate", None) or budget.get("rate")
    return None if share is None or budget.get("size") is not None else float(share)


def natural_order(value: object, before: str = "") -> tuple[str, int, float, str]:
    """Numbers in their order, before text by the number it begins with, before other text.

    Args:
        before: what is sorted by first.
    """
    if isinstance(value, int | float | np.number):
        return before, 0, float(value), ""
    leading = re.match(r"\d+(\.\d+)?", str(value))
    return before, 1 if leading else 2, float(leading[0]) if leading else 0.0, str(value)


def as_text(value: object) -> str:
    """A field's value as a name: 200.0 is 200."""
    whole = isinstance(value, float) and value.is_integer()
    return short_name(str(int(value) if whole else value))  # type: ignore[call-overload]


COLUMNS = (
    *(name for name in COMMON_FIELDS if name != "entries"),
    *("entries_mean", "entries_max", "variant", "rate", "run"),
)
"""Columns that every frame of `load` has, in this order; those of the task follow."""


def load(folder: str | Path) -> pd.DataFrame:
    """Every record below a folder: of one run, of an experiment, or of several experiments.

    One row per (example, method, seed), with the columns of `COLUMNS`, then the task's own. ``variant``
    is the label that tables use, ``rate`` the record's own where a task has several, NaN for a budget
    that names a number of entries, ``ratio`` of measured bytes to the exact cache's, ``entries_mean``
    and ``entries_max`` held per layer and KV head, ``run`` the folder; times are seconds. Values are
    numbers, texts, truth values and lists of texts (other values are JSON), so that
    ``load(folder).to_parquet("x.parquet")`` works.

    Raises:
        StoreError: no runs there, or one that is broken.
    """
    place = Path(folder).expanduser()
    if (place / MANIFEST).is_file():
        runs = [load_run(place)]
    else:
        inner = sorted({path.parents[3] for path in place.glob(f"*/*/*/*/{MANIFEST}")})
        runs = [run for one in inner for run in load_runs(one)] or load_runs(place)
    if not runs:
        raise StoreError(f"no runs in {place}: expected an experiment's folder, or one run's")
    frames = []
    for run, variant in zip(runs, variants_of(runs), strict=True):
        rate = _rate_of(run.manifest)
        frame = run.records.drop(columns="entries").assign(
            variant=variant.label,
            rate=run.records.get("rate", math.nan if rate is None else rate),
            run=str(run.folder),
            **_entries(run.records),
        )
        for name, column in frame.items():
            if not pd.api.types.is_numeric_dtype(column):
                frame[name] = [_plain(value, texts=name == "answers") for value in column]
        frames.append(frame)
    whole = pd.concat([frame for frame in frames if len(frame)] or frames, ignore_index=True)
    return whole[[*COLUMNS, *sorted(map(str, set(whole) - set(COLUMNS)))]]


def _plain(value: Any, *, texts: bool) -> Any:
    """A list of texts, or JSON in place of any other list and of a mapping."""
    if isinstance(value, list) and texts:
        return [one if isinstance(one, str) else json.dumps(one) for one in value]
    return json.dumps(value) if isinstance(value, dict | list) else value


def _entries(records: pd.DataFrame) -> dict[str, pd.Series]:
    """The records' ``entries`` as two columns of numbers."""
    held = pd.DataFrame([e if isinstance(e, dict) else {} for e in records["entries"]])
    held = held.reindex(index=range(len(records)), columns=["mean", "max"]).set_index(records.index)
    return {f"entries_{key}": pd.to_numeric(held[key], errors="coerce") for key in held}
