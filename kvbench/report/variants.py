"""Variants: the rows of a comparison, one for each run or for several that differ only in their seed."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvbench.records.read import Run
from kvbench.report.labels import digest, flat, natural_order, short_name, shortest
from kvbench.report.style import order_of

RATES = ("rate", "total_rate")
"""Options of the budget that name a share of the prompt."""


class Option(NamedTuple):
    """An option in which the runs of one method differ, e.g. rate 0.25."""

    name: str
    value: str

    @property
    def text(self) -> str:
        """The option as it stands in labels."""
        return short_name(f"{self.name} {self.value}".strip())


@dataclass(frozen=True)
class Variant:
    """One row of a comparison: a method with the options that it was run with.

    Attributes:
        options: only the options in which the runs of this method differ.
        rate: the share of the middle, or of the whole prompt, that the budget keeps; None where the
            method has no budget, or a budget that is a number of entries.
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
        """Sorts variants as tables show them: by method (`kvbench.report.style`, the exact cache first),
        then larger rates before smaller ones, then by the values of their options."""
        options = [natural_order(option.value, option.name) for option in self.options]
        return order_of(self.method), -(self.rate or 0.0), options


def variants_of(runs: Sequence[Run]) -> list[Variant]:
    """The variant of each run. Runs that differ only in their seed have equal variants.

    The variants of one method are named by the options in which its runs differ. If the method keeps the
    whole cache, options of the budget are ignored.
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
    """The variant of each run; all runs are of one method."""
    whole_cache = all(_keeps_whole_cache(run) for run in runs)
    options = [_options_of(run, with_budget=not whole_cache) for run in runs]
    names = sorted(set().union(*options))
    differing = [name for name in names if len({values.get(name) for values in options}) > 1]
    short = {name: shortest([values.get(name) for values in options]) for name in differing}
    variants = []
    for run, values in zip(runs, options, strict=True):
        shown = (Option(name.split(".")[-1], short[name][values.get(name)]) for name in differing)
        rate = None if whole_cache else rate_of(run.manifest)
        variants.append(Variant(method, tuple(shown), rate))
    if whole_cache:
        return variants
    # Different versions of kvbench made runs that agree in label and seed but not in their hashes.
    keys = [(v.label, str(r.manifest.get("seed"))) for v, r in zip(variants, runs, strict=True)]
    counts = Counter(keys)
    for i, run in enumerate(runs):
        if counts[keys[i]] > 1:
            version = Option("", str(run.manifest.get("config_hash")))
            variants[i] = replace(variants[i], options=(*variants[i].options, version))
    return variants


def _keeps_whole_cache(run: Run) -> bool:
    """Whether the records of a run say that its method saves no memory."""
    saves_memory = run.records["saves_memory"].dropna()
    return len(saves_memory) > 0 and not saves_memory.astype(bool).any()


def _options_of(run: Run, *, with_budget: bool) -> dict[str, str]:
    """The settings of a run that change a score, by dotted key, with a digest of the data files."""
    identity = dict(run.manifest.get("identity") or run.manifest.get("config") or {})
    if identity.get("data"):
        identity["data"] = digest(json.dumps(identity["data"], sort_keys=True))
    options = flat(identity)
    if with_budget:
        return options
    return {key: value for key, value in options.items() if not key.startswith("budget.")}


def rate_of(manifest: Mapping[str, Any]) -> float | None:
    """The share of the middle, or of the whole prompt, that the budget of a run keeps; None where the
    budget is a number of entries."""
    budget = (manifest.get("identity") or manifest.get("config") or {}).get("budget") or {}
    share = budget.get("total_rate") or budget.get("rate")
    return None if share is None or budget.get("size") is not None else float(share)
