"""The identity of a run: the settings that change its scores.

Settings at their defaults do not enter the name of a run. A later version may therefore add an option
with a default, to a method, a task or a model, and still continues the runs that are on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from pydoc import locate
from typing import Any

from kvbench.engine.model import ModelSpec
from kvbench.records.aside import VERSIONS

_DEFAULTS: Mapping[str, Any] = {
    "data": None,
    "budget": None,
    "compress_after": "prompt",
    "timeout_s": None,
}
"""Settings that hashes left out in the past, at these values. They are no defaults of today, and no
place for a new setting, which enters every hash by its name."""

CODE_AND_WEIGHTS = ("source", "weights", *VERSIONS)
"""The parts of an identity that say which code and which weights its numbers are of."""


def without_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those at their defaults; versions have no default and always stay."""
    reduced = _drop_defaults(settings, _DEFAULTS)
    for key in ("method", "task", "budget"):
        if key in reduced:
            reduced[key] = _drop_class_defaults(reduced[key])
    model = _drop_defaults(reduced["model"], _defaults_of(ModelSpec))
    return reduced | {"model": model}


def settings_alone(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`without_defaults` without code and weights."""
    return {
        key: value
        for key, value in without_defaults(settings).items()
        if key not in CODE_AND_WEIGHTS
    }


def _drop_class_defaults(value: Any) -> Any:
    """A config in which each node with a ``_target_``, at any depth, lacks the options that are at the
    default of its class."""
    if isinstance(value, list | tuple):
        return [_drop_class_defaults(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    reduced = {str(key): _drop_class_defaults(item) for key, item in value.items()}
    return _drop_defaults(reduced, _defaults_of(locate(str(value.get("_target_")))))


def _drop_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not at these defaults."""
    return {
        key: value
        for key, value in values.items()
        if key not in defaults or _plain(value) != defaults[key]
    }


@lru_cache
def _defaults_of(kind: Any) -> dict[str, Any]:
    """The defaults of a dataclass's options, as YAML would hold them; empty for anything else."""
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
    """The value as YAML would hold it: tuples become lists."""
    return json.loads(json.dumps(value, default=repr))
