"""Compression methods, and what a method of your own needs. Every file of this folder is one method,
except ``base`` and files that begin with an underscore."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from kvbench.errors import check_known
from kvbench.kernels.decode import Eviction
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries, keep_all
from kvbench.methods._draws import place, places, uniforms
from kvbench.methods._select import (
    best_and_recent,
    group_mean,
    keep_marked,
    positions_between,
    top_positions,
    with_sink_and_window,
)
from kvbench.methods._wrapped import ScoreWrapper, Wrapper
from kvbench.methods.base import (
    Held,
    Method,
    Replay,
    Schedule,
    SecondPass,
    TokenScoringMethod,
)

__all__ = [
    "Budget",
    "CompressedKV",
    "Eviction",
    "Held",
    "KVError",
    "LayerKV",
    "Method",
    "Replay",
    "Schedule",
    "ScoreWrapper",
    "SecondPass",
    "TokenScoringMethod",
    "Wrapper",
    "available_methods",
    "best_and_recent",
    "build_method",
    "gather_entries",
    "group_mean",
    "keep_all",
    "keep_marked",
    "method_class",
    "option_names",
    "place",
    "places",
    "positions_between",
    "top_positions",
    "uniforms",
    "with_sink_and_window",
]


def available_methods() -> list[str]:
    """The names of the methods, sorted: those of their files."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in names if name != "base" and not name.startswith("_"))


def method_class(name: str) -> type[Method]:
    """The `Method` subclass defined in ``kvbench/methods/<name>.py``.

    Raises:
        KVError: an unknown name, with the nearest known one.
    """
    known = available_methods()
    if name not in known:
        presets = [
            f"{method}_{preset}" for method in known for preset in method_class(method).presets
        ]
        check_known(f"unknown method {name!r}", name, sorted([*known, *presets]), KVError)
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
        name: the name of a method, or as on the command line a method and its preset
            (``balancekv_released``).
        preset: a named set of options of that method; explicit `options` override it.
        options: fields of the method's dataclass.

    Raises:
        KVError: an unknown name, preset or option, with the nearest known one.
    """
    if preset is None:
        name, preset = _split_preset(name)
    method = method_class(name)
    preset_options: Mapping[str, Any] = {}
    if preset is not None:
        known_presets = sorted(method.presets)
        check_known(f"method {name!r} has no preset {preset!r}", preset, known_presets, KVError)
        preset_options = method.presets[preset]
    known_options = [field.name for field in dataclasses.fields(method)]
    for option in options:
        check_known(f"method {name!r} has no option {option!r}", option, known_options, KVError)
    return method(**{**preset_options, **options})


def option_names(name: str) -> list[str]:
    """The names of a method's options; `name` is that of a method or of a method and its preset.

    Raises:
        KVError: an unknown name, with the nearest known one.
    """
    method, _ = _split_preset(name)
    return [field.name for field in dataclasses.fields(method_class(method))]


def _split_preset(name: str) -> tuple[str, str | None]:
    """Split ``balancekv_released`` into method and preset. A name without a preset has None."""
    methods = available_methods()
    if name in methods:
        return name, None
    for method in methods:
        for preset in method_class(method).presets:
            if name == f"{method}_{preset}":
                return method, preset
    return name, None
