"""Random damage to a results folder: the report is made, or one line names the run that is damaged."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.cli_cases import ended
from support.report_runs import LINES_META, write_run

from kvbench.report.__main__ import main

VALUES: list[Any] = [None, True, -1, 0, 0.5, 1e308, 10**40, float("nan"), float("inf")]
VALUES += ["", "x", "\ud800", "../up", "<b>", "\x1b[31m", [], [1], {}, {"a": {"b": []}}]


def keys_within(content: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every value inside a JSON value."""
    if isinstance(content, dict):
        parts = list(content.items())
    elif isinstance(content, list):
        parts = list(enumerate(content))
    else:
        parts = []
    paths: list[tuple[Any, ...]] = []
    for key, inner in parts:
        path = (*above, key)
        paths.append(path)
        paths += keys_within(inner, path)
    return paths


def damage_json(text: str, rng: random.Random) -> str:
    """The JSON text with one value replaced by another, left out, or wrapped in a list."""
    content = json.loads(text)
    *above, last = rng.choice(keys_within(content))
    inner = content
    for key in above:
        inner = inner[key]
    kind = rng.randrange(3)
    if kind == 0:
        inner[last] = rng.choice(VALUES)
    elif kind == 1:
        del inner[last]
    else:
        inner[last] = [inner[last]]
    return json.dumps(content)


def damage(path: Path, rng: random.Random) -> None:
    """Change a value of a manifest or of one record; or cut, double or overwrite bytes."""
    data = path.read_bytes()
    kind = rng.randrange(5)
    if kind < 3 and path.suffix == ".json":
        path.write_text(damage_json(data.decode(), rng))
    elif kind < 3:
        lines = data.decode().splitlines()
        place = rng.randrange(len(lines))
        lines[place] = damage_json(lines[place], rng)
        path.write_text("\n".join(lines) + "\n")
    elif kind == 3:
        path.write_bytes(data[: rng.randrange(len(data))])
    else:
        begin = rng.randrange(len(data))
        path.write_bytes(data[:begin] + rng.randbytes(rng.randrange(1, 9)) + data[begin:])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_folder_is_reported_or_refused_in_one_line(seed: int, tmp_path: Path) -> None:
    for method in ("exact", "snapkv"):
        rows = [
            {"example_id": f"e{i}", "num_lines": 20, "score": i / 12, "ratio": 0.3}
            for i in range(12)
        ]
        write_run(tmp_path, method=method, records=rows, task_meta=LINES_META)
    files = sorted((tmp_path / "demo").rglob("*.json*"))
    undamaged = {path: path.read_bytes() for path in files}
    rng = random.Random(seed)
    refused = 0
    for number in range(40 if seed == 0 else 400):
        damaged = rng.choice(files)
        damage(damaged, rng)
        result = ended([str(tmp_path / "demo")], main=main)
        context = (seed, number, damaged.name, result.err[-1500:])
        assert result.problem() is None, context
        assert result.status in (0, 1), context
        if result.status:
            refused += 1
            assert damaged.parent.name in result.err, context
        for path, content in undamaged.items():
            path.write_bytes(content)
    assert refused > 5, "the damage is noticed"
