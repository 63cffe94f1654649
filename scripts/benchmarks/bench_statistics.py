"""How often the report's intervals hold the truth, and its marks and p-values are right: by simulation.

    python scripts/benchmarks/bench_statistics.py [--studies 2000] [--out results/bench/statistics.csv]

Every figure is of the functions that the report itself calls; only the data are drawn here, from a
seed. A row is printed for each figure; one that misses its bound is marked with !, and the exit status
is then 1. --out writes all rows as CSV, of which results/README.md shows the worst. The last line has
the processor seconds.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, norm

from kvbench.report.marks import standing
from kvbench.report.stats import (
    ALPHA,
    FEWEST,
    Array,
    Estimate,
    Scores,
    Stratum,
    compared,
    differences,
    margin_of,
    mean_intervals,
)

SIZES = (5, 10, 20, 50, 100, 300)
LEVELS = (0.5, 0.9, 0.99)
LONGBENCH = (2, 3, 5, 10, 20, 30, 50, 100, 150, 200, 200, 200, 300)
LONGBENCH_LEVELS = (0.9, 0.1, 0.5, 0.3, 0.99, 0.2, 0.4, 0.6, 0.05, 0.7, 0.35, 0.45, 0.55)
"""Units and true means of 13 datasets."""
UNEQUAL: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {
    "13 datasets of 2 to 300, the smallest two at .8, the others at 1": (
        LONGBENCH,
        (0.8,) * 2 + (1.0,) * 11,
    ),
    "13 datasets of 2 to 300, the smallest four at .5, the others at .02": (
        LONGBENCH,
        (0.5,) * 4 + (0.02,) * 9,
    ),
    "3 and 300 at .5 and .99": ((3, 300), (0.5, 0.99)),
    "three of 50 at 1 and one of 4 at .5": ((50, 50, 50, 4), (1.0, 1.0, 1.0, 0.5)),
    "2 and 2 at .5": ((2, 2), (0.5, 0.5)),
    "10 and 300 at .5 and 1": ((10, 300), (0.5, 1.0)),
    "20 and 300 at .05 and .99": ((20, 300), (0.05, 0.99)),
    "four of 5 at .5": ((5,) * 4, (0.5,) * 4),
}
"""Units and true means of strata of which the smallest differ from the others."""
METHODS = 7
Generator = np.random.Generator


@dataclass(frozen=True)
class Figure:
    """A measured share of studies, which must be `bound` at least, or with `most` at most."""

    what: str
    share: float
    bound: float
    most: bool = False

    @property
    def kept(self) -> bool:
        """Whether the share keeps its bound."""
        return self.share <= self.bound if self.most else self.share >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.most else ">="
        return f"{'' if self.kept else '!':1} {self.what:66} {self.share:6.1%}  {sign} {self.bound:.0%}"


def figures(studies: int, sizes: Sequence[int] = SIZES) -> Iterator[Figure]:
    """Every figure, function by function; those of marks are of half as many studies."""
    yield from interval_figures(studies, sizes)
    yield from difference_figures(studies, sizes)
    yield from unequal_figures(studies)
    yield from skewed_figures(studies, sizes)
    yield from p_figures(studies, sizes)
    yield from mark_figures(studies // 2, sizes)
    yield from power_figures(studies // 2)
    yield from margin_figures(studies)


def interval_figures(studies: int, sizes: Sequence[int]) -> Iterator[Figure]:
    """Coverage of the intervals of mean scores."""
    rng = np.random.default_rng(1)
    for n in sizes:
        for p in LEVELS:
            right = (rng.random((n, studies)) < p).astype(float)
            yield _mean(f"0/1 scores, n = {n}, p = {p}", [right], p)
    for n in sizes:
        for p in LEVELS:
            difficulty = rng.beta(2 * p, 2 * (1 - p), (n, studies))
            yield _mean(
                f"0/1 scores, mean of three seeds, n = {n}, p = {p}",
                [rng.binomial(3, difficulty) / 3],
                p,
            )
    for n in sizes:
        for p in LEVELS:
            yield _mean(f"F1-like scores, n = {n}, mean = {p}", [_f1(rng, n, studies, p)], p)
    for kind in ("0/1", "F1-like"):
        for level in (*LEVELS, None):
            means = LONGBENCH_LEVELS if level is None else (level,) * len(LONGBENCH)
            strata = [
                (rng.random((n, studies)) < p).astype(float)
                if kind == "0/1"
                else _f1(rng, n, studies, p)
                for n, p in zip(LONGBENCH, means, strict=True)
            ]
            text = "mixed means" if level is None else f"mean = {level}"
            name = f"average of 13 datasets of 2 to 300, {kind}, {text}"
            yield _mean(name, strata, float(np.mean(means)))
    for n in sizes:
        errors = rng.lognormal(-1.5, 0.5, (n, studies))
        truth = float(np.exp(-1.5 + 0.125))
        intervals = mean_intervals([_stratum(errors)], fraction=False)
        name = f"means of log-normal errors of sigma .5, n = {n}"
        yield Figure(name, _coverage(intervals, truth), 0.90)


def difference_figures(studies: int, sizes: Sequence[int]) -> Iterator[Figure]:
    """Coverage of the intervals of paired differences."""
    rng = np.random.default_rng(2)
    for n in sizes:
        for up, down in ((0.02, 0.02), (0.1, 0.1), (0.3, 0.1), (0.1, 0.0)):
            signs = _signs(rng, n, studies, up, down)
            intervals = differences([_stratum(signs)], fraction=True)
            name = f"0/1 differences, n = {n}, {up:.0%} won, {down:.0%} lost"
            yield Figure(name, _coverage(intervals, up - down), 0.92)
    for n in sizes:
        for changed in (0.1, 0.5, 1.0):
            losses = rng.beta(1.5, 3, (n, studies)) * (rng.random((n, studies)) < changed)
            intervals = differences([_stratum(-losses)], fraction=True)
            name = f"F1-like differences, n = {n}, {changed:.0%} lose a third"
            bound = 0.90 if changed < 0.5 else 0.92
            yield Figure(name, _coverage(intervals, -changed / 3), bound)
    for up, down in ((0.05, 0.05), (0.2, 0.1)):
        strata = [_stratum(_signs(rng, n, studies, up, down)) for n in LONGBENCH]
        intervals = differences(strata, fraction=True)
        name = f"average of 13 datasets, 0/1 differences, {up:.0%} won, {down:.0%} lost"
        yield Figure(name, _coverage(intervals, up - down), 0.92)


def unequal_figures(studies: int) -> Iterator[Figure]:
    """Coverage of averages over strata of which the smallest differ."""
    rng = np.random.default_rng(7)
    for text, (sizes, means) in UNEQUAL.items():
        strata = [
            (rng.random((n, studies)) < p).astype(float) for n, p in zip(sizes, means, strict=True)
        ]
        yield _mean(f"average of {text}", strata, float(np.mean(means)), 0.95)
    for lost in (0.1, 0.5, 0.9, 1.0):
        down = [lost] * 4 + [0.0] * 9
        strata = [_signs(rng, n, studies, 0.0, p) for n, p in zip(LONGBENCH, down, strict=True)]
        intervals = differences([_stratum(values) for values in strata], fraction=True)
        name = f"average of 13 datasets, {lost:.0%} lost in the smallest four"
        yield Figure(name, _coverage(intervals, -float(np.mean(down))), 0.95)


def skewed_figures(studies: int, sizes: Sequence[int]) -> Iterator[Figure]:
    """Coverage where few units carry most of the mean: rare large losses beside small differences, and
    long tails; and how often a claim about such a difference holds although it is at its edge."""
    rng = np.random.default_rng(8)
    for small in (2, 3, 5):
        strata = [_signs(rng, small, studies, 0.0, 0.1)]
        strata += [rng.uniform(-0.02, 0.02, (n, studies)) for n in (100, 200, 200)]
        intervals = differences([_stratum(values) for values in strata], fraction=True)
        name = f"average of 3 datasets within ±.02 and one of {small} that loses 1 in 10 %"
        yield Figure(name, _coverage(intervals, -0.1 / 4), 0.90)
    for n in (size for size in sizes if 10 <= size <= 50):
        values = np.where(rng.random((n, studies)) < 0.03, -1.0, 0.05)
        intervals = differences([_stratum(values)], fraction=True)
        name = f"differences of .05 with 3 % losses of 1, n = {n}"
        yield Figure(name, _coverage(intervals, 0.97 * 0.05 - 0.03), 0.90)
    for n in (size for size in sizes if size >= 10):
        errors = rng.lognormal(0, 1, (n, studies))
        intervals = mean_intervals([_stratum(errors)], fraction=False)
        name = f"means of log-normal errors of sigma 1, n = {n}"
        yield Figure(name, _coverage(intervals, float(np.exp(0.5))), 0.90)
        around_zero = rng.lognormal(0, 1, (n, studies)) - float(np.exp(0.5))
        intervals = differences([_stratum(around_zero)], fraction=False)
        claimed = float(np.mean([interval.high < 0 for interval in intervals]))
        name = f"a claim below 0 holds of skewed differences of mean 0, n = {n}"
        yield Figure(name, claimed, 0.10, most=True)


def power_figures(studies: int) -> Iterator[Figure]:
    """How often the one worse method of eight is marked, beside McNemar's exact tests of the best and
    each other method with Holm's adjustment, which ignore that the data chose the best."""
    rng = np.random.default_rng(9)
    for n in (12, 30, 50, 100):
        for loss in (0.2, 0.3, 0.5):
            marked = by_holm = 0
            for _ in range(studies):
                scores = answers(rng, n, [0.7] * METHODS + [0.7 - loss], 0.5)
                marked += METHODS in worse(scores)
                by_holm += METHODS in worse_by_holm(scores.values)
            name = (
                f"worse by {loss} of eight marked, n = {n} (Holm-McNemar {by_holm / studies:.0%})"
            )
            yield Figure(name, marked / studies, max(0.0, by_holm / studies - 0.1))
    yield from average_power_figures(studies)


