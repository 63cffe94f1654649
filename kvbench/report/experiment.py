"""What a report reads from an experiment's folder.

In: the runs on disk. Out: one `Group` for each model and task, with the variants that are compared
(methods with the options they were run with) and one frame of all their records.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from kvbench.errors import first_line, printable
from kvbench.records.figures import Figure, TaskKind, figures_in, task_kind
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
"""Two records of one example id are about the same example where they agree in these fields."""
RATES = ("rate", "total_rate")
"""Options of the budget that name a share of the prompt."""


class Option(NamedTuple):
    """An option that sets a variant apart from other runs of the same method, e.g. rate 0.25."""

    name: str
    value: str

    @property
    def text(self) -> str:
        """How labels show it."""
        return short_name(f"{self.name} {self.value}".strip())


@dataclass(frozen=True)
class Variant:
    """One row of a comparison: a method with the options it was run with.

    Attributes:
        options: those that differ between the runs of this method.
        rate: the share that the budget keeps (of the middle, or of the whole prompt); None where the
            method has no budget, or one that names a number of entries.
    """

    method: str
    options: tuple[Option, ...] = ()
    rate: float | None = None

    @property
    def label(self) -> str:
        """The variant's name in tables and figures, e.g. "snapkv, rate 0.25"."""
        return ", ".join([self.method, *(option.text for option in self.options)])

    @property
    def without_rate(self) -> str:
        """The label without the rate, for places that show the rate by other means."""
        others = [option.text for option in self.options if option.name not in RATES]
        return ", ".join([self.method, *others])

    @property
    def sort_key(self) -> tuple[Any, ...]:
        """Table order: the exact cache first, then methods in their fixed order, larger budgets before
        smaller ones, options by their value."""
        options = [natural_order(option.value, option.name) for option in self.options]
        return order_of(self.method), -(self.rate or 0.0), options


@dataclass(frozen=True)
class TaskMeta:
    """What a task says about its scores (manifest key ``task_meta``).

    Attributes:
        kind: what the task measures.
        metric: the name of the score's metric; empty where the task names none.
        breakdown: record fields that tables split the examples by.
        measures: record fields that hold further scores, which a table shows side by side.
        unit: record field that names the independent unit, which intervals resample.
    """

    kind: TaskKind = "scores"
    metric: str = ""
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
        known: dict[str, Any] = {f.name: meta[f.name] for f in fields(TaskMeta) if f.name in meta}
        for key in ("breakdown", "measures"):
            known[key] = tuple(name for name in known.get(key) or () if name != "dataset")
        if not known.get("metric"):
            # Older manifests name the metric only as an option of the task.
            options = (manifest.get("config") or {}).get("task")
            options = options if isinstance(options, Mapping) else {}
            known["metric"] = str(options.get("primary") or options.get("metric") or "")
        return TaskMeta(**known | {"kind": task_kind(meta), "figures": figures_in(meta)})

    def figure(self, kind: type[F]) -> F | None:
        """The first figure of this type that the task asks for."""
        return next((one for one in self.figures if isinstance(one, kind)), None)


