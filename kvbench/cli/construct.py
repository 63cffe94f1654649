"""Objects from composed configs, their classes and options checked before anything is called.

Imports no torch: what can be refused without it is refused at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from pydoc import ErrorDuringImport, locate
from typing import TYPE_CHECKING, Any, get_args

from kvbench.budget import Budget, KVError
from kvbench.cli.declared import declared_options
from kvbench.errors import first_line, nearest
from kvbench.errors.options import fits, hints_of, refusal
from kvbench.tasks.base import Task

if TYPE_CHECKING:
    from kvbench.methods.base import Method

WITHOUT_TORCH: Mapping[str, type] = {"kvbench.kv.Budget": Budget}
"""Classes by the names that configs have for them, where finding these would import torch."""


def constructed(node: object, key: str, *kinds: type) -> Any:
    """The object of which a config names the class in ``_target_`` and has the options.

    The class is found to be of an expected kind, and its options to be there and to allow their
    values, before anything of it is called. Configs inside the config are made first, of a class that
    the hint of their option names.

    Args:
        node: the config as plain values.
        key: what the command line calls it.
        kinds: what the class must be derived from; `Plan`: a class with its methods.

    Raises:
        KVError: one line that names the key, its value and what is allowed.
    """
    named = node.get("_target_") if isinstance(node, Mapping) else None
    words = " or ".join(kind.__name__ for kind in kinds) or "nothing that is made of a _target_"
    if not isinstance(node, Mapping) or not isinstance(named, str):
        raise KVError(f"{key} is {node!r:.200}; allowed: a mapping with a _target_: {words}")
    if named.partition(".")[0] in sys.stdlib_module_names:  # importing some of them does things
        raise KVError(f"{key}._target_ is {named!r}; allowed: a {words}")
    try:
        target: Any = WITHOUT_TORCH.get(named) or locate(named)
    except ErrorDuringImport as error:
        raise KVError(f"{key}._target_ is {named!r}: {first_line(error)}") from error
    if not isinstance(target, type) or not issubclass(target, kinds):
        missing = ", which cannot be found" if target is None else ""
        raise KVError(f"{key}._target_ is {named!r}{missing}; allowed: a {words}")
    hints, options = hints_of(target), dict[str, Any]()  # type: ignore[arg-type]
    for name, value in ((name, node[name]) for name in node if name != "_target_"):
        inner = _with_inner(value, f"{key}.{name}", *_classes_in(hints.get(name)))
        _check_option(key, name, value, inner, hints)
        options[name] = inner
    try:
        return target(**options)
    except TypeError as error:
        raise KVError(f"{key} cannot be made: {first_line(error)}") from error


def check_declared(node: Any, key: str) -> None:
    """Refuse what is wrong in a config that the source of its class tells without an import; what it
    does not tell, e.g. a class that is not kvbench's, is left to `constructed`.

    Raises:
        KVError: one line, that of `constructed`.
    """
    named = node.get("_target_") if isinstance(node, Mapping) else None
    hints = declared_options(named) if isinstance(named, str) else None
    if not hints:
        return
    for name, value in node.items():
        if name != "_target_":
            is_config = isinstance(value, Mapping) and "_target_" in value
            _check_option(key, name, value, value, {name: Any} if is_config else hints)


def _check_option(key: str, name: str, value: Any, made: Any, hints: Mapping[str, Any]) -> None:
    """Refuse an option that a class does not have, or whose hint does not allow the value.

    Args:
        key: what the command line calls the object. value: as the config has it. made: the value with
            objects in place of the configs in it. hints: of all options; none where they are unknown.
    """
    if not hints:
        return
    if name not in hints:
        meant = f"{nearest(name, list(hints))}; allowed: {', '.join(hints)}"
        raise KVError(f"unknown key {name!r} of {key}{meant}")
    if not fits(hints[name], made):
        several = ",".join(map(str, value)) if isinstance(value, list) else ""
        several = several and f"; for a job each: -m {key}.{name}={several}"
        raise KVError(refusal(f"{key}.{name}", value, hints[name]) + several)


def _with_inner(value: Any, key: str, *kinds: type) -> Any:
    """The value of an option, with objects in place of the configs in it."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return constructed(value, key, *kinds)
        return {name: _with_inner(inner, f"{key}.{name}", *kinds) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_inner(inner, f"{key}.{at}", *kinds) for at, inner in enumerate(value)]
    return value


def _classes_in(hint: Any) -> list[type]:
    """The classes with options that a hint names."""
    if isinstance(hint, type) and not get_args(hint):
        return [hint] if is_dataclass(hint) or issubclass(hint, Task) else []
    return [found for part in get_args(hint) for found in _classes_in(part)]


def methods_of(nodes: Mapping[str, Any]) -> dict[str, Method]:
    """The methods of a config by their labels. Imports torch, and no library that knows models.

    Raises:
        KVError: see `constructed` and `describe_itself`.
    """
    from kvbench.methods.base import Method, describe_itself

    methods: dict[str, Method] = {}
    for label, node in nodes.items():
        methods[label] = constructed(node, f"methods.{label}", Method)
        describe_itself(label, methods[label])
    return methods
