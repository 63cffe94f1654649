"""Any command line is a correct run or an error of one line: never a traceback, never a silent skip."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.cli_cases import BASE, QUICK, command_lines, ended, names, other_lines

COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],
}


def check(arguments: list[str]) -> None:
    found = ended(arguments)
    problem = found.problem()
    assert problem is None, f"{problem}: kvbench {arguments}\n{found.status}\n{found.err[-3000:]}"


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (command_lines, 15),
        (other_lines, 10),
        *(pytest.param(command_lines, 250, marks=pytest.mark.slow) for _ in range(3)),
        pytest.param(other_lines, 250, marks=pytest.mark.slow),
    ],
)
def test_any_command_line(make: Callable[[], st.SearchStrategy[list[str]]], count: int) -> None:
    settings(max_examples=count, derandomize=count < 100, **COMMON)(given(make())(check))()


def test_every_task_has_a_quick_form() -> None:
    """Or its dry runs would take minutes."""
    assert sorted(QUICK) == names("tasks")


def test_setting_up_logging_leaves_the_tests_output_open() -> None:
    """Hydra closes all log handlers, that of a library loaded by an earlier test among them, which may
    hold the stderr of that test."""
    from rouge_score import rouge_scorer  # noqa: F401 - loads absl

    stderr = sys.stderr
    assert ended([*BASE, "task=needle", "method=exact"]).status == 0
    assert not stderr.closed


@pytest.mark.parametrize(
    "name", ["../../escape", "..", "/tmp/escape", "a/../../escape", "~/escape"]
)
def test_no_name_leads_out_of_the_results_folder(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    base = [word for word in BASE if not word.startswith("dry_run")]
    base += ["method=exact", "task=longeval_lines", "task.num_lines=[5]", "task.max_new_tokens=1"]
    for words in (
        [f"experiment_name={name}"],
        [f"task_label={name}"],
        [f"+methods.'{name}'._target_=kvbench.methods.exact.Exact"],
        [f"model.name={name}"],
    ):
        found = ended([*base, *words], folder=inside)
        assert found.problem() is None, found
        written = [path for path in tmp_path.rglob("*") if "escape" in path.name]
        for path in written:
            assert path.is_relative_to(inside / "runs"), path
        assert sorted(path.name for path in tmp_path.iterdir()) == ["inside"]
    assert not Path("/tmp/escape").exists()
    assert not Path("~/escape").expanduser().exists()
