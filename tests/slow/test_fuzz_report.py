"""Any arguments of kvbench-report, and any results, give a report or one line."""

from __future__ import annotations

import json
import shutil
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.cli_cases import ended
from support.report_runs import LINES_META, TASKS, write_run

from kvbench.records.store import MANIFEST
from kvbench.report.__main__ import main

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
            root, experiment=name, task="t", method="snapkv", records=records, task_meta=LINES_META
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


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_any_arguments(results: Path, count: int) -> None:
    run = settings(max_examples=count, derandomize=count == 60, **COMMON)
    run(given(arguments())(lambda words: check(results, words)))()


ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**70, 10**400, 1e308, -1e308, 1e-320, float("nan")),
    *(
        float("inf"),
        "",
        "x",
        "0.25",
        "=1+1",
        "-0.5",
        "$a$ b$",
        "\\frac{",
        "\x1b[31mred",
        "\u202eabc",
    ),
    *("\x00", "a\nb", "a|b", "[x](javascript:alert(1))", "é" * 300, "日本語" * 60, "x" * 1_000_000),
    *("../../x", "..", "a/b", "%s{}", "[/bold]", "score", "variant", "depth", "num_lines", "exact"),
    *([], {}, [1], ["x"], [None], [[1]], {"a": 1}, {"a": {"b": [1]}}, {"mean": "x"}, [{}], [5]),
    *(
        {"mean": 10**400},
        {"kind": "heatmap"},
        [{"kind": "bars", "x": "num_lines", "facet": "score"}],
    ),
    *(
        [{"kind": "heatmap", "x": "depth", "y": "nosuch"}],
        ["nosuch", "score", "answers"],
        ["variant"],
    ),
    json.loads("[" * 150 + "]" * 150),
]


def paths_of(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*prefix, key)
            yield from paths_of(inner, (*prefix, key))


@st.composite
def damage(draw: st.DrawFn) -> list[tuple[str, int, tuple[Any, ...], Any]]:
    """Values to put into a record or a manifest: which of the two, the how many-th, where, and what."""
    kinds = st.sampled_from(["record", "record", "manifest", "manifest"])
    found = []
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)))
        found.append((draw(kinds), place[0], (place[1],), draw(st.sampled_from(ODD_VALUES))))
    return found


def put(value: Any, place: int, odd: Any) -> None:
    """Put something odd in one of the places there are."""
    paths = list(paths_of(value))
    *path, last = paths[place % len(paths)]
    for part in path:
        value = value[part]
    value[last] = odd


def damaged_results(folder: Path, task: str, damages: list[Any]) -> Path:
    """A small experiment of one task, damaged."""
    make, meta = TASKS[task]
    for method in ("exact", "balancekv"):
        write_run(folder, task=task, method=method, records=make(method)[:12], task_meta=meta)
    manifests = sorted(folder.glob(f"demo/*/*/*/{MANIFEST}"))
    for kind, which, (place,), odd in damages:
        path = manifests[which % len(manifests)]
        if kind == "manifest":
            content = json.loads(path.read_text())
            put(content, place, odd)
            path.write_text(json.dumps(content))
        else:
            path = path.parent / "records.jsonl"
            lines = path.read_text().split("\n")[:-1]
            content = json.loads(lines[which % len(lines)])
            put(content, place, odd)
            lines[which % len(lines)] = json.dumps(content)
            path.write_text("\n".join([*lines, ""]))
    return folder / "demo"


def check_damaged(task: str, damages: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = damaged_results(Path(folder), task, damages)
        found = ended([str(results)], main=main)
        problem = found.problem()
        assert problem is None, f"{problem}: {task} {damages!r:.2000}\n{found.err[-3000:]}"
        shown = found.out.replace("\n", "") + found.err.replace("\n", "")
        assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cf")]
        if found.status == 0:
            again = ended([str(results), str(results)], folder=Path(folder), main=main)
            assert again.problem() is None, f"{task} {damages!r:.2000}\n{again.err[-3000:]}"


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_any_damaged_results(count: int) -> None:
    run = settings(max_examples=count, derandomize=count == 12, **COMMON)
    run(given(st.sampled_from(list(TASKS)), damage())(check_damaged))()
