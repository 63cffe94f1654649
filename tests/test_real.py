"""The language model that a package ships: the default, and a needle that methods keep or lose."""

from __future__ import annotations

from typing import Any

import pytest
from support.command import job_of
from support.jobs import records_of

from kvbench.cli import config
from kvbench.run.runner import run_job

NEEDLE = ["task=needle", "device=cpu", "task.lengths=[1024]", "task.depths=[25,75]"]
NEEDLE += ["task.num_examples=1", "logger=none"]
METHODS = "[exact,snapkv,h2o,uniform,balancekv,turboquant]"
"""All, evicting, sampling, in few bits."""


@pytest.mark.parametrize("installed", [True, False])
def test_the_demo_takes_the_shipped_model_where_the_real_one_is_not_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(config, "ITS_PACKAGES", ("json" if installed else "no_such_package",))
    demo = "demo" if installed else "demo_recall_mini"
    assert config.expanded(["experiment=demo"]) == [f"experiment={demo}"]
    assert ("recall_mini takes its place" in capsys.readouterr().err) != installed


@pytest.mark.parametrize(
    "words", [["task=needle", "limit=2"], ["experiment=ruler", "task=needle"]], ids=" ".join
)
def test_other_commands_are_as_they_were_typed(words: list[str]) -> None:
    assert config.expanded(words) == words


@pytest.mark.real
@pytest.mark.slow
def test_the_real_model_finds_a_needle_and_methods_that_evict_lose_some(tmp_path: Any) -> None:
    words = [*NEEDLE, "model=smollm2_135m", f"method={METHODS}", f"results_dir={tmp_path}"]
    result = run_job(job_of(*words))
    assert result.failed == 0
    records = records_of(result)
    scores = {label: sum(r["word_recall"] for r in rows) / 2 for label, rows in records.items()}
    assert [row["containment"] for row in records["exact"]] == [1.0, 1.0]
    assert scores["snapkv"] >= 0.5
    assert scores["turboquant"] > scores["uniform"]
    for label in ("snapkv", "h2o", "uniform", "balancekv"):
        assert records[label][0]["ratio"] < 0.35
