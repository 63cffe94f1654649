"""What a report reads from an experiment's folder.

In: the runs on disk. Out: one `Group` for each model and task, with the variants that are compared and
one frame of all their records.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from kvbench.errors import first_line, printable
from kvbench.records.figures import Figure, TaskKind, figures_in
from kvbench.records.read import MANIFEST, Run, StoreError, load_runs
from kvbench.report.labels import natural_order, short_name
from kvbench.report.variants import (
    Variant,
    by_task_settings,
    on_the_same_prompts,
    prompt_seed,
    protocol_of,
    variants_of,
)

F = TypeVar("F")
BASELINE = "exact"
"""The method that the others are compared with, where it was run."""
MOST_COMPARED = 2_000_000
"""Words of all texts times texts, of which Self-BLEU is taken; those of H2O's 100 texts are 640,000."""
PROMPT = ("prompt_tokens", "prompt_tail", "answers")
"""Two records with one example id are about the same prompt if they agree in these fields."""


@dataclass(frozen=True)
class TaskMeta:
    """How the scores of a task are read (manifest key ``task_meta``).

    Attributes:
        metric: empty where the task names none.
        breakdown: the record fields by whose values tables split the examples.
        unit: the record field with the name of the independent unit that a record belongs to.
        measures: the record fields with further scores, which a table shows side by side.
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
        """Read a manifest; what it lacks has the default of this class."""
        meta = manifest.get("task_meta") or {}
        known: dict[str, Any] = {f.name: meta[f.name] for f in fields(TaskMeta) if f.name in meta}
        for key in ("breakdown", "measures"):
            known[key] = tuple(name for name in known.get(key) or () if name != "dataset")
        if not known.get("metric"):
            # An older manifest has the metric only among the options of the task.
            options = (manifest.get("config") or {}).get("task")
            options = options if isinstance(options, Mapping) else {}
            known["metric"] = str(options.get("primary") or options.get("metric") or "")
        return TaskMeta(
            **known | {"kind": meta.get("kind") or "scores", "figures": figures_in(meta)}
        )

    def figure(self, kind: type[F]) -> F | None:
        return next((figure for figure in self.figures if isinstance(figure, kind)), None)


@dataclass(frozen=True, eq=False)
class Group:
    """The runs that one table compares: those of one model on one task with the same settings.

    Attributes:
        task: the name of the task, followed by its settings where the folder has several of them.
        variants: in the order of tables.
        records: one row per (variant, seed, example). Four columns are added to those on disk:
            ``variant``, the label; ``entries_mean`` and ``entries_max``, entries held per layer and KV
            head; and ``self_bleu``, how alike a sampled answer is to the variant's other answers on the
            dataset (NaN where answers were not sampled).
        baseline: for each variant's label the label of the exact variant that it is compared with; None
            for an exact variant, and where the exact cache was not run.
        left_out: the methods that are not shown because they were run on other prompts.
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
        return [variant.label for variant in self.variants]

    @cached_property
    def names(self) -> dict[str, str]:
        return {variant.label: variant.without_rate for variant in self.variants}

    @cached_property
    def compressed(self) -> frozenset[str]:
        """The labels of the variants that are ranked: all but the exact cache and methods that save no
        memory."""
        whole_cache = set(self.records["variant"][self.records["saves_memory"].eq(False)])
        others = frozenset(v.label for v in self.variants if v.method != BASELINE)
        return others - whole_cache

    @cached_property
    def peers(self) -> list[list[int]]:
        """For each rate the indices of its compressed variants, which are ranked together."""
        at_rate: dict[str, list[int]] = {}
        for i, variant in enumerate(self.variants):
            if variant.label in self.compressed:
                at_rate.setdefault(variant.at, []).append(i)
        return list(at_rate.values())

    @cached_property
    def datasets(self) -> list[Any]:
        """The names of the datasets: in the order of these numbers if all begin with one (20 lines, 100
        lines), else in the order in which the task has them."""
        names = list(self.records["dataset"].unique())
        numbered = all(re.match(r"\d+[ _]", str(name)) for name in names)
        return sorted(names, key=natural_order) if numbered else names

    @cached_property
    def protocol(self) -> str:
        """Which part of each prompt was compressed (`protocol_of`), one for all variants."""
        return next(map(protocol_of, self.manifests), "")

    @property
    def protocol_in_title(self) -> str:
        """ ", compress_after all_but_last"; empty where the task's name says it, or there is none."""
        named = f", compress_after {self.protocol}"
        return "" if not self.protocol or named in self.task else named

    @property
    def baseline_name(self) -> str | None:
        """The method from which differences are taken; None where it was not run."""
        return BASELINE if any(self.baseline.values()) else None

    @property
    def percent(self) -> bool:
        return self.meta.score_unit == "fraction"

    @cached_property
    def good(self) -> pd.DataFrame:
        return self.records[self.records["status"].eq("ok")]


@dataclass(frozen=True, eq=False)
class Experiment:
    name: str
    folder: Path
    runs: tuple[Run, ...]
    groups: tuple[Group, ...]

    @property
    def small(self) -> list[str]:
        """Sentences that say in what the runs are smaller than those of the paper, each once."""
        configs = [run.manifest.get("config") or {} for run in self.runs]
        sentences = [config.get("small") for config in configs]
        return list(dict.fromkeys(str(text) for text in sentences if text))


