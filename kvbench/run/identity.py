"""What makes two runs the same: everything that changes a score, less what is at its default.

An option that is added with its default, to a method, a task or a model, so leaves the names of earlier
runs as they are, and their records are taken up. Folders named by the hash of every value, defaults
included, as they were before, are taken up too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
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


def without_defaults(identity: Mapping[str, Any]) -> dict[str, Any]:
    """A run's identity with only the values that differ from their defaults (and versions, always)."""
    found = {
        key: value
        for key, value in identity.items()
        if key not in _DEFAULTS or value != _DEFAULTS[key]
    }
    for key in ("method", "task", "budget"):
        if key in found:
            found[key] = _dropping(found[key], _defaults_of)
    return found | {"model": _differing(found["model"], _defaults_of(ModelSpec))}


def folder_of(place: Path, names: tuple[str, str, str, str], identity: Mapping[str, Any]) -> Path:
    """The folder of a run: by its identity, or where a run of before lies under its whole identity.

    Args:
        place: the results folder. names: experiment, model, task, method's label.
    """
    folder = run_folder(place, *names, config_hash(without_defaults(identity)))
    if folder.is_dir():
        return folder
    earlier = run_folder(place, *names, config_hash(as_before(identity)))
    return earlier if earlier.is_dir() else folder


def as_before(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The whole identity without options that were `ADDED` since, where they are at their defaults."""
    dropped = {key: _dropping(value, _added) for key, value in identity.items()}
    return dropped | {"model": _differing(identity["model"], _added(ModelSpec))}


def _dropping(value: Any, which: Callable[[type], Mapping[str, Any]]) -> Any:
    """A config whose ``_target_`` nodes, at any depth, lack those options of their class that are at the
    default which `which` has of them."""
    if isinstance(value, list | tuple):
        return [_dropping(item, which) for item in value]
    if not isinstance(value, Mapping):
        return value
    kind = _class_named(str(value["_target_"])) if "_target_" in value else None
    reduced = {str(key): _dropping(item, which) for key, item in value.items()}
    return reduced if kind is None else _differing(reduced, which(kind))


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


@lru_cache
def _added(kind: type) -> dict[str, Any]:
    """Defaults of the options that were added since runs were first named."""
    names = {one.name for one in fields(kind) if one.metadata.get("added")}
    return {name: value for name, value in _defaults_of(kind).items() if name in names}


def _plain(value: Any) -> Any:
    """Tuples as lists, as YAML has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
