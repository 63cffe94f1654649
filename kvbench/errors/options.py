"""Checks options by their type hints; a refusal is one line with the option, its value, what is allowed.

An option is a field of a dataclass: a method, a task, a probe, a budget. Its hint says which values are
allowed, bounds included::

    rate: Share = 0.25
    kernel_size: Annotated[int, Ge(1)] = 5
    pooling: Literal["avgpool", "maxpool"] = "avgpool"

pydantic checks the values in its strict mode, in which "4" and true are no integers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from os import PathLike, fspath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen, Predicate
from pydantic import ConfigDict, TypeAdapter, ValidationError

from kvbench.errors import UserError

T = TypeVar("T")

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Odd = Annotated[int, Ge(1), Predicate(lambda value: value % 2 == 1), "an odd integer >= 1"]
Share = Annotated[float, Gt(0), Le(1)]
Fraction = Annotated[float, Ge(0), Le(1)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Text = Annotated[str, Predicate(lambda text: bool(text.strip())), "text that is not empty"]
Several = Annotated[Sequence[T], MinLen(1)]
"""A list of one or more values."""
Distinct = Annotated[Sequence[T], Predicate(lambda v: len(set(v)) == len(v) > 0), "each once"]
"""A list of one or more values, none of them twice."""


def check_options(instance: Any, prefix: str, error: type[UserError]) -> None:
    """Check every option of a dataclass's instance by its hint, and set it to the value of `fitted`.

    Args:
        prefix: what the message has before the option's name, e.g. ``budget.``.
        error: the class of the error.

    Raises:
        UserError: `error`, for the first option whose hint does not allow its value.
    """
    for name, hint in hints_of(type(instance)).items():  # type: ignore[arg-type]
        value = getattr(instance, name)
        try:
            fitting = fitted(hint, value)
        except ValueError:
            raise error(refusal(prefix + name, value, hint)) from None
        if fitting is not value:
            object.__setattr__(instance, name, fitting)


def fitted(hint: Any, value: Any) -> Any:
    """The value in the form that can be hashed, if its hint allows it: lists as tuples. Where the hint
    is a list, a single value becomes a tuple of one, and None an empty tuple.

    Raises:
        ValueError: the hint does not allow the value.
    """
    frozen = () if value is None and get_origin(hint) is Sequence else _frozen(value)
    try:
        _adapter(hint).validate_python(frozen)
    except ValidationError:
        if isinstance(frozen, tuple) or not _allows_list(hint):
            raise
        frozen = (frozen,)
        _adapter(hint).validate_python(frozen)
    return value if frozen == value and isinstance(value, Hashable) else frozen


def _allows_list(hint: Any) -> bool:
    """Whether a list is among the values that a hint allows."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _allows_list(parts[0])
    return origin in (Sequence, tuple) or (
        origin in (Union, UnionType) and any(map(_allows_list, parts))
    )


def fits(hint: Any, value: Any) -> bool:
    """Whether a hint allows a value."""
    try:
        fitted(hint, value)
    except ValueError:
        return False
    return True


def refusal(key: str, value: object, hint: Any) -> str:
    """One line for a value that is not allowed: the key, its value, what its hint allows."""
    shown = list(value) if isinstance(value, tuple) else value
    return f"{key} is {shown!r}; allowed: {allowed(hint)}"


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


def allowed(hint: Any, *, many: bool = False) -> str:
    """The values that a hint allows, in words, e.g. "an integer >= 1".

    Args:
        many: name several such values, e.g. "integers >= 1".
    """
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint][many]
    if origin is Annotated:
        return _annotated(parts[0], parts[1:], many)
    if origin is Literal:
        return " | ".join("null" if part is None else str(part) for part in parts)
    if origin in (Union, UnionType):
        *others, last = (allowed(part, many=many) for part in parts)
        return f"{', '.join(others)}{',' if last == 'null' else ''} or {last}"
    if origin is tuple and Ellipsis not in parts:
        return f"{'lists' if many else 'a list'} of {len(parts)}: {allowed(parts[0], many=True)}"
    if origin in (Sequence, list, tuple):
        return f"{'lists' if many else 'a list'} of {allowed(parts[0], many=True)}"
    if origin in (Mapping, dict):
        key, value = (allowed(part, many=True) for part in parts)
        return f"{'mappings' if many else 'a mapping'} from {key} to {value}"
    if isinstance(hint, type):
        return f"{'instances' if many else 'an instance'} of {hint.__name__}"
    return "anything"


_PLAIN: dict[Any, tuple[str, str]] = {
    Any: ("anything", "anything"),
    bool: ("true | false", "true | false"),
    int: ("an integer", "integers"),
    float: ("a finite number", "finite numbers"),
    str: ("text", "texts"),
    NoneType: ("null", "null"),
}


def _annotated(hint: Any, extras: Sequence[object], many: bool) -> str:
    """The values that an ``Annotated`` hint allows, in words.

    Args:
        hint: its first part.
        extras: its other parts: bounds, and text, which describes the values. Of a list, the text is
            added to the words of the list.
        many: see `allowed`.
    """
    texts = [extra for extra in extras if isinstance(extra, str)]
    if texts and get_origin(hint) is Sequence:
        return f"{allowed(hint, many=many)}, {texts[0]}"
    if texts:
        return texts[0]
    least = next((extra for extra in extras if isinstance(extra, Ge | Gt)), None)
    most = next((extra for extra in extras if isinstance(extra, Le | Lt)), None)
    low = least.ge if isinstance(least, Ge) else least.gt if least else None
    high = most.le if isinstance(most, Le) else most.lt if most else None
    if low is None or high is None:
        bound = "" if low is None else f" {'>=' if isinstance(least, Ge) else '>'} {low:g}"
        bound += "" if high is None else f" {'<=' if isinstance(most, Le) else '<'} {high:g}"
        return allowed(hint, many=many) + bound
    if hint is int:
        return f"{allowed(hint, many=many)} from {low} to {high}"
    ends = "[" if isinstance(least, Ge) else "(", "]" if isinstance(most, Le) else ")"
    return f"{'numbers' if many else 'a number'} in {ends[0]}{low:g}, {high:g}{ends[1]}"


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    """pydantic's strict check of a hint."""
    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return TypeAdapter(_instances(hint), config=config)


def _instances(hint: Any) -> Any:
    """The hint with two changes: an instance of a dataclass is checked for its type alone, since its own
    options were checked when it was made, and text must consist of characters that UTF-8 has."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[(_instances(parts[0]), *parts[1:])]
    if origin in (Union, UnionType):
        return Union[tuple(map(_instances, parts))]  # noqa: UP007
    if origin in (Sequence, list):
        return tuple.__class_getitem__((_instances(parts[0]), ...))
    if (
        hint is str
    ):  # the command line turns bytes that are not UTF-8 into halves of surrogate pairs
        return Annotated[str, Predicate(lambda text: text.encode(errors="ignore").decode() == text)]
    if isinstance(hint, type) and is_dataclass(hint):
        return Annotated[Any, Predicate(lambda value: isinstance(value, hint))]
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
