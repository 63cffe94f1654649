"""Effects of an ablation: which prompts are drawn, how many variants are picked from, two metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kvbench.probes.ablation import Ablation
from scipy.stats import ttest_1samp
from support.report_runs import write_run
from support.tables import frame, heads, shown

from kvbench.probes.layers import SyntheticLayers
from kvbench.report.experiment import Group, load_experiment
from kvbench.report.tables.ablation import Effect, ablation_of
from kvbench.report.tables.study import study_of

RATES = (0.5, 0.25, 0.125)
Change = Callable[[int, float], float]
"""Log ratio of a variant's error to the reference's, by prompt and rate."""


def write(
    folder: Path, variants: dict[str, Change], prompts: int, pooled: Change | None = None
) -> Group:
    meta = Ablation(
        synthetic=SyntheticLayers(n=256),
        layers=(1,),
        rates=RATES,
        exact=16,
        parts={"part": list(variants)},
    ).meta()
    for method, change in {"balancekv": lambda p, r: 0.0, **variants}.items():
        records = [
            {
                "example_id": f"p{prompt}/layer1/rate{rate}/seed0",
                "prompt": f"p{prompt}",
                "rate": rate,
                "layer": 1,
                "relative_error": (error := 0.1 * (2 + prompt) * math.exp(change(prompt, rate))),
                "score": error,
                "compress_s": 0.01,
            }
            | (
                {}
                if pooled is None or method == "balancekv"
                else {"pooled_error": 0.1 * math.exp(pooled(prompt, rate))}
            )
            | ({"pooled_error": 0.1} if pooled is not None and method == "balancekv" else {})
            for prompt in range(prompts)
            for rate in RATES
        ]
        write_run(folder, task="ablation", method=method, records=records, task_meta=meta)
    (group,) = load_experiment(folder / "demo").groups
    return group


def effects(group: Group) -> dict[str, Effect]:
    ablation = ablation_of(group)
    assert ablation is not None
    return {effect.label: effect for effect in ablation.first}


PROMPTS = np.random.default_rng(0).normal(0.0, 0.1, 12)


def test_a_prompt_drawn_is_drawn_at_every_rate(tmp_path: Path) -> None:
    """What a prompt does at all rates is not averaged away by the number of rates."""
    group = write(tmp_path, {"shared": lambda p, r: PROMPTS[p]}, 12)
    effect = effects(group)["shared"]
    for cell in effect.cells.values():
        assert (cell.low, cell.high) == pytest.approx((effect.overall.low, effect.overall.high))
    low, high = ttest_1samp(PROMPTS, 0).confidence_interval(0.95)
    width = math.log1p(effect.overall.high) - math.log1p(effect.overall.low)
    assert width == pytest.approx(high - low, rel=0.1)
    assert effect.p == pytest.approx(ttest_1samp(PROMPTS, 0).pvalue)


def test_what_cancels_between_rates_leaves_no_width(tmp_path: Path) -> None:
    """Only where the same prompts are drawn do opposite changes cancel, draw by draw."""
    signs = dict(zip(RATES, (1.0, -1.0, 0.0), strict=True))
    group = write(tmp_path, {"opposed": lambda p, r: signs[r] * PROMPTS[p]}, 12)
    overall = effects(group)["opposed"].overall
    assert (overall.value, overall.low, overall.high) == pytest.approx((0, 0, 0), abs=1e-9)


def test_prompts_missing_at_one_rate_stay_in_their_rows(tmp_path: Path) -> None:
    group = write(tmp_path, {"shared": lambda p, r: PROMPTS[p]}, 12)
    gone = group.records["prompt"].isin(["p0", "p7"]) & group.records["rate"].eq(0.25)
    part = Group(
        group.model, group.task, group.meta, group.variants, group.records[~gone], group.baseline
    )
    (effect,) = effects(part).values()
    whole = effects(group)["shared"]
    assert effect.overall.value == pytest.approx(
        math.expm1((2 * PROMPTS.mean() + np.delete(PROMPTS, [0, 7]).mean()) / 3)
    )
    width, before = (e.overall.high - e.overall.low for e in (effect, whole))
    assert width == pytest.approx(before, rel=0.15), (
        "rows of other prompts would shrink it by 10 %+"
    )
    assert effect.p == pytest.approx(ttest_1samp(np.delete(PROMPTS, [0, 7]), 0).pvalue)


def test_the_best_of_many_equals_is_not_called_better(tmp_path: Path) -> None:
    """Of 24 variants that change nothing, some interval excludes 0; none is told from the reference."""
    noise = np.random.default_rng(5).normal(0.0, 0.05, (24, 8, 3))
    at = {rate: i for i, rate in enumerate(RATES)}
    variants: dict[str, Change] = {
        f"v{i}": lambda p, r, i=i: float(noise[i, p, at[r]])  # type: ignore[misc]
        for i in range(24)
    }
    group = write(tmp_path, variants, 8)
    found = effects(group)
    assert any(e.overall.low > 0 or e.overall.high < 0 for e in found.values())
    raw = [ttest_1samp(noise[i].mean(1), 0).pvalue for i in range(24)]
    assert min(effect.p for effect in found.values()) == pytest.approx(min(1.0, 24 * min(raw)))
    study = study_of(group, tmp_path / "demo", draw=False)
    assert study is not None
    assert not any(text.startswith(("Less", "More")) for text in study.findings)
    assert (
        study.findings[-1] == "No variant is shown better overall, worse in no cell, and as fast."
    )


def test_both_metrics_are_told(tmp_path: Path) -> None:
    """A change may be one of the pooled error alone."""
    rng = np.random.default_rng(2).normal(0.0, 0.01, (10, 3))
    at = {rate: i for i, rate in enumerate(RATES)}
    group = write(
        tmp_path,
        {"v": lambda p, r: float(rng[p, at[r]])},
        10,
        pooled=lambda p, r: 0.2 + float(rng[p, at[r]]),
    )
    study = study_of(group, tmp_path / "demo", draw=False)
    assert study is not None
    text = "\n".join(study.findings)
    assert "No difference shown in relative error: v " in text
    assert "More pooled error: v +2" in text
    table = study.tables[0]
    assert heads(table)[6] == "change of pooled error, %"
    assert shown(table)[0][6].startswith("+2")
    lines = frame(table)
    overall = lines[lines["rate"].eq("all")].set_index("metric")["change"]
    assert overall["pooled_error"] == pytest.approx(math.expm1(0.2 + rng.mean()))
    assert overall["relative_error"] == pytest.approx(math.expm1(rng.mean()))


def test_one_prompt_determines_nothing(tmp_path: Path) -> None:
    group = write(tmp_path, {"v": lambda p, r: -0.5}, 1)
    (effect,) = effects(group).values()
    assert effect.overall.value == pytest.approx(math.expm1(-0.5))
    assert math.isnan(effect.overall.low)
    assert math.isnan(effect.p)
    study = study_of(group, tmp_path / "demo")
    assert study is not None
    assert (
        study.findings[1] == "One repetition, 1 prompt, determines nothing: there are no intervals."
    )
    assert "No difference shown in relative error: v −39.3 (no interval) %." in study.findings
    assert pd.isna(frame(study.tables[0])["p_holm"]).all()
