"""Reads the options that a class of kvbench declares from its source, without importing it.

Importing a method imports torch, which takes seconds; with the hints in its source, a wrong option is
refused before that. A hint with a name that only an import could resolve is `Any` here; such an option
is checked when the object is made.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kvbench

LIGHT = ("typing", "annotated_types", "collections.abc", "kvbench.errors.options")
"""Modules that are imported to resolve names in hints; none of them imports anything large."""


class Module:
    """The source of a module of kvbench.

    Attributes:
        classes: the classes that the module defines, by name.
        places: the module and the name there of every name that the module imports or a class defines.
    """

    def __init__(self, name: str, source: str) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self.places: dict[str, tuple[str, str]] = {}
        self._aliases: dict[str, ast.expr] = {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
                self.places[node.name] = name, node.name
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.places[alias.asname or alias.name] = str(node.module), alias.name
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._aliases[node.targets[0].id] = node.value

    def __getitem__(self, name: str) -> Any:
        """The object that a name in a hint stands for.

        Raises:
            KeyError: only an import could tell.
        """
        if name in self._aliases:  # as Layers = Sequence[Whole]
            return self.hint(self._aliases[name])
        module, original = self.places.get(name, ("", name))
        if module in LIGHT:
            return getattr(importlib.import_module(module), original)
        imported = source_of(module)
        if imported is None or original in imported.classes:
            return vars(builtins)[name]
        return imported[original]

    def hint(self, expression: ast.expr) -> Any:
        """The hint that an expression stands for; Any where an import would be needed to resolve it."""
        try:
            return self._value(expression)
        except Exception:  # noqa: BLE001 - whatever the expression is
            return Any

    def _value(self, node: ast.expr) -> Any:
        """The value of an expression in one of the forms that hints have: a name, a subscript, a union,
        or a call of a function of `LIGHT`, e.g. ``Ge(1)``.

        Raises:
            ValueError: an expression of another kind.
            KeyError: see `__getitem__`.
        """
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self[name]
            case ast.Tuple(elts=parts):
                return tuple(self._value(part) for part in parts)
            case ast.Subscript(value=origin, slice=part):
                return self._value(origin)[self._value(part)]
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._value(left) | self._value(right)
            case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]):
                return self[name](*(self._value(part) for part in parts))
        raise ValueError(ast.unparse(node))


@cache
def source_of(module: str) -> Module | None:
    """The source of a module of kvbench; None where kvbench has no file of this name."""
    path = Path(kvbench.__file__).parents[1] / f"{module.replace('.', '/')}.py"
    if not module.startswith("kvbench.") or not path.is_file():
        return None
    return Module(module, path.read_text(encoding="utf-8"))


@cache
def declared_options(target: str) -> Mapping[str, Any] | None:
    """The hints of a dataclass's options, inherited ones first.

    Args:
        target: module and class, as ``_target_`` names them, e.g. ``kvbench.methods.snapkv.SnapKV``.

    Returns:
        Hints by option; None where the class, or one that it derives from, is not in kvbench's source.
    """
    module, _, name = target.rpartition(".")
    source = source_of(module)
    if source is None or name not in source.classes:
        return None
    hints: dict[str, Any] = {}
    for parent in source.classes[name].bases:
        place = ".".join(source.places.get(ast.unparse(parent), ()))
        inherited = {} if place == "abc.ABC" else declared_options(place)
        if inherited is None:
            return None
        hints |= inherited
    for part in source.classes[name].body:
        if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
            continue
        is_class_variable = ast.unparse(part.annotation).startswith("ClassVar")
        is_set_later = part.value is not None and "init=False" in ast.unparse(part.value)
        if not is_class_variable and not is_set_later:
            hints[part.target.id] = source.hint(part.annotation)
    return hints
