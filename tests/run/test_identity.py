"""A run's name covers what differs from the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvbench.records.store import config_hash
from kvbench.run import identity
from kvbench.run.identity import without_defaults


@dataclass(frozen=True)
class Before:
    size: int
    rate: float = 0.5


@dataclass(frozen=True)
class After(Before):
    shapes: tuple[int, ...] = (1, 2)


def lean(kind: type, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    monkeypatch.setattr(identity, "_class_named", lambda name: kind)
    named = {"model": {"name": "m", "path": "p"}, "task": {"_target_": "t"}, "seed": 0}
    return config_hash(without_defaults({**named, "method": {"_target_": "m", **options}}))


def test_an_option_that_is_added_with_its_default_changes_no_name(monkeypatch: Any) -> None:
    before = lean(Before, monkeypatch, size=3, rate=0.5)
    assert lean(Before, monkeypatch, size=3) == before
    assert lean(After, monkeypatch, size=3, rate=0.5, shapes=[1, 2]) == before
    assert lean(After, monkeypatch, size=3, shapes=[2, 1]) != before
    assert lean(Before, monkeypatch, size=4) != before
    assert lean(Before, monkeypatch, size=3, rate=0.25) != before
