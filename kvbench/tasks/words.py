"""English words of the wonderwords package, from which several tasks make keys and texts."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version


@cache
def words_of(*kinds: str) -> tuple[str, ...]:
    """The words of the given kinds ("adjective", "noun", "verb"), in the package's order. Some have a
    blank or a hyphen ("contact lens", "e-mail")."""
    from wonderwords import RandomWord

    return tuple(RandomWord().filter(include_categories=list(kinds)))


def words_version() -> str:
    """The name and version of the package. Versions differ in their lists of words."""
    return f"wonderwords {version('wonderwords')}"