def load_experiment(folder: Path) -> Experiment:
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
    """Group runs with the same model, task and settings of the task.

    Groups are sorted by the time at which the first run of their model was started; of one model, groups
    with scores that are fractions come first. Where the numbers of a task are not about the model, its
    subject (`task_meta.subject`) takes the place of the model.
    """
    by_model_and_task: dict[tuple[str, str], list[Run]] = defaultdict(list)
    starts: dict[str, str] = {}
    for run in runs:
        subject = (run.manifest.get("task_meta") or {}).get("subject")
        model = short_name(str(subject or run.manifest.get("model")))
        by_model_and_task[model, short_name(str(run.manifest.get("task")))].append(run)
        every = (run.manifest, *run.manifest.get("earlier_starts", ()))
        first = min(str(start.get("started")) for start in every)
        starts[model] = min(first, starts.get(model, first))
    groups = [
        _group(model, f"{task}, {settings}" if settings else task, together)
        for (model, task), runs_of_task in by_model_and_task.items()
        for settings, together in by_task_settings(runs_of_task).items()
    ]
    return sorted(groups, key=lambda g: (starts[g.model], g.model, not g.percent, g.task))


def _group(model: str, task: str, together: Sequence[Run]) -> Group:
    runs, left_out = on_the_same_prompts(together)
    variants = variants_of(runs)
    try:
        meta = TaskMeta.of(runs[-1].manifest)
    except ValueError as error:
        raise StoreError(f"{runs[-1].folder / MANIFEST}: {first_line(error)}") from error
    if meta.unit == "example_id" and any("context_id" in run.records for run in runs):
        meta = replace(meta, unit="context_id")  # answers about one context are not independent
    frames = []
    prompt_seeds = {prompt_seed(run.manifest) for run in runs}
    for run, variant in zip(runs, variants, strict=True):
        outside = run.records[run.records["score"].lt(-1e-9) | run.records["score"].gt(1 + 1e-9)]
        if meta.score_unit == "fraction" and len(outside):
            name, score = outside[["example_id", "score"]].iloc[0]
            raise StoreError(
                f"{run.folder}: example {name!r:.80} has score {score:g}; allowed: 0 to 1, as the"
                " task's scores are fractions"
            )
        seed = run.records["seed"].fillna(run.manifest.get("seed") or 0)
        records = run.records.assign(variant=variant.label, seed=seed)
        if len(prompt_seeds) > 1:  # the same names for other prompts
            for name in {"example_id", "context_id"} & set(records):
                named = f"prompts {prompt_seed(run.manifest)}: " + records[name].astype(str)
                records[name] = named.where(records[name].notna(), records[name])
        frames.append(records)
    # Columns without any value are left out, since pandas guesses their type, with a warning.
    with_values = [frame.dropna(axis=1, how="all") for frame in frames if len(frame)] or frames
    records = pd.concat(with_values, ignore_index=True)
    records = records.reindex(columns=list(dict.fromkeys([*records, *runs[0].records.columns])))
    records = records.drop_duplicates(["variant", "seed", "example_id"], ignore_index=True)
    records = records.assign(
        **entries_columns(records),
        dataset=[short_name(d) if isinstance(d, str) else d for d in records["dataset"]],
        self_bleu=_self_bleu_column(records, runs),
    )
    if meta.unit in records:  # a record that names no unit is a unit of its own
        records[meta.unit] = records[meta.unit].fillna(records["example_id"])
    unique = tuple(sorted(set(variants), key=lambda variant: variant.sort_key))
    manifests = tuple(run.manifest for run in runs)
    others = tuple(dict.fromkeys(left_out))
    return Group(model, task, meta, unique, records, _baselines(unique), manifests, others)


def _self_bleu_column(records: pd.DataFrame, runs: Sequence[Run]) -> pd.Series:
    """For each record the Self-BLEU of its answer among the variant's answers on the dataset; NaN unless
    answers were sampled, which the temperature in a manifest says."""
    column = pd.Series(np.nan, index=records.index)
    options = [(run.manifest.get("config") or {}).get("sampling") or {} for run in runs]
    if any(sampling.get("temperature") for sampling in options):
        answered = records[records["prediction"].map(lambda text: isinstance(text, str))]
        for _, texts in answered.groupby(["variant", "dataset", "seed"], sort=False)["prediction"]:
            column.loc[texts.index] = np.array(self_bleu(list(texts)))
    return column


def self_bleu(texts: Sequence[str]) -> list[float]:
    """For each text its BLEU-4, 0 to 1, with all other texts as references: the lower, the more diverse.
    NaN for a single text, and for so many words that to compare each text with each other takes minutes.

    H2O (arXiv 2306.14048, appendix C.1) names the measure (arXiv 1802.01886), but neither the length of
    n-grams, nor the smoothing (here method 1 of Chen and Cherry, 2014), nor what a word is (here words
    and punctuation marks).
    """
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    words = [re.findall(r"\w+|[^\w\s]", text) for text in texts]
    if len(texts) < 2 or len(texts) * sum(map(len, words)) > MOST_COMPARED:
        return [np.nan for _ in texts]
    smooth = SmoothingFunction().method1
    return [
        float(sentence_bleu(words[:i] + words[i + 1 :], own, smoothing_function=smooth))
        for i, own in enumerate(words)
    ]


def _baselines(variants: Sequence[Variant]) -> dict[str, str | None]:
    """By label of each variant the label of the exact variant that has the most options in common with
    it; None for exact variants, and where there are none."""
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


def entries_columns(records: pd.DataFrame) -> dict[str, pd.Series]:
    counts = [entries if isinstance(entries, dict) else {} for entries in records["entries"]]
    entries = pd.DataFrame(counts).reindex(index=range(len(records)), columns=["mean", "max"])
    entries = entries.set_index(records.index)
    return {f"entries_{key}": pd.to_numeric(entries[key], errors="coerce") for key in entries}
