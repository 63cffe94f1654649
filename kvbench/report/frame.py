"""The tidy frame that all tables, figures and files are made of: a row per variant, measure and value.

measure    "score", "difference" (paired, to the exact cache), or one of `COSTS`
by, value  the record field that splits the examples ("dataset" as a rule) and one of its values;
           "average" is the mean over datasets, each of which counts alike
unit       what the score is measured in
mean, low, high, p   the number, its 95 % interval, and the p-value of no difference
n, expected, units   scored examples, examples given to any variant, independent units
mark       words: "best" (of the compressed methods at one rate), "tied" (not shown to differ from
           the best), "worse" and "better" (shown to be), "few" (too few prompts to say; these are
           of totals and of the scores at one rate alone), "incomplete"
failures   a text such as "2 oom"
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from kvbench.report.experiment import PROMPT, Group, as_text, natural_order
from kvbench.report.stats import (
    FEWEST,
    NOTHING,
    Array,
    Estimate,
    Flags,
    Pair,
    Scores,
    compared,
    differences,
    largest_scores,
    mean_intervals,
    standing,
)

AVERAGE = "average"
COLUMNS = (
    "model",
    "task",
    "method",
    "variant",
    "rate",
    "measure",
    "by",
    "value",
    "unit",
    "mean",
    "low",
    "high",
    "p",
    "n",
    "expected",
    "units",
    "mark",
    "failures",
)
COSTS: Mapping[str, tuple[str, str]] = {
    "ratio": ("ratio", "mean"),
    "entries_mean": ("entries_mean", "mean"),
    "entries_max": ("entries_max", "max"),
    "self_bleu": ("self_bleu", "mean"),
}
"""Measures beside the score, over a method's scored examples: by name the record field and how its
values are put together. ``self_bleu`` says how alike sampled answers are. There are no seconds here:
where methods share decoding steps, those of one method are not its own, and the throughput probe
measures them."""


def tidy(group: Group) -> pd.DataFrame:
    """The tidy frame of a group: scores and differences by dataset and by every field that the task
    breaks down by, and costs."""
    parts = [scores(group)]
    parts += [scores(group, name) for name in group.meta.breakdown if name in group.records]
    measures = [name for name in group.meta.measures if name in group.records]
    if measures:
        parts.append(scores(group, "measure", fields=measures))
    return pd.concat([*parts, costs(group)], ignore_index=True)


@lru_cache(maxsize=16)
def comparisons(group: Group) -> dict[Pair, Estimate]:
    """The differences over all datasets that a table shows, by pair of variants. The datasets are those
    of `compared_strata`."""
    return comparisons_over(group, compared_strata(group))


def comparisons_over(group: Group, strata: Sequence[Scores]) -> dict[Pair, Estimate]:
    """The average differences over these datasets, by pair of variants.

    Intervals and p-values are adjusted for multiple comparisons within a family. A family has the
    differences of one rate: between every pair of variants that compete at it, and between each of them
    and its exact variant. The differences of variants without a rate are one more family.
    """
    bases = {
        i: group.labels.index(base)
        for i, label in enumerate(group.labels)
        if (base := group.baseline[label]) is not None
    }
    at_rates = [[*peers] for peers in group.peers]
    elsewhere = set(bases).difference(*at_rates)
    tests: dict[Pair, Estimate] = {}
    for peers in at_rates:
        pairs = [*itertools.combinations(peers, 2), *((i, bases[i]) for i in peers if i in bases)]
        tests |= compared(strata, pairs, fraction=group.percent)
    pairs = [(i, bases[i]) for i in sorted(elsewhere)]
    return tests | compared(strata, pairs, fraction=group.percent)


def compared_strata(group: Group) -> list[Scores]:
    """The datasets that differences are averaged over: those with `FEWEST` prompts or more, or all where
    none has as many. An average counts each dataset alike; the error of one with a few prompts would be
    most of the average's error, and hide what the others show."""
    strata = strata_of(group)
    large = [dataset for dataset in strata if len(set(dataset.units)) >= FEWEST]
    return large or strata


