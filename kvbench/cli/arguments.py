"""What a config asks of a constructor, held against the hints of its options: for the line that a user
reads where the constructor failed with words about Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pydoc import locate
from typing import Any

from kvbench.errors import nearest
from kvbench.errors.options import fitted, hints_of, refusal


def wrong_argument(node: object, key: str) -> str | None:
    """One line on the first value in a config, inner ``_target_`` nodes first, that the hints of what
    it is for do not allow, or on the first key that they do not have; None where all fit.

    Args:
        node: the config as plain values.
        key: what the command line calls it.
    """
    for name, value in _items(node):
        problem = wrong_argument(value, f"{key}.{name}")
        if problem is not None:
            return problem
    target = node.get("_target_") if isinstance(node, Mapping) else None
    hints = _hints(target) if isinstance(target, str) else {}
    for name, value in _items(node):
        if not hints or re.fullmatch(r"_\w+_", name):
            continue
        if name not in hints:
            hint = nearest(name, list(hints))
            return f"unknown key {name!r} of {key}{hint}; allowed: {', '.join(hints)}"
        if "_target_" in repr(value):
            continue  # made by itself, and checked above
        try:
            fitted(hints[name], value)
        except ValueError:
            return refusal(f"{key}.{name}", value, hints[name])
    return None


def _items(value: object) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(name), inner) for name, inner in value.items()]
    if isinstance(value, list | tuple):
        return [(str(place), inner) for place, inner in enumerate(value)]
    return []


def _hints(target: str) -> dict[str, Any]:
    try:
        return hints_of(locate(target))
    except Exception:  # noqa: BLE001 - any module may be named; that it cannot be imported is Hydra's line
        return {}
