"""Options, fields and their values as short texts, and the order in which values are shown."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

NOT_IN_LABELS = frozenset(
    {
        "command",
        "device",
        "dry_run",
        "experiment",
        "hydra",
        "launcher",
        "limit",
        "lock_timeout",
        "logger",
        "name",
        "results_dir",
        "seed",
        "shard",
        "shards",
        "verbose",
    }
)
"""Config keys that say how a run was made rather than what was compared."""
_LONGEST, _VALUE = 80, 40
"""Most characters of a name, and of an option's value in a label."""


def shortest(values: Sequence[str | None]) -> dict[str | None, str]:
    """A short text for each of an option's values, by value: of a path its last part, of a long text its
    beginning. Where that would give two values one text, each keeps its whole text, or a digest of it.
    """
    short: dict[str | None, str] = {}
    for value in values:
        text = "unset" if value is None else value
        parts = [json.loads(text)] if text[:1] == '"' else re.findall(r'"([^"]*)"', text) or [text]
        short[value] = " ".join(part.rstrip("/").rsplit("/", 1)[-1] for part in parts)[:_VALUE]
    if len(set(short.values())) == len(short):
        return short
    return {value: short_name("unset" if value is None else value, _VALUE) for value in values}


def flat(
    config: Mapping[str, Any], prefix: str = "", without: Collection[str] = NOT_IN_LABELS
) -> dict[str, str]:
    """A nested config as one mapping, from dotted keys to values as text.

    Args:
        without: keys that are left out at any depth, by default those that belong in no label.
    """
    texts: dict[str, str] = {}
    for key, value in config.items():
        if key in without:
            continue
        if isinstance(value, Mapping):
            texts |= flat(value, f"{prefix}{key}.", without)
        else:
            texts[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return texts


def words(name: str) -> str:
    """A field's name in words."""
    return name.replace("_", " ")


def short_name(text: str, longest: int = _LONGEST) -> str:
    """The text, or its beginning and a digest of the whole where it is too long for a label."""
    return text if len(text) <= longest else f"{text[: longest - 9]}…{digest(text)}"


def digest(text: str) -> str:
    """Eight hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]


def natural_order(value: object, before: str = "") -> tuple[str, int, float, str]:
    """A sort key: numbers first, by size, then texts that begin with a number, by that number, then
    other texts.

    Args:
        before: a text that comes first in the key, so that values are sorted by it before all else.
    """
    if isinstance(value, int | float | np.number):
        return before, 0, float(value), ""
    leading = re.match(r"\d+(\.\d+)?", str(value))
    return before, 1 if leading else 2, float(leading[0]) if leading else 0.0, str(value)


def as_text(value: object) -> str:
    """The value of a record field as tables show it: 200.0 is "200"."""
    whole = isinstance(value, float) and value.is_integer()
    return short_name(str(int(value) if whole else value))  # type: ignore[call-overload]
