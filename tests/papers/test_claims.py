"""kvbench claims: verdicts of differences that are known, and claims from their runs to their tables."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.command import refusal_of
from support.paths import ROOT

from kvbench.cli import reproduce
from kvbench.cli.main import main
from kvbench.errors import UserError

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "claims.py"))
CLAIMS = SCRIPT["claims_for"]("recall_mini")


def rows(gains: dict[str, float], spread: float = 0.1, prompts: int = 12) -> pd.DataFrame:
    """Scores of two methods in cells, the first better by `gains` on average, two draws a prompt."""
    rng = np.random.default_rng(0)
    made = []
    for cell, gain in gains.items():
        for prompt in range(prompts):
            for draw in range(2):
                base = rng.normal()
                where = {"prompt": f"p{prompt}", "layer": cell, "draw": draw, "model": "m"}
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
    found = SCRIPT["differences_to_each"](SCRIPT["values_of_units"](rows(gains), asked), asked)["b"]
    assert found.shape == (12, len(gains))
    judged = SCRIPT["verdict_on"](found.to_numpy(), asked)
    assert judged.verdict == verdict
    assert (judged.more is not None) == (verdict == "cannot be told")


def test_answers_that_are_all_alike_bear_out_nothing() -> None:
    alike = np.zeros((12, 1))
    for side in ("below", "above"):
        for more in ({}, {"fraction": True}):
            assert SCRIPT["verdict_on"](alike, {"side": side} | more).verdict != "holds"


def test_slopes_targets_and_factors() -> None:
    frame = pd.DataFrame(
        {"prompt": f"p{p}", "method": "a", "held": held, "error": (1 + p) * held**-0.5}
        for p in range(4)
        for held in (10, 20, 40)
    )
    asked = {"value": "error", "slope": "held", "first": "a", "target": -0.5}
    (found,) = SCRIPT["differences_to_each"](
        SCRIPT["values_of_units"](frame, asked), asked
    ).values()
    assert found.abs().max().max() < 1e-12
    values = pd.DataFrame({"a": [4.0, 5.0], "b": [2.0, 2.0], "c": [3.0, 3.0]})
    asked = {"first": "a", "against": ["b", "c"], "factor": 1.25}
    assert SCRIPT["differences_to_each"](values, asked)["1.25 b"].iloc[:, 0].tolist() == [1.5, 2.5]


RUNS = {"here": rows({"1": 1, "2": 1}), "later": rows({"1": -1, "2": -1})}
ONCE = SIDES | {"run": "here"}


def decided(*comparisons: dict[str, Any], runs: dict[str, Any] = RUNS) -> list[dict[str, Any]]:
    """What a claim's comparisons say of the runs."""
    about = {"id": "X", "place": "p", "stated": "s", "measure": "as stated", "claim": "c"}
    return SCRIPT["rows_of_claim"](about | {"comparisons": list(comparisons)}, runs)


def test_the_worst_comparison_decides() -> None:
    found = decided(ONCE, ONCE | {"by": -5})
    assert [row["result"] for row in found] == ["holds", "fails"]
    assert [row["decides"] for row in found] == [False, True]
    assert {row["verdict"] for row in found} == {"fails"}
    (row,) = decided(ONCE | {"minus": "later"})
    assert row["difference"] == pytest.approx(-2, abs=0.1)


