"""Any command line is a correct run or an error of one line, never a traceback."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support.cli_cases import command_lines, ended


@pytest.mark.parametrize("count", [8, pytest.param(500, marks=pytest.mark.slow)])
def test_any_command_line(count: int) -> None:
    @settings(
        max_examples=count,
        derandomize=count < 100,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(command_lines())
    def check(arguments: list[str]) -> None:
        found = ended(arguments)
        problem = found.problem()
        assert problem is None, f"{problem}: kvbench {arguments}\n{found.err[-3000:]}"

    check()
