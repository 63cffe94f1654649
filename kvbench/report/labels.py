"""What sets the runs of a comparison apart, and what each is called."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from kvbench.records.read import Run
from kvbench.report.fields import short_name
from kvbench.report.figures.style import order_of

_NOT_IN_LABELS = frozenset(
    (
        *("command", "device", "dry_run", "experiment", "hydra", "launcher", "limit", "name"),
        *("lock_timeout", "logger", "results_dir", "seed", "shard", "shards", "verbose"),
    )
)
"""Config keys that say how a run was made rather than what was compared."""

_DATA = "data"
"""The key of an identity under which a task notes the content of its files."""

_LONGEST = 40
"""Characters of an option's value in a label."""


@dataclass(frozen=True)
class Variant:
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
    def options_without_rate(self) -> tuple[str, ...]:
        """What sets it apart from runs of the same method at its rate."""
        return tuple(o for o in self.options if not o.startswith(("rate ", "total_rate ")))

    @property
    def sort_key(self) -> tuple[tuple[int, str], float, tuple[tuple[str, float, str], ...]]:
        """The reference methods first, larger budgets before smaller ones; options by their number."""
        return order_of(self.method), -(self.rate or 0.0), tuple(map(_natural, self.options))


def _natural(option: str) -> tuple[str, float, str]:
    """``kernel_size 5`` before ``kernel_size 15``."""
    name, _, value = option.rpartition(" ")
    try:
        return name, float(value), ""
    except ValueError:
        return name, math.inf, value


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
        whole = all(_keeps_all(runs[i].records) for i in indices)
        configs = {i: _distinguishing_options(runs[i].manifest) for i in indices}
        if whole:
            configs = {i: _without_budget(config) for i, config in configs.items()}
        varied = _varied(list(configs.values()))
        shown = {key: _short([config.get(key) for config in configs.values()]) for key in varied}
        for i, config in configs.items():
            options = tuple(
                short_name(f"{key.split('.')[-1]} {shown[key][config.get(key)]}") for key in varied
            )
            variants[i] = Variant(method, options, None if whole else _rate_of(runs[i].manifest))
        if not whole:
            _add_hashes(variants, runs, indices)
    return [variants[i] for i in range(len(runs))]


def _rate_of(manifest: Mapping[str, Any]) -> float | None:
    """The share that the run's budget names, of the whole prompt or of its middle; None where it names a
    number of entries."""
    budget = _identity(manifest).get("budget") or {}
    if budget.get("size") is not None:
        return None
    named = (budget.get(name) for name in ("total_rate", "rate"))
    share = next((share for share in named if share is not None), None)
    return None if share is None else float(share)


def _distinguishing_options(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What may distinguish a run from others: its options, and one digest of its data's content."""
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


def _add_hashes(variants: dict[int, Variant], runs: Sequence[Run], indices: Sequence[int]) -> None:
    """Runs with one seed and one label but different hashes were made by different versions."""
    named = {i: (variants[i].label, str(runs[i].manifest.get("seed"))) for i in indices}
    shared = Counter(named.values())
    for i in (i for i in indices if shared[named[i]] > 1):
        tag = str(runs[i].manifest.get("config_hash"))
        variants[i] = replace(variants[i], options=(*variants[i].options, tag))


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
