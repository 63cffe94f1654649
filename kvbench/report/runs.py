"""Reads the runs of an experiment's folder, as one `Group` for each model and task with the variants
that are compared and one frame of all their records; `load` reads the records of any folder.

Runs of one model and task stand together where the task's settings are the same: prompts of 20 lines and
prompts of 200 are different tables, whatever folder they lie in. Options of a method by which its runs
differ make them different rows, its variants. Every row of a table is about the same prompts, those that
the command which ran last asked for: a method that was run on fewer of them is left out and named.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from kvbench.errors import first_line, printable
from kvbench.records.figures import Figure, TaskKind, figures_in
from kvbench.records.read import COMMON_FIELDS, MANIFEST, Run, StoreError, load_run, load_runs
from kvbench.report.style import order_of

F = TypeVar("F")
BASELINE = "exact"
"""The method that the others are compared with, where it was run."""
RATES = ("rate", "total_rate")
"""Options of the budget that name a share of the prompt."""
PROMPT = ("prompt_tokens", "prompt_tail", "answers")
"""Two records with one example id are about the same prompt if they agree in these fields."""
PROMPTS_OF_SEED = re.compile(r"^prompts [\d, ]*: ")
"""How the ids of examples and contexts begin where a table has prompts of several seeds."""
COLUMNS = (
    *(name for name in COMMON_FIELDS if name != "entries"),
    "entries_mean",
    "entries_max",
    "variant",
    "rate",
    "run",
)
"""The first columns of every frame of `load`; the fields of the task follow, sorted by name."""
MOST_NAMES = 4
"""Names that a sentence lists; it counts the others."""
_LONGEST = 80
"""Most characters of a name."""


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested config as one mapping, from dotted keys to values as text, without names."""
    texts: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            texts |= flat(value, f"{prefix}{key}.")
        elif key != "name":
            texts[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return texts


def words(name: str) -> str:
    return name.replace("_", " ")


def listed(names: Sequence[str], most: int = MOST_NAMES, separator: str = ", ") -> str:
    """At most so many names in a sentence, and how many others there are. Names that hold commas have
    "; " between all of them."""
    *some, last = names
    if len(names) > most:
        some, last = list(names[:most]), f"{len(names) - most} more"
    elif separator != ", ":
        return separator.join(names)
    return f"{separator.join(some)} and {last}" if some else last


def short_name(text: str) -> str:
    """The text, or its beginning and a digest of the whole where it is too long for a label."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 9]}…{digest(text)}"


def digest(text: str) -> str:
    """Eight hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]


def natural_order(value: object, before: str = "") -> tuple[str, int, float, str]:
    """A sort key: by the text `before`, then numbers by size, then texts that begin with a number, by
    that number, then other texts."""
    if isinstance(value, int | float | np.number):
        return before, 0, float(value), ""
    leading = re.match(r"\d+(\.\d+)?", str(value))
    return before, 1 if leading else 2, float(leading[0]) if leading else 0.0, str(value)


def as_text(value: object) -> str:
    """The value of a record field as tables show it: 200.0 is "200"."""
    whole = isinstance(value, float) and value.is_integer()
    return short_name(str(int(value) if whole else value))  # type: ignore[call-overload]


class Option(NamedTuple):
    """An option as the config calls it, e.g. rate 0.25."""

    name: str
    value: str

    @property
    def text(self) -> str:
        return short_name(f"{self.name} {self.value}".strip())


