"""Where the entries of the rows of a decode step lie, and by which rule each row evicts: a table that is
made once and read at every step by the kernels that attend, append and evict. H2O (arXiv 2306.14048)
evicts by accumulated attention, StreamingLLM (arXiv 2309.17453) by age."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels._choice import multiprocessors
from kvbench.kernels.philox import to_device

COLUMNS = (
    "keys",
    "values",
    "log_weights",
    "key_head_stride",
    "key_entry_stride",
    "value_head_stride",
    "value_entry_stride",
    "weight_head_stride",
    "weight_entry_stride",
    "reserved",
    "scores",
    "positions",
    "number_head_stride",
    "limit",
    "sink",
    "recent",
    "heaviest_leaves",
    "place",
)
"""What the columns of `RowPointers.pointers` have for a row: the addresses of its three buffers (that of
the log-weights is 0 where all are zero); the strides of each over heads and over entries, in elements;
and how many entries there is room for (`reserved`). Where rows evict, also: the addresses of scores (0
where it has none) and positions, the stride of both over heads, the row's limit, the fields of its
`Eviction`, and its place in the batch; else these are 0."""


@dataclass(frozen=True)
class Eviction:
    """The rule by which an entry of each KV head leaves a full cache when a token has joined.

    Attributes:
        leaves: oldest | lightest | heaviest. The latter two go by the scores of the entries, to which
            the attention from every token is added.
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


@dataclass(frozen=True)
class RowPointers:
    """Where the entries of each row lie (`pointers_of` makes it once; every step reads it).

    The rows of a decode step are prompts and methods with different numbers of entries. A padded batch
    tensor would read and store padding; one pool for all rows would have to be moved when a row joins,
    leaves or grows. With a table of addresses rows stay where they are (in buffers, or in views of a
    pool), and the same table serves every step, so that a step does no Python work per row and can be
    captured in a CUDA graph. Only the rows' lengths, a tensor beside the table, change.

    Attributes:
        keys, values: for each row [kv_heads, reserved, dim]; `reserved` differs between rows.
        log_weights: for each row [kv_heads, reserved] float32, or None where all are zero; -inf hides
            an entry.
        longest: the entries for which programs are launched, at least the largest `reserved`.
        rules: none where no row evicts; else one a row, as are all that follow.
        limits: how many entries a head may have.
        scores, positions: buffers [kv_heads, reserved] float32 (None where the rule goes by age) and
            int64, contiguous.
        places: the row's place among the rows of the whole batch.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    log_weights: tuple[Tensor | None, ...]
    longest: int
    rules: tuple[Eviction, ...] = ()
    limits: tuple[int, ...] = ()
    scores: tuple[Tensor | None, ...] = ()
    positions: tuple[Tensor, ...] = ()
    places: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.keys)

    @property
    def kv_heads(self) -> int:
        return self.keys[0].shape[0]

    @property
    def weighs(self) -> bool:
        """Whether rows evict by attention."""
        return bool(self.rules) and self.rules[0].leaves != "oldest"

    @cached_property
    def chunk(self) -> int:
        """How many entries a program of the Triton kernel reads: a power of two."""
        entries = sum(key.shape[1] for key in self.keys)
        # Four programs for each multiprocessor keep all of them busy to the end although rows differ.
        programs = 4 * multiprocessors(self.keys[0].device)
        share = -(-self.kv_heads * entries // programs)
        # Below 128 combining the chunks would cost more than reading them.
        return min(4096, max(128, 1 << (share - 1).bit_length()))

    @cached_property
    def aligned(self) -> bool:
        """Whether every entry lies at a multiple of 16 bytes."""
        return all(
            part.data_ptr() % 16 == 0
            and all(stride * part.element_size() % 16 == 0 for stride in part.stride()[:2])
            for part in (*self.keys, *self.values)
        )

    @cached_property
    def pointers(self) -> Tensor:
        """The table as a tensor [rows, len(COLUMNS)] int64 on the rows' device."""
        table = []
        for row, (key, value, weight) in enumerate(
            zip(self.keys, self.values, self.log_weights, strict=True)
        ):
            columns = {
                "keys": key.data_ptr(),
                "values": value.data_ptr(),
                "log_weights": 0 if weight is None else weight.data_ptr(),
                "key_head_stride": key.stride(0),
                "key_entry_stride": key.stride(1),
                "value_head_stride": value.stride(0),
                "value_entry_stride": value.stride(1),
                "weight_head_stride": 0 if weight is None else weight.stride(0),
                "weight_entry_stride": 0 if weight is None else weight.stride(1),
                "reserved": key.shape[1],
            }
            if self.rules:
                rule, scores, positions = self.rules[row], self.scores[row], self.positions[row]
                columns |= {
                    "scores": 0 if scores is None else scores.data_ptr(),
                    "positions": positions.data_ptr(),
                    "number_head_stride": positions.stride(0),
                    "limit": self.limits[row],
                    "sink": rule.sink,
                    "recent": rule.recent,
                    "heaviest_leaves": int(rule.leaves == "heaviest"),
                    "place": self.places[row],
                }
            table.append([columns.get(name, 0) for name in COLUMNS])
        return to_device(torch.tensor(table, dtype=torch.int64), self.keys[0].device)


