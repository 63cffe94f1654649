"""Any command line is a correct run or an error of one line: never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support.cli_cases import BASE, command_lines, ended


def check(arguments: list[str]) -> None:
    found = ended(arguments)
    problem = found.problem()
    assert problem is None, f"{problem}: kvbench {arguments}\n{found.status}\n{found.err[-3000:]}"


@pytest.mark.parametrize("count", [6, pytest.param(400, marks=pytest.mark.slow)])
def test_any_command_line(count: int) -> None:
    settings(
        max_examples=count,
        derandomize=count < 100,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )(given(command_lines())(check))()


@pytest.mark.parametrize("name", ["../../escape", "/tmp/escape", "~/escape"])
def test_no_name_leads_out_of_the_results_folder(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    base = [*BASE[:-1], "task=longeval_lines", "task.num_lines=[5]", "task.max_new_tokens=1"]
    for words in (
        [f"experiment_name={name}", "method=exact"],
        [f"task_label={name}", "method=exact"],
        [f"+methods.'{name}'._target_=kvbench.methods.exact.Exact", "method=exact"],
        [f"model.name={name}", "method=exact"],
    ):
        found = ended([*base, *words], folder=inside)
        assert found.problem() is None, found
        for path in (path for path in tmp_path.rglob("*") if "escape" in path.name):
            assert path.is_relative_to(inside / "runs"), path
        assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert not Path("/tmp/escape").exists()
    assert not Path("~/escape").expanduser().exists()
