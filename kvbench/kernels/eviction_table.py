"""The rules by which entries leave full caches while decoding, and a table of them for the rows of a
decode step. H2O (arXiv 2306.14048) evicts by accumulated attention, StreamingLLM (arXiv 2309.17453) by
age."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels.philox import to_device


@dataclass(frozen=True)
class Eviction:
    """The rule by which an entry of each KV head leaves a full cache when a token has joined: of the
    entries that are neither sink nor recent, the oldest or the one of least or most accumulated
    attention.

    Attributes:
        leaves: oldest | lightest (least attention) | heaviest (most attention). The latter two go by
            the scores of the entries, to which the attention from every token is added.
        sink: entries at positions below this stay.
        recent: how many of the newest tokens stay, the one that joined included.
    """

    leaves: Literal["oldest", "lightest", "heaviest"]
    sink: int = 0
    recent: int = 0

    def choose(self, scores: Tensor | None, positions: Tensor) -> Tensor:
        """Choose the entry of each head that leaves, the first one on a tie: indices [kv_heads].

        Args:
            scores: [kv_heads, c] float32, the newest entry last; not read by `oldest`.
            positions: [kv_heads, c] int64.
        """
        worth = positions
        if self.leaves != "oldest":
            assert scores is not None
            worth = scores if self.leaves == "lightest" else -scores
        most = torch.inf if worth.is_floating_point() else torch.iinfo(worth.dtype).max
        if self.sink:
            worth = worth.masked_fill(positions < self.sink, most)
        if self.recent:
            # Each token is one position behind the one before, and recent ones never leave.
            worth = worth.masked_fill(positions > positions[:, -1:] - self.recent, most)
        return worth.argmin(-1)


RULE = (
    "scores",
    "positions",
    "head_stride",
    "limit",
    "sink",
    "recent",
    "heaviest_leaves",
    "place",
)
"""What the columns of `EvictionTable.numbers` have for a row: the addresses of its scores (0 where it
has none) and positions, the stride of both over heads, its limit, the fields of its `Eviction`, and
its place in the batch."""


@dataclass(frozen=True)
class EvictionTable:
    """What `evict_entries` needs of each row beside its entries. It is made once and read at every
    step.

    Attributes:
        rules: the rule of each row; all go by attention, or all by age.
        limits: for each row, how many entries a head may have.
        scores, positions: for each row, buffers [kv_heads, reserved] float32 (None where the rule goes
            by age) and int64, contiguous.
        places: for each row, its place among the rows of the whole batch.

    Raises:
        ValueError: rules of which some go by attention and some by age, or a rule by attention without
            scores.
    """

    rules: Sequence[Eviction]
    limits: Sequence[int]
    scores: Sequence[Tensor | None]
    positions: Sequence[Tensor]
    places: Sequence[int]

    def __post_init__(self) -> None:
        if len({rule.leaves == "oldest" for rule in self.rules}) != 1:
            raise ValueError(
                f"rules are {list(self.rules)}; allowed: all by age, or all by attention"
            )
        if self.weighs and any(part is None for part in self.scores):
            raise ValueError(
                "a rule by attention has no scores; allowed: [kv_heads, reserved] float32"
            )
        if self.positions[0].is_cuda:
            _ = (
                self.numbers
            )  # Made now, since nothing can be copied while a CUDA graph is captured.

    @property
    def weighs(self) -> bool:
        """Whether the rules go by attention."""
        return self.rules[0].leaves != "oldest"

    @cached_property
    def numbers(self) -> Tensor:
        """The table as a tensor, [rows, columns] int64 on the rows' device; `RULE` names the
        columns."""
        table = []
        for rule, limit, scores, positions, place in zip(
            self.rules, self.limits, self.scores, self.positions, self.places, strict=True
        ):
            row = {
                "scores": 0 if scores is None else scores.data_ptr(),
                "positions": positions.data_ptr(),
                "head_stride": positions.stride(0),
                "limit": limit,
                "sink": rule.sink,
                "recent": rule.recent,
                "heaviest_leaves": int(rule.leaves == "heaviest"),
                "place": place,
            }
            table.append([row[name] for name in RULE])
        return to_device(torch.tensor(table, dtype=torch.int64), self.positions[0].device)
