from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar

from kvbench.errors.options import Text
from kvbench.kv import Budget, KVError, LayerKV
from kvbench.methods.base import Method, Replay, SecondPass, TokenScoringMethod


@dataclass(frozen=True, kw_only=True)
class Wrapper(Method):
    """A method that uses another method, the inner method.

    Args:
        of: the name of the inner method, as in ``adakv`` *of* ``snapkv``. The option's name is part of
            every config hash, so it stays.
        options: the options of the inner method.
    """

    own_version: ClassVar[int] = 1
    """As `Method.version`, for the wrapper's part."""

    of: Text = "snapkv"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_inner(self.inner)

    @classmethod
    @abstractmethod
    def can_wrap(cls, inner: type[Method]) -> bool:
        """Whether a method of the class `inner` can be the inner method."""

    @cached_property
    def inner(self) -> Method:
        inner: Method = _registry().build_method(self.of, **self.options)
        return inner

    @property
    def version(self) -> int:  # type: ignore[override]
        """A number for each pair of the two versions: a change of either part makes another result."""
        return 100 * (self.own_version - 1) + self.inner.version

    def layer_capacities(self, budget: Budget, n: int, num_layers: int) -> Sequence[int]:
        return self.inner.layer_capacities(budget, n, num_layers)

    @property
    def second_pass(self) -> SecondPass | None:
        return self.inner.second_pass

    def observe(self, layer: LayerKV, replay: Replay, budget: Budget) -> None:
        self.inner.observe(layer, replay, budget)

    def _check_inner(self, inner: Method) -> None:
        if self.can_wrap(type(inner)):
            return
        allowed = [
            name
            for name in _registry().available_methods()
            if self.can_wrap(_registry().method_class(name))
        ]
        raise KVError(f"{self.method_name()}.of is {self.of!r}; allowed: {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True)
class ScoreWrapper(Wrapper):
    """A wrapper that chooses other entries than the inner method, by the inner method's token scores."""

    @classmethod
    def can_wrap(cls, inner: type[Method]) -> bool:
        return issubclass(inner, TokenScoringMethod)

    @property
    def scorer(self) -> TokenScoringMethod:
        assert isinstance(self.inner, TokenScoringMethod)
        return self.inner


def _registry() -> ModuleType:
    """The package `kvbench.methods`. It is imported when it is needed, since this module is part of
    it."""
    return importlib.import_module("kvbench.methods")
