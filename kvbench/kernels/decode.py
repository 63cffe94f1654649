"""A decoding step by kernels, for all rows of a batch at once: attention of one new token per row over
the row's entries (`weighted_decode_attention`), the entry that joins (`append_entries`) and the one that
leaves (`evict_entries`).

`RowPointers` says where the entries lie and by which rule each row evicts. H2O (arXiv 2306.14048) evicts
by accumulated attention, StreamingLLM (arXiv 2309.17453) by age. The Triton kernels run on CUDA, and in
Triton's interpreter; elsewhere each row attends by its own caches (`kvbench.engine.cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvbench.kernels._choice import multiprocessors, use_triton
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
"""The columns of `RowPointers.pointers`. A row has there the addresses of its three buffers (that of the
log-weights is 0 where all are zero); the strides of each over heads and over entries, in elements; and
how many entries there is room for (`reserved`). Where rows evict, it also has the addresses of scores (0
without scores) and positions, the stride of both over heads, its limit, the fields of its `Eviction`,
and its place in the batch; else these are 0."""


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


@dataclass(eq=False)
class RowPointers:
    """Where the entries of each row lie, in the buffers of the rows themselves: nothing is copied.

    The rows of a decode step are prompts and methods with different numbers of entries. A padded batch
    tensor would read and store padding; one pool for all rows would have to be moved when a row joins,
    leaves or grows. With a table of addresses rows stay where they are (in buffers, or in views of a
    pool), and the same table serves every step, so that a step does no Python work per row and can be
    captured in a CUDA graph. Only the rows' lengths, a tensor beside the table, change. A new table is
    needed when a row joins or leaves, or when a buffer is replaced by a larger one.

    Attributes:
        keys, values: for each row [kv_heads, reserved, dim]; `reserved` differs between rows. All keys
            share dtype, device, kv_heads and dim; so do all values, with a dim of their own. The numbers
            of an entry are adjacent in memory.
        log_weights: for each row [kv_heads, reserved] float32, or None where all are zero; -inf hides
            an entry. Empty where all of all rows are zero.
        longest: the entries for which programs are launched, at least the largest `reserved`.
        rules: none where no row evicts; else one a row, as are all that follow.
        limits: how many entries a head may have.
        scores, positions: buffers [kv_heads, reserved] float32 (None where the rule goes by age) and
            int64, contiguous.
        places: the row's place among the rows of the whole batch.

    Raises:
        ValueError: no rows, rows that differ in what they must share, rules of which some go by
            attention and some by age, or a rule by attention without scores.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    log_weights: Sequence[Tensor | None] = ()
    longest: int = 0
    rules: Sequence[Eviction] = ()
    limits: Sequence[int] = ()
    scores: Sequence[Tensor | None] = ()
    positions: Sequence[Tensor] = ()
    places: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.log_weights = self.log_weights or [None] * len(self.keys)
        if not self.keys or not len(self.keys) == len(self.values) == len(self.log_weights):
            raise ValueError(
                f"{len(self.keys)} rows of keys, {len(self.values)} of values, "
                f"{len(self.log_weights)} of log-weights; allowed: the same number, at least 1"
            )
        for name, rows in (("keys", self.keys), ("values", self.values)):
            shared = {(row.shape[0], row.shape[2], row.dtype, row.device) for row in rows}
            if len(shared) > 1:
                raise ValueError(
                    f"{name} differ in (kv_heads, dim, dtype, device): {sorted(map(str, shared))}"
                )
            if any(row.stride(2) != 1 for row in rows):
                raise ValueError(f"{name} of an entry are not adjacent in memory (stride 1)")
        for row, parts in enumerate(zip(self.keys, self.values, self.log_weights, strict=True)):
            buffers = [(tuple(x.shape[:2]), x.dtype) for x in parts if x is not None]
            fitting = [buffers[0], buffers[0], (buffers[0][0], torch.float32)]
            if buffers != fitting[: len(buffers)]:
                raise ValueError(
                    f"row {row} has keys, values, log-weights {buffers}; allowed: {fitting}"
                )
        if len({rule.leaves == "oldest" for rule in self.rules}) > 1:
            raise ValueError(
                f"rules are {list(self.rules)}; allowed: all by age, or all by attention"
            )
        if self.weighs and any(part is None for part in self.scores):
            raise ValueError(
                "a rule by attention has no scores; allowed: [kv_heads, reserved] float32"
            )
        self.longest = max(self.longest, *(key.shape[1] for key in self.keys))
        if self.keys[0].is_cuda:
            _ = self.pointers  # Made now: nothing can be copied while a CUDA graph is captured.

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


def takes(keys: Tensor, values: Tensor, group: int, choice: str = "auto") -> bool:
    """Whether the kernels of a decode step run on these buffers of a row, [kv_heads, reserved, dim], for
    `group` query heads per KV head. `choice`: see `use_triton`."""
    widest = max(keys.shape[-1], values.shape[-1])
    obstacle = _too_wide(group, widest, keys.element_size())
    return use_triton("weighted_decode_attention", choice, keys, values, obstacle=obstacle)


