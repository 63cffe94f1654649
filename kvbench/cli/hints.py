"""What a word that is no choice may have meant."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import yaml

from kvbench.catalogue import config_dir
from kvbench.tasks.longbench_datasets import DATASETS
from kvbench.tasks.ruler import TASKS


def task_with(name: str) -> str:
    """The words that run a data set or a benchmark's task of this name, as a part of one of conf's
    tasks or of lm-eval; empty where there is none."""
    options = dict.fromkeys(DATASETS, "longbench 'task.datasets")
    options |= dict.fromkeys(TASKS, "ruler 'task.tasks")
    for path in sorted(config_dir().rglob("task/[!_]*.yaml")):
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        for subset in config.get("task", config).get("subsets") or ():
            options.setdefault(subset, f"{path.stem} 'task.datasets")
    option = options.get(name) or ("lm_eval 'task.tasks" if _is_of_lm_eval(name) else None)
    return f"task={option}=[{name}]'" if option else ""


def _is_of_lm_eval(name: str) -> bool:
    package = find_spec("lm_eval")
    if package is None or package.origin is None or not name.isidentifier():
        return False
    folder = Path(package.origin).parent / "tasks"
    return any(True for end in ("", ".yaml") for _ in folder.rglob(name + end))
