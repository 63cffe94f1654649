"""Do the intervals of the studies hold what they say? By simulation, with the report's own functions.

    python scripts/benchmarks/bench_study_intervals.py [--runs 2000]

Prints, for designs whose truth is known: how often 95 % intervals of slopes and of an ablation's
changes cover it, how often a slope that lies on the bound is called as predicted (the two one-sided
tests allow 2.5 %), how often an option that changes nothing is called more or less error, and how
often the interval of a median of run times covers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from kvbench.report.experiment import Group, TaskMeta
from kvbench.report.labels import Variant
from kvbench.report.tables.ablation import effects_of
from kvbench.report.tables.scaling import AS_PREDICTED, NEAR, curves_of, fits_of
from kvbench.report.tables.timings import median_of

RATES = (0.5, 0.25, 0.125)
LEVELS = (64, 128, 256, 512, 1024)
SKEW = 0.1
"""Sigma of the lognormal noise that is shifted to mean 0: skewness 0.3. That of balancekv_ablation's
log ratios, means of a prompt, cannot be told from 0 (mean over 24 variants -0.13 at 8 prompts)."""


def slopes(units: int, noise: float, shared: float, runs: int, seed: int = 0) -> dict[str, float]:
    """Curves y = x^-1/2 times lognormal noise, of which a share is the repetition's at all levels.

    Returns:
        `coverage` of the slope's interval; `false` and `right`: how often it is called as predicted
        with a prediction that is wrong by `NEAR`, and with the true one.
    """
    rng = np.random.default_rng([seed, units])
    own = rng.standard_normal((runs, units, len(LEVELS)))
    whole = rng.standard_normal((runs, units, 1))
    log = -0.5 * np.log(LEVELS) + noise * (shared**0.5 * whole + (1 - shared) ** 0.5 * own)
    run, unit, level = np.indices(log.shape).reshape(3, -1)
    records = pd.DataFrame(
        {
            "status": "ok",
            "variant": "uniform",
            "facet": run,
            "unit": unit,
            "level": np.array(LEVELS, float)[level],
            "y": np.exp(log).ravel(),
        }
    ).assign(x=lambda frame: frame["level"])
    group = _group(records, ["uniform"])
    spec = {"x": "x", "y": "y", "level": "level", "facet": "facet", "unit": "unit"}
    fits = fits_of(curves_of(group, spec), spec)
    found = [fit.slope for fit in fits]
    verdicts = {
        at: [replace(fit, expected=at).verdict for fit in fits] for at in (-0.5, -0.5 - NEAR)
    }
    return {
        "coverage": float(np.mean([s.low <= -0.5 <= s.high for s in found])),
        "false": verdicts[-0.5 - NEAR].count(AS_PREDICTED) / runs,
        "right": verdicts[-0.5].count(AS_PREDICTED) / runs,
    }


def ablation(
    prompts: int, correlation: float, runs: int, *, variants: int = 25, seed: int = 0
) -> dict[str, float]:
    """Variants that change nothing: log ratios of a prompt at three rates, skewed, correlated.

    Returns:
        `overall` and `cells`: coverage of 0 by their intervals; `told`: the share of tables of so
        many variants in which any is told from the reference.
    """
    rng = np.random.default_rng([seed, prompts, int(100 * correlation)])
    tables = -(-runs // variants)
    covered, of_cells, told = [], [], 0
    for _ in range(tables):
        shape = (variants, prompts)
        whole, own = _skewed(rng, (*shape, 1)), _skewed(rng, (*shape, len(RATES)))
        log = correlation**0.5 * whole + (1 - correlation) ** 0.5 * own
        effects = _effects(0.05 * log)
        covered += [e.overall.low <= 0 <= e.overall.high for e in effects]
        of_cells += [c.low <= 0 <= c.high for e in effects for c in e.cells.values()]
        told += any(e.shown for e in effects)
    return {
        "overall": float(np.mean(covered)),
        "cells": float(np.mean(of_cells)),
        "told": told / tables,
    }


def medians(times: int, runs: int, seed: int = 0) -> float:
    """Coverage of a median's interval over so many lognormal run times."""
    rng = np.random.default_rng([seed, times])
    found = (median_of(pd.Series(np.exp(rng.standard_normal(times)))) for _ in range(runs))
    return float(np.mean([e.low <= 1.0 <= e.high for e in found]))


def _skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Mean 0, variance 1."""
    x = np.exp(SKEW * rng.standard_normal(shape)) - math.exp(SKEW**2 / 2)
    return x / math.sqrt((math.exp(SKEW**2) - 1) * math.exp(SKEW**2))


def _effects(log: np.ndarray) -> list:
    variants, prompts, rates = log.shape
    labels = [f"v{i}" for i in range(variants)]
    variant, prompt, rate = np.indices((variants + 1, prompts, rates)).reshape(3, -1)
    whole = np.concatenate([np.zeros((1, prompts, rates)), log])
    records = pd.DataFrame(
        {
            "status": "ok",
            "seed": 0,
            "method": np.array(["reference", *labels])[variant],
            "prompt": prompt,
            "rate": np.array(RATES)[rate],
            "example_id": prompt * rates + rate,
            "y": np.exp(whole).ravel(),
            "compress_s": 1.0,
        }
    )
    spec = {"y": "y", "by": "rate", "unit": "prompt", "reference": "reference"}
    return effects_of(_group(records, labels), {**spec, "parts": {"part": labels}})


def _group(records: pd.DataFrame, labels: Sequence[str]) -> Group:
    return Group("m", "t", TaskMeta(), tuple(Variant(label) for label in labels), records, {})


def table(runs: int) -> Iterator[tuple[str, float, float, float]]:
    """(design, value, least and most allowed) of every cell."""
    for units in (3, 4, 6, 16):
        for noise, shared in ((0.05, 0.0), (0.05, 0.5), (0.3, 0.0)):
            found = slopes(units, noise, shared, runs)
            name = f"slope, {units} repetitions, noise {noise:g}, {shared:g} of it shared"
            yield f"{name}: coverage", found["coverage"], 0.92, 1.0
            yield f"{name}: on the bound, as predicted", found["false"], 0.0, 0.035
            yield f"{name}: true, as predicted", found["right"], 0.0, 1.0
    for prompts in (4, 8, 20):
        for correlation in (0.0, 0.5, 0.95):
            found = ablation(prompts, correlation, runs)
            name = f"ablation, {prompts} prompts, correlation over rates {correlation:g}"
            yield f"{name}: coverage, mean over rates", found["overall"], 0.92, 1.0
            yield f"{name}: coverage, cells", found["cells"], 0.92, 1.0
            yield f"{name}: any of 25 told", found["told"], 0.0, 0.09
    for times in (6, 10, 20, 50):
        yield f"median of {times} run times: coverage", medians(times, runs), 0.94, 1.0


def main() -> None:
    """Print the table; exit with 1 where a cell is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000, help="simulations of each cell")
    wrong = 0
    for name, value, least, most in table(parser.parse_args().runs):
        outside = not least <= value <= most
        wrong += outside
        print(f"{100 * value:6.1f} %  {name}{'   OUTSIDE' if outside else ''}", flush=True)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