def average_power_figures(studies: int) -> Iterator[Figure]:
    """How often the one worse method of eight is marked in an average over 13 datasets of 2 to 300, of
    which differences are of those of ten prompts or more (`kvbench.report.frame.compared_strata`); and
    how often any of eight equal ones is."""
    rng = np.random.default_rng(10)
    sizes = [n for n in LONGBENCH if n >= FEWEST]
    for loss, bound in ((0.2, 0.9), (0.0, 0.07)):
        means = [0.7] * METHODS + [0.7 - loss]
        marked = 0
        for _ in range(studies):
            strata = [
                answers(rng, n, means, 0.5, name=f"d{place}") for place, n in enumerate(sizes)
            ]
            marked_methods = worse_in(strata)
            marked += METHODS in marked_methods if loss else bool(marked_methods)
        method = f"worse by {loss} of eight" if loss else "any of eight equal ones"
        name = f"{method} in each of 13 datasets of 2 to 300 marked"
        yield Figure(name, marked / studies, bound, most=not loss)


def worse_by_holm(values: Array) -> set[int]:
    """Methods that Holm's adjustment of McNemar's exact tests against the best shows to differ."""
    best = int(values.mean(0).argmax())
    p: dict[int, float] = {}
    for other in range(values.shape[1]):
        change = values[:, best] - values[:, other]
        up, down = int((change > 0).sum()), int((change < 0).sum())
        if other != best:
            p[other] = min(1.0, 2 * float(binom.cdf(min(up, down), up + down, 0.5)))
    shown: set[int] = set()
    for rank, other in enumerate(sorted(p, key=p.__getitem__)):
        if p[other] * (len(p) - rank) >= ALPHA:
            break
        shown.add(other)
    return shown