@dataclass(frozen=True)
class Variant:
    """One row of a comparison: a method with the options in which its runs differ.

    Attributes:
        rate: the share that the budget keeps; None where the method has no budget, or a budget that is
            a number of entries.
        share: what the rate is a share of: ``rate`` of the middle, ``total_rate`` of the whole prompt.
        size: the entries of a budget that is a number of them; None for any other.
    """

    method: str
    options: tuple[Option, ...] = ()
    rate: float | None = None
    share: str = RATES[0]
    size: int | None = None

    @property
    def at(self) -> str:
        """ "rate 0.25", "total rate 0.25", or empty: variants are ranked with those at the same."""
        return "" if self.rate is None else f"{words(self.share)} {self.rate:g}"

    @property
    def label(self) -> str:
        """The variant's name in tables and figures, e.g. "snapkv, rate 0.25"."""
        return ", ".join([self.method, *(option.text for option in self.options)])

    @property
    def without_rate(self) -> str:
        """The label for places that show the rate by other means."""
        others = [option.text for option in self.options if option.name not in RATES]
        return ", ".join([self.method, *others])

    @property
    def sort_key(self) -> tuple[Any, ...]:
        """Sorts variants as tables show them: by method (`kvbench.report.style`, the exact cache first),
        then larger rates before smaller ones, then by the values of their options."""
        options = [natural_order(option.value, option.name) for option in self.options]
        return order_of(self.method), self.share, -(self.rate or 0.0), options


@dataclass(frozen=True)
class TaskMeta:
    """How the scores of a task are read (manifest key ``task_meta``).

    Attributes:
        metric: empty where the task names none.
        breakdown: the record fields by whose values tables split the examples.
        unit: the record field with the name of the independent unit that a record belongs to.
        measures: the record fields with further scores, which a table shows side by side.
        signed: whether a score may be negative, even where none is.
    """

    kind: TaskKind = "scores"
    metric: str = ""
    score_unit: str = "fraction"
    lower_is_better: bool = False
    breakdown: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    unit: str = "example_id"
    measures: tuple[str, ...] = ()
    signed: bool = False

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> TaskMeta:
        """Read a manifest; what it lacks has the default of this class."""
        meta = manifest.get("task_meta") or {}
        known: dict[str, Any] = {f.name: meta[f.name] for f in fields(TaskMeta) if f.name in meta}
        for key in ("breakdown", "measures"):
            known[key] = tuple(name for name in known.get(key) or () if name != "dataset")
        options = (manifest.get("identity") or {}).get("task")
        if not known.get("metric") and isinstance(options, Mapping):
            known["metric"] = str(options.get("metric") or "")  # of a probe it is an option
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
        records: one row per (variant, seed, example). Three columns are added to those on disk:
            ``variant``, the label; ``entries_mean`` and ``entries_max``, entries held per layer and KV
            head.
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
    def at(self) -> dict[str, str]:
        """By label the rate (`Variant.at`)."""
        return {variant.label: variant.at for variant in self.variants}

    @cached_property
    def exact_of(self) -> dict[int, int]:
        """By index of each variant that is compared with an exact one the index of that (`baseline`)."""
        pairs = [(label, self.baseline[label]) for label in self.labels]
        index = self.labels.index
        return {index(label): index(exact) for label, exact in pairs if exact is not None}

    @cached_property
    def compressed(self) -> frozenset[str]:
        """The labels of the variants that are ranked: all but the exact cache and methods that save no
        memory."""
        whole_cache = set(self.records["variant"][self.records["saves_memory"].eq(False)])
        others = frozenset(v.label for v in self.variants if v.method != BASELINE)
        return others - whole_cache

    @cached_property
    def peers(self) -> list[list[int]]:
        """For each rate, or number of entries, the indices of its compressed variants, which are ranked
        together."""
        of_budget: dict[tuple[str, int | None], list[int]] = {}
        for i, variant in enumerate(self.variants):
            if variant.label in self.compressed:
                of_budget.setdefault((variant.at, variant.size), []).append(i)
        return list(of_budget.values())

    @cached_property
    def datasets(self) -> list[Any]:
        """The names of the datasets: in the order of these numbers if all begin with one (20 lines, 100
        lines), else in the order in which the task has them."""
        names = list(self.records["dataset"].unique())
        numbered = all(re.match(r"\d+[ _]", str(name)) for name in names)
        return sorted(names, key=natural_order) if numbered else names

    @cached_property
    def protocol(self) -> str:
        """The part of each prompt that was compressed (`protocol_of`), one for all variants."""
        return next(map(protocol_of, self.manifests), "")

    @property
    def protocol_in_title(self) -> str:
        """ ", compress_after all_but_last"; empty where the task's name says it, or there is none."""
        named = f", compress_after {self.protocol}"
        return "" if not self.protocol or named in self.task else named

    @property
    def title(self) -> str:
        """ "needle on smollm2, compress_after all_but_last"."""
        return f"{self.task} on {self.model}{self.protocol_in_title}"

    @property
    def about(self) -> dict[str, str]:
        """The columns of files that name the group."""
        return {"model": self.model, "task": self.task, "compress_after": self.protocol}

    @property
    def percent(self) -> bool:
        return self.meta.score_unit == "fraction"

    @cached_property
    def good(self) -> pd.DataFrame:
        return self.records[self.records["status"].eq("ok")]

    def measuring(self, numbers: pd.Series, unit: str, *, signed: bool = False) -> Group:
        """The group with another number of each record, in this unit, in the place of its score."""
        meta = replace(self.meta, score_unit=unit, signed=signed)
        return replace(self, meta=meta, records=self.records.assign(score=numbers))


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
        first = min(str(start.get("started")) for start in starts_of(run.manifest))
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
        if "asked_rate" in records and records["asked_rate"].notna().any():
            records = records.assign(rate=rates_of(run))
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
    )
    if meta.unit in records:  # a record that names no unit is a unit of its own
        records[meta.unit] = records[meta.unit].fillna(records["example_id"])
    unique = tuple(sorted(set(variants), key=lambda variant: variant.sort_key))
    manifests = tuple(run.manifest for run in runs)
    others = tuple(dict.fromkeys(left_out))
    return Group(model, task, meta, unique, records, _baselines(unique), manifests, others)