def scores(
    group: Group,
    by: str = "dataset",
    *,
    fields: Sequence[str] = (),
    also: Mapping[str, Sequence[str]] | None = None,
) -> pd.DataFrame:
    """Mean scores, and paired differences, of every variant for each value of the record field `by`.

    Args:
        fields: record fields that each hold a score; given, each of them is a value of `by`, over the
            examples that have it.
        also: further rows by name: the plain average over some values, where all of these are there.
    """
    if fields:
        failed = group.records["status"].ne("ok")
        parts = []
        for field in fields:
            having = group.records[group.records[field].notna() | failed]
            parts.append(having.assign(score=having[field], measure=field))
        every = [dataset for part in parts for dataset in strata_of(group, part, "measure")]
    else:
        every = strata_of(group, group.records, by)
    strata = {dataset.value: [dataset] for dataset in every}
    single = dict(strata)
    if by == "dataset" and len(every) > 1:
        strata[AVERAGE] = every
    for name, values in (also or {}).items():
        if set(values) <= set(single):
            strata[name] = [single[value][0] for value in values]
    rows: list[dict[str, Any]] = []
    for value, members in strata.items():
        tests = None
        if by == "rate":  # of a probe that measures several rates in one run
            tests = comparisons_over(group, members)
        elif by == "dataset" and len(members) == len(every) and value not in (also or ()):
            tests = comparisons(group)
        rows += [{**row, "by": by, "value": value} for row in _rows(group, members, tests)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def costs(group: Group) -> pd.DataFrame:
    """The rows of `COSTS` for every variant, and "uncompressed": how many of its examples were too short
    to be compressed."""
    rows: list[dict[str, Any]] = []
    for variant in group.variants:
        good = group.good[group.good["variant"] == variant.label]
        whole = good["compressed"].eq(False) & good["saves_memory"].eq(True)
        # A field that the run's version did not measure yet is not known.
        measured = good.reindex(columns=[*good, *{of for of, _ in COSTS.values()} - set(good)])
        values = {key: getattr(measured[of], how)() for key, (of, how) in COSTS.items()}
        for key, value in {**values, "uncompressed": whole.sum()}.items():
            about = {"measure": key, "by": "", "value": "", "unit": "", "mean": float(value)}
            rows.append(_named(group, variant.label) | about | {"n": len(good)})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _named(group: Group, label: str) -> dict[str, Any]:
    variant = group.variants[group.labels.index(label)]
    about = {"model": group.model, "task": group.task, "method": variant.method}
    return about | {"variant": label, "rate": variant.rate, "mark": "", "failures": ""}


def _rows(
    group: Group, strata: Sequence[Scores], tests: Mapping[Pair, Estimate] | None
) -> list[dict[str, Any]]:
    """Score and difference of every variant, over one dataset or on average of several.

    Args:
        tests: what `comparisons` returned of total scores, or `comparisons_over` of those at one rate;
            their differences are these, and they have marks. None of other scores.
    """
    labels, marks = group.labels, dict[int, str]()
    base = [labels.index(group.baseline[label] or label) for label in labels]
    own = [dataset.stratum(dataset.values) for dataset in strata]
    means = mean_intervals(own, fraction=group.percent)
    if tests is not None:
        changes = [tests.get(pair, NOTHING) for pair in enumerate(base)]
        for peers in group.peers:
            marks |= standing(strata, peers, tests, lower=group.meta.lower_is_better)
    else:
        paired = [dataset.stratum(dataset.values - dataset.values[:, base]) for dataset in strata]
        reach = largest_scores(strata, list(enumerate(base)))
        changes = differences(paired, fraction=group.percent, reach=reach)
    rows = []
    for i, label in enumerate(labels):
        failures: Counter[str] = Counter()
        for dataset in strata:
            failures.update(dataset.statuses[i])
        given = [dataset.values[dataset.given[:, i], i] for dataset in strata]
        n, expected = sum(int((~np.isnan(v)).sum()) for v in given), sum(map(len, given))
        about = _named(group, label) | {
            "unit": group.meta.score_unit,
            "n": n,
            "expected": expected,
            "units": sum(int((dataset.counts[:, i] > 0).sum()) for dataset in own),
            "failures": failures_text(failures),
        }
        words = [marks.get(i, ""), "incomplete" if n < expected else ""]
        mark = " ".join(filter(None, words))
        rows.append(about | _numbers(means[i]) | {"measure": "score", "mark": mark})
        if group.baseline[label] is not None:
            rows.append(about | _numbers(changes[i]) | {"measure": "difference"})
    return rows


def _numbers(estimate: Estimate) -> dict[str, float]:
    """An estimate as columns of the tidy frame."""
    return dict(zip(("mean", "low", "high", "p"), estimate, strict=True))


def failures_text(failures: Mapping[str, int]) -> str:
    """E.g. ``2 oom, 1 missing``; empty where nothing failed."""
    return ", ".join(f"{count} {status}" for status, count in failures.items())


def totals(frame: pd.DataFrame, measure: str = "score") -> pd.DataFrame:
    """The rows of a tidy frame that sum up a task, by variant: over all datasets, or the only one."""
    mine = frame[(frame["measure"] == measure) & frame["by"].isin(["dataset", ""])]
    last = mine[~mine.duplicated(["model", "task", "variant"], keep="last")]
    return last.set_index("variant", drop=False).rename_axis(None)


def strata_of(
    group: Group, records: pd.DataFrame | None = None, by: str = "dataset"
) -> list[Scores]:
    """The scores for each value of the record field `by`: datasets in the task's order, other values in
    their natural one.

    Args:
        records: by default the group's.
    """
    records = group.records if records is None else records
    unit = group.meta.unit if group.meta.unit in records else "example_id"
    needed = dict.fromkeys(["variant", "seed", "example_id", "status", "score", *PROMPT, unit, by])
    parts = list(records.reindex(columns=list(needed)).groupby(by, sort=False))
    order = {name: i for i, name in enumerate(group.datasets)} if by == "dataset" else None
    parts.sort(key=lambda part: order[part[0]] if order else natural_order(part[0]))
    return [_scores(group, part, unit, by, as_text(value)) for value, part in parts]


def _scores(group: Group, records: pd.DataFrame, unit: str, by: str, value: str) -> Scores:
    labels = group.labels
    pairs = records["seed"].astype(str) + "/" + records["example_id"].astype(str)
    codes, keys = pd.factorize(pairs, sort=True)
    variants = pd.Index(labels).get_indexer(pd.Index(records["variant"]))
    values = np.full((len(keys), len(labels)), np.nan)
    score = pd.to_numeric(records["score"]).where(records["status"] == "ok")
    values[codes, variants] = score.to_numpy(float)
    present = np.zeros(values.shape, dtype=bool)
    present[codes, variants] = True
    of_pair = np.empty(len(keys), dtype=object)
    of_pair[codes[::-1]] = records[unit].astype(str).to_numpy()[::-1]  # the first record's
    wrong = records[score.isna()]
    failed = {label: failures_of(part) for label, part in wrong.groupby("variant")}
    given = np.ones(values.shape, dtype=bool)
    if records["seed"].nunique() > 1:
        values, given = _stand_in(values, present, codes, records)
    missing = (given & ~present).sum(0)
    statuses = tuple(
        failed.get(label, {}) | ({"missing": int(missing[i])} if missing[i] else {})
        for i, label in enumerate(labels)
    )
    return Scores(by, value, values, given, pd.factorize(of_pair, sort=True)[0], statuses)


def failures_of(records: pd.DataFrame) -> dict[str, int]:
    """Failed records by status; a record that is ok without a score counts as "no score"."""
    failed = records.loc[(records["status"] != "ok") | records["score"].isna(), "status"]
    counts = failed.where(failed != "ok", "no score").value_counts()
    return {str(name): int(counts[name]) for name in sorted(counts.index)}


def _stand_in(
    values: Array, present: Flags, codes: Any, records: pd.DataFrame
) -> tuple[Array, Flags]:
    """Fill in a variant's scores under seeds that it was not run with: its mean over its own seeds, for
    examples whose prompt is the same under all seeds. (A method that draws nothing needs one seed, while
    methods beside it may have been run with three.)

    Returns:
        The scores [pairs, variants], and which pairs each variant was to score itself.
    """
    of_pair = records.iloc[np.unique(codes, return_index=True)[1]]
    seed, example = (of_pair[key].astype(str).to_numpy() for key in ("seed", "example_id"))
    scored, tried = pd.DataFrame(values), pd.DataFrame(present)
    prompts = of_pair[list(PROMPT)].map(str).agg("\x00".join, axis=1)
    same = prompts.groupby(example).transform("nunique").eq(1) & of_pair["prompt_tail"].notna()
    stands = tried.groupby(example).transform("any") & ~tried.groupby(seed).transform("any")
    stands = stands.mul(same.to_numpy(), axis=0)
    filled = scored.where(~stands, scored.groupby(example).transform("mean"))
    return filled.to_numpy(), ~stands.to_numpy(bool)
