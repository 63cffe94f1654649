"""scripts/claims.py: verdicts of known differences, and claims from their runs to their tables."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.command import refusal_of
from support.paths import ROOT
from transformers import Gemma3TextConfig

from kvbench.errors import UserError

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "claims.py"))
CLAIMS = SCRIPT["claims_for"]("recall_mini")


def rows(gains: dict[str, float], spread: float = 0.1, prompts: int = 12) -> pd.DataFrame:
    """Scores of two methods in cells, the first better by `gains` on average, two draws a prompt."""
    rng = np.random.default_rng(0)
    scores = []
    for cell, gain in gains.items():
        for prompt in range(prompts):
            for draw in range(2):
                base = rng.normal()
                where = {"prompt": f"p{prompt}", "layer": cell, "draw": draw, "model": "m"}
                scores.append(where | {"method": "a", "score": base - gain + spread * rng.normal()})
                scores.append(where | {"method": "b", "score": base})
    return pd.DataFrame(scores)


SIDES = {"value": "score", "first": "a", "against": ["b"], "cells": ["layer"]}


@pytest.mark.parametrize(
    ("gains", "more", "verdict"),
    [
        ({"1": 1, "2": 1}, {}, "holds"),
        ({"1": 1, "2": 0}, {}, "holds on average"),
        ({"1": 1, "2": 0}, {"share": 0.5}, "holds"),
        ({"1": -1, "2": -1}, {}, "fails"),
        ({"1": -1, "2": -1}, {"side": "above"}, "holds"),
        ({"1": 0, "2": 0}, {}, "cannot be told"),
        ({"1": 0, "2": 0}, {"side": "within", "by": 0.5}, "holds"),
        ({"1": 1, "2": 1}, {"side": "within", "by": 0.5}, "fails"),
        ({"1": 1}, {"by": -0.5}, "holds"),
        ({"1": 1}, {"by": -2}, "fails"),
    ],
)
def test_a_verdict_is_that_of_the_rule(
    gains: dict[str, float], more: dict[str, Any], verdict: str
) -> None:
    comparison = SIDES | more
    values = SCRIPT["values_of_units"](rows(gains), comparison)
    sides = SCRIPT["sides_to_each"](values, comparison)
    assert [one.shape for one in sides["b"]] == [(12, len(gains))] * 2
    (decision,) = SCRIPT["verdicts_on"](list(sides.values()), comparison)
    assert decision.verdict == verdict
    assert (decision.more is not None) == (verdict == "cannot be told")


@pytest.mark.parametrize("side", ["below", "above"])
@pytest.mark.parametrize("more", [{}, {"fraction": True}], ids=["", "fraction"])
def test_answers_that_are_all_alike_bear_out_nothing(side: str, more: dict[str, Any]) -> None:
    zeros = pd.DataFrame(np.zeros((12, 1)))
    (decision,) = SCRIPT["verdicts_on"]([(zeros, zeros)], {"side": side} | more)
    assert decision.verdict == "cannot be told"


def test_a_claim_is_decided_as_a_table_marks_its_methods() -> None:
    """Five of 30 prompts lost and none won: McNemar's p is .0625, where the t test's is below .05. Two
    methods of errors of very different size are told apart by their ratio. Of ten cells at p = .02 each,
    none is significant."""
    one = pd.DataFrame(np.ones((30, 1)))
    lost = one.where(one.index.to_series() >= 5, 0.0, axis=0)
    (decision,) = SCRIPT["verdicts_on"]([(lost, one)], {"fraction": True})
    assert decision.verdict == "cannot be told"
    rng = np.random.default_rng(0)
    errors = pd.DataFrame(rng.lognormal(0, 1.5, (12, 1)))
    (decision,) = SCRIPT["verdicts_on"]([(errors, 12 * errors)], {})
    assert (decision.verdict, decision.difference.times) == ("holds", True)
    assert decision.difference.value == pytest.approx(1 / 12)
    for cells, verdict in ((1, "holds"), (10, "cannot be told")):
        gains = rng.normal(size=(20, 1))
        gains = (gains - gains.mean()) / gains.std(ddof=1)
        same = pd.DataFrame(np.tile(gains - 0.6, (1, cells)))
        # the mean over cells alone would be significant: ask for the cells
        (decision,) = SCRIPT["verdicts_on"]([(same, same * 0)], {})
        assert decision.held == (cells if verdict == "holds" else 0)


def test_a_slope_is_compared_with_a_target_and_a_factor_multiplies_what_is_subtracted() -> None:
    frame = pd.DataFrame(
        {"prompt": f"p{p}", "method": "a", "held": held, "error": (1 + p) * held**-0.5}
        for p in range(4)
        for held in (10, 20, 40)
    )
    comparison = {"value": "error", "slope": "held", "first": "a", "target": -0.5}
    slopes = SCRIPT["values_of_units"](frame, comparison)
    ((found, target),) = SCRIPT["sides_to_each"](slopes, comparison).values()
    assert (found - target).abs().max().max() < 1e-12
    values = pd.DataFrame({"a": [4.0, 5.0], "b": [2.0, 2.0], "c": [3.0, 3.0]})
    times = SCRIPT["sides_to_each"](values, {"first": "a", "against": ["b", "c"], "factor": 1.25})
    first, other = times["1.25 b"]
    assert (first - other).iloc[:, 0].tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("numbers", "shown", "spread"),
    [
        (range(1, 31), [1, 2, 5], [1, 6, 11, 15, 20, 25, 30]),
        ([6, 12, 18], [6, 12, 18], [6, 12, 18]),  # Gemma 3 270M: the others attend to a window
        ([2, 4, 6, 8], [2], [2, 4, 6, 8]),
    ],
)
def test_claims_name_layers_that_attend_to_everything(numbers, shown, spread) -> None:
    layers = SCRIPT["layers_by_name"](list(numbers))
    assert (layers["$SHOWN"], layers["$SPREAD"]) == (shown, spread)
    assert layers["$BOTH"] == sorted({*shown, *spread})


def test_the_committed_table_says_of_each_claim_what_the_list_says() -> None:
    known = {claim["id"]: claim for claim in CLAIMS["claims"]}
    for row in pd.read_csv(ROOT / "results/claims/claims.csv").to_dict("records"):
        for text in ("place", "stated", "measure", "claim"):
            assert row[text] == known[row["id"]][text]


RUNS = {"here": rows({"1": 1, "2": 1}), "later": rows({"1": -1, "2": -1})}
IN_ONE_RUN = SIDES | {"run": "here"}


def decided(*comparisons: dict[str, Any], runs: dict[str, Any] = RUNS) -> list[dict[str, Any]]:
    about = {"id": "X", "place": "p", "stated": "s", "measure": "as stated", "claim": "c"}
    return SCRIPT["rows_of_claim"](about | {"comparisons": list(comparisons)}, runs)


def test_the_worst_comparison_decides() -> None:
    two = decided(IN_ONE_RUN, IN_ONE_RUN | {"by": -5})
    assert [row["result"] for row in two] == ["holds", "fails"]
    assert [row["decides"] for row in two] == [False, True]
    assert {row["verdict"] for row in two} == {"fails"}


def test_a_difference_may_be_less_that_of_another_run() -> None:
    (row,) = decided(IN_ONE_RUN | {"minus": "later"})
    assert row["difference"] == pytest.approx(-2, abs=0.1)
    assert row["comparison"] == "here, score: a - b, less that of later"


def test_what_no_model_can_do_says_nothing() -> None:
    able, unable = decided(IN_ONE_RUN, IN_ONE_RUN | {"able": "b"})  # whose mean is about 0
    assert able["verdict"] == "holds"
    assert unable["result"] == SCRIPT["UNABLE"]
    alike = {"here": RUNS["here"].assign(prediction="p", example_id=np.arange(96) // 2)}
    (row,) = decided(IN_ONE_RUN | {"unlike": "b"}, runs=alike)
    assert row["verdict"] == "needs a model on which a differs from b"


def test_a_model_with_windows_is_not_asked_for_what_it_cannot_run(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds, vocab_size=99)
    config.save_pretrained(tmp_path)
    spec = SCRIPT["claims_for"](str(tmp_path))
    (claim,) = [claim for claim in spec["claims"] if claim["id"] == "L1"]
    runs: dict[str, pd.DataFrame] = {}
    SCRIPT["run_comparisons"](claim, spec["runs"], {}, tmp_path, runs)
    assert {row["verdict"] for row in SCRIPT["rows_of_claim"](claim, runs)} == {SCRIPT["WINDOWED"]}
    unmet = [each for one in CLAIMS["claims"] for each in one["comparisons"] if "unmet" in each]
    assert [each["run"] for each in unmet] == ["multi_news"], "which has a folder of its own"


def test_the_claims_name_runs_that_are_there() -> None:
    with pytest.raises(UserError, match="allowed: B1,B2"):
        SCRIPT["main"](["claims=Z9"])
    claims = CLAIMS["claims"]
    assert len({claim["id"] for claim in claims}) == len(claims)
    names = set()
    for claim in claims:
        for comparison in claim["comparisons"]:
            names |= {comparison[key] for key in ("run", "minus") if key in comparison}
    assert names == set(CLAIMS["runs"])


def test_the_commands_of_runs_are_accepted_and_read_the_texts() -> None:
    options = {"model": "recall_mini", "files": "[essays/*.txt]"}
    for name, run in CLAIMS["runs"].items():
        if "folder" in run:
            continue
        words = SCRIPT["command"](name, run["command"], options, Path("runs"))
        assert ("{texts}" in run["protocol"]) == any("essays" in word for word in words), name
        if words[1] != "-m":
            assert Path(words[1]).is_file()
            continue
        first_of_sweep = [
            word if "[" in word or "{" in word else word.partition(",")[0] for word in words[3:]
        ]
        assert refusal_of([word for word in first_of_sweep if word != "-m"]) is None, name


def test_claims_have_a_page(tmp_path: Path) -> None:
    shutil.copy(ROOT / "results" / "claims" / "claims.csv", tmp_path)
    rows = pd.read_csv(tmp_path / "claims.csv")
    text = SCRIPT["write_page"](tmp_path).read_text()
    assert text.count('<tbody data-group="">') == 1, "one table of verdicts"
    assert text.count('<tr class="part">') == rows["id"].nunique()
    for claim in rows["id"].unique():
        assert f"<td>{claim}</td>" in text