def _too_wide(group: int, dim: int, itemsize: int) -> str | None:
    """Why a program of the Triton kernel has no room for a group's queries beside keys and values, or
    None. What is allowed fits every GPU since compute capability 8.0 (test_kernels_compile.py)."""
    members, columns = (1 << (size - 1).bit_length() for size in (group, dim))
    if members <= 64 or (members <= 128 and members * columns * itemsize <= 64 << 10):
        return None
    return f"{group} query heads of dim {dim} share a KV head: more than a program holds"


def weighted_decode_attention(
    query: Tensor,
    table: RowPointers,
    lengths: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention softmax(q . k * scaling + log_weight) . v of one token per row over the row's entries.

    Nothing is repeated, padded or copied, and the work of a row is proportional to its entries. The
    entry of the token itself must already be in the buffers and counted.

    Args:
        query: [rows, heads, dim]; query head i uses KV head i // (heads / kv_heads).
        lengths: [rows] int32 or int64 on the query's device, the number of entries of each row. They are
            not compared with the buffers, because the host would have to wait for the device; no entry
            beyond `reserved` is read. A row of length 0 gives zeros, as does a head whose entries are
            all hidden.
        softcap: s of s * tanh(logit / s), applied after scaling.
        sinks: [rows, heads], one more logit in the softmax of each query, whose value is 0.

    Returns:
        the output [rows, heads, value_dim] in the query's dtype; and the softmax attention that each
        entry received, mean over the query heads of its group, [rows, kv_heads, table.longest]
        float32, zero beyond a row's length (None unless `return_mass`; H2O needs it).

    Raises:
        ValueError: shapes that do not fit.
    """
    rows, heads, dim = query.shape
    kv_heads = table.kv_heads
    if (
        rows != table.rows
        or len(lengths) != rows
        or heads % kv_heads
        or dim != table.keys[0].shape[2]
    ):
        raise ValueError(
            f"query {tuple(query.shape)} and {len(lengths)} lengths over {table.rows} rows of "
            f"{kv_heads} KV heads of dim {table.keys[0].shape[2]}"
        )
    keys, values = table.keys[0], table.values[0]
    takes(keys, values, heads // kv_heads, "triton")
    from kvbench.kernels import _triton_decode

    out, mass = _triton_decode.attention(
        query.to(keys.dtype),
        table.pointers,
        lengths,
        kv_heads=kv_heads,
        value_dim=values.shape[2],
        longest=table.longest,
        chunk=table.chunk,
        aligned=table.aligned,
        scaling=scaling,
        softcap=softcap,
        sinks=sinks,
        return_mass=return_mass,
    )
    return out.to(query.dtype), mass


def append_entries(
    table: RowPointers,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
) -> None:
    """Write one new entry per row behind its others, at place `lengths[row]`, with log-weight 0.

    This is one launch for all rows, and the host computes no address, so that a captured CUDA graph can
    append. A row whose buffer has no room stays as it is.

    Args:
        lengths: the number of entries of each row before the new one, see `weighted_decode_attention`;
            not changed.
        key, value: [rows, kv_heads, dim], in the buffers' dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    rows, kv_heads = table.rows, table.kv_heads
    for name, new, buffer in (("key", key, table.keys[0]), ("value", value, table.values[0])):
        shape = (rows, kv_heads, buffer.shape[2])
        if new.shape != shape or new.dtype != buffer.dtype:
            raise ValueError(
                f"{name} is {tuple(new.shape)} {new.dtype}; allowed: {shape} {buffer.dtype}"
            )
    use_triton("append_entries", "triton", key, value)  # raises where it cannot run
    from kvbench.kernels import _triton_decode

    _triton_decode.append(table.pointers, lengths, key, value)


def evict_entries(
    table: RowPointers,
    lengths: Tensor,
    mass: Tensor | None,
    positions: Tensor,
    going: Tensor,
) -> None:
    """Update each row after a token was appended at place `lengths[row]` and has attended.

    The attention that entries received is added to their scores. Where the row now has more entries
    than its limit, the new entry overwrites the one that leaves.

    Args:
        lengths: the number of entries of each row before the token, see `weighted_decode_attention`;
            not changed. Afterwards a row has min(length + 1, limit) entries.
        mass: [rows, kv_heads, table.longest] float32, the attention that each entry received; None
            where rules go by age.
        positions: [batch] int64, the position of the token fed to each row of the whole batch
            (`RowPointers.places`).
        going: [batch] int64, 0 for rows of the whole batch that have ended, which are not changed.
    """
    use_triton("evict_entries", "triton", table.keys[0], table.values[0])  # raises where it cannot
    from kvbench.kernels import _triton_evict

    _triton_evict.evict(
        table.pointers,
        lengths,
        mass,
        positions,
        going,
        keys=table.keys[0],
        values=table.values[0],
        longest=table.longest,
    )
