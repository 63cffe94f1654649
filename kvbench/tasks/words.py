"""Keys and words that several tasks draw: UUIDs, and English words of the wonderwords package."""

from __future__ import annotations

import random
import uuid
from functools import cache
from importlib.metadata import version


def drawn_uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


@cache
def words_of(*kinds: str) -> tuple[str, ...]:
    """The words of the given kinds ("adjective", "noun", "verb"), in the package's order. Some have a
    blank or a hyphen ("contact lens", "e-mail")."""
    from wonderwords import RandomWord

    return tuple(RandomWord().filter(include_categories=list(kinds)))


def words_version() -> str:
    """The name and version of the package. Versions differ in their lists of words."""
    return f"wonderwords {version('wonderwords')}"
