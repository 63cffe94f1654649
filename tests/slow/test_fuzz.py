"""Any command line is a correct run or an error of one line, never a traceback."""

from __future__ import annotations

import json
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.cli_cases import command_lines, ended
from support.report_runs import LINES_META, write_run

from kvbench.records.read import MANIFEST
from kvbench.report.__main__ import main

COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],
}


def tried(strategy: Any, check: Callable[[Any], None], count: int) -> None:
    settings(max_examples=count, derandomize=count < 100, **COMMON)(given(strategy)(check))()


def often(count: int, slow: int) -> Any:
    return pytest.mark.parametrize("count", [count, pytest.param(slow, marks=pytest.mark.slow)])


@often(8, 500)
def test_any_command_line(count: int) -> None:
    def check(arguments: list[str]) -> None:
        found = ended(arguments)
        problem = found.problem()
        assert problem is None, f"{problem}: kvbench {arguments}\n{found.err[-3000:]}"

    tried(command_lines(), check, count)


ODD: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**70, 10**400, 1e308, float("nan"), float("inf"), "", "x", "0.25"),
    *("=1+1", "$a$ b$", "\x1b[31mred", "\u202eabc", "\x00", "a\nb", "a|b", "é" * 300, "x" * 10**6),
    *("../../x", "%s{}", "[/bold]", "score", "variant", "<script>", "\ud800", "\u2028"),
    *([], {}, [1], [None], [[1]], {"a": {"b": [1]}}, {"mean": 10**400}, [{"kind": "heatmap"}]),
]


def places(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*prefix, key)
            yield from places(inner, (*prefix, key))


@often(12, 100)
def test_any_damaged_results(count: int) -> None:
    """Up to three odd values somewhere in records and manifests."""
    damage = st.tuples(st.booleans(), st.integers(0, 10**6), st.sampled_from(ODD))

    def check(damages: list[tuple[bool, int, Any]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for method in ("exact", "balancekv"):
                records = [
                    {"example_id": f"e{i}", "num_lines": i % 2, "score": 0.5} for i in (0, 1, 2)
                ]
                run = write_run(
                    Path(folder), task="t", method=method, records=records, task_meta=LINES_META
                )
            for of_manifest, place, odd in damages:
                path = run / (MANIFEST if of_manifest else "records.jsonl")
                head, _, rest = path.read_text().partition("\n" if not of_manifest else "\0")
                content = json.loads(head)
                *above, last = (paths := list(places(content)))[place % len(paths)]
                inner = content
                for part in above:
                    inner = inner[part]
                inner[last] = odd
                path.write_text(json.dumps(content) + "\n" + rest)
            found = ended([str(Path(folder) / "demo")], main=main)
            problem = found.problem()
            assert problem is None, f"{problem}: {damages!r:.2000}\n{found.err[-3000:]}"
            shown = (found.out + found.err).replace("\n", "")
            assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cf")]

    tried(st.lists(damage, min_size=1, max_size=3), check, count)
