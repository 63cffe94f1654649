"""Options, fields and their values as short texts, and the order in which values are shown."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_LONGEST = 80
"""Most characters of a name."""


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested config as one mapping, from dotted keys to values as text, without names."""
    texts: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            texts |= flat(value, f"{prefix}{key}.")
        elif key != "name":
            texts[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return texts


def words(name: str) -> str:
    return name.replace("_", " ")


def short_name(text: str) -> str:
    """The text, or its beginning and a digest of the whole where it is too long for a label."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 9]}…{digest(text)}"


def digest(text: str) -> str:
    """Eight hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]


def natural_order(value: object, before: str = "") -> tuple[str, int, float, str]:
    """A sort key: by the text `before`, then numbers by size, then texts that begin with a number, by
    that number, then other texts."""
    if isinstance(value, int | float | np.number):
        return before, 0, float(value), ""
    leading = re.match(r"\d+(\.\d+)?", str(value))
    return before, 1 if leading else 2, float(leading[0]) if leading else 0.0, str(value)


def as_text(value: object) -> str:
    """The value of a record field as tables show it: 200.0 is "200"."""
    whole = isinstance(value, float) and value.is_integer()
    return short_name(str(int(value) if whole else value))  # type: ignore[call-overload]
