"""Checks options by their type hints, with pydantic in its strict mode, in which "4" and true are no
integers. An option is a field of a dataclass: a method, a task, a probe, a budget. Its hint says which
values are allowed, bounds included::

    rate: Share = 0.25
    kernel_size: Annotated[int, Ge(1)] = 5
    pooling: Literal["avgpool", "maxpool"] = "avgpool"
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from os import PathLike, fspath
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from kvbench.errors import UserError

T = TypeVar("T")
NO_LIST = {"is_instance_of", "sequence_str", "tuple_type"}
"""pydantic's types of error for a value that is no list where a hint wants one."""


def only(holds: Callable[[Any], object], words: str) -> AfterValidator:
    """A part of an ``Annotated`` hint: values for which `holds` is true, which are `words`."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(words)
        return value

    return AfterValidator(check)


Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Odd = Annotated[int, Ge(1), only(lambda value: value % 2 == 1, "an odd integer")]
Share = Annotated[float, Gt(0), Le(1)]
Fraction = Annotated[float, Ge(0), Le(1)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Text = Annotated[str, only(str.strip, "text that is not empty")]
Several = Annotated[Sequence[T], MinLen(1)]
Distinct = Annotated[
    Sequence[T], MinLen(1), only(lambda v: len(set(v)) == len(v), "each value once")
]


def check_options(instance: Any, prefix: str, error: type[UserError]) -> None:
    """Check every option of a dataclass's instance by its hint, and set it to the value of `checked`.

    Args:
        prefix: what the message has before the option's name, e.g. ``budget.``.

    Raises:
        UserError: `error`, for the first option whose hint does not allow its value.
    """
    for name, hint in hints_of(type(instance)).items():  # type: ignore[arg-type]
        value = getattr(instance, name)
        fitting = checked(prefix + name, value, hint, error)
        if fitting is not value:
            object.__setattr__(instance, name, fitting)


def checked(key: str, value: Any, hint: Any, error: type[UserError] = UserError) -> Any:
    """The value as `fitted` has it; where its hint does not allow it, an error of one line: the key, its
    value and what the hint allows."""
    try:
        return fitted(hint, value)
    except ValidationError:
        shown = list(value) if isinstance(value, tuple) else value
        raise error(f"{key} is {shown!r}; allowed: {allowed(hint, value)}") from None


def fitted(hint: Any, value: Any) -> Any:
    """The value in a form that can be hashed, if its hint allows it: lists as tuples. Where the hint is
    a list, a single value becomes a tuple of one, and None an empty tuple.

    Raises:
        ValidationError: the hint does not allow the value.
    """
    frozen = _frozen(value)
    try:
        _adapter(hint).validate_python(frozen)
    except ValidationError as error:
        types = {problem["type"] for problem in error.errors()}
        if isinstance(frozen, tuple) or not types & NO_LIST:
            raise
        frozen = () if value is None else (frozen,)
        try:
            _adapter(hint).validate_python(frozen)
        except ValidationError:
            if types - NO_LIST:  # a value that may be single: what is wrong with it says more
                raise error from None
            raise
    return value if frozen == value and isinstance(value, Hashable) else frozen


def allowed(hint: Any, value: Any) -> str:
    """The values that a hint allows in place of this one, in pydantic's words; empty if it allows it."""
    try:
        fitted(hint, value)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        problems = [p for p in problems if p["type"] not in NO_LIST] or problems
        # of a list the item; text in a location names one of several hints
        places = [[part for part in p["loc"] if isinstance(part, int)] for p in problems]
        place = max(places, key=len)
        texts = [p["msg"] for p, where in zip(problems, places, strict=True) if where == place]
        words = (t.removeprefix("Input should be ").removeprefix("Value error, ") for t in texts)
        return " or ".join(dict.fromkeys(words)).replace("a valid dictionary", "{option: value}")
    return ""


@cache
def hints_of(dataclass: Any) -> dict[str, Any]:
    """The hints of a dataclass's options, by name. Empty for any other object, and where a hint names a
    class that is imported for type checkers only and so cannot be read at run time."""
    if not is_dataclass(dataclass):
        return {}
    try:
        hints = get_type_hints(dataclass, include_extras=True)
    except NameError:
        return {}
    return {field.name: hints[field.name] for field in fields(dataclass) if field.init}


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return TypeAdapter(_instances(hint), config=config)


def _instances(hint: Any) -> Any:
    """The hint with an instance of a dataclass checked for its type alone: its own options were checked
    when it was made."""
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(map(_instances, get_args(hint)))]  # noqa: UP007
    if isinstance(hint, type) and is_dataclass(hint):
        return Annotated[
            Any, only(lambda v: isinstance(v, hint), f"an instance of {hint.__name__}")
        ]
    return hint


def _frozen(value: Any) -> Any:
    """Lists as tuples, paths as text, numbers of other libraries (numpy) as Python's."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, Real) and not isinstance(value, int | float):
        return int(value) if isinstance(value, Integral) else float(value)
    return value
