"""What a user means who writes something else: a model's path in place of a name, an experiment's older
name, a key without the group it is in, a dtype's short name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kvbench.cli.catalogue import catalogue
from kvbench.cli.papers import experiment_called

DTYPE_NAMES = {
    **dict.fromkeys(("bf16", "torch.bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("fp32", "f32", "float", "torch.float32"), "float32"),
}


def expand_aliases(overrides: Sequence[str]) -> list[str]:
    """The overrides with what their values stand for: see `expand_model_paths`, `expand_experiments`."""
    return expand_model_paths(expand_experiments(overrides))


def expand_experiments(overrides: Sequence[str]) -> list[str]:
    """The overrides with experiments by their names. An older name keeps the folder that it had, so
    that the runs in it go on."""
    found: list[str] = []
    named = any(text.startswith("experiment_name=") for text in overrides)
    for text in overrides:
        key, _, value = text.partition("=")
        if key != "experiment":
            found.append(text)
            continue
        called = [experiment_called(name) for name in value.split(",")]
        found.append(f"{key}={','.join(name for name, _ in called)}")
        if len(called) == 1 and called[0][1] is not None and not named:
            found.append(f"experiment_name={called[0][1]}")
    return found


def expand_model_paths(overrides: Sequence[str]) -> list[str]:
    """The overrides with ``model=<Hub id or folder>`` as ``model=hf model.path=<...>``; several of them
    make a sweep of paths. Names of conf/model stay."""
    found: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        if (
            key == "model"
            and _are_paths(value)
            and not any(o.startswith("model.path=") for o in overrides)
        ):
            found += ["model=hf", f"model.path={value}"]
            name = Path(value.strip("'\"").rstrip("/")).name
            named = any(o.startswith("model.name=") for o in overrides)
            if (
                _is_folder(value.strip("'\""))
                and re.fullmatch(r"[A-Za-z][\w.-]*", name)
                and not named
            ):
                found.append(f"model.name={name}")
        else:
            found.append(text)
    return found


def _are_paths(value: str) -> bool:
    """Whether all of the values are a Hub id or a folder, and none a name of conf/model."""
    values = [part.strip("'\"") for part in value.split(",")]
    if any(part in catalogue("models") for part in values):
        return False
    return all(("/" in part and "=" not in part) or _is_folder(part) for part in values)


def _is_folder(value: str) -> bool:
    try:
        return value not in ("", ".", "..") and Path(value).is_dir()
    except (OSError, ValueError):  # no name that a folder can have
        return False
