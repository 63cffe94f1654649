"""Which entry of a full cache leaves when a token has joined it, for all rows of a layer at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton
from kvbench.kernels.decode_attention import EntryTable, on_device
from kvbench.kernels.philox import to_device


@dataclass(frozen=True)
class Eviction:
    """The rule by which an entry of each KV head leaves a full cache, once a token has joined: of those
    that are neither sink nor recent the oldest, or the one of least (most) accumulated attention.

    Attributes:
        leaves: oldest | lightest | heaviest. The latter two go by `Held.scores`, to which the attention
            of every token is added.
        sink: tokens at positions below it stay.
        recent: so many of the newest tokens stay, the one that joined included.
    """

    leaves: Literal["oldest", "lightest", "heaviest"]
    sink: int = 0
    recent: int = 0

    def choose(self, scores: Tensor | None, positions: Tensor) -> Tensor:
        """Index [kv_heads] of the entry that leaves, the first on a tie; scores [kv_heads, c] float32
        (not read with `oldest`), positions [kv_heads, c], the newest entry last."""
        worth = positions
        if self.leaves != "oldest":
            assert scores is not None
            worth = scores if self.leaves == "lightest" else -scores
        most = torch.inf if worth.is_floating_point() else torch.iinfo(worth.dtype).max
        if self.sink:
            worth = worth.masked_fill(positions < self.sink, most)
        if self.recent:
            # Tokens come one position after the other, and recent ones never leave.
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
"""Of `EvictionTable.numbers`: the addresses of scores (0: none) and positions, the stride of both over
heads, what `Eviction` says, and the row's place in the batch."""


@dataclass(frozen=True)
class EvictionTable:
    """What `evict_entries` needs of each row beside its entries. Made once, used at every step.

    Attributes:
        rules: all go by attention, or all by age.
        limits: entries per head that the row may hold.
        scores, positions: the row's buffers, [kv_heads, reserved] float32 (None where the rule goes by
            age) and int64, contiguous.
        places: of each row among those of the whole batch.

    Raises:
        ValueError: rules of which some weigh and some do not, or one that weighs without scores.
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
            _ = self.numbers  # now: while a CUDA graph is captured nothing can come from the host

    @property
    def weighs(self) -> bool:
        """Whether the rules go by attention."""
        return self.rules[0].leaves != "oldest"

    @cached_property
    def numbers(self) -> Tensor:
        """[rows, columns] int64 on the rows' device; `RULE` names the columns."""
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


def evict_entries(
    table: EntryTable,
    evictions: EvictionTable,
    lengths: Tensor | Sequence[int],
    mass: Tensor | None,
    positions: Tensor,
    going: Tensor,
    *,
    implementation: str = "auto",
) -> None:
    """A token was appended to each row at place `lengths[row]` and has attended: add the attention to
    the scores, and where the row now holds more than its limit, put the new entry in the place of the
    one that leaves. Two launches for all rows.

    Args:
        lengths: before the token: see `weighted_decode_attention`; not changed. Afterwards a row
            holds min(length + 1, limit).
        mass: [rows, kv_heads, table.longest] float32, the attention that each entry received; None
            where rules go by age.
        positions: int64, of the token fed to each row of the whole batch (`EvictionTable.places`).
        going: int64, 0 for rows of the whole batch that have ended: nothing happens to them.
    """
    if use_triton("evict_entries", implementation, table.keys[0], table.values[0]):
        from kvbench.kernels import _triton_evict

        _triton_evict.evict(
            table.pointers,
            evictions.numbers,
            on_device(lengths, positions.device),
            mass,
            positions,
            going,
            keys=table.keys[0],
            values=table.values[0],
            longest=table.longest,
        )
        return
    counts = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    ended = {place for place, goes in enumerate(going.tolist()) if not goes}
    for row, place in enumerate(evictions.places):
        if place not in ended:
            received = None if mass is None else mass[row]
            _evict(table, evictions, row, counts[row], received, positions[place])


def _evict(
    table: EntryTable,
    evictions: EvictionTable,
    row: int,
    new: int,
    mass: Tensor | None,
    position: Tensor,
) -> None:
    """One row, whose new entry stands at place `new`."""
    positions, scores = evictions.positions[row], evictions.scores[row]
    positions[:, new] = position
    if scores is not None and mass is not None:
        scores[:, new] = 0
        scores[:, : new + 1] += mass[:, : new + 1]
        scores = scores[:, : new + 1]
    if new < evictions.limits[row]:
        return
    leaving = evictions.rules[row].choose(scores, positions[:, : new + 1])[:, None]
    for part in (positions, evictions.scores[row], table.log_weights[row]):
        if part is not None:
            part.scatter_(1, leaving, part[:, new, None].clone())
    for part in (table.keys[row], table.values[row]):
        everywhere = leaving[..., None].expand(-1, -1, part.shape[2])
        part.scatter_(1, everywhere, part[:, new, None].clone())
