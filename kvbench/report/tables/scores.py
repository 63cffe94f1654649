"""The numbers of a comparison: scores, paired differences, memory, time, failures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.report.experiment import Arm, Group
from kvbench.report.stats.estimate import Array, Estimate, Stratum, ratio
from kvbench.report.stats.intervals import difference_intervals, mean_intervals
from kvbench.report.stats.marks import standing

AVERAGE = "average"
PROMPT = ("prompt_tokens", "prompt_tail", "answers")
"""Fields that are the same where two records of one id are about the same example."""


@dataclass(frozen=True)
class Cell:
    """The score of one arm on one dataset (or on their average).

    Attributes:
        score: mean over scored examples.
        difference: the paired difference to the baseline over examples that both scored; None for
            the baseline itself.
        best: the best of the compressed arms of the same rate.
        tied: not shown to differ from the best. worse: shown to be worse (`marks.standing`).
        scored, expected: examples with a score, and examples that any arm was given.
        failures: failed examples by status; "missing" counts those without a record.
        units: independent units with a score.
    """

    score: Estimate
    difference: Estimate | None
    worse: bool
    scored: int
    expected: int
    failures: Mapping[str, int]
    best: bool = False
    tied: bool = False
    units: int = 0

    @property
    def complete(self) -> bool:
        """Whether every example was scored."""
        return self.scored == self.expected


NO_CELL = Cell(Estimate(np.nan, np.nan, np.nan), None, False, 0, 0, {})


@dataclass(frozen=True)
class Row:
    """One arm: its cells by column, and what it cost.

    Attributes:
        ratio: mean over examples of cache bytes / bytes of the exact cache, as measured.
        entries_mean, entries_max: entries per layer and KV head.
        prefill_s, compress_s, decode_s: medians over examples.
        decode_ms: milliseconds of decoding per step, median over examples.
        kept_whole: examples that were too short to be compressed.
        budget_preset: the preset that may hold more than the budget, where there is one; then
            capacity: the mean of what the budget allows per layer and KV head.
    """

    arm: Arm
    cells: Mapping[str, Cell]
    ratio: float
    entries_mean: float
    entries_max: float
    prefill_s: float
    compress_s: float
    decode_s: float
    decode_ms: float
    kept_whole: int
    budget_preset: str | None = None
    capacity: float = math.nan

    @property
    def total(self) -> Cell:
        """The average cell, or the only one; an empty one where nothing was run yet."""
        if AVERAGE in self.cells:
            return self.cells[AVERAGE]
        return next(iter(self.cells.values()), NO_CELL)


@dataclass(frozen=True)
class ScoreTable:
    """Arms x datasets (or x values of another record field) for one model and task."""

    model: str
    task: str
    by: str
    unit: str
    lower_is_better: bool
    baseline: str | None
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    beyond: tuple[int, int, int] | None = None
    """Of prompts longer than the model's positions: how many, the longest, the positions."""


@dataclass(frozen=True)
class Overview:
    """Arms x tasks of one model: the ``total`` cell of each task's table."""

    model: str
    tables: tuple[ScoreTable, ...]

    @property
    def arms(self) -> list[Arm]:
        """Every arm of any task, in table order."""
        return sorted({row.arm for t in self.tables for row in t.rows}, key=lambda a: a.sort_key)

    def label(self, arm: Arm) -> str:
        """What the arm is called among all tasks' arms: with its rate where tasks had different ones."""
        twins = [other for other in self.arms if other.label == arm.label]
        return (
            arm.label if len(twins) == 1 or arm.rate is None else f"{arm.label}, rate {arm.rate:g}"
        )

    def row(self, table: ScoreTable, arm: Arm) -> Row | None:
        """What `arm` did on one task, None where it was not run."""
        return next((row for row in table.rows if row.arm == arm), None)