@dataclass(frozen=True, eq=False)
class Group:
    """All records of one model on one task, under one choice of the task's settings: what one table
    compares.

    Attributes:
        task: the task's name, followed by its settings where the folder has runs with several.
        records: one row per (variant, seed, example). Four columns are added to those on disk:
            ``variant``, the label; ``entries_mean`` and ``entries_max``, entries held per layer and KV
            head; and ``self_bleu``, how alike a sampled answer is to the variant's other answers on the
            dataset (NaN where answers were not sampled).
        variants: in table order.
        baseline: by label, the label of the exact variant that a variant is compared with; None for an
            exact variant, and where the exact cache was not run.
        left_out: methods that are not shown, because they were run on other prompts.
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
        """The variants' labels, in table order."""
        return [variant.label for variant in self.variants]

    @property
    def names(self) -> dict[str, str]:
        """What figures call each variant, by label: the label without its rate."""
        return {variant.label: variant.without_rate for variant in self.variants}

    @cached_property
    def compressed(self) -> frozenset[str]:
        """Labels of the variants that compete: those that save memory, except the exact cache."""
        whole_cache = set(self.records["variant"][self.records["saves_memory"].eq(False)])
        others = frozenset(v.label for v in self.variants if v.method != BASELINE)
        return others - whole_cache

    @cached_property
    def peers(self) -> list[list[int]]:
        """Indices of the variants that compete with each other: for each rate the compressed ones."""
        at_rate: dict[float | None, list[int]] = {}
        for i, variant in enumerate(self.variants):
            if variant.label in self.compressed:
                at_rate.setdefault(variant.rate, []).append(i)
        return list(at_rate.values())

    @cached_property
    def datasets(self) -> list[Any]:
        """Names of the datasets, in the order of the first records, which is the task's own. Names that
        all begin with a number (20 lines, 100 lines) are in the order of these numbers."""
        names = list(self.records["dataset"].unique())
        numbered = all(re.match(r"\d+[ _]", str(name)) for name in names)
        return sorted(names, key=natural_order) if numbered else names

    @property
    def baseline_name(self) -> str | None:
        """The method that differences are taken to; None where it was not run."""
        return BASELINE if any(self.baseline.values()) else None

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
        """Sentences that say by how much runs are smaller than the paper's; none where they are not."""
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
        StoreError: a task whose scores are fractions has a score outside 0 to 1.
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
    made = [
        _group(model, f"{task}, {settings}" if settings else task, members)
        for (model, task), every in groups.items()
        for settings, members in sections_of(every).items()
    ]
    return sorted(made, key=lambda g: (starts[g.model], g.model, not g.percent, g.task))


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
    # pandas warns of columns without any value, and guesses their type
    with_values = [frame.dropna(axis=1, how="all") for frame in frames if len(frame)] or frames
    records = pd.concat(with_values, ignore_index=True)
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
    """For each record how alike its answer is to the variant's others (`stats.self_bleu`), where a
    temperature says that answers were sampled; else NaN."""
    likeness = pd.Series(np.nan, index=records.index)
    options = [(run.manifest.get("config") or {}).get("sampling") or {} for run in runs]
    if any(given.get("temperature") for given in options):
        answered = records[records["prediction"].map(lambda text: isinstance(text, str))]
        for _, alike in answered.groupby(["variant", "dataset", "seed"], sort=False)["prediction"]:
            likeness.loc[alike.index] = np.array(self_bleu(list(alike)))
    return likeness


def _baselines(variants: Sequence[Variant]) -> dict[str, str | None]:
    """For each variant the exact variant that shares most of its options; None where none was run:
    no other method takes its place."""
    exact = [variant for variant in variants if variant.method == BASELINE]
    baselines: dict[str, str | None] = dict.fromkeys(variant.label for variant in variants)
    if not exact:
        return baselines
    for variant in variants:
        if variant.method != BASELINE:
            options = set(variant.options)
            nearest = max(exact, key=lambda other: len(set(other.options) & options))
            baselines[variant.label] = nearest.label
    return baselines


