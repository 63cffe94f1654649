"""Methods that change how another one's choice is used."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from kvbench.kv import KVError
from kvbench.methods.base import Method


def wrapped(method: Any, needs: str) -> Method:
    """The method that `method.of` and `method.options` name.

    Args:
        needs: what it must implement, or a flag it must have.

    Raises:
        KVError: unknown, wrong options, or it lacks what is needed.
    """
    kind: type = type(method)
    return _built(kind.__module__, method.of, tuple(sorted(method.options.items())), needs)


@lru_cache(maxsize=256)
def _built(module: str, name: str, options: tuple[tuple[str, Any], ...], needs: str) -> Method:
    package = importlib.import_module("kvbench.methods")  # which imports nothing of this folder
    made: Method = package.build_method(name, **dict(options))
    able = [one for one in package.available_methods() if _has(package.method_class(one), needs)]
    if name not in able:
        raise KVError(f"{module.rpartition('.')[2]}.of is {name!r}; allowed: {', '.join(able)}")
    return made


def _has(kind: type[Method], needs: str) -> bool:
    if isinstance(getattr(Method, needs), bool):
        return bool(getattr(kind, needs))
    return getattr(kind, needs) is not getattr(Method, needs)
