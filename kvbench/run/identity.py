"""What makes two runs the same: everything that changes a score, less what is at its default.

An option that is added with its default, to a method, a task or a model, so leaves the names of earlier
runs as they are, and their records are taken up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from pydoc import locate
from typing import Any

from kvbench.engine.loading import ModelSpec
from kvbench.records.store import config_hash, run_folder

_DEFAULTS: Mapping[str, Any] = {
    "data": None,
    "budget": None,
    "compress_after": "prompt",
    "timeout_s": None,
}
"""Of the settings that a run has beside its model, task and method."""


@dataclass(frozen=True)
class RunIdentity:
    """The run of one method.

    Attributes:
        settings: everything that changes a score, defaults included.
        names: what its records and its manifest call it: experiment, model, task, method, config_hash
            (of the settings that are not at their defaults) and seed.
        folder: where its records are.
    """

    settings: Mapping[str, Any]
    names: Mapping[str, Any]
    folder: Path


def identify(
    results_dir: Path, names: Mapping[str, Any], settings: Mapping[str, Any]
) -> RunIdentity:
    """The run of these settings.

    Args:
        names: experiment, model, task and method.
    """
    code = config_hash(without_defaults(settings))
    folder = run_folder(results_dir, **names, config_hash=code)
    named = {**names, "config_hash": code, "seed": settings["seed"]}
    return RunIdentity(settings, named, folder)


def without_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Only the settings that differ from their defaults (and versions, always)."""
    found = _differing(settings, _DEFAULTS)
    for key in ("method", "task", "budget"):
        if key in found:
            found[key] = _dropping_defaults(found[key])
    return found | {"model": _differing(found["model"], _defaults_of(ModelSpec))}


def _dropping_defaults(value: Any) -> Any:
    """A config whose ``_target_`` nodes, at any depth, lack the options at their class's default."""
    if isinstance(value, list | tuple):
        return [_dropping_defaults(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kind = _class_named(str(value["_target_"])) if "_target_" in value else None
    reduced = {str(key): _dropping_defaults(item) for key, item in value.items()}
    return reduced if kind is None else _differing(reduced, _defaults_of(kind))


def _differing(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not at these defaults."""
    return {
        key: value
        for key, value in values.items()
        if key not in defaults or _plain(value) != defaults[key]
    }


@lru_cache
def _class_named(name: str) -> type | None:
    found = locate(name)
    return found if isinstance(found, type) and is_dataclass(found) else None


@lru_cache
def _defaults_of(kind: type) -> dict[str, Any]:
    """Plain values of the options that have a default."""
    found = {}
    for one in fields(kind):
        if one.default is not MISSING:
            found[one.name] = _plain(one.default)
        elif one.default_factory is not MISSING:
            found[one.name] = _plain(one.default_factory())
    return found


def _plain(value: Any) -> Any:
    """Tuples as lists, as YAML has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
