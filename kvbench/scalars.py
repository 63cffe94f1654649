"""What counts as an integer and as a number in a config: ``true`` is neither."""

from __future__ import annotations

import math


def is_integer(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether `value` is an integer in [least, most]."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> bool:
    """Whether `value` is a number that a float can hold: finite, and no integer beyond that."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
