"""The order of examples that vary in several things at once, so that every prefix is balanced."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm


def spread(count: int) -> list[int]:
    """0..count-1 with neighbours far apart: a prefix takes from both ends and the middle."""
    step = next(s for s in range(max(1, round(0.618 * count)), 2 * count + 1) if gcd(s, count) == 1)
    return [(place * step) % count for place in range(count)]


def balanced_order(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Every combination of range(sizes[0]) x range(sizes[1]) x ... once.

    Whatever the prefix, a value of one of them has come up as often as any other of it, or once more
    or less: each runs round and round, and starts one place later whenever all before it and it are
    back where they began.
    """
    found: list[tuple[int, ...]] = [()]
    for size in sizes:
        known, values = len(found), spread(size)
        turn = lcm(known, size)
        found = [
            (*found[place % known], values[(place + place // turn) % size])
            for place in range(known * size)
        ]
    return found