def _baselines(variants: Sequence[Variant]) -> dict[str, str | None]:
    """By label of each variant the label of the exact variant that has the most options in common with
    it; None for exact variants, and where there are none."""
    exact = [variant for variant in variants if variant.method == BASELINE]
    baselines: dict[str, str | None] = dict.fromkeys(variant.label for variant in variants)
    for variant in variants:
        if exact and variant.method != BASELINE:
            options = set(variant.options)
            nearest = max(exact, key=lambda other: len(set(other.options) & options))
            baselines[variant.label] = nearest.label
    return baselines


def entries_columns(records: pd.DataFrame) -> dict[str, pd.Series]:
    counts = [entries if isinstance(entries, dict) else {} for entries in records["entries"]]
    entries = pd.DataFrame(counts).reindex(index=range(len(records)), columns=["mean", "max"])
    entries = entries.set_index(records.index)
    return {f"entries_{key}": pd.to_numeric(entries[key], errors="coerce") for key in entries}


def variants_of(runs: Sequence[Run]) -> list[Variant]:
    """The variant of each run. Runs that differ only in their seed have equal variants; the exact cache
    has no budget, and what else keeps the whole cache has no rate: it is named by its budget. An exact
    cache of few bits (`Method.quantize`) is no exact cache."""
    of_method: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        name = short_name(str(run.manifest.get("method")))
        is_packed = name == BASELINE and run.records["saves_memory"].eq(True).any()
        of_method[f"{name}_quantized" if is_packed else name].append(run)
    variants: dict[Run, Variant] = {}
    for method, mine in of_method.items():
        is_whole = all(map(_keeps_whole_cache, mine))
        settings = [settings_of(run.manifest) for run in mine]
        differing = [
            key
            for key in sorted(set().union(*settings))
            if len({own.get(key, "unset") for own in settings}) > 1
            and not (is_whole and method == BASELINE and key.startswith("budget"))
        ]
        for run, own in zip(mine, settings, strict=True):
            options = (Option(_name_of(k, is_whole), own.get(k, "unset")) for k in differing)
            share, rate = share_of(run.manifest)
            if "asked_rate" in run.records and rates_of(run).nunique() == 1:
                rate = float(rates_of(run).max())
            size = None if is_whole else _budget_of(run.manifest).get("size")
            variants[run] = Variant(method, tuple(options), None if is_whole else rate, share, size)
        # What is in a hash and no setting, such as the code of a method, tells runs apart by the hash.
        keys = [
            (variants[run].label, str(run.manifest.get("seed")), prompt_seed(run.manifest))
            for run in mine
        ]
        for run, key in zip(mine, keys, strict=True):
            if keys.count(key) > 1 and not is_whole:
                version = Option("", str(run.manifest.get("config_hash")))
                variants[run] = replace(variants[run], options=(*variants[run].options, version))
    return [variants[run] for run in runs]