def variants_of(runs: Sequence[Run]) -> list[Variant]:
    """One variant per run; runs that differ by nothing but their seed share one.

    Of several runs of one method, the options in which they differ tell them apart. Where a method
    keeps the whole cache, its budget does not count.
    """
    by_method: dict[str, list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        by_method[short_name(str(run.manifest.get("method")))].append(index)
    variants: dict[int, Variant] = {}
    for method, indices in by_method.items():
        for i, variant in zip(indices, _variants(method, [runs[i] for i in indices]), strict=True):
            variants[i] = variant
    return [variants[i] for i in range(len(runs))]


def _variants(method: str, runs: Sequence[Run]) -> list[Variant]:
    """The variants of the runs of one method, in their order."""
    whole_cache = all(_keeps_whole_cache(run) for run in runs)
    options = [_options_of(run, with_budget=not whole_cache) for run in runs]
    names = sorted(set().union(*options))
    varied = [name for name in names if len({of_run.get(name) for of_run in options}) > 1]
    short = {name: shortest([of_run.get(name) for of_run in options]) for name in varied}
    variants = []
    for run, of_run in zip(runs, options, strict=True):
        shown = (Option(name.split(".")[-1], short[name][of_run.get(name)]) for name in varied)
        rate = None if whole_cache else _rate_of(run.manifest)
        variants.append(Variant(method, tuple(shown), rate))
    if whole_cache:
        return variants
    # Runs with one label and one seed but different hashes were made by different versions.
    labels = [(v.label, str(r.manifest.get("seed"))) for v, r in zip(variants, runs, strict=True)]
    counts = Counter(labels)
    for i, run in enumerate(runs):
        if counts[labels[i]] > 1:
            version = Option("", str(run.manifest.get("config_hash")))
            variants[i] = replace(variants[i], options=(*variants[i].options, version))
    return variants


def _keeps_whole_cache(run: Run) -> bool:
    """Whether the method of a run saves no memory, by all records that have this field."""
    saves_memory = run.records["saves_memory"].dropna()
    return len(saves_memory) > 0 and not saves_memory.astype(bool).any()


def _options_of(run: Run, *, with_budget: bool) -> dict[str, str]:
    """The run's settings that change a score, by dotted key; a digest stands for the data files."""
    identity = dict(run.manifest.get("identity") or run.manifest.get("config") or {})
    if identity.get("data"):
        identity["data"] = digest(json.dumps(identity["data"], sort_keys=True))
    options = flat(identity)
    if with_budget:
        return options
    return {key: value for key, value in options.items() if not key.startswith("budget.")}


def _rate_of(manifest: Mapping[str, Any]) -> float | None:
    """The share of the whole prompt, or of its middle, that the run's budget keeps; None where the
    budget names a number of entries."""
    budget = (manifest.get("identity") or manifest.get("config") or {}).get("budget") or {}
    share = budget.get("total_rate", None) or budget.get("rate")
    return None if share is None or budget.get("size") is not None else float(share)


def natural_order(value: object, before: str = "") -> tuple[str, int, float, str]:
    """A sort key: numbers in their order, then texts by the number they begin with, then other texts.

    Args:
        before: a text that values are sorted by before anything else.
    """
    if isinstance(value, int | float | np.number):
        return before, 0, float(value), ""
    leading = re.match(r"\d+(\.\d+)?", str(value))
    return before, 1 if leading else 2, float(leading[0]) if leading else 0.0, str(value)


def as_text(value: object) -> str:
    """A record field's value as tables name it: 200.0 is "200"."""
    whole = isinstance(value, float) and value.is_integer()
    return short_name(str(int(value) if whole else value))  # type: ignore[call-overload]


COLUMNS = (
    *(name for name in COMMON_FIELDS if name != "entries"),
    "entries_mean",
    "entries_max",
    "variant",
    "rate",
    "run",
)
"""Columns that every frame of `load` has, in this order; the task's own columns follow."""


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
        experiments = sorted({path.parents[3] for path in place.glob(f"*/*/*/*/{MANIFEST}")})
        runs = [run for folder_of_runs in experiments for run in load_runs(folder_of_runs)]
        runs = runs or load_runs(place)
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
    counts = [entries if isinstance(entries, dict) else {} for entries in records["entries"]]
    entries = pd.DataFrame(counts).reindex(index=range(len(records)), columns=["mean", "max"])
    entries = entries.set_index(records.index)
    return {f"entries_{key}": pd.to_numeric(entries[key], errors="coerce") for key in entries}
