"""Values of the wrong type in what a config makes, found by the type hints of its class.

A constructor checks what its hints cannot say, e.g. ranges; a wrong type that it does not notice would
fail deep in a run, or in the constructor itself with words about Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pydoc import locate
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvbench.errors import is_integer, is_number, nearest

FROM_TARGET = object()
"""Stands for what an inner ``_target_`` makes, of whatever class."""


@dataclass(frozen=True)
class Kind:
    """What a type hint allows: a test, and words for one such value and for several."""

    fits: Callable[[Any], bool]
    one: str
    many: str


def wrong_field(made: object, key: str) -> str | None:
    """One line on the first value in a dataclass, or in what it holds, that its hint does not allow.

    Args:
        key: what the config calls `made`.
    """
    for name, value, hint in _values_of(made):
        inner = f"{key}.{name}"
        kind = kind_of(hint)
        problem = wrong_field(value, inner) if kind.fits(value) else _line(inner, value, kind)
        if problem is not None:
            return problem
    return None


def wrong_argument(node: object, key: str) -> str | None:
    """One line on the first value in a config, inner ``_target_`` nodes first, that the hints of what
    it is for do not allow. A single value may stand for a list of one, as constructors take it.

    Args:
        node: the config as plain values.
    """
    for name, value in _items(node):
        problem = wrong_argument(value, f"{key}.{name}")
        if problem is not None:
            return problem
    target = node.get("_target_") if isinstance(node, Mapping) else None
    hints = _hints_of(target) if isinstance(target, str) else {}
    for name, value in _items(node):
        if hints and name not in hints and not re.fullmatch(r"_\w+_", name):
            hint = nearest(name, list(hints))
            return f"unknown key {name!r} of {key}{hint}; allowed: {', '.join(hints)}"
        kind = kind_of(hints.get(name, Any))
        given = _as_made(value)
        if not (kind.fits(given) or kind.fits([given])):
            return _line(f"{key}.{name}", value, kind)
    return None


def kind_of(hint: Any) -> Kind:
    """The test and the words for a type hint; of hints that no config needs, everything fits."""
    origin, inner = get_origin(hint), [kind_of(part) for part in get_args(hint)]
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin in (Union, UnionType):
        return Kind(
            lambda v: any(kind.fits(v) for kind in inner),
            _either([kind.one for kind in inner]),
            _either([kind.many for kind in inner]),
        )
    if origin in (Sequence, list):
        (each,) = inner
        return Kind(
            lambda v: isinstance(v, list | tuple) and all(map(each.fits, v)),
            f"a list of {each.many}",
            f"lists of {each.many}",
        )
    if origin in (Mapping, dict):
        key, value = inner
        return Kind(
            lambda v: isinstance(v, Mapping) and all(key.fits(k) and value.fits(v[k]) for k in v),
            f"a mapping from {key.many} to {value.many}",
            f"mappings from {key.many} to {value.many}",
        )
    if isinstance(hint, type):
        return Kind(
            lambda v: v is FROM_TARGET or isinstance(v, hint),
            f"a {hint.__name__}",
            f"{hint.__name__} objects",
        )
    return _ANYTHING


def _line(key: str, value: object, kind: Kind) -> str:
    shown = list(value) if isinstance(value, tuple) else value
    return f"{key} is {shown!r}; allowed: {kind.one}"


def _either(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}"


def _values_of(made: object) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and hint of the options of a dataclass, or of the items of a list or mapping."""
    if is_dataclass(made) and not isinstance(made, type):
        for name, hint in _hints(type(made)).items():
            yield name, getattr(made, name), hint
    else:
        for name, value in _items(made):
            yield name, value, Any


def _items(value: object) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(name), inner) for name, inner in value.items()]
    if isinstance(value, list | tuple):
        return [(str(place), inner) for place, inner in enumerate(value)]
    return []


def _as_made(value: Any) -> Any:
    """The value with `FROM_TARGET` in place of every ``_target_`` node in it."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return FROM_TARGET
        return {name: _as_made(inner) for name, inner in value.items()}
    return [_as_made(inner) for inner in value] if isinstance(value, list) else value


def _hints_of(target: str) -> dict[str, Any]:
    try:
        return _hints(locate(target))
    except Exception:  # noqa: BLE001 - any module may be named; that it cannot be imported is Hydra's line
        return {}


def _hints(made_by: Any) -> dict[str, Any]:
    """Hints of a dataclass's options; none where they name what is imported for type checkers only."""
    if not is_dataclass(made_by):
        return {}
    try:
        hints = get_type_hints(made_by)
    except NameError:
        return {}
    return {field.name: hints[field.name] for field in fields(made_by) if field.init}


def _is_text(value: Any) -> bool:
    """Text that can be written: the command line can bring halves of characters."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


_ANYTHING = Kind(lambda v: True, "anything", "anything")
_PLAIN: dict[Any, Kind] = {
    Any: _ANYTHING,
    bool: Kind(lambda v: isinstance(v, bool), "true or false", "true or false"),
    int: Kind(is_integer, "an integer", "integers"),
    float: Kind(is_number, "a finite number", "finite numbers"),
    str: Kind(_is_text, "text", "texts"),
    NoneType: Kind(lambda v: v is None, "null", "null"),
}
