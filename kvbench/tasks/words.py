"""English words of the wonderwords package, of which several tasks make keys and texts."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version


@cache
def words_of(*kinds: str) -> tuple[str, ...]:
    """The words of one or several kinds ("adjective", "noun", "verb"), in the package's order. Some hold
    a blank or a hyphen ("contact lens", "e-mail")."""
    from wonderwords import RandomWord

    return tuple(RandomWord().filter(include_categories=list(kinds)))


def words_version() -> str:
    """The package and its version, whose lists differ from one another."""
    return f"wonderwords {version('wonderwords')}"
