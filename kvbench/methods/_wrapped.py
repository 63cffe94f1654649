"""Methods that change how another one's choice is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from kvbench.errors.options import Text
from kvbench.kv import KVError
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Wrapper(Method):
    """A method that uses another one.

    Args:
        of: its name. options: its options.

    Raises:
        KVError: unknown, wrong options, or it lacks what is needed.
    """

    needs: ClassVar[str]
    """What the other must implement, or a flag that it must have."""

    of: Text = "snapkv"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.inner

    @property
    def inner(self) -> Method:
        """The method that `of` and `options` name."""
        return _built(
            type(self).__module__, self.of, tuple(sorted(self.options.items())), self.needs
        )


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
