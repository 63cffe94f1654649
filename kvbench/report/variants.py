"""Variants: the rows of a comparison, one for each run or for several that differ only in their seed."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvbench.records.read import Run
from kvbench.report.labels import digest, flat, natural_order, short_name
from kvbench.report.style import order_of

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
        """The label for places that show the rate by other means."""
        others = [option.text for option in self.options if option.name not in RATES]
        return ", ".join([self.method, *others])

    @property
    def sort_key(self) -> tuple[Any, ...]:
        """Sorts variants as tables show them: by method (`kvbench.report.style`, the exact cache first),
        then larger rates before smaller ones, then by the values of their options."""
        options = [natural_order(option.value, option.name) for option in self.options]
        return order_of(self.method), -(self.rate or 0.0), options


def variants_of(runs: Sequence[Run]) -> list[Variant]:
    """The variant of each run. Runs that differ only in their seed have equal variants; a method that
    keeps the whole cache has no budget."""
    of_method: dict[str, list[Run]] = defaultdict(list)
    methods = [short_name(str(run.manifest.get("method"))) for run in runs]
    for run, method in zip(runs, methods, strict=True):
        of_method[method].append(run)
    whole = {method: all(map(_keeps_whole_cache, mine)) for method, mine in of_method.items()}
    settings = [_settings(run, whole[method]) for run, method in zip(runs, methods, strict=True)]
    values: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for method, own in zip(methods, settings, strict=True):
        for key in set().union(*settings):
            values[method][key].add(own.get(key, "unset"))
    variants = []
    for run, method, own in zip(runs, methods, settings, strict=True):
        differing = sorted(key for key, each in values[method].items() if len(each) > 1)
        shown = [Option(key.rsplit(".", 1)[-1], own.get(key, "unset")) for key in differing]
        variants.append(
            Variant(method, tuple(shown), None if whole[method] else rate_of(run.manifest))
        )
    # Different versions of kvbench made runs that agree in label and seed but not in their hashes.
    keys = [(v.label, str(r.manifest.get("seed"))) for v, r in zip(variants, runs, strict=True)]
    counts = Counter(keys)
    for i, run in enumerate(runs):
        if counts[keys[i]] > 1 and not whole[methods[i]]:
            version = Option("", str(run.manifest.get("config_hash")))
            variants[i] = replace(variants[i], options=(*variants[i].options, version))
    return variants


def _keeps_whole_cache(run: Run) -> bool:
    saves_memory = run.records["saves_memory"].dropna()
    return len(saves_memory) > 0 and not saves_memory.astype(bool).any()


def _settings(run: Run, whole_cache: bool) -> dict[str, str]:
    """The settings of a run that change a score, but for its seed, by dotted key, with a digest of the
    data files."""
    identity = dict(run.manifest.get("identity") or {})
    for key in ("seed", *(["budget"] if whole_cache else [])):
        identity.pop(key, None)
    if identity.get("data"):
        identity["data"] = digest(json.dumps(identity["data"], sort_keys=True))
    return flat(identity)


def rate_of(manifest: Mapping[str, Any]) -> float | None:
    """The share of the middle, or of the whole prompt, that the budget of a run keeps; None where the
    budget is a number of entries."""
    budget = (manifest.get("identity") or {}).get("budget") or {}
    share = budget.get("total_rate") or budget.get("rate")
    return None if share is None or budget.get("size") is not None else float(share)
