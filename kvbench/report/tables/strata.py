"""Records as matrices: the scores of every example by variant, which every comparison takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.report.experiment import Group
from kvbench.report.stats.estimate import Array, Stratum, ratio

PROMPT = ("prompt_tokens", "prompt_tail", "answers")
"""Fields that are the same where two records of one id are about the same example."""


@dataclass(frozen=True)
class Scores:
    """Scores of one dataset, as every comparison takes them.

    Attributes:
        values: [pairs, variants], NaN where missing; a pair is one (seed, example). A variant that
            was not run with a seed has its mean over its own seeds there, where the prompt is the same.
        given: [pairs, variants] whether the variant was to score the pair itself.
        units: [pairs] number of the independent unit that each pair belongs to.
        statuses: per variant, failed examples by status.
    """

    name: str
    values: Array
    given: NDArray[np.bool_]
    units: NDArray[np.intp]
    statuses: tuple[Mapping[str, int], ...]

    def stratum(self, *columns: Array) -> Stratum:
        """Columns [pairs, k] summed within each unit."""
        order, starts = self._by_unit
        values = np.concatenate(columns, axis=1)[order]
        known = ~np.isnan(values)
        sums, counts = np.where(known, values, 0.0), known.astype(float)
        if len(starts) < len(order):
            sums, counts = (np.add.reduceat(part, starts, axis=0) for part in (sums, counts))
        return Stratum(self.name, sums, counts)

    @cached_property
    def _by_unit(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The pairs in the order of their units, and where each unit begins."""
        order = np.argsort(self.units, kind="stable")
        return order, np.unique(self.units[order], return_index=True)[1]


def strata_of(group: Group, by: str = "dataset") -> list[Scores]:
    """The scores for each value of the record field `by`: datasets in the task's order, other values in
    their natural one."""
    unit = group.meta.unit if group.meta.unit in group.records else "example_id"
    needed = dict.fromkeys(["variant", "seed", "example_id", "status", "score", *PROMPT, unit, by])
    records = group.records.reindex(columns=list(needed))
    return [
        _scores(group, part, unit, f"{by} {as_text(value)}")
        for value, part in sorted(
            records.groupby(by),
            key=lambda item: (
                group.datasets.index(item[0]) if by == "dataset" else natural_order(item[0])
            ),
        )
    ]


def peers_of(group: Group) -> list[list[int]]:
    """Indices of variants that compete with each other: compressed, at the same rate."""
    found: dict[float | None, list[int]] = {}
    for i, variant in enumerate(group.variants):
        if variant.label in group.compressed:
            found.setdefault(variant.rate, []).append(i)
    return list(found.values())


def as_text(value: object) -> str:
    """A field's value as a column name: 200.0 is 200."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def failures_of(records: pd.DataFrame) -> dict[str, int]:
    """Failed records by status; a record that is ok without a score counts as "no score"."""
    failed = records.loc[(records["status"] != "ok") | records["score"].isna(), "status"]
    if failed.empty:
        return {}
    counts = failed.where(failed != "ok", "no score").value_counts()
    return {str(name): int(counts[name]) for name in sorted(counts.index)}


def _scores(group: Group, records: pd.DataFrame, unit: str, name: str) -> Scores:
    labels = [variant.label for variant in group.variants]
    pairs = records["seed"].astype(str) + "/" + records["example_id"].astype(str)
    codes, keys = pd.factorize(pairs, sort=True)
    variants = pd.Index(labels).get_indexer(pd.Index(records["variant"]))
    values = np.full((len(keys), len(labels)), np.nan)
    values[codes, variants] = records["score"].where(records["status"] == "ok").to_numpy(float)
    present = np.zeros(values.shape, dtype=bool)
    present[codes, variants] = True
    named = records[unit].astype(str).to_numpy()
    of_pair = np.empty(len(keys), dtype=object)
    of_pair[codes[::-1]] = named[::-1]  # the first record of a pair names its unit
    wrong = records[(records["status"] != "ok") | records["score"].isna()]
    failed = {label: failures_of(part) for label, part in wrong.groupby("variant")}
    given = _stand_in(values, present, codes, records)
    statuses = []
    for i, label in enumerate(labels):
        missing = int((given[:, i] & ~present[:, i]).sum())
        found = failed.get(label, {})
        statuses.append(found | ({"missing": missing} if missing else {}))
    return Scores(
        name=name,
        values=values,
        given=given,
        units=pd.factorize(of_pair, sort=True)[0],
        statuses=tuple(statuses),
    )


def _stand_in(
    values: Array, present: NDArray[np.bool_], codes: NDArray[np.intp], records: pd.DataFrame
) -> NDArray[np.bool_]:
    """Fill in what a variant would score under seeds it was not run with, where it is known: its
    mean over its own seeds, where the example's prompt is the same under all. (A method without
    draws needs one seed; the runs of one with draws beside it may have three.)

    Returns:
        [pairs, variants] the pairs that each variant was to score itself.
    """
    firsts = np.unique(codes, return_index=True)[1]
    of_pair = records.iloc[firsts]
    seeds = pd.factorize(of_pair["seed"].astype(str))[0]
    ran = np.array([present[seeds == seed].any(0) for seed in range(seeds.max(initial=-1) + 1)])
    lacking = ~ran & ran.any(0)
    given = np.ones(values.shape, dtype=bool)
    if not lacking.any():
        return given
    examples = pd.factorize(of_pair["example_id"].astype(str))[0]
    prompts = pd.Series("", index=of_pair.index)
    for field in PROMPT:
        prompts = prompts + "\x00" + of_pair[field].map(str)
    same = prompts.groupby(examples).transform("nunique").eq(1) & of_pair["prompt_tail"].notna()
    for i in np.flatnonzero(lacking.any(0)):
        known, count = ~np.isnan(values[:, i]), examples.max() + 1
        scored = np.bincount(examples[known], minlength=count)
        means = ratio(np.bincount(examples[known], values[known, i], minlength=count), scored)
        tried = np.bincount(examples[present[:, i]], minlength=count) > 0
        filled = lacking[seeds, i] & same.to_numpy() & tried[examples]
        values[filled, i] = means[examples][filled]
        given[filled, i] = False
    return given


def natural_order(value: object) -> tuple[int, float, str]:
    """Numbers in their order, before text by the number it begins with, before other text."""
    if isinstance(value, int | float | np.number):
        return (0, float(value), "")
    leading = re.match(r"\d+", str(value))
    return (1, float(leading[0]), str(value)) if leading else (2, 0.0, str(value))
