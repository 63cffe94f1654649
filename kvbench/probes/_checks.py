"""Checks of a probe's options: one line that names the option, its value and what is allowed."""

from __future__ import annotations

from typing import Any

from kvbench.errors import is_integer
from kvbench.tasks.base import TaskError

MOST_REPEATS = 100_000
"""Repetitions, each of which is a record of its own."""
MOST_TOKENS = 10_000_000
"""Tokens or vectors of one layer."""
MOST_LAYERS = 10_000


def check_counts(
    probe: object, *options: str, least: int = 1, most: int = MOST_REPEATS, of: str = "task."
) -> None:
    """Refuse options that are no integers in [least, most].

    Args:
        of: what the option's name is told with.
    """
    for option in options:
        value = getattr(probe, option)
        if not is_integer(value, least, most):
            raise TaskError(
                f"{of}{option} is {value!r}; allowed: an integer from {least} to {most}"
            )


def check_list(probe: object, option: str, most: int = MOST_TOKENS, what: str = "integers") -> None:
    """Refuse an option that is no list of one or more different integers in [1, most].

    Args:
        what: what they are.
    """
    value: Any = getattr(probe, option)
    allowed = f"{what} from 1 to {most}, each once"
    if not isinstance(value, list | tuple) or not value:
        raise TaskError(f"task.{option} is {value!r}; allowed: {allowed}")
    for place, item in enumerate(value):
        if not is_integer(item, 1, most) or item in value[:place]:
            raise TaskError(f"task.{option} has {item!r}; allowed: {allowed}")
