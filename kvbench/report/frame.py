"""The tidy frame from which tables, figures and files are made. It has a row for each variant and
measure, and for each part of the examples that the measure is taken over.

measure    "score"; "difference", paired, of the score from that of the exact cache, or "times", its
           ratio to it (`kvbench.report.stats.paired`); one of `COSTS`; or, of a method run at several
           rates, "ratio_at_95" (`kvbench.report.ratios`), whose variant is the method without its rate
by, value  the part: a record field, such as "dataset", and the value that it has in all examples of
           the part. The value "average" of "dataset" is the mean over datasets with equal weights
unit       the unit of the score
mean       the number
low, high  the bounds of its 95 % interval
p          the p-value of the hypothesis that a difference is 0, or a ratio 1; that of a total is
           adjusted for all methods at its rate
n          the number of scored examples
expected   the number of examples that the variant was to be run on
units      the number of independent units that have a score
mark       words. Total scores, and the scores at each rate of a probe that measures several in one
           run, have a mark of `kvbench.report.stats.standing` among the compressed methods: "best",
           "tied", "worse", "better" or "few". Any score may be "incomplete", where fewer examples
           than expected are scored. A ratio_at_95 may be "at_most" this or "more_than" this
failures   the number of failed examples by status, such as "2 oom"
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from kvbench.report.ratios import RATIO_AT_95, at_rate, enough_ratios, ratios_of, weighed
from kvbench.report.runs import PROMPT, Group, as_text, natural_order
from kvbench.report.stats import (
    FEWEST,
    NOTHING,
    Array,
    Estimate,
    Flags,
    Pair,
    Scores,
    compared,
    means,
    num_units,
    paired,
    standing,
)

AVERAGE = "average"
COLUMNS = (
    "model",
    "task",
    "compress_after",
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
COSTS = ("ratio", "entries_mean", "entries_max")
"""Measures other than the score, weighed as scores are; ``entries_max`` is a maximum. Seconds are not
among them: they are shared where methods decode together, and the throughput probe measures those of
each method."""


@lru_cache(maxsize=64)
def tidy(group: Group) -> pd.DataFrame:
    """Scores and differences by dataset and by each field of the task's breakdown, costs, and the
    ratios that are enough. Made once for each group; its tables, figures and sentences are all of it, so
    that nobody may change it."""
    parts = [scores(group)]
    parts += [scores(group, name) for name in group.meta.breakdown if name in group.records]
    measures = [name for name in group.meta.measures if name in group.records]
    if measures:
        parts.append(scores(group, "measure", fields=measures))
    return pd.concat([*parts, costs(group), _enough(group)], ignore_index=True)


@lru_cache(maxsize=16)
def comparisons(group: Group) -> dict[Pair, Estimate]:
    return comparisons_over(group, compared_strata(group))


def comparisons_over(group: Group, strata: Sequence[Scores]) -> dict[Pair, Estimate]:
    """The differences of the mean scores over these datasets, by pair of variants.

    P-values are adjusted within a family: the differences between any two compressed variants at a rate,
    those between these and their exact variants, and those of the other variants from theirs.
    """
    tests: dict[Pair, Estimate] = {}
    others = sorted(set(group.exact_of).difference(*group.peers))
    families = [list(itertools.combinations(peers, 2)) for peers in group.peers]
    for members in (*group.peers, others):
        families.append([(i, group.exact_of[i]) for i in members if i in group.exact_of])
    for pairs in families:
        tests |= compared(strata, pairs, fraction=group.percent)
    return tests


def compared_strata(group: Group) -> list[Scores]:
    """The datasets over which total differences are averaged: those with at least `FEWEST` prompts, or
    all where none has as many. Datasets have equal weights, so that the error of one with a few prompts
    would dominate the error of the average."""
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
    """Mean scores and paired differences of every variant, for each value of the record field `by`.

    Args:
        fields: record fields that each hold a score. If there are any, the rows are for these scores,
            over the examples that have them, and the names of the fields are the values of `by`.
        also: further rows: by name, values of `by` whose scores are averaged. A row is left out if one
            of its values does not occur.
    """
    if fields:
        failed = group.records["status"].ne("ok")
        strata = []
        for field in fields:
            with_field = group.records[group.records[field].notna() | failed]
            scores_of_field = with_field.assign(score=with_field[field], measure=field)
            strata += strata_of(group, scores_of_field, "measure")
    else:
        strata = strata_of(group, by=by)
    by_value = {stratum.value: stratum for stratum in strata}
    parts = {value: [stratum] for value, stratum in by_value.items()}
    if by == "dataset" and len(strata) > 1:
        parts[AVERAGE] = strata
    for name, values in (also or {}).items():
        if set(values) <= set(by_value):
            parts[name] = [by_value[value] for value in values]
    rows: list[dict[str, Any]] = []
    for value, part in parts.items():
        tests: Mapping[Pair, Estimate] | None = None
        ranked = part
        if by == "rate":  # of a probe that measures several rates in one run
            tests = comparisons_over(group, part)
        elif by == "dataset" and len(part) == len(strata) and value not in (also or ()):
            tests, ranked = comparisons(group), compared_strata(group)
        rows += [{**row, "by": by, "value": value} for row in _rows(group, part, tests, ranked)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def costs(group: Group) -> pd.DataFrame:
    """The rows of `COSTS` for every variant, and the row "uncompressed": the number of its examples that
    were too short to be compressed."""
    rows: list[dict[str, Any]] = []
    means = weighed(group.records, ["variant"], COSTS).reindex(group.labels)
    for variant in group.variants:
        good = group.good[group.good["variant"] == variant.label]
        uncompressed = good["compressed"].eq(False) & good["saves_memory"].eq(True)
        costs_of_variant = {name: float(means[name][variant.label]) for name in COSTS}
        costs_of_variant["entries_max"] = float(good["entries_max"].max())
        costs_of_variant["uncompressed"] = float(uncompressed.sum())
        for name, cost in costs_of_variant.items():
            row = {"measure": name, "by": "", "value": "", "unit": "", "mean": cost, "n": len(good)}
            rows.append(_columns_of_variant(group, variant.label) | row)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _enough(group: Group) -> pd.DataFrame:
    method_of = {group.names[variant.label]: variant.method for variant in group.variants}
    strata = compared_strata(group)
    ratios = strata_of(group, group.records.assign(score=group.records["ratio"]))
    held = [next(of for of in ratios if of.value == dataset.value) for dataset in strata]
    rows: list[dict[str, Any]] = [
        {
            **group.about,
            **{"method": method_of[name], "variant": name},
            **{"measure": RATIO_AT_95, "by": "", "value": "", "unit": ""},
            **_numbers(found),
            **{"mark": mark, "failures": ""},
        }
        for name, (found, mark) in enough_ratios(group, strata, held).items()
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _columns_of_variant(group: Group, label: str) -> dict[str, Any]:
    variant = group.variants[group.labels.index(label)]
    return {
        **group.about,
        "method": variant.method,
        "variant": label,
        "rate": variant.rate,
        "mark": "",
        "failures": "",
    }


def _rows(
    group: Group,
    strata: Sequence[Scores],
    tests: Mapping[Pair, Estimate] | None,
    ranked: Sequence[Scores],
) -> list[dict[str, Any]]:
    """The rows of the score and the difference of every variant, as the mean over these datasets, with
    marks over the `ranked` ones; of scores without `tests` there are no marks, and p-values are not
    adjusted."""
    labels = group.labels
    pairs = [(i, group.exact_of.get(i, i)) for i in range(len(labels))]
    of_scores = means(strata, fraction=group.percent, signed=group.meta.signed)
    marks: dict[int, str] = {}
    if tests is not None:
        changes = [tests.get(pair, NOTHING) for pair in pairs]
        for peers in group.peers:
            marks |= standing(ranked, peers, tests, lower=group.meta.lower_is_better)
    else:
        changes = paired(strata, pairs, fraction=group.percent)
    rows = []
    for i, label in enumerate(labels):
        failures: Counter[str] = Counter()
        for dataset in strata:
            failures.update(dataset.statuses[i])
        expected = [dataset.values[dataset.given[:, i], i] for dataset in strata]
        num_expected = sum(map(len, expected))
        num_scored = sum(int((~np.isnan(values)).sum()) for values in expected)
        columns = _columns_of_variant(group, label) | {
            "unit": group.meta.score_unit,
            "n": num_scored,
            "expected": num_expected,
            "units": num_units(strata, [i]),
            "failures": failures_text(failures),
        }
        words = [marks.get(i, ""), "incomplete" if num_scored < num_expected else ""]
        mark = " ".join(filter(None, words))
        rows.append(columns | _numbers(of_scores[i]) | {"measure": "score", "mark": mark})
        if i in group.exact_of and (group.percent or changes[i].value == changes[i].value):
            measure = "times" if changes[i].times else "difference"
            rows.append(columns | _numbers(changes[i]) | {"measure": measure})
    return rows


def _numbers(estimate: Estimate) -> dict[str, float]:
    return {"mean": estimate.value, "low": estimate.low, "high": estimate.high, "p": estimate.p}


def failures_text(failures: Mapping[str, int]) -> str:
    """Such as ``2 oom, 1 missing``."""
    return ", ".join(f"{count} {status}" for status, count in failures.items())


def totals(frame: pd.DataFrame, measure: str = "score") -> pd.DataFrame:
    """The row of each variant, by its label, with the total of a measure: over all datasets, or over the
    only one."""
    rows = frame[(frame["measure"] == measure) & frame["by"].isin(["dataset", ""])]
    last_rows = rows[~rows.duplicated(["model", "task", "variant"], keep="last")]
    return last_rows.set_index("variant", drop=False).rename_axis(None)


def totals_at_rates(group: Group) -> pd.DataFrame:
    """The total scores of every variant with its name without the rate in ``label``, the rate in ``at``
    (empty for what is not compressed or has none) and the mean measured ratio in ``ratio``. Of a probe
    that measures several rates in one run a compressed variant has a row for each, unless it holds the
    same bytes at all."""
    frame = tidy(group)
    total = totals(frame)
    ratio = total["variant"].map(totals(frame, "ratio")["mean"])
    total = total.assign(at=total["variant"].map(group.at), ratio=ratio)
    by_rate = frame[frame["by"].eq("rate") & frame["measure"].eq("score")]
    by_rate = by_rate[by_rate["variant"].isin(group.compressed)]
    if by_rate["value"].nunique() > 1:
        by_rate = by_rate[by_rate["variant"].isin(ratios_of(group)["variant"])]
        records = group.records.assign(value=group.records["rate"].map(as_text))
        held = weighed(records, ["variant", "value"], ["ratio"])
        by_rate = by_rate.assign(at=by_rate["value"].astype(float).map(at_rate))
        by_rate = by_rate.join(held, on=["variant", "value"])
        total = pd.concat([total[~total["variant"].isin(by_rate["variant"])], by_rate])
    at = total["at"].where(total["variant"].isin(group.compressed), "")
    return total.assign(at=at, label=total["variant"].map(group.names))


def strata_of(
    group: Group, records: pd.DataFrame | None = None, by: str = "dataset"
) -> list[Scores]:
    """The scores of all variants, in all records of the group or in these, for each value of the record
    field `by`: datasets in the order of the task, other values in their natural order."""
    records = group.records if records is None else records
    unit = group.meta.unit if group.meta.unit in records else "example_id"
    needed = dict.fromkeys(["variant", "seed", "example_id", "status", "score", *PROMPT, unit, by])
    parts = list(records.reindex(columns=list(needed)).groupby(by, sort=False))
    order = {name: i for i, name in enumerate(group.datasets)} if by == "dataset" else None
    parts.sort(key=lambda part: order[part[0]] if order else natural_order(part[0]))
    return [_scores(group, part, unit, as_text(value)) for value, part in parts]


def _scores(group: Group, records: pd.DataFrame, unit: str, value: str) -> Scores:
    """The scores in these records, which are those of the part `value`; the field `unit` names the
    independent unit."""
    labels = group.labels
    pairs = records["seed"].astype(str) + "/" + records["example_id"].astype(str)
    codes, keys = pd.factorize(pairs, sort=True)
    variants = pd.Index(labels).get_indexer(pd.Index(records["variant"]))
    values = np.full((len(keys), len(labels)), np.nan)
    score = pd.to_numeric(records["score"]).where(records["status"] == "ok")
    values[codes, variants] = score.to_numpy(float)
    present = np.zeros(values.shape, dtype=bool)
    present[codes, variants] = True
    units = np.empty(len(keys), dtype=object)
    units[codes[::-1]] = records[unit].astype(str).to_numpy()[::-1]  # of each pair's first record
    unscored = records[score.isna()]
    failed = {label: failures_of(part) for label, part in unscored.groupby("variant")}
    given = np.ones(values.shape, dtype=bool)
    if records["seed"].nunique() > 1:
        values, given = _fill_other_seeds(values, present, codes, records)
    missing = (given & ~present).sum(0)
    statuses = tuple(
        failed.get(label, {}) | ({"missing": int(missing[i])} if missing[i] else {})
        for i, label in enumerate(labels)
    )
    unit_of_pair = pd.factorize(units, sort=True)[0]
    return Scores(value, values, given, unit_of_pair, statuses)


def failures_of(records: pd.DataFrame) -> dict[str, int]:
    """The number of failed records by status. A record with status ok that has no score is "no
    score"."""
    failed = records.loc[(records["status"] != "ok") | records["score"].isna(), "status"]
    counts = failed.where(failed != "ok", "no score").value_counts()
    return {str(name): int(counts[name]) for name in sorted(counts.index)}


