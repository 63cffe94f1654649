"""What makes two runs the same: everything that changes a score, less what is at its default.

An option that is added with its default, to a method, a task or a model, so leaves the names of earlier
runs as they are, and their records are taken up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from pydoc import locate
from typing import Any, NamedTuple

from kvbench.engine.model_spec import ModelSpec

_DEFAULTS: Mapping[str, Any] = {
    "data": None,
    "budget": None,
    "compress_after": "prompt",
    "timeout_s": None,
}
"""Defaults of the settings that a run has beside its model, task and method."""


class RunIdentity(NamedTuple):
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


def without_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Only the settings that differ from their defaults (and versions, always)."""
    differing = _differing(settings, _DEFAULTS)
    for key in ("method", "task", "budget"):
        if key in differing:
            differing[key] = _dropping_defaults(differing[key])
    model = _differing(differing["model"], _defaults_of(ModelSpec))
    return differing | {"model": model}


def _dropping_defaults(value: Any) -> Any:
    """A config whose ``_target_`` nodes, at any depth, lack the options at their class's default."""
    if isinstance(value, list | tuple):
        return [_dropping_defaults(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    reduced = {str(key): _dropping_defaults(item) for key, item in value.items()}
    return _differing(reduced, _defaults_of(locate(str(value.get("_target_")))))


def _differing(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not at these defaults."""
    return {
        key: value
        for key, value in values.items()
        if key not in defaults or _plain(value) != defaults[key]
    }


@lru_cache
def _defaults_of(kind: Any) -> dict[str, Any]:
    """Plain values of the options of a dataclass that have a default; of anything else, nothing."""
    defaults: dict[str, Any] = {}
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return defaults
    for option in fields(kind):
        if option.default is not MISSING:
            defaults[option.name] = _plain(option.default)
        elif option.default_factory is not MISSING:
            defaults[option.name] = _plain(option.default_factory())
    return defaults


def _plain(value: Any) -> Any:
    """The value as YAML would hold it, tuples as lists."""
    return json.loads(json.dumps(value, default=repr))
