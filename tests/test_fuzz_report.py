"""Any arguments of kvbench-report give a report, or one line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cases import ended
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from report_runs import LINES_META, write_run

from kvbench.report.__main__ import main
from kvbench.store import MANIFEST

ODD = [
    *("", ".", "..", "nosuch", "a/b/c", "a\x00b", "\ud800", "é" * 200, "~nosuch", "*", "--", "-"),
    *("-x", "--list", "--out", "--out=out", "--out=file", "--out=file/x", "--out=", "--help", "-h"),
    *("file", "empty", "broken", "torn", "manifest", "good", "good/", "other", "good/recall_mini"),
    *("--list=1", "--out=\x00", "--out=../../..", "-o", "--ou=x", "é", "'%s'", "{}", "a b", "\n"),
]
COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with experiments in all states."""
    root = tmp_path_factory.mktemp("results")
    records = [{"example_id": f"e{i}", "score": 1.0, "prediction": "x"} for i in range(2)]
    for name in ("good", "other", "broken", "torn", "manifest"):
        write_run(
            root,
            experiment=name,
            task="t",
            method="snapkv",
            records=records,
            task_meta=LINES_META,
        )
    for path in root.glob("broken/*/*/*/records.jsonl"):
        path.write_text("{\n[]\n3\n")
    for path in root.glob("torn/*/*/*/records.jsonl"):
        path.write_bytes(path.read_bytes()[:-9])
    for path in root.glob(f"manifest/*/*/*/{MANIFEST}"):
        path.write_text("[" * 5000)
    (root / "empty").mkdir()
    (root / "file").write_text("text")
    yield root
    shutil.rmtree(root)


def arguments() -> st.SearchStrategy[list[str]]:
    word = st.one_of(
        *[st.sampled_from(ODD)] * 4, st.text(max_size=8).map(lambda s: s.replace("/", ""))
    )
    return st.lists(word, max_size=4)


def check(results: Path, words: list[str]) -> None:
    found = ended(words, folder=results, main=main)
    problem = found.problem()
    assert problem is None, (
        f"{problem}: kvbench-report {words}\n{found.status}\n{found.err[-3000:]}"
    )


def test_a_sample_of_arguments(results: Path) -> None:
    settings(max_examples=60, derandomize=True, **COMMON)(
        given(arguments())(lambda words: check(results, words))
    )()


@pytest.mark.slow
def test_many_arguments(results: Path) -> None:
    settings(max_examples=300, **COMMON)(given(arguments())(lambda words: check(results, words)))()