def pointers_of(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    log_weights: Sequence[Tensor | None] | None = None,
    *,
    longest: int = 0,
    rules: Sequence[Eviction] = (),
    limits: Sequence[int] = (),
    scores: Sequence[Tensor | None] = (),
    positions: Sequence[Tensor] = (),
    places: Sequence[int] = (),
) -> RowPointers:
    """Make the table of these rows, as described in `RowPointers`. It refers to their buffers and copies
    nothing.

    A new table is needed when a row joins or leaves, or when a buffer is replaced by a larger one, but
    not when an entry is appended to a buffer in place.

    Args:
        keys, values: all keys share dtype, device, kv_heads and dim; so do all values, with a dim of
            their own. The numbers of an entry are adjacent in memory.
        longest: given where it is more than the rows need.

    Raises:
        ValueError: no rows, rows that differ in what they must share, rules of which some go by
            attention and some by age, or a rule by attention without scores.
    """
    weights = (None,) * len(keys) if log_weights is None else tuple(log_weights)
    if not keys or not len(keys) == len(values) == len(weights):
        raise ValueError(
            f"{len(keys)} rows of keys, {len(values)} of values, {len(weights)} of log-weights; "
            "allowed: the same number, at least 1"
        )
    for name, rows in (("keys", keys), ("values", values)):
        shared = {(row.shape[0], row.shape[2], row.dtype, row.device) for row in rows}
        if len(shared) > 1:
            raise ValueError(
                f"{name} differ in (kv_heads, dim, dtype, device): {sorted(map(str, shared))}"
            )
        if any(row.stride(2) != 1 for row in rows):
            raise ValueError(f"{name} of an entry are not adjacent in memory (stride 1)")
    for row, (key, value, weight) in enumerate(zip(keys, values, weights, strict=True)):
        buffers = [(tuple(x.shape[:2]), x.dtype) for x in (key, value, weight) if x is not None]
        fitting = [buffers[0], buffers[0], (buffers[0][0], torch.float32)]
        if buffers != fitting[: len(buffers)]:
            raise ValueError(
                f"row {row} has keys, values, log-weights {buffers}; allowed: {fitting}"
            )
    if len({rule.leaves == "oldest" for rule in rules}) > 1:
        raise ValueError(f"rules are {list(rules)}; allowed: all by age, or all by attention")
    table = RowPointers(
        tuple(keys),
        tuple(values),
        weights,
        max(longest, *(key.shape[1] for key in keys)),
        tuple(rules),
        tuple(limits),
        tuple(scores),
        tuple(positions),
        tuple(places),
    )
    if table.weighs and any(part is None for part in scores):
        raise ValueError("a rule by attention has no scores; allowed: [kv_heads, reserved] float32")
    if keys[0].is_cuda:
        _ = table.pointers  # Made now, since nothing can be copied while a CUDA graph is captured.
    return table