def p_figures(studies: int, sizes: Sequence[int]) -> Iterator[Figure]:
    """False positives of the paired test at 5 % between two equal variants, and p beside an interval
    that says otherwise."""
    rng = np.random.default_rng(3)
    for n in (2, *sizes):
        for name, values in (
            ("0/1", _signs(rng, n, studies, 0.2, 0.2)),
            ("0/1, all change,", _signs(rng, n, studies, 0.5, 0.5)),
            ("continuous", rng.normal(0, 1, (n, studies))),
            ("F1-like", _f1(rng, n, studies, 0.5) - _f1(rng, n, studies, 0.5)),
        ):
            estimates = differences([_stratum(values)], fraction=name != "continuous")
            rate = float(np.mean([estimate.p < ALPHA for estimate in estimates]))
            yield Figure(f"false positives, {name} differences, n = {n}", rate, 0.07, most=True)
            disagree = [
                (estimate.p < ALPHA) != (estimate.low > 0 or estimate.high < 0)
                for estimate in estimates
            ]
            name = f"p and interval disagree, {name} differences, n = {n}"
            yield Figure(name, float(np.mean(disagree)), 0.0, most=True)
    strata = [_stratum(_signs(rng, n, studies, 0.2, 0.2)) for n in LONGBENCH]
    estimates = differences(strata, fraction=True)
    rate = float(np.mean([estimate.p < ALPHA for estimate in estimates]))
    yield Figure("false positives, average of 13 datasets", rate, 0.06, most=True)


