"""The options that a class of kvbench declares, read from its source.

Importing a method imports torch, which takes seconds. An option's hint stands in the source of its
class, so that a wrong option can be refused without the import. A hint that names something which only
an import could give is `Any` here; it is checked when the object is made.
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
"""Modules of which hints take names, and that are imported for it: they import nothing large."""


class Module:
    """The source of a module of kvbench.

    Attributes:
        classes: what it defines, by name. places: module and name of what it imports, by the name here.
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
        """What a name of a hint stands for. Raises a KeyError where only an import could tell."""
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
        """The hint that an expression stands for; Any where an import would be needed to tell."""
        try:
            return self._value(expression)
        except Exception:  # noqa: BLE001 - whatever the expression is
            return Any

    def _value(self, node: ast.expr) -> Any:
        """The value of the few kinds of expressions that hints are written with; nothing is evaluated
        but names, subscripts, unions and calls of what `LIGHT` defines, e.g. ``Ge(1)``."""
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
    """The source of a module; None of what is not a file of kvbench."""
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
    found: dict[str, Any] = {}
    for parent in source.classes[name].bases:
        place = ".".join(source.places.get(ast.unparse(parent), ()))
        inherited = {} if place == "abc.ABC" else declared_options(place)
        if inherited is None:
            return None
        found |= inherited
    for part in source.classes[name].body:
        if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
            continue
        of_class = ast.unparse(part.annotation).startswith("ClassVar")
        made_later = part.value is not None and "init=False" in ast.unparse(part.value)
        if not of_class and not made_later:
            found[part.target.id] = source.hint(part.annotation)
    return found
