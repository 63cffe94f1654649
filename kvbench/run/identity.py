"""What makes two runs the same: everything that changes a score, less what is at its default.

An option that is added with its default, to a method, a task or a model, so leaves the names of earlier
runs as they are, and their records are taken up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from pydoc import locate
from typing import Any

from kvbench.engine.loading import ModelSpec

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
