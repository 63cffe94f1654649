"""What is an extra is one line where it is missing, and nothing else needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.paths import DATA

MISSING = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith({!r}):
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Missing())
"""
"""Code that makes packages look as if they were not installed."""


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)


@pytest.mark.slow
def test_a_missing_extra_is_one_line_that_names_the_command() -> None:
    code = MISSING.format(("lm_eval",)) + "from kvbench.cli.main import main\nmain(sys.argv[1:])\n"
    words = ["experiment=balancekv_table1", "model=recall_mini", f"task.data={DATA}"]
    done = run(code, *words, "hydra.mode=RUN", "logger=none")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "allowed: pip install 'kvbench[lm-eval]'" in line


@pytest.mark.slow
def test_compress_and_the_default_task_need_no_extra_and_load_no_report() -> None:
    names = ("submitit", "lm_eval", "wandb_workspaces")
    done = run(
        MISSING.format(names) + "import kvbench.api, kvbench.tasks.needle\n"
        "heavy = {'wandb', 'matplotlib', 'datasets', 'lm_eval'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import kvbench.cli.build, kvbench.tasks.longeval_lines\n"
        "from kvbench.cli.config import composed, hydra_of_conf\n"
        "with hydra_of_conf() as hydra: composed(hydra, ['experiment=demo'])\n"
    )
    assert done.returncode == 0, done.stderr
