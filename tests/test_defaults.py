"""Defaults stay what they are: the name of a run leaves out every option at its default, so that a
default which changes would give unlike runs one name. Who means to change one gives its method or task
another version, and tests/data/defaults.json the new value."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pydoc import locate
from typing import Any

import pytest
from support.paths import ROOT

WRITTEN: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests/data/defaults.json").read_text(encoding="utf-8")
)
"""Of classes by their names, options by theirs; what is added since is not in it."""


def defaults_of(kind: Any) -> dict[str, Any]:
    """The options of a dataclass that have a default, as JSON would hold them."""
    found: dict[str, Any] = {}
    for field in fields(kind):
        if field.default is not MISSING:
            found[field.name] = field.default
        elif field.default_factory is not MISSING:
            found[field.name] = field.default_factory()
    return json.loads(json.dumps(found, default=repr))


@pytest.mark.parametrize("name", WRITTEN)
def test_no_default_changes_unseen(name: str) -> None:
    found = defaults_of(locate(name))
    assert {option: found[option] for option in WRITTEN[name]} == WRITTEN[name]