def _fill_other_seeds(
    values: Array, present: Flags, codes: Any, records: pd.DataFrame
) -> tuple[Array, Flags]:
    """Give each variant scores for the seeds that it was not run with: the mean over its own seeds, for
    examples whose prompt is the same under all seeds. (A method without random draws needs only one
    seed, while the methods that it is compared with may have several.)

    Args:
        values: [pairs, variants] the scores, NaN where missing.
        present: [pairs, variants] whether there is a record.
        codes: [records] the index of the pair that each record belongs to.

    Returns:
        The scores [pairs, variants], and whether each variant was to be run on the pair itself.
    """
    # One record for each pair. What failed before it was encoded has no prompt, and says nothing of it.
    says_prompt = records["prompt_tail"].notna() | records["status"].eq("ok")
    order = np.argsort(~says_prompt.to_numpy(), kind="stable")
    first_records = records.iloc[order[np.unique(codes[order], return_index=True)[1]]]
    seeds = first_records["seed"].astype(str).to_numpy()
    examples = first_records["example_id"].astype(str).to_numpy()
    prompts = first_records[list(PROMPT)].map(str).agg("\x00".join, axis=1)
    is_known = first_records["prompt_tail"].notna()
    prompts = prompts.where(is_known | first_records["status"].eq("ok"))
    has_one_prompt = prompts.groupby(examples).transform("nunique").le(1)
    has_one_prompt &= is_known | first_records["status"].ne("ok")
    has_record = pd.DataFrame(present)
    ran_example = has_record.groupby(examples).transform("any")
    ran_seed = has_record.groupby(seeds).transform("any")
    is_filled = (ran_example & ~ran_seed).mul(has_one_prompt.to_numpy(), axis=0)
    scores_of_pairs = pd.DataFrame(values)
    means = scores_of_pairs.groupby(examples).transform("mean")
    return scores_of_pairs.where(~is_filled, means).to_numpy(), ~is_filled.to_numpy(bool)
