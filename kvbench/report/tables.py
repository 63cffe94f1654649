"""The numbers of a comparison: scores, paired differences, memory, time, failures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.report.data import Arm, Group
from kvbench.report.stats import Array, Estimate, Stratum, estimates

AVERAGE = "average"


@dataclass(frozen=True)
class Cell:
    """The score of one arm on one dataset (or on their average).

    Attributes:
        score: mean over scored examples.
        difference: the paired difference to the baseline over examples that both scored; None for
            the baseline itself.
        best: the best of the compressed arms of the same rate.
        tied: not told apart from the best: the interval of the paired difference holds zero.
        worse: told apart from the best.
        scored, expected: examples with a score, and examples that any arm was given.
        failures: failed examples by status; "missing" counts those without a record.
    """

    score: Estimate
    difference: Estimate | None
    worse: bool
    scored: int
    expected: int
    failures: Mapping[str, int]
    best: bool = False
    tied: bool = False

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
        values: [pairs, arms], NaN where missing; a pair is one (seed, example).
        units: [pairs] number of the independent unit that each pair belongs to.
        statuses: per arm, failed examples by status.
    """

    name: str
    values: Array
    units: NDArray[np.intp]
    statuses: tuple[Mapping[str, int], ...]

    def stratum(self, *columns: Array) -> Stratum:
        """Columns [pairs, k] summed within each unit."""
        values = np.concatenate(columns, axis=1)
        shape = (len(np.unique(self.units)), values.shape[1])
        sums, counts = np.zeros(shape), np.zeros(shape)
        np.add.at(sums, self.units, np.nan_to_num(values))
        np.add.at(counts, self.units, ~np.isnan(values))
        return Stratum(self.name, sums, counts)


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
    )


def strata_of(group: Group, by: str = "dataset") -> list[Scores]:
    """The scores for each value of the record field `by`, in its natural order."""
    unit = group.meta.unit if group.meta.unit in group.records else "example_id"
    needed = dict.fromkeys(["arm", "seed", "example_id", "status", "score", unit, by])
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
                    "not_told_from_best": cell.tied,
                    "worse_than_best": cell.worse,
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
    statuses = []
    for i, label in enumerate(labels):
        missing = len(keys) - int(present[:, i].sum())
        found = failures_of(failed[label]) if label in failed else {}
        statuses.append(found | ({"missing": missing} if missing else {}))
    return Scores(
        name=name,
        values=values,
        units=pd.factorize(of_pair, sort=True)[0],
        statuses=tuple(statuses),
    )


def _cells(group: Group, strata: Sequence[Scores]) -> list[Cell]:
    """One cell per arm, over one dataset or over the average of several."""
    arms = group.arms
    labels = [arm.label for arm in arms]
    base = [labels.index(group.baseline[label] or label) for label in labels]
    rival, best = _rivals(group, strata)
    found = estimates(
        [
            one.stratum(
                one.values,
                one.values - one.values[:, base],
                one.values - one.values[:, rival],
            )
            for one in strata
        ]
    )
    k, lower = len(arms), group.meta.lower_is_better
    cells = []
    for i, label in enumerate(labels):
        against = found[2 * k + i]
        compared = rival[i] != i and i not in best and not math.isnan(against.value)
        failures: dict[str, int] = {}
        for one in strata:
            for status, count in one.statuses[i].items():
                failures[status] = failures.get(status, 0) + count
        cells.append(
            Cell(
                score=found[i],
                difference=None if group.baseline[label] is None else found[k + i],
                worse=compared and (against.low > 0 if lower else against.high < 0),
                scored=sum(int((~np.isnan(one.values[:, i])).sum()) for one in strata),
                expected=sum(len(one.values) for one in strata),
                failures=failures,
                best=i in best,
                tied=compared and not against.excludes_zero,
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


def common_means(strata: Sequence[Scores], columns: Sequence[int]) -> Array:
    """Mean over strata of the mean score, over the examples that all these arms scored."""
    means = []
    for one in strata:
        values = one.values[:, columns]
        means.append(_nanmean(values[~np.isnan(values).any(axis=1)]))
    return np.asarray(np.mean(means, axis=0))


def _rivals(group: Group, strata: Sequence[Scores]) -> tuple[list[int], set[int]]:
    """For each arm the best arm that it competes with (itself: none), and all that are best.

    Means over different examples cannot be ranked: arms that lack a score stand back where another
    has them all, and where each lacks some, the examples that all scored decide.
    """
    sign = -1.0 if group.meta.lower_is_better else 1.0
    rivals, best = list(range(len(group.arms))), set()
    for peers in peers_of(group):
        lacking = [sum(int(np.isnan(one.values[:, i]).sum()) for one in strata) for i in peers]
        whole = [i for i, missing in zip(peers, lacking, strict=True) if not missing]
        scored = [i for i in peers if all((~np.isnan(one.values[:, i])).any() for one in strata)]
        ranked = whole or scored
        if len(scored) < 2 or not ranked:
            continue
        means = sign * common_means(strata, ranked)
        if np.isnan(means).all():
            continue
        top = float(np.nanmax(means))
        winners = [
            i for i, mean in zip(ranked, means, strict=True) if np.isclose(mean, top, rtol=1e-9)
        ]
        best |= set(winners)
        for i in peers:
            rivals[i] = winners[0]
    return rivals, best


def _row(group: Group, arm: Arm, cells: Mapping[str, Cell]) -> Row:
    records = group.records[group.records["arm"] == arm.label]
    good = records[records["status"] == "ok"]
    whole = good["compressed"].eq(False) & good["saves_memory"].eq(True)
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
    )


def _nanmean(values: Array) -> Array:
    counts = (~np.isnan(values)).sum(0)
    total = np.nansum(values, axis=0)
    return np.divide(total, counts, out=np.full(len(counts), np.nan), where=counts > 0)


def _natural(value: object) -> tuple[int, float, str]:
    """Numbers in their order, before text in its own."""
    if isinstance(value, int | float | np.number):
        return (0, float(value), "")
    return (1, 0.0, str(value))
