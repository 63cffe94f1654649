"""What is an extra is one line where it is missing, and nothing else needs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hydra.errors import HydraException
from support.paths import DATA

from kvbench.cli.config import explain


def without(*packages: str) -> str:
    """Code that makes these packages look as if they were not installed."""
    return (
        "import importlib.abc, sys\n"
        "class Missing(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.startswith({packages!r}):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )


def test_a_missing_extra_is_one_line_that_names_the_command(tmp_path: Path) -> None:
    words = [
        "experiment=balancekv_table1",
        "model=recall_mini",
        f"task.data={DATA}",
        "hydra.mode=RUN",
    ]
    code = without("lm_eval") + "from kvbench.cli.main import main\nmain(sys.argv[1:])\n"
    command = [sys.executable, "-c", code, *words, "logger=none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "allowed: pip install 'kvbench[lm-eval]'" in line


def test_a_launcher_whose_package_is_missing_names_the_command() -> None:
    """As Hydra says it; scripts/try_wheel.sh asks for it in an environment that lacks the package."""
    said = explain(HydraException("Could not find 'hydra/launcher/submitit_slurm'"))
    assert said.endswith("allowed: pip install 'kvbench[slurm]'")


def test_compress_and_the_default_task_need_no_extra() -> None:
    names = ("hydra_plugins.hydra_submitit_launcher", "submitit", "lm_eval", "wandb_workspaces")
    code = without(*names) + (
        "import kvbench.api, kvbench.cli.build, kvbench.tasks.needle, kvbench.tasks.longeval_lines\n"
        "from kvbench.cli.config import composed, hydra_of_conf\n"
        "with hydra_of_conf() as hydra: composed(hydra, ['experiment=demo'])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_compress_loads_torch_and_transformers_and_no_report() -> None:
    code = "import sys, kvbench.api; heavy = {'wandb', 'matplotlib', 'datasets', 'lm_eval'}\n"
    code += "print(sorted(heavy & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
