"""Bounds that several tasks share, far above what finishes: a typing error ends in one line."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

Many = Annotated[int, Ge(1), Le(1_000_000)]
"""Examples, fillers, facts."""
Repeats = Annotated[int, Ge(1), Le(1000)]
"""Copies of one thing in a prompt."""
Tokens = Annotated[int, Ge(1), Le(10_000_000)]
"""Tokens of a prompt."""
NewTokens = Annotated[int, Ge(1), Le(100_000)]
"""Tokens of an answer."""
