"""The numbers of a comparison: scores, paired differences, memory, time, failures; and their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvbench.report.experiment import Group
from kvbench.report.labels import Variant
from kvbench.report.stats.estimate import Estimate
from kvbench.report.stats.intervals import difference_intervals, mean_intervals
from kvbench.report.stats.marks import standing
from kvbench.report.table import INCOMPLETE, NOTHING, TIED
from kvbench.report.tables.strata import Scores, peers_of, strata_of

AVERAGE = "average"


@dataclass(frozen=True)
class Measure:
    """A record field that tables show beside the scores: declared here, shown everywhere.

    Attributes:
        key: its name in files. of: the record field. how: over the examples of a variant, a method of a
            pandas column.
        heading, kind: of its column (`kvbench.report.table.Column`); no heading: for files only.
    """

    key: str
    of: str
    how: str
    heading: str | None = None
    kind: str = "number"


COSTS = (
    Measure("ratio", "ratio", "mean", "ratio"),
    Measure("entries_mean", "entries_mean", "mean", "entries", "count"),
    Measure("entries_max", "entries_max", "max"),
    Measure("prefill_s", "prefill_s", "median", "prefill s"),
    Measure("compress_s", "compress_s", "median", "compress s"),
    Measure("decode_s", "decode_s", "median"),
    Measure("decode_ms_per_token", "decode_ms", "median", "decode ms/token"),
    Measure("self_bleu", "self_bleu", "mean", "self-BLEU"),
)
"""What a method cost, over its scored examples; and how alike the answers are that it drew."""


@dataclass(frozen=True)
class Cell:
    """The score of one variant on one dataset (or on their average).

    Attributes:
        score: mean over scored examples.
        difference: the paired difference to the baseline over examples that both scored; None for
            the baseline itself.
        best: the best of the compressed variants of the same rate.
        tied: not shown to differ from the best. worse: shown to be worse (`marks.standing`).
        scored, expected: examples with a score, and examples that any variant was given.
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

    @property
    def marks(self) -> str:
        """Signs behind the score."""
        return INCOMPLETE * (not self.complete) + TIED * self.tied


NO_CELL = Cell(NOTHING, None, False, 0, 0, {})


@dataclass(frozen=True)
class VariantScores:
    """One variant: its cells by column, and what it cost.

    Attributes:
        costs: by key of `COSTS`.
        uncompressed: examples that were too short to be compressed.
        budget_preset: the preset that may hold more than the budget, where there is one; then
            capacity: the mean of what the budget allows per layer and KV head.
    """

    variant: Variant
    cells: Mapping[str, Cell]
    costs: Mapping[str, float]
    uncompressed: int
    budget_preset: str | None = None
    capacity: float = np.nan

    @property
    def ratio(self) -> float:
        """Bytes held over those of the exact cache, as measured."""
        return self.costs["ratio"]

    @property
    def total(self) -> Cell:
        """The average cell, or the only one; an empty one where nothing was run yet."""
        if AVERAGE in self.cells:
            return self.cells[AVERAGE]
        return next(iter(self.cells.values()), NO_CELL)


@dataclass(frozen=True)
class ScoreTable:
    """Variants x datasets (or x values of another record field) for one model and task."""

    model: str
    task: str
    by: str
    unit: str
    lower_is_better: bool
    baseline: str | None
    columns: tuple[str, ...]
    rows: tuple[VariantScores, ...]
    beyond: tuple[int, int, int] | None = None
    """Of prompts longer than the model's positions: how many, the longest, the positions."""
    ranked: bool = True
    """False where variants are ways to look at a model (a task with a figure ``measured``)."""

    def row(self, variant: Variant) -> VariantScores | None:
        """What `variant` did, None where it was not run."""
        return next((row for row in self.rows if row.variant == variant), None)


def score_table(
    group: Group, by: str = "dataset", *, sums: Mapping[str, Sequence[str]] | None = None
) -> ScoreTable:
    """Mean scores of every variant for each value of the record field `by`.

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
            _row(group, variant, {name: cells[i] for name, cells in columns.items()})
            for i, variant in enumerate(group.variants)
        ),
        beyond=group.beyond_positions,
        ranked=group.meta.figure("measured") is None,
    )


def _cells(group: Group, strata: Sequence[Scores]) -> list[Cell]:
    """One cell per variant, over one dataset or over the average of several."""
    variants = group.variants
    labels = [variant.label for variant in variants]
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
        failures: Counter[str] = Counter()
        for one in strata:
            failures.update(one.statuses[i])
        given = [one.values[one.given[:, i], i] for one in strata]
        cells.append(
            Cell(
                score=scores[i],
                difference=None if group.baseline[label] is None else differences[i],
                worse=i in worse,
                scored=sum(int((~np.isnan(values)).sum()) for values in given),
                expected=sum(map(len, given)),
                failures=dict(failures),
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


def _row(group: Group, variant: Variant, cells: Mapping[str, Cell]) -> VariantScores:
    records = group.records[group.records["variant"] == variant.label]
    good = records[records["status"] == "ok"]
    whole = good["compressed"].eq(False) & good["saves_memory"].eq(True)
    more = good.reindex(columns=["budget_preset"])["budget_preset"].dropna()
    return VariantScores(
        variant=variant,
        cells=cells,
        costs={m.key: float(getattr(good[m.of], m.how)()) for m in COSTS},
        uncompressed=int(whole.sum()),
        budget_preset=None if more.empty else str(more.iloc[0]),
        capacity=float(good["capacity"].mean()),
    )
