"""How often the report's intervals hold the truth, and how often its marks are wrong: by simulation.

    python scripts/benchmarks/bench_statistics.py [--studies 2000] [--only family ratio] [--out CSV]

Every figure is of the functions that the report itself calls; only the data are drawn here, from a
seed. A row is printed for each figure; one that misses its bound is marked with !, and the exit status
is then 1. --out writes all rows as CSV, of which scripts/README.md shows the worst. The last line has
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
from scipy.stats import norm

from kvbench.report.ratios import SHARE, enough, nonnegative_from
from kvbench.report.stats import (
    ALPHA,
    FEWEST,
    Array,
    Estimate,
    Scores,
    compared,
    differences,
    holm,
    mean_intervals,
    paired,
    standing,
)

SIZES = (10, 20, 50, 100, 300)
LEVELS = (0.5, 0.9, 0.99)
LONGBENCH = (2, 3, 5, 10, 20, 30, 50, 100, 150, 200, 200, 200, 300)
LONGBENCH_LEVELS = (0.9, 0.1, 0.5, 0.3, 0.99, 0.2, 0.4, 0.6, 0.05, 0.7, 0.35, 0.45, 0.55)
"""Units and true means of 13 datasets."""
METHODS = 7
FAMILIES = tuple(itertools.product((7, 8, 22), (12, 30, 200), (0.0, 0.5)))
"""Methods, prompts and correlations of the simulated studies of marks."""
TWO = 20
"""Two equal methods are simulated this many times as often: one test comes close to its level of 5 %."""
HOLDS, FALSE = 0.92, 0.05
"""The least coverage of an interval, and the largest share of tables with a false mark."""
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
        return self.share <= self.bound if self.most else self.share >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.most else ">="
        return f"{'' if self.kept else '!':1} {self.what:66} {self.share:6.1%}  {sign} {self.bound:.0%}"


def figures(studies: int, only: Sequence[str] = ()) -> Iterator[Figure]:
    """Every figure, or those of these kinds; those of power are of a quarter as many studies, those of
    two equal methods of `TWO` times as many, those of families of twice as many."""
    kinds = {
        "interval": lambda: interval_figures(studies, SIZES),
        "difference": lambda: difference_figures(studies, SIZES),
        "mark": lambda: mark_figures(studies, SIZES),
        "average_mark": lambda: average_mark_figures(studies),
        "power": lambda: power_figures(studies // 4),
        "family": lambda: family_figures(2 * studies),
        "ratio": lambda: ratio_figures(studies),
        "enough": lambda: enough_figures(studies),
    }
    for kind in only or kinds:
        yield from kinds[kind]()


def interval_figures(studies: int, sizes: Sequence[int]) -> Iterator[Figure]:
    rng = np.random.default_rng(1)
    for n, p in itertools.product(sizes, LEVELS):
        of = f"n = {n}, mean = {p}"
        right = (rng.random((n, studies)) < p).astype(float)
        yield _mean(f"mean of 0/1 scores, {of}", [right], p)
        seeds = rng.binomial(3, rng.beta(2 * p, 2 * (1 - p), (n, studies))) / 3
        yield _mean(f"mean of 0/1 scores with three seeds, {of}", [seeds], p)
        yield _mean(f"mean of F1-like scores, {of}", [_f1(rng, n, studies, p)], p)
    for n, sigma in itertools.product(sizes, (0.5, 1.0)):
        errors = rng.lognormal(0, sigma, (n, studies))
        found = mean_intervals([errors], fraction=False)
        name = f"mean of log-normal errors, n = {n}, sigma = {sigma}"
        yield Figure(name, _coverage(found, float(np.exp(sigma**2 / 2))), HOLDS)
    for level in (*LEVELS, None):
        means = LONGBENCH_LEVELS if level is None else (level,) * len(LONGBENCH)
        cells = list(zip(LONGBENCH, means, strict=True))
        of = "mixed means" if level is None else f"mean = {level}"
        right_parts = [(rng.random((n, studies)) < p).astype(float) for n, p in cells]
        f1_parts = [_f1(rng, n, studies, p) for n, p in cells]
        for kind, parts in (("0/1", right_parts), ("F1-like", f1_parts)):
            name = f"average of 13 datasets of 2 to 300, {kind}, {of}"
            yield _mean(name, parts, float(np.mean(means)))


def difference_figures(studies: int, sizes: Sequence[int]) -> Iterator[Figure]:
    rng = np.random.default_rng(2)

    def figure(name: str, parts: Sequence[Array], truth: float, reach: float | None) -> Figure:
        return Figure(name, _coverage(differences(parts, reach=reach), truth), HOLDS)

    for n in sizes:
        shape = (n, studies)
        for up, down in ((0.02, 0.02), (0.1, 0.1), (0.3, 0.1), (0.1, 0.0)):
            signs = _signs(rng, n, studies, up, down)
            name = f"difference of 0/1 scores, n = {n}, {up:.0%} won, {down:.0%} lost"
            yield figure(name, [signs], up - down, 1.0)
        for changed in (0.1, 0.5, 1.0):
            losses = rng.beta(1.5, 3, shape) * (rng.random(shape) < changed)
            name = f"difference of F1-like scores, n = {n}, {changed:.0%} lose a third"
            yield figure(name, [-losses], -changed / 3, 1.0)
        rare = np.where(rng.random(shape) < 0.03, -1.0, 0.05)
        name = f"difference of F1-like scores, n = {n}, 3% lose all and the others win .05"
        yield figure(name, [rare], 0.97 * 0.05 - 0.03, 1.0)
        errors = rng.lognormal(0, 1, shape) - rng.lognormal(0.2, 1, shape)
        truth = float(np.exp(0.5) - np.exp(0.7))
        yield figure(
            f"difference of log-normal errors, n = {n}, both skewed", [errors], truth, None
        )
        one = rng.lognormal(0, 0.5, shape)
        name = f"difference of log-normal errors, n = {n}, one alone"
        yield figure(name, [one], float(np.exp(0.125)), None)
    for up, down in ((0.05, 0.05), (0.2, 0.1)):
        parts = [_signs(rng, n, studies, up, down) for n in LONGBENCH]
        name = f"average difference of 13 datasets, 0/1, {up:.0%} won, {down:.0%} lost"
        yield figure(name, parts, up - down, 1.0)
    for n in sizes:  # told, without a bound
        found = differences([rng.lognormal(0, 1, (n, studies))], reach=None)
        share = _coverage(found, float(np.exp(0.5)))
        yield Figure(f"very skewed difference of log-normal errors, sigma 1, n = {n}", share, 0.0)


def mark_figures(studies: int, sizes: Sequence[int]) -> Iterator[Figure]:
    """How often one of two equal methods, and any of seven, is marked as worse or better."""
    kinds = (("0/1", 0.6, 0.5), ("0/1", 0.9, 0.5), ("0/1", 0.6, 0), ("F1-like", 0.6, 0.5))
    for n, (kind, mean, shared) in itertools.product(sizes, (*kinds, ("errors", 0.0, 0.5))):
        rng = np.random.default_rng([4, n, len(kind), round(10 * mean), round(10 * shared)])
        fraction = kind != "errors"
        of = f"n = {n}, {kind}, mean {mean}, correlation {shared}"
        false = 0
        for _ in range(TWO):
            two = drawn(rng, n, [mean] * 2, shared, kind, studies)
            tests = differences([two[:, 0] - two[:, 1]], reach=1.0 if fraction else None)
            false += sum(test.p < ALPHA for test in tests)
        share = false / (TWO * studies)
        yield Figure(f"two equal methods, one marked, {of}", share, FALSE, most=True)
        tables = np.moveaxis(drawn(rng, n, [mean] * METHODS, shared, kind, studies), 2, 0)
        share = float(np.mean([bool(marked([scores(table)], fraction)) for table in tables]))
        yield Figure(f"seven equal methods, one marked, {of}", share, FALSE, most=True)


def average_mark_figures(studies: int) -> Iterator[Figure]:
    rng = np.random.default_rng(5)
    large = [n for n in LONGBENCH if n >= FEWEST]
    false = [
        bool(marked([answers(rng, n, [0.7] * METHODS) for n in large])) for _ in range(studies)
    ]
    name = "seven equal methods, one marked, average of 13 datasets"
    yield Figure(name, float(np.mean(false)), FALSE, most=True)


def power_figures(studies: int) -> Iterator[Figure]:
    """How often the one worse method of eight is marked. Told, without a bound."""
    rng = np.random.default_rng(9)
    for n, loss in itertools.product((30, 50, 100), (0.2, 0.3, 0.5)):
        means = [0.7] * METHODS + [0.7 - loss]
        found = [METHODS in marked([answers(rng, n, means)]) for _ in range(studies)]
        name = f"worse by {loss} of eight marked, n = {n}"
        yield Figure(name, float(np.mean(found)), 0.0)


def family_figures(
    studies: int, families: Sequence[tuple[int, int, float]] = FAMILIES
) -> Iterator[Figure]:
    """All pairs of right and wrong answers: how often any pair of equal methods differs significantly,
    where all are equal and where the first half is worse; and, told without a bound, what share of the
    worse half is told from the best, by the discrete form of Holm's method and by the usual one."""
    for (methods, n, shared), level, loss in itertools.product(families, (0.6, 0.9), (0.0, 0.5)):
        cell = (round(10 * share) for share in (shared, level, loss))
        rng = np.random.default_rng([10, methods, n, *cell])
        worse = methods // 2 if loss else 0
        means = [level - loss] * worse + [level] * (methods - worse)
        false, told = [], dict.fromkeys(("discrete", "usual"), 0.0)
        for _ in range(studies // 500 or 1):
            count = min(studies, 500)
            for values in np.moveaxis(drawn(rng, n, means, shared, "0/1", count), 2, 0):
                found = significant(values)
                equal = [
                    pair for pair in found["discrete"] if (pair[0] < worse) == (pair[1] < worse)
                ]
                false.append(bool(equal))
                best = np.flatnonzero(values.sum(0) == values.sum(0).max())
                for name, pairs in found.items():
                    lost = {i for pair in pairs if set(pair) & set(best) for i in pair if i < worse}
                    told[name] += len(lost) / max(worse, 1)
        of = f"{methods} methods, n = {n}, mean {level}, correlation {shared}"
        of += f", {worse} worse by {loss}" if worse else ""
        room = 1.96 * np.sqrt(FALSE * (1 - FALSE) / len(false))  # the lower limit is at most 5 %
        share = float(np.mean(false))
        yield Figure(f"any pair of equal methods, {of}", share, float(FALSE + room), most=True)
        for name, sum_of in told.items() if worse else ():
            yield Figure(f"told from the best, {name} Holm, {of}", sum_of / len(false), 0.0)


def significant(values: Array) -> dict[str, list[tuple[int, int]]]:
    """The pairs of 0/1 scores [n, methods] whose adjusted p is below 5 %, by either form of Holm's
    method."""
    pairs = list(itertools.combinations(range(values.shape[1]), 2))
    found = paired([scores(values)], pairs, fraction=True)
    p = [one.p for one in found]
    adjusted = {"discrete": holm(p, [one.discordant for one in found]), "usual": holm(p)}
    return {
        name: [pair for pair, x in zip(pairs, each, strict=True) if x < ALPHA]
        for name, each in adjusted.items()
    }


def ratio_figures(studies: int) -> Iterator[Figure]:
    """Two methods by the ratio of what is never negative: how often equal ones differ significantly, how
    often an interval holds the truth, and, told without a bound, how often one of 12 times the other is
    told from it, by the ratio and on the raw scale."""
    rng = np.random.default_rng(11)
    for n, sigma in itertools.product((12, 30, 100), (0.5, 1.0, 1.5)):
        prompts = rng.normal(size=(studies, n, 1))
        own = rng.normal(size=(studies, n, 2))
        equal = np.exp(sigma * (prompts + own) / np.sqrt(2))
        far = equal * [1.0, 12.0]
        of = f"n = {n}, sigma {sigma}"
        ratios = [paired([scores(table)], [(1, 0)], fraction=False)[0] for table in equal]
        share = float(np.mean([one.p < ALPHA for one in ratios]))
        yield Figure(f"two equal log-normal methods differ, {of}", share, FALSE, most=True)
        share = float(np.mean([one.low <= 1.0 <= one.high for one in ratios]))
        yield Figure(f"interval of the ratio of geometric means, {of}", share, HOLDS)
        told = [paired([scores(table)], [(1, 0)], fraction=False)[0].p < ALPHA for table in far]
        yield Figure(f"12 times as much told by the ratio, {of}", float(np.mean(told)), 0.0)
        raw = differences([(far[:, :, 1] - far[:, :, 0]).T], reach=None)
        share = float(np.mean([one.p < ALPHA for one in raw]))
        yield Figure(f"12 times as much told on the raw scale, {of}", share, 0.0)


def enough_figures(studies: int) -> Iterator[Figure]:
    """Coverage of the ratio from which on a method keeps 95 % of the exact cache's score."""
    rng = np.random.default_rng(6)
    ratios = [0.2, 0.3, 0.6]
    for n in (10, 30, 100, 300):
        for exact, right in ((0.98, (0.5, 0.9, 0.97)), (0.6, (0.3, 0.5, 0.59))):
            truth = nonnegative_from(ratios, np.array(right) - SHARE * exact)
            tables = [answers(rng, n, [*right, exact]).values for _ in range(studies)]
            values = np.stack(tables, axis=1)
            margins = values[..., :-1] - SHARE * values[..., -1:]
            found = differences([margins.reshape(n, -1)], reach=1.0)
            each = [enough(ratios, found[i : i + 3])[0] for i in range(0, len(found), 3)]
            covered = float(np.mean([one.low <= truth <= one.high for one in each]))
            yield Figure(f"ratio that is enough, n = {n}, exact {exact}", covered, HOLDS)


def _mean(name: str, parts: Sequence[Array], truth: float) -> Figure:
    """The coverage of intervals of mean scores, averaged over datasets [units, studies]."""
    return Figure(name, _coverage(mean_intervals(parts, fraction=True), truth), HOLDS)


def _coverage(intervals: Sequence[Estimate], truth: float) -> float:
    return float(np.mean([interval.low <= truth <= interval.high for interval in intervals]))


def _f1(rng: Generator, n: int, studies: int, mean: float) -> Array:
    """Scores as of F1 or Rouge, [n, studies]: two in five are 0 or 1, the others lie in between."""
    zero_or_one = (rng.random((n, studies)) < mean).astype(float)
    between = rng.beta(2 * mean, 2 * (1 - mean), (n, studies))
    return np.where(rng.random((n, studies)) < 0.4, zero_or_one, between)


def _signs(rng: Generator, n: int, studies: int, up: float, down: float) -> Array:
    """Differences of 0/1 scores, [n, studies]: 1 with probability `up`, -1 with `down`, else 0."""
    return rng.choice((1.0, -1.0, 0.0), (n, studies), p=(up, down, 1 - up - down))


def drawn(
    rng: Generator, n: int, means: Sequence[float], shared: float, kind: str, studies: int
) -> Array:
    """Scores [n, methods, studies], whose latent ability on an example is correlated: a share
    `shared` of its variance is the example's.

    Args:
        kind: "0/1"; "F1-like", where right answers have partial credit; or "errors", the exponential of
            the ability, which has no bounds.
    """
    own = rng.normal(size=(n, len(means), studies)) * np.sqrt(1 - shared)
    latent = rng.normal(size=(n, 1, studies)) * np.sqrt(shared) + own
    levels = np.array(means)[:, None]
    if kind == "errors":
        return np.asarray(np.exp(latent + levels))
    values = (latent < norm.ppf(levels)).astype(float)
    return values * rng.beta(2, 1, values.shape) if kind == "F1-like" else values


def answers(rng: Generator, n: int, means: Sequence[float], shared: float = 0.5) -> Scores:
    return scores(drawn(rng, n, means, shared, "0/1", 1)[:, :, 0])


def scores(values: Array) -> Scores:
    """Scores [n, methods] of which none is missing."""
    units: NDArray[np.intp] = np.arange(len(values))
    given = np.ones(values.shape, dtype=bool)
    return Scores("", values, given, units, ({},) * values.shape[1])


def marked(strata: Sequence[Scores], fraction: bool = True) -> set[int]:
    """Methods that a table marks as worse or better than the best."""
    peers = range(strata[0].values.shape[1])
    tests = compared(strata, list(itertools.combinations(peers, 2)), fraction=fraction)
    marks = standing(strata, peers, tests, lower=not fraction)
    return {i for i, mark in marks.items() if mark in ("worse", "better")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=2000, help="simulated studies a figure")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="kind", help="such as family ratio"
    )
    parser.add_argument("--out", type=Path, help="CSV of every row")
    options = parser.parse_args()
    start = time.process_time()
    measured = []
    for figure in figures(options.studies, options.only):
        print(figure, flush=True)
        measured.append(figure)
    if options.out:
        write(measured, options.out)
    print(f"{time.process_time() - start:.0f} s of CPU")
    return 0 if all(figure.kept for figure in measured) else 1


def write(measured: Sequence[Figure], path: Path) -> None:
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