def _name_of(key: str, is_whole: bool) -> str:
    name = key.rpartition(".")[2]
    # The budget of what keeps the whole cache is no rate by which rows are grouped.
    return f"at {name}" if is_whole and key.startswith("budget.") else name


def _keeps_whole_cache(run: Run) -> bool:
    saves_memory = run.records["saves_memory"].dropna()
    return len(saves_memory) > 0 and not saves_memory.astype(bool).any()


def settings_of(manifest: Mapping[str, Any], parts: Collection[str] = ()) -> dict[str, str]:
    """The settings of a run that change a score, but for seeds, by dotted key, with a digest of the data
    files; those of these parts of its identity, or all."""
    identity = dict(manifest.get("identity") or {})
    if identity.get("data"):
        identity["data"] = digest(json.dumps(identity["data"], sort_keys=True))
    known = {k: v for k, v in identity.items() if v is not None and (not parts or k in parts)}
    return {key: value for key, value in flat(known).items() if not _is_seed(key)}


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def starts_of(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """When, by which command and with what every start of a run was made, the last one's at the end."""
    return [*manifest.get("earlier_starts", ()), manifest]


def share_of(manifest: Mapping[str, Any]) -> tuple[str, float | None]:
    """The share that the budget of a run keeps, behind what it is a share of (`Variant.share`); None
    where the budget is a number of entries."""
    budget = _budget_of(manifest)
    name = "total_rate" if budget.get("total_rate") else "rate"
    share = budget.get(name)
    return name, None if share is None or budget.get("size") is not None else float(share)


def rates_of(run: Run) -> pd.Series:
    """The rate of each record: its own where a task measures several in one run (a throughput probe's
    settings may have rates), else that of the run's budget; NaN where that is a number of entries."""
    if "rate" in run.records:
        return run.records["rate"]
    _, rate = share_of(run.manifest)
    of_run = pd.Series(math.nan if rate is None else rate, run.records.index)
    return pd.to_numeric(run.records.get("asked_rate", of_run)).fillna(of_run)


def _budget_of(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    return (manifest.get("identity") or {}).get("budget") or {}


def protocol_of(manifest: Mapping[str, Any]) -> str:
    """The part of a prompt that a run compressed, `compress_after`; empty for a probe of single layers.

    Version 0.2 wrote "prompt" for a probe of fidelity and for lm-eval's tasks, although the last token
    was fed to every cache."""
    identity = manifest.get("identity") or {}
    options = identity.get("task")
    options = options if isinstance(options, Mapping) else {}
    if isinstance(options.get("exact"), int):
        return ""
    protocol = str(identity.get("compress_after") or "prompt")
    fed = any(name in str(options.get("_target_")) for name in ("fidelity", "lm_eval"))
    return "all_but_last" if fed and protocol == "prompt" else protocol


def prompt_seed(manifest: Mapping[str, Any]) -> str:
    """The seed of a run's prompts (``task.seed``), of which a table shows the union; draws of methods
    have another (``seed``)."""
    task = (manifest.get("identity") or {}).get("task")
    options = flat(task) if isinstance(task, Mapping) else {}
    return ", ".join(options[key] for key in options if _is_seed(key))


def by_task_settings(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one model and task in groups with the same settings and protocol, each under those in
    which it differs from the others, such as ``num_lines 20``; an empty name where there is one.

    A setting that older runs lack, since the option did not exist, is taken to have the others' value.
    """
    groups: list[tuple[dict[str, str], list[Run]]] = []
    for run in runs:
        settings = settings_of(run.manifest, ("task", "task_version", "data"))
        settings["compress_after"] = protocol_of(run.manifest)
        for known, members in groups:
            if all(known[key] == settings[key] for key in known.keys() & settings.keys()):
                known |= settings
                members.append(run)
                break
        else:
            groups.append((settings, [run]))
    named: dict[str, list[Run]] = {}
    for own, members in groups:
        parts = []
        for key, value in own.items():
            if any(other.get(key, value) != value for other, _ in groups):
                parts.append(f"{key.rsplit('.', 1)[-1]} {value.strip('[]')}")
        name = short_name(", ".join(parts))
        if name in named:
            name = f"{name} {digest(json.dumps(own, sort_keys=True))}"
        named[name] = members
    return named


def on_the_same_prompts(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Restrict the runs of a table to the prompts that the last command asked for, of each seed.

    A run that was asked for a prompt and has no record of it stays: it was interrupted, and its table
    says so. A run that was never asked for some of the prompts is left out. Where the last run's prompts
    are not recorded, all records of the seed count.

    Returns:
        The runs with their records of these prompts, and the methods of the runs that are left out.
    """
    asked = {}
    for run in sorted(runs, key=lambda run: str(run.manifest.get("started"))):
        asked[run.manifest.get("seed"), prompt_seed(run.manifest)] = run.asked
    kept: list[Run] = []
    left_out: list[str] = []
    for run in runs:
        prompts = asked[run.manifest.get("seed"), prompt_seed(run.manifest)]
        names = run.records["example_id"]
        if prompts is None:
            kept.append(run)
        elif prompts <= (run.asked or frozenset()) | set(names):
            records = run.records[names.isin(prompts)].reset_index(drop=True)
            kept.append(replace(run, records=records))
        else:
            left_out.append(str(run.manifest.get("method")))
    return kept, left_out


def load(folder: str | Path) -> pd.DataFrame:
    """Read every record below a folder, of one run, of an experiment, or of several experiments: a row
    for each, with `COLUMNS` and the fields of the task.

    ``variant`` is the label in tables; ``rate`` the record's where a task has several, else that of the
    run's budget (NaN for a number of entries); ``ratio`` bytes over those of the exact cache; entries
    are per layer and KV head, times in seconds. Values are numbers, texts, truth values or lists of
    texts; others are JSON, so that ``load(folder).to_parquet("x.parquet")`` works.

    Raises:
        StoreError: the folder has no runs, or a broken one.
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
        frame = run.records.drop(columns="entries").assign(
            variant=variant.label,
            rate=rates_of(run),
            run=str(run.folder),
            **entries_columns(run.records),
        )
        for name, column in frame.items():
            if not pd.api.types.is_numeric_dtype(column):
                frame[name] = [_simple(value, is_answers=name == "answers") for value in column]
        frames.append(frame)
    records = pd.concat([frame for frame in frames if len(frame)] or frames, ignore_index=True)
    return records[[*COLUMNS, *sorted(map(str, set(records) - set(COLUMNS)))]]


def _simple(value: Any, *, is_answers: bool) -> Any:
    if isinstance(value, list) and is_answers:
        return [answer if isinstance(answer, str) else json.dumps(answer) for answer in value]
    return json.dumps(value) if isinstance(value, dict | list) else value
