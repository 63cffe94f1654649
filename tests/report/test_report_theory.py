"""Slopes, ratios and the sentences about them, on records whose laws are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvbench.probes.clusters import SubGenClusters
from kvbench.probes.discrepancy import UnitVectors, WalkDiscrepancy
from scipy.stats import ttest_1samp
from support.jobs import Echo
from support.report_runs import write_run
from support.tables import shown

from kvbench.probes.error_scaling import BoundedData, ErrorScaling
from kvbench.report.build import build_report
from kvbench.report.experiment import load_experiment
from kvbench.report.tables.scaling import (
    AS_PREDICTED,
    SHALLOWER,
    STEEPER,
    UNDECIDED,
    Fit,
    scaling_of,
)
from kvbench.report.tables.study import study_of

Law = Callable[[float], float]
LEVELS = [2.0**i for i in range(4, 12)]


def findings(
    folder: Path, meta: dict[str, Any], laws: dict[str, Law], held: float = 1.0
) -> tuple[list[str], list[Fit]]:
    """Of one experiment: every variant follows its law exactly, on four repetitions."""
    (spec,) = (figure for figure in meta["figures"] if figure["kind"] == "scaling")
    for method, law in laws.items():
        records = [
            {
                "example_id": f"{level}/{unit}",
                "dataset": "d",
                spec["level"]: level,
                spec["x"]: level * (held if spec["x"] == "held" else 1.0),
                spec["unit"]: str(unit),
                spec["y"]: law(level),
                "score": law(level),
            }
            for level in LEVELS
            for unit in range(4)
        ]
        write_run(folder, method=method, records=records, task_meta=meta)
    (group,) = load_experiment(folder / "demo").groups
    study = study_of(group, folder / "demo")
    assert study is not None
    scaling = scaling_of(group)
    assert scaling is not None
    return list(study.findings), list(scaling.fits)


def error_meta(**expected: float) -> dict[str, Any]:
    return ErrorScaling(
        n=8192, kept=(16,), data={"d": BoundedData()}, expected=expected, compare="uniform"
    ).meta()


def bent(x: float) -> float:
    """x^-1 up to 128, x^-1/2 beyond."""
    return 1 / x if x <= 128 else (x / 128) ** -0.5 / 128


def test_errors_in_words(tmp_path: Path) -> None:
    meta = error_meta(uniform=-0.5, balancekv=-1.0)
    text, _ = findings(tmp_path, meta, {"uniform": lambda x: x**-0.5, "balancekv": bent}, held=1.25)
    assert text == [
        "Slopes of the error of equation (2) against entries held, fitted from 16 to 2048 entries "
        "asked for, 95 % intervals over 4 repetitions. As predicted: the whole interval lies within "
        "0.1 of the prediction (two one-sided tests); steeper or shallower: it lies wholly beyond; "
        "not determined: neither. As steep as the predicted −1.00 or steeper, the whole interval "
        "below −0.90: balancekv on 0 of 1 data sets. As steep as the predicted −0.50 or steeper, the "
        "whole interval below −0.40: uniform on 1 of 1 data sets.",
        "uniform, predicted −0.50: As predicted on d (−0.50 [−0.50, −0.50]).",
        "balancekv, predicted −1.00: Shallower on d (−0.70 [−0.70, −0.70]). The slope changes along "
        "the way: d (−0.90 up to 256 entries, −0.50 beyond).",
        # 1/128 * 4^-1 over 2048^-1/2
        "Error relative to uniform's with 2048 entries asked for: balancekv from 0.088 [0.088, 0.088]"
        " times on d (interval below 1 on 1, above 1 on 0 of 1).",
        "Entries held beyond those asked for: uniform up to 1.25 times; balancekv up to 1.25 times. "
        "Slopes and curves are against what is held.",
    ]


def test_errors_that_are_larger_or_cannot_be_told(tmp_path: Path) -> None:
    meta = error_meta(uniform=-0.5, h2o=-1.0)
    text, _ = findings(tmp_path / "a", meta, {"uniform": lambda x: x**-0.5, "h2o": lambda x: 9 / x})
    assert "h2o, predicted −1.00: As predicted on d (−1.00 [−1.00, −1.00])." in text
    assert (
        "h2o from 0.20 [0.20, 0.20] times on d (interval below 1 on 1, above 1 on 0 of 1)"
        in text[3]
    )
    text, _ = findings(
        tmp_path / "b", meta, {"uniform": lambda x: x**-0.5, "h2o": lambda x: 3 * x**-0.5}
    )
    assert (
        "h2o from 3.00 [3.00, 3.00] times on d (interval below 1 on 0, above 1 on 1 of 1)"
        in text[3]
    )


def test_a_slope_is_of_the_levels_asked_for(tmp_path: Path) -> None:
    _, fits = findings(tmp_path, error_meta(), {"uniform": lambda x: x**-0.5, "balancekv": bent})
    curve = next(fit.curve for fit in fits if fit.curve.variant.method == "balancekv")
    assert curve.slope(most=128).value == pytest.approx(-1.0)
    assert curve.slope(least=128).value == pytest.approx(-0.5)
    assert curve.slope(least=64, most=128).value == pytest.approx(-1.0)  # two levels are enough
    assert curve.slope(least=128, most=128).value != curve.slope(least=128, most=128).value  # NaN


def test_discrepancy_in_words(tmp_path: Path) -> None:
    meta = WalkDiscrepancy(steps=(16, 2048), data={"d": UnitVectors()}).meta()
    laws: dict[str, Law] = {
        "random_signs": lambda n: n**0.5,
        "walk": lambda n: 8.0 if n > 16 else 4.0,  # from n = 128 on it is smaller
    }
    text, _ = findings(tmp_path, meta, laws)
    assert text == [
        "Growth of the largest coordinate of the signed sum as n^slope, fitted from n = 32 to 2048, "
        "95 % intervals over 4 repetitions. Random signs must give 1/2, a logarithm something close to "
        "0.",
        "random_signs: d (slope 0.50 [0.50, 0.50], 45.3 at the end).",
        "walk: d (slope 0.00 [0.00, 0.00], 8.00 at the end, 0.18 [0.18, 0.18] times random_signs).",
        "Smaller than random_signs, the whole interval of the paired ratio below 1: walk (d from n = "
        "128).",
    ]


def test_clusters_in_words(tmp_path: Path) -> None:
    meta = SubGenClusters(steps=(16, 2048), data={"d": BoundedData()}).meta()
    text, _ = findings(tmp_path, meta, {"delta_1": lambda n: 2 * n**0.5})
    assert text == [
        "Growth of the number of clusters m as n^slope, fitted from n = 128 to 2048; memory is "
        "sublinear in n only where the slope is below 1.",
        "delta_1: d (slope 0.50 [0.50, 0.50], m = 90.5, 4.42 % of n).",
    ]


def fit_of(folder: Path, slopes: Sequence[float], draws: int = 1, expected: float = -0.5) -> Fit:
    """Of a method whose error falls like x^slope, one slope per prompt, the same in each draw."""
    meta = ErrorScaling(
        n=8192, kept=(16,), prompts=Echo(), layers=(1,), expected={"uniform": expected}
    ).meta()
    records = [
        {
            "example_id": f"layer 1/{level}/p{prompt}-draw{draw}",
            "dataset": "layer 1",
            "kept": level,
            "held": level,
            "replicate": f"p{prompt}-draw{draw}",
            "prompt": f"p{prompt}",
            "scaled_error": (error := level**slope * (1 + 1e-3 * draw)),
            "score": error,
        }
        for level in LEVELS
        for prompt, slope in enumerate(slopes)
        for draw in range(draws)
    ]
    write_run(folder, method="uniform", records=records, task_meta=meta)
    (group,) = load_experiment(folder / "demo").groups
    scaling = scaling_of(group)
    assert scaling is not None
    (fit,) = scaling.fits
    return fit


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    return float(low), float(high)


@pytest.mark.parametrize(
    ("middle", "spread", "verdict"),
    [
        (-0.5, 0.02, AS_PREDICTED),
        (-0.5, 0.15, UNDECIDED),  # the middle is what was predicted, and says nothing
        (-0.7, 0.02, STEEPER),
        (-0.61, 0.02, UNDECIDED),  # beyond the bound, but not shown to be
        (-0.3, 0.02, SHALLOWER),
    ],
)
def test_a_verdict_is_of_the_interval_and_not_of_the_middle(
    tmp_path: Path, middle: float, spread: float, verdict: str
) -> None:
    slopes = [middle + spread * step for step in (-1.0, 1.0, -0.5, 0.5, 0.2, -0.2)]
    fit = fit_of(tmp_path, slopes)
    low, high = t_interval(slopes)
    assert (fit.slope.low, fit.slope.high) == pytest.approx((low, high), abs=0.35 * (high - low))
    assert fit.slope.high - fit.slope.low == pytest.approx(high - low, rel=0.3)
    assert fit.verdict == verdict
    assert fit.reaches == (high < -0.4)


def test_draws_of_one_prompt_are_no_repetitions(tmp_path: Path) -> None:
    slopes = (-0.55, -0.45, -0.5)
    one, many = (fit_of(tmp_path / str(draws), slopes, draws) for draws in (1, 30))
    assert (one.curve.units, many.curve.units) == (3, 3)
    assert many.slope.low == pytest.approx(one.slope.low, abs=1e-3)
    assert many.slope.high == pytest.approx(one.slope.high, abs=1e-3)
    low, high = t_interval(slopes)
    assert many.slope.high - many.slope.low > 0.7 * (high - low)


def test_one_repetition_determines_nothing(tmp_path: Path) -> None:
    fit = fit_of(tmp_path, [-0.5], draws=9)
    assert fit.slope.value == pytest.approx(-0.5)
    assert math.isnan(fit.slope.low)
    assert (fit.verdict, fit.reaches) == (UNDECIDED, False)
    (group,) = load_experiment(tmp_path / "demo").groups
    study = study_of(group, tmp_path / "demo")
    assert study is not None
    assert study.findings[0] == (
        "Slopes of the error of equation (2) against entries held, of 1 prompt: one repetition has no "
        "interval and determines nothing. Its numbers are in the table."
    )
    assert shown(study.tables[0]) == [["uniform", "−0.50", "−0.50 [–]"]]
    assert "of 1 prompt, which has no interval" in study.tables[0].notes[0]
    assert all("1 prompt, which has no interval" in drawn.caption for drawn in study.figures)
    assert all("predicted on" not in text for text in study.findings)


def test_smaller_from_is_where_it_stays_smaller(tmp_path: Path) -> None:
    meta = WalkDiscrepancy(steps=(16, 2048), data={"d": UnitVectors()}).meta()
    laws: dict[str, Law] = {
        "random_signs": lambda n: n**0.5,
        "walk": lambda n: 4.0 if n in (64, 512) else 40.0 if n == 128 else 0.4 * n**0.5,
    }
    text, _ = findings(tmp_path, meta, laws)
    assert "walk (d from n = 256)" in text[-1], "at 64 it was smaller, at 128 larger again"


def test_the_page_of_a_study_opens_with_its_table(tmp_path: Path) -> None:
    meta = error_meta(uniform=-0.5, balancekv=-1.0)
    text, _ = findings(tmp_path, meta, {"uniform": lambda x: x**-0.5, "balancekv": bent})
    page = build_report(tmp_path / "demo").page.read_text(encoding="utf-8")
    section = page[page.index('id="section-1"') :]
    assert section.index("<table") < section.index("<summary>In words</summary>")
    assert section.index("<summary>In words</summary>") < section.index(text[1].split(",")[0] + ",")
    verdict = page[page.index('class="verdicts"') : page.index("<nav")]
    assert "As steep as the predicted" in verdict
    assert text[1] not in verdict
