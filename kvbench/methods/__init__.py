"""Compression methods, one file each, found by scanning this folder."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from typing import Any

from kvbench.kv import KVError
from kvbench.methods.base import Held, Method, check_known

__all__ = ["Held", "Method", "available_methods", "build_method", "method_class"]


def available_methods() -> list[str]:
    """Names of the methods in this folder, sorted; one file is one method."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in names if name != "base" and not name.startswith("_"))


def method_class(name: str) -> type[Method]:
    """The `Method` subclass defined in ``kvbench/methods/<name>.py``.

    Raises:
        KVError: unknown name, with the nearest known one.
    """
    known = available_methods()
    if name not in known:
        presets = [
            f"{method}_{preset}" for method in known for preset in method_class(method).presets
        ]
        check_known(f"unknown method {name!r}", name, sorted([*known, *presets]))
    module = importlib.import_module(f"{__name__}.{name}")
    classes = [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, Method) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise KVError(f"{module.__name__} defines {len(classes)} Method classes; allowed: one")
    return classes[0]


def build_method(name: str, preset: str | None = None, **options: Any) -> Method:
    """Make a method by name: ``build_method("balancekv", preset="released", gamma=2.0)``.

    Args:
        name: a file of this folder, or with a preset as on the command line (``balancekv_released``).
        preset: a named set of options of that method; explicit `options` override it.
        options: fields of the method's dataclass.

    Raises:
        KVError: unknown name, preset or option, with the nearest known one.
    """
    known = available_methods()
    if name not in known and preset is None:
        split = (n for n in known if name.removeprefix(f"{n}_") in method_class(n).presets)
        if method := next(split, None):
            name, preset = method, name.removeprefix(f"{method}_")
    cls = method_class(name)
    if preset is not None:
        check_known(f"method {name!r} has no preset {preset!r}", preset, sorted(cls.presets))
    fields = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        check_known(f"method {name!r} has no option {option!r}", option, fields)
    return cls(**{**(cls.presets[preset] if preset else {}), **options})
