"""scripts/claims.py: verdicts of differences that are known, and a claim from its runs to its line."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from support.command import refusal_of
from support.paths import ROOT

from kvbench.errors import UserError

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "claims.py"))
CLAIMS = yaml.safe_load((ROOT / "results" / "claims.yaml").read_text(encoding="utf-8"))


def rows(gains: dict[str, float], spread: float = 0.1, prompts: int = 12) -> pd.DataFrame:
    """Scores of two methods in cells, the first better by `gains` on average, two draws a prompt."""
    rng = np.random.default_rng(0)
    made = []
    for cell, gain in gains.items():
        for prompt in range(prompts):
            for draw in range(2):
                base = rng.normal()
                where = {"prompt": f"p{prompt}", "layer": cell, "draw": draw}
                made.append(where | {"method": "a", "score": base - gain + spread * rng.normal()})
                made.append(where | {"method": "b", "score": base})
    return pd.DataFrame(made)


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
    asked = SIDES | more
    found = SCRIPT["differences"](SCRIPT["table"](rows(gains), asked), asked)
    assert found.shape == (12, len(gains))
    judged = SCRIPT["judged"](found, asked)
    assert judged.verdict == verdict
    assert (judged.more is not None) == (verdict == "cannot be told")


def test_slopes_targets_and_the_best_of_several() -> None:
    frame = pd.DataFrame(
        {"prompt": f"p{p}", "method": "a", "held": held, "error": (1 + p) * held**-0.5}
        for p in range(4)
        for held in (10, 20, 40)
    )
    asked = {"value": "error", "slope": "held", "first": "a", "target": -0.5}
    assert SCRIPT["differences"](SCRIPT["table"](frame, asked), asked).abs().max().max() < 1e-12
    values = pd.DataFrame({"a": [4.0, 5.0], "b": [2.0, 2.0], "c": [3.0, 3.0]})
    asked = {"first": "a", "against": ["b", "c"], "best": "lowest", "factor": 1.25}
    assert SCRIPT["differences"](values, asked)["b"].tolist() == [1.5, 2.5]


def test_the_nineteen_claims_name_runs_that_are_there() -> None:
    claims = CLAIMS["claims"]
    assert len({claim["id"] for claim in claims}) == len(claims) == 19
    named = {one["run"] for claim in claims for one in claim["comparisons"]}
    assert named == set(CLAIMS["runs"])
    options = {"model": "recall_mini", "files": "[essays/*.txt]"}
    for name, words in CLAIMS["runs"].items():
        made = SCRIPT["command"](name, words, options, Path("runs"))
        if made[1] != "-m":
            assert Path(made[1]).is_file()
            continue
        swept = [w if "[" in w or "{" in w else w.partition(",")[0] for w in made[3:]]
        assert refusal_of([word for word in swept if word != "-m"]) is None, name
    with pytest.raises(UserError, match="allowed: B1,B2"):
        SCRIPT["main"](["claims=Z9"])


@pytest.mark.slow
def test_a_claim_is_run_once_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SCRIPT["main"].__globals__, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    small = "task=layer_error task@task.prompts=text task.prompts.tokens=300 task.exact=32 "
    small += "task.layers=[1] task.rates=[0.25] task.num_prompts=4 method=[uniform,balancekv]"
    one = next(claim for claim in CLAIMS["claims"] if claim["id"] == "B1")
    text = yaml.safe_dump({"runs": {"layers": small}, "claims": [one]})
    (tmp_path / "results" / "claims.yaml").write_text(text)
    given = ["model=recall_mini", f"results_dir={tmp_path / 'runs'}"]
    SCRIPT["main"](given)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("B1: -m kvbench model=recall_mini task=layer_error")
    assert said[1].startswith("| B1 | BalanceKV 4.1, Figure 1 |")
    assert ", 4 units" in said[1]
    monkeypatch.setattr(sys, "executable", "nothing is run again")
    SCRIPT["main"](given)
    assert capsys.readouterr().out.splitlines() == said[1:]
