"""Compression methods, one file each, found by scanning this folder."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

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
        check_known(f"unknown method {name!r}", name, sorted([*known, *variants()]))
    module = importlib.import_module(f"{__name__}.{name}")
    classes = [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, Method) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise KVError(f"{module.__name__} defines {len(classes)} Method classes; allowed: one")
    return classes[0]


def variants() -> list[str]:
    """Names of conf/method that are a method of this folder with options of their own, sorted."""
    return sorted({path.stem for path in _folder().glob("*.yaml")} - set(available_methods()))


def _folder() -> Path:
    return Path(str(files("kvbench"))) / "conf" / "method"


def _options_of(variant: str) -> dict[str, Any]:
    """What a file composes to: the options that it inherits, and its own over them."""
    own = yaml.safe_load((_folder() / f"{variant}.yaml").read_text(encoding="utf-8"))
    options: dict[str, Any] = {}
    for parent in own.pop("defaults", ()):
        options = _merged(options, _options_of(parent.partition("@")[0]))
    return _merged(options, own)


def _merged(options: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: value for key, value in over.items() if isinstance(options.get(key), dict)}
    deeper = {key: _merged(options[key], value) for key, value in both.items() if value}
    return {**options, **over, **deeper}


def build_method(name: str, preset: str | None = None, **options: Any) -> Method:
    """Make a method by name: ``build_method("balancekv", preset="released", gamma=2.0)``.

    Args:
        name: a file of this folder, or a variant of one as on the command line (``balancekv_released``).
        preset: a named set of options of that method; explicit `options` override it.
        options: fields of the method's dataclass.

    Raises:
        KVError: unknown name, preset or option, with the nearest known one.
    """
    if name not in available_methods() and name in variants():
        options = {**_options_of(name), **options}
        name = options.pop("_target_").split(".")[-2]
    cls = method_class(name)
    if preset is not None:
        check_known(f"method {name!r} has no preset {preset!r}", preset, sorted(cls.presets))
    fields = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        check_known(f"method {name!r} has no option {option!r}", option, fields)
    return cls(**{**(cls.presets[preset] if preset else {}), **options})