def mark_figures(studies: int, sizes: Sequence[int]) -> Iterator[Figure]:
    """How often a table of seven equal methods and the exact cache says something false (a method is
    marked as worse, or a difference to the exact cache excludes 0); and how often a worse method is
    marked."""
    rng = np.random.default_rng(4)
    for n in (size for size in sizes if size >= FEWEST):
        for p, shared in ((0.6, 0.5), (0.9, 0.5), (0.6, 0.0)):
            means = [p] * (METHODS + 1)
            false = [false_table(answers(rng, n, means, shared)) for _ in range(studies)]
            name = f"seven equal methods, a false sentence, n = {n}, p = {p}, correlation {shared}"
            yield Figure(name, float(np.mean(false)), 0.07, most=True)
    alike = (0.95,) * (METHODS - 1) + (0.0,)
    for n in (50, 300):
        marked = [bool(worse(answers(rng, n, [0.6] * METHODS, alike))) for _ in range(studies)]
        name = f"any of six that answer alike and an equal one apart marked, n = {n}"
        yield Figure(name, float(np.mean(marked)), 0.07, most=True)
    for shared, bound in ((0.7, 0.85), (0.5, 0.85), (0.0, 0.0)):
        means = [0.6] * (METHODS - 1) + [0.5]
        marked = [METHODS - 1 in worse(answers(rng, 300, means, shared)) for _ in range(studies)]
        name = f"worse by .10 marked, n = 300, p = .6, correlation {shared}"
        yield Figure(name, float(np.mean(marked)), bound)


def margin_figures(studies: int) -> Iterator[Figure]:
    """How often a published number of the same examples lies beyond the margin of honest reruns, where
    the share of examples that a rerun answers anew is measured by a third run."""
    rng = np.random.default_rng(6)
    for n in (100, 300):
        for p, anew in ((0.6, 0.05), (0.6, 0.3), (0.9, 0.1)):
            for loss, bound in ((0.0, 0.06), (0.04, 1.0)):
                beyond = [_beyond(rng, n, p, anew, loss) for _ in range(studies)]
                name = f"published number beyond the margin, n = {n}, p = {p}, {anew:.0%} anew"
                name += f", ours {loss:.0%} worse" if loss else ", equal"
                yield Figure(name, float(np.mean(beyond)), bound, most=True)


def _beyond(rng: Generator, n: int, p: float, anew: float, loss: float) -> bool:
    """Whether one published number lies beyond the margin: of n examples with mean p, of which a rerun
    answers the share `anew` again by chance, and ours loses the share `loss`."""
    ability = rng.beta(2 * p, 2 * (1 - p), n)
    first = rng.random(n) < ability
    runs = [first]
    for _ in range(2):
        runs.append(np.where(rng.random(n) < anew, rng.random(n) < ability, first))
    ours, again, theirs = (run.astype(float) for run in runs)
    mean = (ours.mean() + again.mean()) / 2
    moved, by_chance = float(np.square(ours - again).sum()), n * 2 * mean * (1 - mean)
    # With 1 and 2 added, so that no change among few examples does not count as none at all.
    share_anew = min(1.0, (moved + 1) / (by_chance + 2))
    ours = ours * (rng.random(n) >= loss / p)
    margin = margin_of([(float(ours.mean()), n)], share_anew, total=False, unit=0.001)
    return bool(abs(ours.mean() - round(float(theirs.mean()), 3)) > margin)


