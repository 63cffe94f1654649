"""The nearest valid word, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest(word: str, allowed: Sequence[str]) -> str:
    """`` (did you mean 'x'?)`` when something allowed is close to `word`, else an empty string."""
    close = difflib.get_close_matches(word, allowed, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
