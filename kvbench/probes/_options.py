"""Bounds that several probes share, far above what finishes: a typing error ends in one line."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from kvbench.errors.options import Distinct

Repeats = Annotated[int, Ge(1), Le(100_000)]
"""Repetitions, each of which is a record of its own."""
Tokens = Annotated[int, Ge(1), Le(10_000_000)]
"""Tokens or vectors of one layer."""
Layers = Distinct[Annotated[int, Ge(1), Le(10_000)]]
"""Numbers of layers, counted from 1."""