def _stratum(values: Array) -> Stratum:
    """Values [units, studies] of which none is missing."""
    return Stratum(values, np.ones(values.shape))


def _mean(name: str, strata: Sequence[Array], truth: float, bound: float = 0.92) -> Figure:
    """The coverage of intervals of mean scores, averaged over strata [units, studies]."""
    intervals = mean_intervals([_stratum(values) for values in strata], fraction=True)
    return Figure(name, _coverage(intervals, truth), bound)


def _coverage(intervals: Sequence[Estimate], truth: float) -> float:
    """The share of intervals that contain the truth."""
    return float(np.mean([interval.low <= truth <= interval.high for interval in intervals]))


def _f1(rng: Generator, n: int, studies: int, mean: float) -> Array:
    """Scores as of F1 or Rouge, [n, studies]: two in five are 0 or 1, the others lie in between."""
    zero_or_one = (rng.random((n, studies)) < mean).astype(float)
    between = rng.beta(2 * mean, 2 * (1 - mean), (n, studies))
    return np.where(rng.random((n, studies)) < 0.4, zero_or_one, between)


def _signs(rng: Generator, n: int, studies: int, up: float, down: float) -> Array:
    """Differences of 0/1 scores, [n, studies]: 1 with probability `up`, -1 with `down`, else 0."""
    return rng.choice((1.0, -1.0, 0.0), (n, studies), p=(up, down, 1 - up - down))


def answers(
    rng: Generator,
    n: int,
    means: Sequence[float],
    shared: float | Sequence[float],
    name: str = "d",
) -> Scores:
    """0/1 scores of methods, [n, methods], whose latent ability on an example is correlated: a share
    `shared` of its variance is the example's."""
    common = np.broadcast_to(np.asarray(shared, dtype=float), (len(means),))
    own = rng.normal(size=(n, len(means))) * np.sqrt(1 - common)
    latent = rng.normal(size=(n, 1)) * np.sqrt(common) + own
    values = (latent < norm.ppf(means)).astype(float)
    units: NDArray[np.intp] = np.arange(n)
    return Scores("", name, values, np.ones(values.shape, dtype=bool), units, ({},) * len(means))


def worse(scores: Scores) -> set[int]:
    """Methods that a table of one dataset marks as worse."""
    return worse_in([scores])


def worse_in(strata: Sequence[Scores]) -> set[int]:
    """Methods that a table marks as worse."""
    peers = range(strata[0].values.shape[1])
    tests = compared(strata, list(itertools.combinations(peers, 2)), fraction=True)
    marks = standing(strata, peers, tests, lower=False)
    return {i for i, mark in marks.items() if mark == "worse"}


def false_table(scores: Scores) -> bool:
    """Whether a table of equal methods, the last the exact cache, shows any difference."""
    pairs = list(itertools.combinations(range(scores.values.shape[1]), 2))
    estimates = compared([scores], pairs, fraction=True).values()
    return any(estimate.p < ALPHA for estimate in estimates)


def main() -> int:
    """Measure and print every figure; the exit status is 1 where one misses its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=2000, help="simulated studies a figure")
    parser.add_argument("--out", type=Path, help="CSV of every row")
    options = parser.parse_args()
    start = time.process_time()
    measured = []
    for figure in figures(options.studies):
        print(figure, flush=True)
        measured.append(figure)
    if options.out:
        write(measured, options.out)
    print(f"{time.process_time() - start:.0f} s of CPU")
    return 0 if all(figure.kept for figure in measured) else 1


def write(measured: Sequence[Figure], path: Path) -> None:
    """Write the figures as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["what", "share", "bound", "kept"])
        for figure in measured:
            sign = "<=" if figure.most else ">="
            bound = f"{sign} {figure.bound:g}"
            rows.writerow([figure.what, f"{figure.share:.4f}", bound, figure.kept])


if __name__ == "__main__":
    sys.exit(main())
