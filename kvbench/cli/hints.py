"""Guesses at the meaning of a word that is no choice and of a key that does not exist."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from kvbench.catalogue import KINDS, catalogue, config_dir, files_of

OF_PYTHON = ("compare", "compress", "kept", "load_model")
OF_EVERY_CALL = ("run", "eval", "evaluate", "bench", "benchmark", "start")
"""Words that other programs begin with; a job's command here is its keys."""
OF_LM_EVAL = ("model_args", "num_fewshot", "tasks")
"""Options that lm-evaluation-harness has beside some that are keys here."""
PARTS = {
    "methods": "method=<name>,<name>, and methods.<name>.<option>=",
    "budget": "budget.rate=, the share that is kept; or budget.total_rate=, budget.size=",
    "sampling": "sampling.temperature=, sampling.top_p=, sampling.samples=",
}
"""By the parts of a config that are no choice of a file, what is typed of them."""


def _meant(words: str) -> str:
    return f" (did you mean {words}?)"


def of_word(word: str) -> str:
    """A first word that is no command."""
    if word == "compare":
        return _meant(
            "method=a,b, which compares methods, kvbench-report <folder> <folder>, which compares runs, "
            "or in Python: from kvbench import compare"
        )
    if word == "report":
        return _meant("kvbench-report <folder>")
    if word in catalogue("methods"):
        return _meant(f"method=<name>,{word}, or kvbench show method={word}")
    if word in OF_PYTHON:
        return f" (in Python: from kvbench import {word})"
    return _meant("the same without it") if word in OF_EVERY_CALL else ""


def of_option(words: str) -> str:
    """Words with an option of two dashes that other programs have."""
    names = [name.replace("-", "_") for name in re.findall(r"--([\w-]+)", words)]
    if set(names) & set(OF_LM_EVAL):
        return _meant("python -m kvbench.lm_eval, which has lm-evaluation-harness's options")
    keys = _read(config_dir() / "config.yaml")
    known = [name for name in names if name in keys or f"{name}s" in KINDS]
    return _meant(f"{known[0]}=<value>") if known else ""


def of_key(key: str) -> str:
    """A key at the top of the config."""
    if key == "method":  # of a file's own: method= is a choice
        return " (the first line of a file in method/ is # @package methods.<its name>)"
    if key in ("max_capacity_prompt", "max_capacity_prompts"):
        return _meant("budget.size")
    if key in ("pretrained", "model_path"):
        return _meant("model=<an id of the Hub, a folder or a name>")
    if key == "compression_ratio":
        return _meant("budget.total_rate, which is 1 - compression_ratio")
    if key in ("press", "press_name"):
        return _meant("method=<name>, e.g. method=snapkv, or method=kvpress methods.kvpress.press")
    first, _, option = key.partition(".")
    if option and first in catalogue("methods"):
        return _meant(f"methods.{key}")
    groups = [group for group, known in _options().items() if key in known]
    methods = [group.partition(".")[2] for group in groups if group.startswith("methods.")]
    if len(methods) == len(groups) > 1:
        return _meant(f"methods.<method>.{key}, an option of {', '.join(methods)}")
    return _meant(f"{groups[0]}.{key}") if groups else ""


@cache
def _options() -> dict[str, set[str]]:
    """By the groups of a config the options that some choice of the group has."""
    base = _read(config_dir() / "config.yaml")
    options = {group: set(base[group]) for group in ("budget", "sampling")}
    options["task"] = {
        key for path in files_of("tasks").values() for key in _read(path).get("task", _read(path))
    }
    options["model"] = set(_read(config_dir() / "model" / "_base.yaml"))
    for name, path in files_of("methods").items():
        options[f"methods.{name}"] = set(_read(path))
    return options


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def of_press(name: str, known: Sequence[str]) -> str:
    """A kvpress class in place of a method: ours of that name, or the press itself."""
    if not re.fullmatch(r"\w+Press", name):
        return ""
    own = [method for method in known if f"{method}press".replace("_", "") == name.lower()]
    return _meant(own[0] if own else f"method=kvpress methods.kvpress.press={name}")


def of_task(name: str) -> str:
    """The words that run a data set or a benchmark's task of this name, as a part of one of conf's
    tasks or of lm-eval; empty where there is none."""
    from kvbench.tasks.longbench_datasets import DATASETS
    from kvbench.tasks.ruler import TASKS

    options = dict.fromkeys(DATASETS, "longbench 'task.datasets")
    options |= dict.fromkeys(TASKS, "ruler 'task.tasks")
    for path in sorted(config_dir().rglob("task/[!_]*.yaml")):
        config = _read(path)
        for subset in config.get("task", config).get("subsets") or ():
            options.setdefault(subset, f"{path.stem} 'task.datasets")
    option = options.get(name) or ("lm_eval 'task.tasks" if _is_of_lm_eval(name) else None)
    return _meant(f"task={option}=[{name}]'") if option else ""


def _is_of_lm_eval(name: str) -> bool:
    package = find_spec("lm_eval")
    if package is None or package.origin is None or not name.isidentifier():
        return False
    folder = Path(package.origin).parent / "tasks"
    return any(True for end in ("", ".yaml") for _ in folder.rglob(name + end))
