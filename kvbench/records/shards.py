"""Shards: one run split by example over several processes, each with a records file of its own.

``shard=i/k`` is the i-th of k parts, counted from 1. Every part of every shard count writes to the
same run folder (`kvbench.records.read` reads all of them as one), so shards need no merging, and a later
run, with another k or none, does only what no part has done.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvbench.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """The `index`-th of `count` parts, counted from 1."""

    index: int
    count: int

    @staticmethod
    def parse(text: object) -> Shard | None:
        """``"i/k"`` as a shard, None for None.

        Raises:
            UserError: anything else.
        """
        if text is None:
            return None
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text) if isinstance(text, str) else None
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(
                f"shard is {text!r}; allowed: i/k with whole numbers 1 <= i <= k, e.g. 1/4 for the "
                "first of four, or null"
            )
        return Shard(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def suffix(self) -> str:
        """What tells this part's records file from the others'."""
        return f"{self.index}of{self.count}"

    def select(self, units: Sequence[T]) -> list[T]:
        """This shard's part of `units`, in their order.

        Of every k units in a row (the 1st to the k-th, the k+1-th to the 2k-th ...) each shard gets
        one, so that a balanced prefix gives balanced parts. From one such block to the next, whose
        turn it is moves on by k times the golden ratio: units that come round in a cycle, e.g. of
        prompt lengths, are then spread evenly whatever the cycle's length (Weyl: its multiples are
        equidistributed along every arithmetic progression), where dealing in turn would give all the
        long prompts to one shard.
        """
        golden_ratio = 0x9E3779B97F4A7C15  # its fractional part, of 2**64: floats would drift
        mine = []
        for number, unit in enumerate(units):
            block = number // self.count
            moved = (block * golden_ratio % 2**64) * self.count >> 64
            if (number + moved) % self.count == self.index - 1:
                mine.append(unit)
        return mine
