"""Attention of one new token per row over the row's entries, which lie in buffers of its own.

The Triton kernel cuts the entries into chunks and combines the softmax over each of them (flash
decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvbench.kernels._choice import multiprocessors, use_triton
from kvbench.kernels.philox import to_device
from kvbench.kernels.quantize import CACHED, Packed, Quantization
from kvbench.kernels.softcap import capped

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
    "packed",
    "key_codes",
    "key_scales",
    "key_zeros",
    "value_codes",
    "value_scales",
    "value_zeros",
)
"""What the columns of `EntryTable.pointers` have for a row: the addresses of its three buffers (that
of the log-weights is 0 where all are zero); the strides of each over heads and over entries, in
elements; how many entries there is room for (`reserved`, packed ones included); how many entries are
packed; and the addresses of their codes, scales and zero points (0 where no entry is packed)."""


@dataclass(frozen=True)
class EntryTable:
    """A table of where the entries of each row lie. `entry_table` makes it once; every step reads it.

    The rows of a decode step are prompts and methods with different numbers of entries, in buffers
    that were reserved when each was prefilled. A padded batch tensor would read and store padding; one
    pool for all rows would have to be moved when a row joins, leaves or grows. With a table of
    addresses rows stay where they are (in buffers, or in views of a pool), and the same table serves
    every step, so that a step does no Python work per row and can be captured in a CUDA graph. Only
    the rows' lengths, a tensor beside the table, change from step to step.

    The first entries of a row may be packed (`kvbench.kernels.quantize`). They are read as they are
    stored. The buffers of keys and values have the entries behind them.

    Attributes:
        keys, values: for each row [kv_heads, reserved, dim]; `reserved` differs between rows.
        log_weights: for each row [kv_heads, packed + reserved] float32, or None where all are zero;
            -inf hides an entry.
        longest: the entries in buffers for which programs are launched, at least the largest
            `reserved`.
        packed: for each row its packed keys (`by_channel`) and values, all of one `Quantization`;
            empty where no row has any.
        longest_packed: the packed entries for which programs are launched, at least those of every
            row.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    log_weights: tuple[Tensor | None, ...]
    longest: int
    packed: tuple[tuple[Packed, Packed], ...] = ()
    longest_packed: int = 0

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.keys)

    @property
    def kv_heads(self) -> int:
        """The number of KV heads, which all rows share."""
        return self.keys[0].shape[0]

    @property
    def quantization(self) -> Quantization | None:
        """The scheme of the packed entries; None where there are none."""
        return self.packed[0][0].quantization if self.packed else None

    @property
    def packed_counts(self) -> list[int]:
        """The number of packed entries of each row."""
        return [keys.count for keys, _ in self.packed] or [0] * self.rows

    @cached_property
    def chunk(self) -> int:
        """How many entries a program of the Triton kernel reads: a power of two.

        Four programs for each multiprocessor keep all of them busy to the end although rows differ.
        Below 128 entries the launch that combines the chunks would cost more than the one that reads
        them.
        """
        entries = sum(key.shape[1] for key in self.keys) + sum(self.packed_counts)
        programs = 4 * multiprocessors(self.keys[0].device)
        share = -(-self.kv_heads * entries // programs)
        return min(4096, max(128, 1 << (share - 1).bit_length()))

    @cached_property
    def aligned(self) -> bool:
        """Whether every entry in a buffer, and the first code of each row, lies at a multiple of 16
        bytes."""
        return all(codes.data_ptr() % 16 == 0 for codes in self._all_codes) and all(
            part.data_ptr() % 16 == 0
            and all(stride * part.element_size() % 16 == 0 for stride in part.stride()[:2])
            for part in (*self.keys, *self.values)
        )

    @property
    def _all_codes(self) -> list[Tensor]:
        return [side.codes for row in self.packed for side in row]

    @cached_property
    def pointers(self) -> Tensor:
        """The table as a tensor, [rows, columns] int64 on the rows' device; `COLUMNS` names the
        columns."""
        table = []
        not_packed = dict.fromkeys(COLUMNS, 0)
        for number, count in enumerate(self.packed_counts):
            key, value = self.keys[number], self.values[number]
            weight = self.log_weights[number]
            row = not_packed | {
                "keys": key.data_ptr(),
                "values": value.data_ptr(),
                "log_weights": 0 if weight is None else weight.data_ptr(),
                "key_head_stride": key.stride(0),
                "key_entry_stride": key.stride(1),
                "value_head_stride": value.stride(0),
                "value_entry_stride": value.stride(1),
                "weight_head_stride": 0 if weight is None else weight.stride(0),
                "weight_entry_stride": 0 if weight is None else weight.stride(1),
                "reserved": count + key.shape[1],
                "packed": count,
            }
            if self.packed:
                for side, packed in zip(("key", "value"), self.packed[number], strict=True):
                    row[f"{side}_codes"] = packed.codes.data_ptr()
                    row[f"{side}_scales"] = packed.scale.data_ptr()
                    row[f"{side}_zeros"] = packed.zero.data_ptr()
            table.append([row[name] for name in COLUMNS])
        return to_device(torch.tensor(table, dtype=torch.int64), self.keys[0].device)


def entry_table(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    log_weights: Sequence[Tensor | None] | None = None,
    *,
    packed: Sequence[tuple[Packed, Packed]] = (),
    longest: int = 0,
    longest_packed: int = 0,
) -> EntryTable:
    """Make the table of these rows. It refers to their buffers (or views of a pool) and copies
    nothing.

    A new table is needed when a row joins or leaves, or when a buffer is replaced by a larger one, but
    not when an entry is appended to a buffer in place.

    Args:
        keys, values: for each row [kv_heads, reserved, dim]. All keys share dtype, device, kv_heads
            and dim; so do all values, with a dim of their own. The numbers of an entry are adjacent in
            memory.
        log_weights: for each row [kv_heads, packed + reserved] float32, or None where all are zero.
        packed: for each row the packed keys and values of the entries before those in the buffers;
            empty where no row has any.
        longest, longest_packed: `EntryTable.longest` and `longest_packed`, if that is more than the
            rows need.

    Raises:
        ValueError: no rows, or rows that differ in what they must share.
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
    if packed:
        _check_packed(packed, keys, values)
    counts = [row[0].count for row in packed] or [0] * len(keys)
    for row, (key, value, weight) in enumerate(zip(keys, values, weights, strict=True)):
        buffers = [(tuple(x.shape[:2]), x.dtype) for x in (key, value, weight) if x is not None]
        weights_shape = (key.shape[0], counts[row] + key.shape[1])
        fitting = [buffers[0], buffers[0], (weights_shape, torch.float32)]
        if buffers != fitting[: len(buffers)]:
            raise ValueError(
                f"row {row} has keys, values, log-weights {buffers}; allowed: {fitting}"
            )
    table = EntryTable(
        tuple(keys),
        tuple(values),
        weights,
        max(longest, *(key.shape[1] for key in keys)),
        tuple(packed),
        max(longest_packed, *counts),
    )
    if keys[0].is_cuda:
        _ = table.pointers  # Made now, since nothing can be copied while a CUDA graph is captured.
    return table


def is_readable(keys: object, values: object) -> bool:
    """Whether `weighted_decode_attention` can read these packed keys and values as they are stored:
    integers in groups of a power of two numbers, keys packed by channel, values by entry, as many of
    both."""
    if not isinstance(keys, Packed) or not isinstance(values, Packed):
        return False
    size = keys.quantization.group_size
    return (
        size & (size - 1) == 0
        and keys.by_channel
        and not values.by_channel
        and keys.count == values.count
        and all(part.is_contiguous() for side in (keys, values) for part in side.parts)
    )


def _check_packed(
    packed: Sequence[tuple[Packed, Packed]], keys: Sequence[Tensor], values: Sequence[Tensor]
) -> None:
    """Raise the ValueError of `entry_table` where packed entries cannot be read or do not fit the
    buffers."""
    if len(packed) != len(keys):
        raise ValueError(f"{len(packed)} rows have packed entries; allowed: none, or {len(keys)}")
    for row, sides in enumerate(packed):
        if not is_readable(*sides):
            raise ValueError(
                f"row {row} is packed by {sides[0].quantization}; allowed: keys by channel, values by "
                "entry, groups of a power of two"
            )
        stored = [
            (side.shape[0], side.shape[2], side.scale.dtype, side.quantization) for side in sides
        ]
        quantization = packed[0][0].quantization
        fitting = [
            (x.shape[0], x.shape[2], x.dtype, quantization) for x in (keys[row], values[row])
        ]
        if stored != fitting:
            raise ValueError(f"row {row} has packed keys and values {stored}; allowed: {fitting}")


def weighted_decode_attention(
    query: Tensor,
    table: EntryTable,
    lengths: Tensor | Sequence[int],
    *,
    scaling: float,
    softcap: float | None = None,
    return_mass: bool = False,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attention softmax(q . k * scaling + log_weight) . v of one token per row over the row's entries.

    The entries of a KV head are read once for all query heads of the group. Nothing is repeated,
    padded or copied, and the work of a row is proportional to its entries. The entry of the token
    itself must already be in the buffers and counted.

    Args:
        query: [rows, heads, dim]; query head i uses KV head i // (heads / kv_heads).
        table: where the rows' entries are (`entry_table`).
        lengths: the number of entries of each row, packed ones included: [rows] int32 or int64 on the
            query's device (a captured CUDA graph can then read new ones), or plain integers (which
            save a copy where torch runs, since it needs them on the host). The Triton kernel does not
            compare them with the buffers, because the host would have to wait for the device; it reads
            no entry beyond `reserved`. A row of length 0 gives zeros, as does a head whose entries are
            all hidden.
        scaling: factor on q.k before the softmax.
        softcap: s of s * tanh(logit / s), applied after scaling; None for none.
        return_mass: whether the attention that each entry received is returned, too (for H2O); not
            where entries are packed.
        implementation: auto (Triton on CUDA, torch elsewhere) | triton | torch.

    Returns:
        the output [rows, heads, value_dim] in the query's dtype; and the softmax attention that each
        entry received, mean over the query heads of its group, [rows, kv_heads, table.longest]
        float32, zero beyond a row's length (None unless `return_mass`).

    Raises:
        ValueError: shapes that do not fit, or an implementation that is not possible here.
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
    if return_mass and table.packed:
        raise ValueError("return_mass is True and entries are packed; allowed: one or the other")
    keys, values = table.keys[0], table.values[0]
    widest = max(keys.shape[2], values.shape[2])
    obstacle = _too_wide(heads // kv_heads, widest, keys.element_size())
    if not use_triton("weighted_decode_attention", implementation, keys, values, obstacle=obstacle):
        return _torch_attention(query, table, lengths, scaling, softcap, return_mass)
    from kvbench.kernels import _triton_decode

    out, mass = _triton_decode.attention(
        query.to(keys.dtype),
        table.pointers,
        on_device(lengths, query.device),
        kv_heads=kv_heads,
        value_dim=values.shape[2],
        longest=table.longest,
        longest_packed=table.longest_packed,
        quantization=table.quantization,
        chunk=table.chunk,
        aligned=table.aligned,
        scaling=scaling,
        softcap=softcap,
        return_mass=return_mass,
    )
    return out.to(query.dtype), mass


def _too_wide(group: int, dim: int, itemsize: int) -> str | None:
    """The reason why a program of the Triton kernel has no room for the queries of a group of heads of
    `dim` numbers beside keys and values, None where it has, on every GPU since compute capability 8.0
    (tests/kernels/test_kernels_compile.py)."""
    members, columns = (1 << (size - 1).bit_length() for size in (group, dim))
    if members <= 64 or (members <= 128 and members * columns * itemsize <= 64 << 10):
        return None
    return f"{group} query heads of dim {dim} share a KV head: more than a program holds"


def on_device(lengths: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Return `lengths` as an integer tensor [rows] on `device`."""
    if isinstance(lengths, Tensor):
        return lengths.to(device)
    return torch.tensor(lengths, dtype=torch.int64, device=device)


def _torch_attention(
    query: Tensor,
    table: EntryTable,
    lengths: Tensor | Sequence[int],
    scaling: float,
    softcap: float | None,
    return_mass: bool,
) -> tuple[Tensor, Tensor | None]:
    """`weighted_decode_attention` in torch: row by row on views of the buffers, since a batched
    product would need them padded and copied."""
    counts = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    rows, heads, dim = query.shape
    kv_heads = table.kv_heads
    grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
    out = query.new_zeros(*grouped.shape[:3], table.values[0].shape[2])
    mass = (
        query.new_zeros(rows, kv_heads, table.longest, dtype=torch.float32) if return_mass else None
    )
    for row, n in enumerate(counts):
        packed, weight = table.packed_counts[row], table.log_weights[row]
        reserved = packed + table.keys[row].shape[1]
        if not packed <= n <= reserved:
            raise ValueError(f"row {row} has length {n}; allowed: {packed} to {reserved}")
        if n == 0:
            continue
        key, value = table.keys[row][:, : n - packed], table.values[row][:, : n - packed]
        logits = _products(grouped[row], key)
        if packed:
            logits = torch.cat([table.packed[row][0].dot(grouped[row]), logits], dim=-1)
        logits = capped(logits.mul_(scaling), softcap)
        if weight is not None:
            logits += weight[:, None, :n]
        attention = logits.softmax(-1)
        if weight is not None:  # all entries may be hidden
            attention.masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)
        torch.bmm(attention[..., packed:].to(value.dtype), value, out=out[row])
        if packed:
            out[row] = table.packed[row][1].mix(attention[..., :packed]).add_(out[row])
        if mass is not None:
            torch.mean(attention, 1, out=mass[row, :, :n])
    return out.view(rows, heads, -1), mass


