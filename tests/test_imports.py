"""Imports point one way, and the command line answers without torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest.mock import patch

from support.report_runs import write_run

import kvbench

PACKAGE = Path(kvbench.__file__).parent

ALLOWED = {
    "errors": set(),
    "kernels": {"errors"},
    "budget": {"errors"},
    "kv": {"budget", "errors", "kernels"},
    "methods": {"errors", "kernels", "kv"},
    "prompts": {"errors"},
    "hub": set(),
    "tasks": {"errors", "hub", "prompts", "records"},
    "engine": {"budget", "errors", "hub", "kernels", "kv", "methods", "prompts"},
    "records": {"errors"},
    "run": {"engine", "errors", "kv", "methods", "prompts", "records", "tasks"},
    "probes": {
        "engine",
        "errors",
        "kernels",
        "kv",
        "methods",
        "prompts",
        "records",
        "run",
        "tasks",
    },
    "catalogue": set(),
    "report": {"catalogue", "errors", "records"},
}
"""Parts of the package each part may import (besides itself); what is not listed is an entry point."""


@cache
def imported(path: Path) -> set[str]:
    """Parts of kvbench that a file imports, lazy imports included."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "kvbench":
                names = [f"kvbench.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("kvbench.")}
    return parts


def test_imports_point_one_way() -> None:
    """`records` of tasks and probes: their typed figures (`records.figures`)."""
    for part, allowed in ALLOWED.items():
        folder = PACKAGE / part
        files = list(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{part}.py"]
        assert files, part
        for file in files:
            foreign = imported(file) - {part}
            assert foreign <= allowed, f"{file.relative_to(PACKAGE)} imports {foreign - allowed}"


def test_only_the_engine_knows_transformers() -> None:
    for file in set(PACKAGE.rglob("*.py")) - set((PACKAGE / "engine").rglob("*.py")):
        source = file.read_text()
        assert "import transformers" not in source, file
        assert "from transformers" not in source, file


def test_a_report_is_made_without_torch_transformers_or_wandb(tmp_path: Path) -> None:
    """At run time, through whatever it imports: a report of records, and what compares two of them."""
    write_run(tmp_path, method="exact", records=[{"example_id": "a", "score": 1.0}])
    code = (
        "import kvbench.report.compare, sys; from kvbench.report.__main__ import main\n"
        f"status = main([{str(tmp_path / 'demo')!r}])\n"
        "assert not {'torch', 'transformers', 'wandb'} & set(sys.modules), status\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "demo" / "report.html").is_file()


def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise() -> None:
    """From Python, too, and without a trace in the program's environment."""
    script = "import kvbench, os; kvbench.Budget; print({'GOMP_SPINCOUNT'} <= set(os.environ))"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PACKAGE.parent)}
    environment["OMP_DISPLAY_ENV"] = "VERBOSE"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "False\n", done.stderr
    assert re.search(r"(WAIT_POLICY|SPINCOUNT) = 'PASSIVE'", done.stderr), done.stderr
    with patch.dict(os.environ, {"GOMP_SPINCOUNT": "7"}, clear=True):
        assert kvbench.wait_asleep() == []
