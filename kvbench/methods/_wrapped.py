"""Methods that change how another one's choice is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from kvbench.errors.options import Text
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Wrapper(Method):
    """A method that uses another method.

    Args:
        of: the name of the other method.
        options: options of the other method.

    Raises:
        KVError: an unknown method, wrong options, or a method that does not have what the wrapper
            `needs`.
    """

    needs: ClassVar[str]
    """The attribute of `Method` that the other method must override: a hook, or a flag."""

    of: Text = "snapkv"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.inner

    @cached_property
    def inner(self) -> Method:
        """The method that `of` and `options` name."""
        package = importlib.import_module("kvbench.methods")  # which imports nothing of this folder
        made: Method = package.build_method(self.of, **self.options)
        known = package.available_methods()
        able = [label for label in known if self._serves(package.method_class(label))]
        if not self._serves(type(made)):
            name = type(self).__module__.rpartition(".")[2]
            raise KVError(f"{name}.of is {self.of!r}; allowed: {', '.join(able)}")
        return made

    def layer_capacities(self, budget: Budget, n: int, num_layers: int) -> Sequence[int]:
        """The other method's."""
        return self.inner.layer_capacities(budget, n, num_layers)

    def _serves(self, kind: type[Method]) -> bool:
        there, missing = getattr(kind, self.needs), getattr(Method, self.needs)
        return there is not missing
