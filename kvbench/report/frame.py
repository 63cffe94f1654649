"""The one tidy frame between records and every output: a row per variant, measure and value.

``measure`` is "score", "difference" (paired, to the exact cache) or what is held (`COSTS`); ``by`` the
record field that splits the examples, "dataset" as a rule, and ``value`` one of its values, or "average"
over datasets, each counting alike; ``mean``, ``low``, ``high`` the number with its 95 % interval, in the
score's own unit, ``p`` that of no difference; ``n`` the examples it is of and ``expected`` those that
any variant was given; ``mark`` words: "best" of the compressed methods at its rate, "tied" (not shown to
differ from it), "worse" and "better" (shown to be), "few" (too few prompts to say), "incomplete";
``failures`` a text
such as "2 oom". A total alone has the first four.
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
    *("model", "task", "method", "variant", "rate", "measure", "by", "value", "unit"),
    *("mean", "low", "high", "p", "n", "expected", "units", "mark", "failures"),
)
COSTS: Mapping[str, tuple[str, str]] = {
    "ratio": ("ratio", "mean"),
    "entries_mean": ("entries_mean", "mean"),
    "entries_max": ("entries_max", "max"),
    "self_bleu": ("self_bleu", "mean"),
}
"""What a method's cache holds over its scored examples, and how alike the answers are that it drew: by
measure the record field, and what is taken of it. Seconds are a throughput probe's: where methods share
steps, those of one are not its own."""


def tidy(group: Group) -> pd.DataFrame:
    """Scores and differences by dataset and by every field that the task breaks down by; costs."""
    parts = [scores(group)]
    parts += [scores(group, name) for name in group.meta.breakdown if name in group.records]
    measures = [name for name in group.meta.measures if name in group.records]
    if measures:
        parts.append(scores(group, "measure", fields=measures))
    return pd.concat([*parts, costs(group)], ignore_index=True)


@lru_cache(maxsize=16)
def comparisons(group: Group) -> dict[Pair, Estimate]:
    """What a table says about differences over all datasets (`compared_strata`). A family is what stands
    at one rate: every pair of variants that compete with each other there, and every such variant with
    its exact one; and what is at no rate."""
    strata = compared_strata(group)
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
    """The datasets that differences are averaged over: those of `FEWEST` prompts or more, if there are
    any; all others. An average counts each dataset alike, so that of a few prompts of one its error
    would be most of the average's, and hide what the others show."""
    strata = strata_of(group)
    large = [one for one in strata if len(set(one.units)) >= FEWEST]
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
        fields: record fields that are scores, in turn, in place of the values of a field; each of the
            examples that have it.
        also: by name, values whose plain average is a row, too, where all of them are there.
    """
    if fields:
        failed = group.records["status"].ne("ok")
        having = {f: group.records[group.records[f].notna() | failed] for f in fields}
        parts = [records.assign(score=records[f], measure=f) for f, records in having.items()]
        found = [one for part in parts for one in strata_of(group, part, "measure")]
    else:
        found = strata_of(group, group.records, by)
    strata = {one.name.removeprefix(f"{by} "): [one] for one in found}
    single = dict(strata)
    if by == "dataset" and len(found) > 1:
        strata[AVERAGE] = found
    for name, values in (also or {}).items():
        if set(values) <= set(single):
            strata[name] = [single[value][0] for value in values]
    rows: list[dict[str, Any]] = []
    for value, ones in strata.items():
        total = by == "dataset" and len(ones) == len(found) and value not in (also or ())
        rows += [{**row, "by": by, "value": value} for row in _rows(group, ones, total)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def costs(group: Group) -> pd.DataFrame:
    """`COSTS` of every variant; "uncompressed" counts its examples that were too short to be."""
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


def _rows(group: Group, strata: Sequence[Scores], total: bool) -> list[dict[str, Any]]:
    """Score and difference of every variant, over one dataset or on average of several; the total alone
    has marks, and differences that hold together with what these say."""
    labels, marks = group.labels, dict[int, str]()
    base = [labels.index(group.baseline[label] or label) for label in labels]
    own = [one.stratum(one.values) for one in strata]
    means = mean_intervals(own, fraction=group.percent)
    if total:
        tests = comparisons(group)
        changes = [tests.get(pair, NOTHING) for pair in enumerate(base)]
        for peers in group.peers:
            marks |= standing(strata, peers, tests, lower=group.meta.lower_is_better)
    else:
        paired = [one.stratum(one.values - one.values[:, base]) for one in strata]
        reach = largest_scores(strata, list(enumerate(base)))
        changes = differences(paired, fraction=group.percent, reach=reach)
    rows = []
    for i, label in enumerate(labels):
        failures: Counter[str] = Counter()
        for one in strata:
            failures.update(one.statuses[i])
        given = [one.values[one.given[:, i], i] for one in strata]
        n, expected = sum(int((~np.isnan(v)).sum()) for v in given), sum(map(len, given))
        about = _named(group, label) | {
            "unit": group.meta.score_unit,
            "n": n,
            "expected": expected,
            "units": sum(int((one.counts[:, i] > 0).sum()) for one in own),
            "failures": failures_text(failures),
        }
        mark = f"{marks.get(i, '')} {'incomplete' * (n < expected)}".strip()
        rows.append(about | _numbers(means[i]) | {"measure": "score", "mark": mark})
        if group.baseline[label] is not None:
            rows.append(about | _numbers(changes[i]) | {"measure": "difference"})
    return rows


def _numbers(found: Estimate) -> dict[str, float]:
    return dict(zip(("mean", "low", "high", "p"), found, strict=True))


def failures_text(failures: Mapping[str, int]) -> str:
    """E.g. ``2 oom, 1 missing``; empty where nothing failed."""
    return ", ".join(f"{count} {status}" for status, count in failures.items())


def totals(frame: pd.DataFrame, measure: str = "score") -> pd.DataFrame:
    """Of a tidy frame the rows that sum up a task, by variant: over all datasets, or the only one."""
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
    return [_scores(group, part, unit, f"{by} {as_text(value)}") for value, part in parts]


def _scores(group: Group, records: pd.DataFrame, unit: str, name: str) -> Scores:
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
    return Scores(name, values, given, pd.factorize(of_pair, sort=True)[0], statuses)


def failures_of(records: pd.DataFrame) -> dict[str, int]:
    """Failed records by status; a record that is ok without a score counts as "no score"."""
    failed = records.loc[(records["status"] != "ok") | records["score"].isna(), "status"]
    counts = failed.where(failed != "ok", "no score").value_counts()
    return {str(name): int(counts[name]) for name in sorted(counts.index)}


def _stand_in(
    values: Array, present: Flags, codes: Any, records: pd.DataFrame
) -> tuple[Array, Flags]:
    """Fill in what a variant would score under seeds it was not run with, where it is known: its
    mean over its own seeds, where the example's prompt is the same under all. (A method without
    draws needs one seed; the runs of one with draws beside it may have three.)

    Returns:
        [pairs, variants] the scores, and the pairs that each variant was to score itself.
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
