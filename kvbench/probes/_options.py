"""What probes share: bounds far above what finishes, so that a typing error ends in one line, and a
check of what stands where methods stand elsewhere."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from kvbench.errors.options import Distinct
from kvbench.kv import KVError
from kvbench.methods.base import Method
from kvbench.run.plan import Methods

Repeats = Annotated[int, Ge(1), Le(100_000)]
"""Repetitions, each of which is a record of its own."""
Tokens = Annotated[int, Ge(1), Le(10_000_000)]
"""Tokens or vectors of one layer."""
Layers = Distinct[Annotated[int, Ge(1), Le(10_000)]]
"""Numbers of layers, counted from 1."""


def check_kind(task: str, methods: Methods, kind: type[Method]) -> None:
    """Refuse a method that does not stand for what a probe measures.

    Raises:
        KVError: naming it.
    """
    for label, (method, _) in methods.items():
        if not isinstance(method, kind):
            raise KVError(
                f"task {task} has method {label!r}; allowed: {kind.__module__}.{kind.__qualname__}"
            )