@dataclass(frozen=True)
class Scores:
    """Scores of one dataset, as every comparison takes them.

    Attributes:
        values: [pairs, arms], NaN where missing; a pair is one (seed, example). An arm that was not
            run with a seed has its mean over its own seeds there, where the prompt is the same.
        given: [pairs, arms] whether the arm was to score the pair itself.
        units: [pairs] number of the independent unit that each pair belongs to.
        statuses: per arm, failed examples by status.
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


def score_table(
    group: Group, by: str = "dataset", *, sums: Mapping[str, Sequence[str]] | None = None
) -> ScoreTable:
    """Mean scores of every arm for each value of the record field `by`.

    By dataset, an average over datasets (each counting the same) is added where there are several.

    Args:
        sums: instead of single values, sums of the means of several, by name; a sum that lacks one
            of them is left out.
    """
    scores = strata_of(group, by)
    if sums:
        named = {one.name.removeprefix(f"{by} "): one for one in scores}
        columns = {
            name: [_scaled(cell, len(parts)) for cell in _cells(group, [named[p] for p in parts])]
            for name, parts in sums.items()
            if all(part in named for part in parts)
        }
    else:
        columns = {one.name.removeprefix(f"{by} "): _cells(group, [one]) for one in scores}
    if by == "dataset" and len(columns) > 1 and not sums:
        columns[AVERAGE] = _cells(group, scores)
    return ScoreTable(
        model=group.model,
        task=group.task,
        by=by,
        unit=group.meta.score_unit,
        lower_is_better=group.meta.lower_is_better,
        baseline=group.baseline_name,
        columns=tuple(columns),
        rows=tuple(
            _row(group, arm, {name: cells[i] for name, cells in columns.items()})
            for i, arm in enumerate(group.arms)
        ),
        beyond=group.beyond_positions,
    )


def strata_of(group: Group, by: str = "dataset") -> list[Scores]:
    """The scores for each value of the record field `by`, in its natural order."""
    unit = group.meta.unit if group.meta.unit in group.records else "example_id"
    needed = dict.fromkeys(["arm", "seed", "example_id", "status", "score", *PROMPT, unit, by])
    records = group.records.reindex(columns=list(needed))
    return [
        _scores(group, part, unit, f"{by} {as_text(value)}")
        for value, part in sorted(records.groupby(by), key=lambda item: _natural(item[0]))
    ]


def overviews(tables: Sequence[ScoreTable]) -> list[Overview]:
    """The tables of each model side by side."""
    models = sorted({table.model for table in tables})
    return [Overview(m, tuple(t for t in tables if t.model == m)) for m in models]


def frame_of(table: ScoreTable) -> pd.DataFrame:
    """The table in long form, one row per arm and column; fractions as per cent."""
    scale = 100.0 if table.unit == "fraction" else 1.0
    lines = []
    for row in table.rows:
        for column, cell in row.cells.items():
            difference = cell.difference or Estimate(np.nan, np.nan, np.nan)
            lines.append(
                {
                    "model": table.model,
                    "task": table.task,
                    "method": row.arm.method,
                    "arm": row.arm.label,
                    table.by: column,
                    "unit": "%" if table.unit == "fraction" else table.unit,
                    "score": cell.score.value * scale,
                    "score_low": cell.score.low * scale,
                    "score_high": cell.score.high * scale,
                    "baseline": None if cell.difference is None else table.baseline,
                    "difference": difference.value * scale,
                    "difference_low": difference.low * scale,
                    "difference_high": difference.high * scale,
                    "best": cell.best,
                    "not_shown_to_differ": cell.tied,
                    "shown_worse": cell.worse,
                    "scored": cell.scored,
                    "expected": cell.expected,
                    "failures": failures_text(cell.failures),
                    "ratio": row.ratio,
                    "entries_mean": row.entries_mean,
                    "entries_max": row.entries_max,
                    "prefill_s": row.prefill_s,
                    "compress_s": row.compress_s,
                    "decode_s": row.decode_s,
                    "decode_ms_per_token": row.decode_ms,
                    "kept_whole": row.kept_whole,
                }
            )
    return pd.DataFrame(lines)


def split_frame(group: Group, by: str) -> pd.DataFrame:
    """Every dataset split by the record field `by`, in long form; fractions as per cent.

    Beside each part's mean stands the plain mean of the dataset's parts, which is how LongBench-E
    averages a dataset over its length buckets.
    """
    scale = 100.0 if group.meta.score_unit == "fraction" else 1.0
    good = group.records[group.records["status"] == "ok"]
    keys = ["arm", "dataset"]
    means = good.groupby([*keys, by])["score"].agg(["mean", "count"]).reset_index()
    means["score"] = means.pop("mean") * scale
    means["mean_of_parts"] = means.groupby(keys)["score"].transform("mean")
    arms = [arm.label for arm in group.arms]
    means.insert(0, "model", group.model)
    means.insert(1, "task", group.task)
    means = means.rename(columns={"count": "scored"})
    ranks = means["arm"].map(arms.index)
    natural = means[by].map(_natural)
    order = sorted(means.index, key=lambda i: (ranks[i], means["dataset"][i], natural[i]))
    return means.loc[order]


def failures_text(failures: Mapping[str, int]) -> str:
    """E.g. ``2 oom, 1 missing``; empty where nothing failed."""
    return ", ".join(f"{count} {status}" for status, count in failures.items())


def as_text(value: object) -> str:
    """A field's value as a column name: 200.0 is 200."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def failures_of(records: pd.DataFrame) -> dict[str, int]:
    """Failed records by status; a record that is ok without a score counts as "no score"."""
    status = records["status"].mask(
        (records["status"] == "ok") & records["score"].isna(), "no score"
    )
    counts = status[status != "ok"].value_counts()
    return {str(name): int(counts[name]) for name in sorted(counts.index)}