def test_what_no_model_can_do_says_nothing() -> None:
    found = decided(ONCE, ONCE | {"able": "b"})  # whose mean is about 0
    assert found[0]["verdict"] == "holds"
    assert found[1]["result"] == SCRIPT["UNABLE"]
    alike = {"here": RUNS["here"].assign(prediction="p", example_id=np.arange(96) // 2)}
    (row,) = decided(ONCE | {"unlike": "b"}, runs=alike)
    assert row["verdict"] == "needs a model on which a differs from b"


def test_intervals_of_several_comparisons_are_of_one_family() -> None:
    noisy = {"here": rows({"1": 1, "2": 1}, spread=1), "later": rows({"1": 1, "2": 1}, spread=3)}
    widths = []
    for among in ([ONCE], [ONCE, ONCE | {"run": "later"}]):
        one = decided(*among, runs=noisy)[0]
        widths.append(one["difference_high"] - one["difference_low"])
    assert widths[0] < widths[1] < 1.5 * widths[0]
    assert one["comparison"] == "here, score: a - b"


def test_the_claims_name_runs_that_are_there() -> None:
    claims = CLAIMS["claims"]
    assert len({claim["id"] for claim in claims}) == len(claims)
    compared = [one for claim in claims for one in claim["comparisons"]]
    assert {one[key] for one in compared for key in ("run", "minus") if key in one} == {
        *CLAIMS["runs"]
    }
    options = {"model": "recall_mini", "files": "[essays/*.txt]"}
    for name, run in CLAIMS["runs"].items():
        if "folder" in run:
            continue
        made = SCRIPT["command"](name, run["command"], options, Path("runs"))
        assert ("{texts}" in run["protocol"]) == any("essays" in word for word in made), name
        if made[1] != "-m":
            assert Path(made[1]).is_file()
            continue
        swept = [w if "[" in w or "{" in w else w.partition(",")[0] for w in made[3:]]
        assert refusal_of([word for word in swept if word != "-m"]) is None, name
    with pytest.raises(UserError, match="allowed: B1,B2"):
        SCRIPT["main"](["claims=Z9"])


def test_the_command_runs_the_script_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran: list[Any] = []

    def run(words: Any, **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(words)
        return subprocess.CompletedProcess(words, 2)

    monkeypatch.setattr(reproduce.subprocess, "run", run)
    with pytest.raises(SystemExit, match="2"):
        main(["claims", "model=recall_mini", "claims=L1"])
    assert ran[0][1:] == [ROOT / "scripts" / "claims.py", "model=recall_mini", "claims=L1"]
    monkeypatch.setattr(reproduce, "config_dir", lambda: tmp_path / "conf")
    with pytest.raises(SystemExit, match="2"):
        main(["claims", "model=tiny_random"])
    said = "scripts/claims.py is not installed; allowed: kvbench's repository, where it is\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.slow
def test_two_claims_are_run_once_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "task=layer_error task@task.prompts=text task.prompts.tokens=300 task.exact=32 "
    small += "task.layers=[1] task.rates=[0.25] task.num_prompts=4 method=[uniform,balancekv]"
    mass = "attention_mass.py task=text task.tokens=300 per=[head] top=0.2 layers=2 limit=4 fit_most=64"
    texts = {"layers": small, "mass": mass}
    claims = [one for one in CLAIMS["claims"] if one["id"] in ("B1", "H2")]
    asked = {
        "runs": {name: {"command": text, "protocol": "{texts}"} for name, text in texts.items()},
        "claims": [one | {"comparisons": one["comparisons"][:1]} for one in claims],
    }
    monkeypatch.setitem(SCRIPT["main"].__globals__, "claims_for", lambda model: asked)
    given = ["model=recall_mini", f"results_dir={tmp_path / 'runs'}"]
    SCRIPT["main"](given)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("layers: python -m kvbench model=recall_mini task=layer_error")
    assert said[2].startswith("  layers, relative_error: balancekv - uniform ")
    assert "4 units" in said[2]
    assert [line[:3] for line in said if line[0] in "BH"] == ["B1 ", "H2 "]
    found = pd.read_csv(tmp_path / "runs" / "claims.csv")
    assert list(found["id"]) == ["B1", "H2"]
    assert set(found["model"]) == {"recall_mini"}
    assert set(found["protocol"]) == {"generated sentences; seed 0"}
    table = (tmp_path / "runs" / "claims.md").read_text()
    assert table.splitlines()[2].startswith("| B1 | the error of single-layer")
    monkeypatch.setattr(subprocess, "run", None)  # nothing is run again
    SCRIPT["main"](given)
    again = capsys.readouterr().out.splitlines()
    assert again == [line for line in said if not line.startswith(("layers: ", "mass: "))]
    asked["runs"]["layers"]["command"] += " task.seeds=1"
    with pytest.raises(UserError, match="is of another command; allowed: another results_dir"):
        SCRIPT["main"](given)
