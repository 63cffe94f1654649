"""Checks of a method's options: one line that names the option, its value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

from kvbench.errors import is_integer, is_number
from kvbench.kv import KVError


def _refuse(method: object, option: str, allowed: str) -> KVError:
    name = type(method).__module__.rpartition(".")[2]
    return KVError(f"{name}.{option} is {getattr(method, option)!r}; allowed: {allowed}")


def check_choice(method: object, option: str, *allowed: str) -> None:
    """Refuse a value that is not one of `allowed`."""
    if getattr(method, option) not in allowed:
        raise _refuse(method, option, " | ".join(allowed))


def check_flag(method: object, *options: str) -> None:
    """Refuse options that are not true or false."""
    for option in options:
        if not isinstance(getattr(method, option), bool):
            raise _refuse(method, option, "true | false")


def check_integer(
    method: object, option: str, least: int, *, odd: bool = False, none: str | None = None
) -> None:
    """Refuse what is not an integer >= `least`.

    Args:
        odd: it must be odd as well.
        none: what None stands for, where None is allowed.
    """
    value: Any = getattr(method, option)
    if none is not None and value is None:
        return
    if not is_integer(value, least) or (odd and value % 2 == 0):
        kind = "an odd integer" if odd else "an integer"
        raise _refuse(method, option, f"{kind} >= {least}" + (f", or null: {none}" if none else ""))


def check_number(
    method: object, option: str, least: float, most: float = math.inf, *, above: bool = False
) -> None:
    """Refuse what is not a finite number in [least, most], or (least, most] with `above`."""
    value: Any = getattr(method, option)
    if is_number(value) and least <= value <= most and not (above and value == least):
        return
    if most < math.inf:
        raise _refuse(method, option, f"a number in {'(' if above else '['}{least:g}, {most:g}]")
    if least == -math.inf:
        raise _refuse(method, option, "a finite number")
    raise _refuse(method, option, f"a finite number {'>' if above else '>='} {least:g}")


def freeze_sequence(method: object, option: str) -> None:
    """Make a list of numbers (as YAML gives it) a tuple, so that the method can be hashed."""
    value = getattr(method, option)
    if not isinstance(value, int | float | str):
        object.__setattr__(method, option, tuple(value))


def check_integers(method: object, option: str, least: int) -> None:
    """Refuse what is neither an integer >= `least` nor a non-empty sequence of such."""
    value: Any = getattr(method, option)
    each = value if isinstance(value, tuple) else (value,)
    if not each or not all(is_integer(item, least) for item in each):
        raise _refuse(method, option, f"an integer >= {least}, or one per halving")


def check_numbers(method: object, option: str, least: float) -> None:
    """Refuse what is neither a finite number >= `least` nor a non-empty sequence of such."""
    value: Any = getattr(method, option)
    each = value if isinstance(value, tuple) else (value,)
    if not each or not all(is_number(item) and item >= least for item in each):
        raise _refuse(method, option, f"a finite number >= {least:g}, or one per halving")