def _scores(group: Group, records: pd.DataFrame, unit: str, name: str) -> Scores:
    labels = [arm.label for arm in group.arms]
    pairs = records["seed"].astype(str) + "/" + records["example_id"].astype(str)
    codes, keys = pd.factorize(pairs, sort=True)
    arms = pd.Index(labels).get_indexer(pd.Index(records["arm"]))
    values = np.full((len(keys), len(labels)), np.nan)
    values[codes, arms] = records["score"].where(records["status"] == "ok").to_numpy(float)
    present = np.zeros(values.shape, dtype=bool)
    present[codes, arms] = True
    named = records[unit].astype(str).to_numpy()
    of_pair = np.empty(len(keys), dtype=object)
    of_pair[codes[::-1]] = named[::-1]  # the first record of a pair names its unit
    failed = dict(iter(records.groupby("arm")))
    given = _stand_in(values, present, codes, records)
    statuses = []
    for i, label in enumerate(labels):
        missing = int((given[:, i] & ~present[:, i]).sum())
        found = failures_of(failed[label]) if label in failed else {}
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
    """Fill in what an arm would score under seeds it was not run with, where it is known: its mean over
    its own seeds, where the example's prompt is the same under all. (A method without draws needs one
    seed; the runs of one with draws beside it may have three.)

    Returns:
        [pairs, arms] the pairs that each arm was to score itself.
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


def _cells(group: Group, strata: Sequence[Scores]) -> list[Cell]:
    """One cell per arm, over one dataset or over the average of several."""
    arms = group.arms
    labels = [arm.label for arm in arms]
    base = [labels.index(group.baseline[label] or label) for label in labels]
    fraction, lower = group.meta.score_unit == "fraction", group.meta.lower_is_better
    own = [one.stratum(one.values) for one in strata]
    scores = mean_intervals(own, fraction=fraction)
    differences = difference_intervals(
        [one.stratum(one.values - one.values[:, base]) for one in strata], fraction=fraction
    )
    stands = [standing(strata, peers, lower=lower) for peers in peers_of(group)]
    best, worse, tied = (
        frozenset[int]().union(*(getattr(one, name) for one in stands))
        for name in ("best", "worse", "tied")
    )
    cells = []
    for i, label in enumerate(labels):
        failures: dict[str, int] = {}
        for one in strata:
            for status, count in one.statuses[i].items():
                failures[status] = failures.get(status, 0) + count
        given = [one.values[one.given[:, i], i] for one in strata]
        cells.append(
            Cell(
                score=scores[i],
                difference=None if group.baseline[label] is None else differences[i],
                worse=i in worse,
                scored=sum(int((~np.isnan(values)).sum()) for values in given),
                expected=sum(map(len, given)),
                failures=failures,
                best=i in best,
                tied=i in tied,
                units=sum(int((one.counts[:, i] > 0).sum()) for one in own),
            )
        )
    return cells


def _scaled(cell: Cell, count: int) -> Cell:
    """The sum of means whose mean the cell holds."""
    difference = cell.difference and _times(cell.difference, count)
    return replace(cell, score=_times(cell.score, count), difference=difference)


def _times(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, estimate.low * factor, estimate.high * factor)


def peers_of(group: Group) -> list[list[int]]:
    """Indices of arms that compete with each other: compressed, at the same rate."""
    found: dict[float | None, list[int]] = {}
    for i, arm in enumerate(group.arms):
        if arm.label in group.compressed:
            found.setdefault(arm.rate, []).append(i)
    return list(found.values())


def _row(group: Group, arm: Arm, cells: Mapping[str, Cell]) -> Row:
    records = group.records[group.records["arm"] == arm.label]
    good = records[records["status"] == "ok"]
    whole = good["compressed"].eq(False) & good["saves_memory"].eq(True)
    more = good.reindex(columns=["budget_preset"])["budget_preset"].dropna()
    return Row(
        arm=arm,
        cells=cells,
        ratio=float(good["ratio"].mean()),
        entries_mean=float(good["entries_mean"].mean()),
        entries_max=float(good["entries_max"].max()),
        prefill_s=float(good["prefill_s"].median()),
        compress_s=float(good["compress_s"].median()),
        decode_s=float(good["decode_s"].median()),
        decode_ms=float(good["decode_ms"].median()),
        kept_whole=int(whole.sum()),
        budget_preset=None if more.empty else str(more.iloc[0]),
        capacity=float(good["capacity"].mean()),
    )


def _natural(value: object) -> tuple[int, float, str]:
    """Numbers in their order, before text by the number it begins with, before other text."""
    if isinstance(value, int | float | np.number):
        return (0, float(value), "")
    leading = re.match(r"\d+", str(value))
    return (1, float(leading[0]), str(value)) if leading else (2, 0.0, str(value))
