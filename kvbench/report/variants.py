"""What tells runs apart: settings of the task, by which they stand in different tables, and options of a
method, by which they are different rows, its variants.

Runs of one model and task stand together where the task's settings are the same: prompts of 20 lines and
prompts of 200 are different tables, whatever folder they lie in. Within a table every row is about the
same prompts, those that the command which ran last asked for: a method that was run on fewer of them is
left out and named, where its row would be about other prompts than the row above it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvbench.records.read import Run
from kvbench.report.labels import digest, flat, natural_order, short_name, words
from kvbench.report.style import order_of

EXACT = "exact"
RATES = ("rate", "total_rate")
"""Options of the budget that name a share of the prompt."""


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
    """

    method: str
    options: tuple[Option, ...] = ()
    rate: float | None = None
    share: str = RATES[0]

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


def variants_of(runs: Sequence[Run]) -> list[Variant]:
    """The variant of each run. Runs that differ only in their seed have equal variants; the exact cache
    has no budget, and what else keeps the whole cache has no rate: it is named by its budget."""
    of_method: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        of_method[short_name(str(run.manifest.get("method")))].append(run)
    variants: dict[Run, Variant] = {}
    for method, mine in of_method.items():
        is_whole = all(map(_keeps_whole_cache, mine))
        settings = [_settings(run, without_budget=is_whole and method == EXACT) for run in mine]
        differing = [
            key
            for key in sorted(set().union(*settings))
            if len({own.get(key, "unset") for own in settings}) > 1
        ]
        for run, own in zip(mine, settings, strict=True):
            options = (Option(_name_of(k, is_whole), own.get(k, "unset")) for k in differing)
            share, rate = share_of(run.manifest)
            variants[run] = Variant(method, tuple(options), None if is_whole else rate, share)
        # Different versions of kvbench made runs that agree in label and seed but not in their hashes.
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


def _settings(run: Run, *, without_budget: bool) -> dict[str, str]:
    """The settings of a run that change a score, but for seeds, by dotted key, with a digest of the data
    files."""
    identity = dict(run.manifest.get("identity") or {})
    if without_budget:
        identity.pop("budget", None)
    if identity.get("data"):
        identity["data"] = digest(json.dumps(identity["data"], sort_keys=True))
    return {key: value for key, value in flat(identity).items() if not _is_seed(key)}


def _is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def share_of(manifest: Mapping[str, Any]) -> tuple[str, float | None]:
    """Of what the budget of a run keeps a share (`Variant.share`), and the share; None where the budget
    is a number of entries."""
    budget = (manifest.get("identity") or {}).get("budget") or {}
    name = "total_rate" if budget.get("total_rate") else "rate"
    share = budget.get(name)
    return name, None if share is None or budget.get("size") is not None else float(share)


def protocol_of(manifest: Mapping[str, Any]) -> str:
    """Which part of a prompt a run compressed, `compress_after`; empty for a probe of single layers.

    A manifest without one is older than the choice; that of a probe of fidelity or of lm-eval's tasks
    says "prompt" where it is older than all_but_last, although the last token was fed to every cache."""
    settings = {**(manifest.get("config") or {}), **(manifest.get("identity") or {})}
    task = settings.get("task")
    options = task if isinstance(task, Mapping) else {}
    if isinstance(options.get("exact"), int):
        return ""
    protocol = str(settings.get("compress_after") or "prompt")
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
        settings = _task_settings(run.manifest)
        for known, members in groups:
            if all(known[key] == settings[key] for key in known.keys() & settings.keys()):
                known |= settings
                members.append(run)
                break
        else:
            groups.append((dict(settings), [run]))
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


def _task_settings(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What a run was asked for that decides its prompts and scores: the task's options and version, and
    the files that the examples come from."""
    identity = manifest.get("identity") or {}
    task = identity.get("task")
    options = flat(task) if isinstance(task, Mapping) else {}
    settings = {key: value for key, value in options.items() if not _is_seed(key)}
    settings["compress_after"] = protocol_of(manifest)
    if identity.get("task_version") is not None:
        settings["task_version"] = json.dumps(identity["task_version"])
    if identity.get("data"):
        settings["data"] = digest(json.dumps(identity["data"], sort_keys=True))
    return settings


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
