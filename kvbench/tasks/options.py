"""Checks of a task's options: one line that names task, option, value and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.errors import is_integer, nearest
from kvbench.tasks.base import TaskError


def whole(task: str, name: str, value: Any, low: int, high: int) -> int:
    """A whole number in [low, high], as it is.

    Raises:
        TaskError: it is none.
    """
    if not is_integer(value, low, high):
        raise TaskError(f"{task}: {name}={value!r} is not allowed; a whole number {low}..{high}")
    return int(value)


def several(task: str, name: str, value: Any) -> tuple[Any, ...]:
    """A list as a tuple, a single value as a tuple of one.

    Raises:
        TaskError: it is empty, or names a value twice.
    """
    if isinstance(value, str | int | float) or not isinstance(value, Sequence):
        return (value,)
    if not value:
        raise TaskError(f"{task}: {name} is empty; give at least one value")
    if len(set(value)) != len(value):
        raise TaskError(f"{task}: {name}={list(value)} names a value twice; each value once")
    return tuple(value)


def texts(value: Any) -> tuple[str, ...]:
    """None, one text or a list of them as a tuple of texts."""
    if value is None:
        return ()
    return (str(value),) if isinstance(value, str) else tuple(map(str, value))


def one_of(task: str, name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuse what is not one of `allowed`.

    Raises:
        TaskError: naming the nearest.
    """
    if value not in allowed:
        hint = nearest(str(value), allowed)
        raise TaskError(f"{task}: {name}={value!r} unknown{hint}; one of {', '.join(allowed)}")