def _products(query: Tensor, key: Tensor) -> Tensor:
    """`products` of query [kv_heads, group, dim] with key [kv_heads, n, dim].

    On a CPU the order of the two factors changes the time up to threefold: the few queries come first
    where the keys stay in its cache, the keys otherwise.
    """
    if key.dtype != torch.float32 or key.numel() <= IN_CACHE:
        return products(query, key)
    return torch.bmm(key, query.mT).mT.contiguous()


def products(query: Tensor, key: Tensor) -> Tensor:
    """Inner products of query [..., q, dim] with key [..., n, dim]: [..., q, n] in their dtype, but
    float32 where that has 16 bits: there a product may overflow before it is scaled, and it loses
    digits that the exponential makes visible."""
    if key.dtype not in (torch.float16, torch.bfloat16):
        return query @ key.mT
    query = query.float()
    if key.is_cuda:
        return query @ key.float().mT
    # On a CPU some keys at a time, whose float32 copies stay in its cache.
    keys_at_a_time = max(1, CACHED // max(1, key[..., :1, :].numel()))
    parts = key.split(keys_at_a_time, dim=-2)
    return torch.cat([query @ part.float().mT for part in parts], dim=-1)


IN_CACHE = 1 << 19
"""How many numbers of a layer's keys stay in a CPU's cache (2 MB) from one pass over them to the
next."""


def append_entries(
    table: EntryTable,
    lengths: Tensor | Sequence[int],
    key: Tensor,
    value: Tensor,
    *,
    implementation: str = "auto",
) -> None:
    """Write one new entry per row behind its others, at place `lengths[row]`, with log-weight 0.

    On CUDA this is one launch for all rows, and the host computes no address, so that a captured CUDA
    graph can append.

    Args:
        lengths: the number of entries of each row before the new one, see `weighted_decode_attention`;
            not changed.
        key, value: [rows, kv_heads, dim], in the buffers' dtype.

    Raises:
        ValueError: shapes that do not fit, or an implementation that is not possible here; in torch
            also a buffer without room (on CUDA the row then stays as it is).
    """
    rows, kv_heads = table.rows, table.kv_heads
    for name, new, buffer in (("key", key, table.keys[0]), ("value", value, table.values[0])):
        shape = (rows, kv_heads, buffer.shape[2])
        if new.shape != shape or new.dtype != buffer.dtype:
            raise ValueError(
                f"{name} is {tuple(new.shape)} {new.dtype}; allowed: {shape} {buffer.dtype}"
            )
    if use_triton("append_entries", implementation, key, value):
        from kvbench.kernels import _triton_decode

        _triton_decode.append(table.pointers, on_device(lengths, key.device), key, value)
        return
    counts = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    for row, n in enumerate(counts):
        packed, room = table.packed_counts[row], table.keys[row].shape[1]
        place = n - packed
        if not 0 <= place < room:
            raise ValueError(
                f"row {row} has length {n} before a new entry; allowed: {packed} to {packed + room - 1}"
            )
        table.keys[row][:, place] = key[row]
        table.values[row][:, place] = value[row]
        weight = table.log_weights[row]
        if weight is not None:
            weight[:, n] = 0.0
