"""Shards: the examples of one run split over several processes, each with a records file of its own.

``shard=i/k`` is the i-th of k parts, counted from 1. All shards, of whatever k, write into one run
folder, whose files `kvbench.records.read` reads as one run. So shards need no merging, and a later
command, with another k or none, runs only the examples that no shard has run.
"""

from __future__ import annotations

import random
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
        """The shard that ``"i/k"`` names; None for None, which means that a run is not split."""
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
        """``<i>of<k>``, which the name of this shard's records file ends with."""
        return f"{self.index}of{self.count}"

    def select(self, items: Sequence[T]) -> list[T]:
        """This shard's part of `items`, in their order: every k-th of a shuffle, since items that come
        in a cycle, e.g. of prompt lengths, could otherwise give all the long prompts to one shard."""
        shuffled = random.Random(0).sample(range(len(items)), len(items))
        return [items[number] for number in sorted(shuffled[self.index - 1 :: self.count])]
