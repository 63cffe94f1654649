"""Makes objects of composed configs. The class and the options are checked before anything is called."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from pydoc import ErrorDuringImport, locate
from typing import TYPE_CHECKING, Any, get_args

from kvbench.budget import KVError
from kvbench.errors import check_known, first_line
from kvbench.errors.options import checked, hints_of
from kvbench.run.source import source_of
from kvbench.tasks.base import Task

if TYPE_CHECKING:
    from kvbench.methods.base import Method


def constructed(node: object, key: str, *kinds: type) -> Any:
    """Make the object whose class a config names in ``_target_``; its other keys are the options.

    Before anything of the class is called, it is checked that the class is of an expected kind, has the
    options and allows their values. Configs inside the config are made first, of a class that the hint
    of their option names.

    Args:
        node: the config as plain values.
        key: the config's key on the command line, e.g. ``methods.snapkv``.
        kinds: classes of which the named class must be a subclass. `Plan` is a protocol: any class that
            has its methods is one.
    """
    allowed = " or ".join(kind.__name__ for kind in kinds) or "nothing that is made of a _target_"
    class_name = node.get("_target_") if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping) or not isinstance(class_name, str):
        raise KVError(f"{key} is {node!r:.200}; allowed: a mapping with a _target_: {allowed}")
    target: Any = _class_named(class_name, key, allowed, kinds)
    hints = hints_of(target)
    options: dict[str, Any] = {}
    for name, value in node.items():
        if name == "_target_":
            continue
        if hints:
            check_known(f"unknown key {name!r} of {key}", name, list(hints), KVError)
        options[name] = _with_inner(value, f"{key}.{name}", *_classes_in(hints.get(name)))
        if hints:
            checked(f"{key}.{name}", options[name], hints[name], KVError)
    try:
        return target(**options)
    except TypeError as error:
        raise KVError(f"{key} cannot be made: {first_line(error)}") from error


def _class_named(class_name: str, key: str, allowed: str, kinds: tuple[type, ...]) -> type:
    """The class of this name, e.g. ``kvbench.methods.snapkv.SnapKV``."""
    problem = f"{key}._target_ is {class_name!r}"
    # Importing some modules of Python's own library, e.g. this, has effects.
    if class_name.partition(".")[0] in sys.stdlib_module_names:
        raise KVError(f"{problem}; allowed: a {allowed}")
    try:
        target: Any = locate(class_name)
    except ErrorDuringImport as error:
        raise KVError(f"{problem}: {first_line(error)}") from error
    if not isinstance(target, type) or not issubclass(target, kinds):
        missing = ", which cannot be found (is its folder on PYTHONPATH?)" if target is None else ""
        raise KVError(f"{problem}{missing}; allowed: a {allowed}")
    if not target.__module__.startswith("kvbench."):
        source_of(target)  # as it was imported: until the first example the file may be edited
    return target


def _with_inner(value: Any, key: str, *kinds: type) -> Any:
    """The value of an option, with objects in place of the configs in it."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            return constructed(value, key, *kinds)
        return {name: _with_inner(inner, f"{key}.{name}", *kinds) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_inner(inner, f"{key}.{i}", *kinds) for i, inner in enumerate(value)]
    return value


def _classes_in(hint: Any) -> list[type]:
    """The classes with options that a hint names."""
    if isinstance(hint, type) and not get_args(hint):
        return [hint] if is_dataclass(hint) or issubclass(hint, Task) else []
    return [inner for part in get_args(hint) for inner in _classes_in(part)]


def methods_of(nodes: Mapping[str, Any]) -> dict[str, Method]:
    """The methods of a config by their labels. This imports torch, but neither transformers nor another
    library of models."""
    from kvbench.methods.base import Method

    methods: dict[str, Method] = {}
    for label, node in nodes.items():
        methods[label] = constructed(node, f"methods.{label}", Method)
        methods[label].quantization()  # refuses options that its scheme does not allow
    return methods
