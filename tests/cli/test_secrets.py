"""Tokens and keys in all that is said: configs shown, tables, tracebacks, warnings. And results are
not touched by it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.attacks import RUN, SECRETS, TYPED, leaks
from support.cli_cases import Ended, ended
from support.jobs import make_job, records_of

from kvbench.errors import HIDDEN, redact
from kvbench.methods import build_method
from kvbench.records.read import load_run
from kvbench.report.wandb import log_runs
from kvbench.run.plan import TaskPlan
from kvbench.run.runner import run_job
from kvbench.tasks.base import PromptEncoder, TaskError

QUIET = [*RUN, "logger=none"]
TOLD = f"GET https://me:{SECRETS['HF_TOKEN']}@hub {SECRETS['MY_PASSWORD']} failed"


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def clean(folder: Path, found: Ended) -> Ended:
    assert not leaks(folder, found.out + found.err)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["show", f"model.revision={TYPED}"],
        ["show", "model.revision='${oc.env:HF_TOKEN}'"],
        ["--cfg", "job", f"model.revision={TYPED}"],
        ["--cfg", "all", "--resolve", "model.revision='${oc.env:HF_TOKEN}'"],
        ["--info", "config", f"model.revision={TYPED}"],
    ],
)
def test_a_config_is_shown_without_secrets(tmp_path: Path, words: list[str]) -> None:
    found = clean(tmp_path, ended([*words, *QUIET], folder=tmp_path))
    assert found.status == 0, found.err
    assert f"revision: '{HIDDEN}'" in found.out or f"revision: {HIDDEN}" in found.out
    assert "max_new_tokens: 1\n" in found.out


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def units(*_: Any) -> None:
        raise error

    monkeypatch.setattr(TaskPlan, "units", units)


@pytest.mark.parametrize("sweep", [[], ["-m", f"model.revision={TYPED},main"]])
@pytest.mark.parametrize("error", [AssertionError(TOLD), TaskError(TOLD)])
def test_an_error_is_told_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweep: list[str], error: Exception
) -> None:
    """As one line, as a bug's traceback, and in the table that ends a sweep."""
    failing(monkeypatch, error)
    found = clean(tmp_path, ended([*QUIET, *sweep], folder=tmp_path))
    bug = isinstance(error, AssertionError)
    assert found.status == (1 if bug else 2)
    assert f"GET https://{HIDDEN}@hub {HIDDEN} failed" in found.err
    assert ("Traceback" in found.err) is bug
    if sweep:
        assert f"model.revision={HIDDEN}" in found.out
        assert "model.revision=main" in found.out
        assert "2 of them failed" in found.out


def test_a_bug_outside_the_jobs_is_told_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(folder: Path) -> None:
        raise AssertionError(TOLD)

    monkeypatch.setattr("kvbench.cli.build.finish", finish)
    found = clean(tmp_path, ended(QUIET, folder=tmp_path))
    assert found.status == 1
    assert f"AssertionError: GET https://{HIDDEN}@hub {HIDDEN} failed" in found.err


def test_warnings_about_wandb_hold_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError(f"{TOLD}\nand more")

    monkeypatch.setattr("wandb.init", init)
    result = run_job(make_job(tmp_path, {"exact": build_method("exact")}, limit=1))
    with caplog.at_level(logging.WARNING):
        assert log_runs([load_run(f) for f in result.folders.values()], mode="offline") == 0
    assert f"was not logged: GET https://{HIDDEN}@hub {HIDDEN} failed" in caplog.text
    assert not leaks(tmp_path, caplog.text)


@pytest.mark.parametrize(
    "name", ["AZURE_OPENAI_KEY", "DEPLOY_PASS", "REGISTRY_AUTH", "SSH_PASSPHRASE", "A_TOKEN_B"]
)
def test_variables_that_hold_secrets(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "p@ss/wörd=1234")
    assert redact("in p@ss/wörd=1234!") == f"in {HIDDEN}!"
    assert redact("at https://x/?q=p%40ss%2Fw%C3%B6rd%3D1234&b") == f"at https://x/?q={HIDDEN}&b"


@pytest.mark.parametrize("name", ["PWD", "KEYBOARD", "MONKEYS", "AUTHOR", "TOKENIZERS_PARALLELISM"])
def test_variables_that_hold_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "an ordinary value")
    assert redact("an ordinary value") == "an ordinary value"


def test_results_stay_as_they_are_whatever_they_look_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions, answers and prompts are data: only what errors and configs say is redacted."""
    text = f"password: abc, api_key=xyz {TYPED} https://user:pass@host/ {SECRETS['MY_PASSWORD']}"
    monkeypatch.setattr(PromptEncoder, "decode", lambda self, ids: text)
    result = run_job(make_job(tmp_path, {"exact": build_method("exact")}, limit=1))
    (record,) = records_of(result)["exact"]
    assert record["prediction"] == text
    content = (result.folders["exact"] / "records.jsonl").read_text(encoding="utf-8")
    assert json.dumps(text, ensure_ascii=False) in content
