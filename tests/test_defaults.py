"""Defaults stay what they are: the name of a run leaves out every option at its default, so that a
default which changes would give unlike runs one name. Who means to change one gives its method or task
another version, and tests/data/defaults.json the new value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pydoc import locate
from typing import Any

import pytest
from support.paths import ROOT

WRITTEN: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests/data/defaults.json").read_text(encoding="utf-8")
)
"""Of classes by their names, the defaults of their options, their presets and what they say of
themselves; what is added since is not in it."""


def value_of(kind: Any, name: str) -> Any:
    """An option's default, or what stands in the class; as JSON would hold it."""
    options = {field.name: field for field in fields(kind)}
    value = getattr(kind, name, None)
    if name in options:
        value = options[name].default
        if options[name].default_factory is not MISSING:
            value = options[name].default_factory()
    return json.loads(json.dumps(value, default=plain))


def plain(value: Any) -> Any:
    """What JSON does not know, as it does."""
    return dict(value) if isinstance(value, Mapping) else repr(value)


@pytest.mark.parametrize("name", WRITTEN)
def test_defaults_are_those_written_down(name: str) -> None:
    kind, written = locate(name), WRITTEN[name]
    found = {option: value_of(kind, option) for option in written}
    if "presets" in written:  # others may be added
        found["presets"] = {preset: found["presets"].get(preset) for preset in written["presets"]}
    assert found == written
