"""Attention of one new token per row over entries that every row holds in buffers of its own."""

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
"""Of `EntryTable.pointers`: the addresses of the three buffers (log-weights: 0 where all are zero), the
strides over heads and over entries of each, in elements, and the entries that there is room for, packed
ones included; then how many entries are packed, and the addresses of their codes, scales and zero
points (all 0 where no entry is packed)."""


@dataclass(frozen=True)
class EntryTable:
    """The addresses of the entries of each row. Made once by `entry_table`, used at every step.

    Rows of a decode step are forks and prompts that hold different numbers of entries, in buffers
    reserved when each was prefilled. Neither a padded batch tensor (reads and stores padding) nor
    one packed pool (would have to be moved when a row joins, leaves or grows) fits them; a table of
    addresses does: rows stay where they are, a pool's rows are as good as buffers of their own, and
    the same table serves every step, so a step does no Python work per row and can be captured in a
    CUDA graph. Only `lengths`, a tensor beside it, changes from step to step.

    The first entries of a row may be packed (`kvbench.kernels.quantize`). They are read as they lie, and
    the buffers of keys and values begin behind them.

    Attributes:
        keys, values: one [kv_heads, reserved, dim] per row; `reserved` differs between rows.
        log_weights: one [kv_heads, packed + reserved] float32 or None (all zero) per row; -inf hides an
            entry.
        longest: entries for which launches are made, at least what the largest buffer has room for.
        packed: the packed keys (`by_channel`) and values of each row, all of one `Quantization`; empty
            where no row has any.
        longest_packed: packed entries for which launches are made, at least those of every row.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    log_weights: tuple[Tensor | None, ...]
    longest: int
    packed: tuple[tuple[Packed, Packed], ...] = ()
    longest_packed: int = 0

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return len(self.keys)

    @property
    def kv_heads(self) -> int:
        """KV heads of every row."""
        return self.keys[0].shape[0]

    @property
    def quantization(self) -> Quantization | None:
        """How the packed entries are stored; None where there are none."""
        return self.packed[0][0].quantization if self.packed else None

    @property
    def packed_counts(self) -> list[int]:
        """Packed entries of each row."""
        return [keys.count for keys, _ in self.packed] or [0] * self.rows

    @cached_property
    def chunk(self) -> int:
        """Entries of a program on a GPU.

        Four programs per multiprocessor keep all of them busy to the end although rows differ; a power
        of two from 128 (below, the second launch costs more than the first) to 4096.
        """
        entries = sum(key.shape[1] for key in self.keys) + sum(self.packed_counts)
        places = self.kv_heads * entries
        share = -(-places // (4 * multiprocessors(self.keys[0].device)))
        return min(4096, max(128, 1 << (share - 1).bit_length()))

    @cached_property
    def aligned(self) -> bool:
        """True when every entry of every row begins at a multiple of 16 bytes, and so do the codes of
        all packed entries of a row."""
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
        """[rows, columns] int64 on the rows' device; `COLUMNS` names the columns."""
        table = []
        places = dict.fromkeys(COLUMNS, 0)
        for number, count in enumerate(self.packed_counts):
            key, value = self.keys[number], self.values[number]
            weight = self.log_weights[number]
            row = places | {
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
    """The table of these rows' buffers (or views of a pool), which are held, not copied.

    Make a new one when a row joins or leaves or a buffer is replaced by a larger one; appending to a
    buffer in place needs none.

    Args:
        keys, values: per row [kv_heads, reserved, dim]; all rows of one dtype, device, kv_heads and
            dim (of values: their own dim); numbers of an entry adjacent in memory.
        log_weights: per row [kv_heads, packed + reserved] float32, or None where all are zero.
        packed: per row the keys and values of the entries before those in the buffers; empty where no
            row has any.
        longest, longest_packed: make launches for so many entries in buffers, and so many packed ones,
            if that is more than the longest row's.

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
        kinds = {(row.shape[0], row.shape[2], row.dtype, row.device) for row in rows}
        if len(kinds) > 1:
            raise ValueError(
                f"{name} differ in (kv_heads, dim, dtype, device): {sorted(map(str, kinds))}"
            )
        if any(row.stride(2) != 1 for row in rows):
            raise ValueError(f"{name} of an entry are not adjacent in memory (stride 1)")
    if packed:
        _check_packed(packed, keys, values)
    counts = [row[0].count for row in packed] or [0] * len(keys)
    for row, (key, value, weight) in enumerate(zip(keys, values, weights, strict=True)):
        found = [(tuple(x.shape[:2]), x.dtype) for x in (key, value, weight) if x is not None]
        of_weights = (key.shape[0], counts[row] + key.shape[1])
        wanted = [found[0], found[0], (of_weights, torch.float32)]
        if found != wanted[: len(found)]:
            raise ValueError(f"row {row} has keys, values, log-weights {found}; allowed: {wanted}")
    table = EntryTable(
        tuple(keys),
        tuple(values),
        weights,
        max(longest, *(key.shape[1] for key in keys)),
        tuple(packed),
        max(longest_packed, *counts),
    )
    if keys[0].is_cuda:
        _ = table.pointers  # now: while a CUDA graph is captured nothing can come from the host
    return table


def is_readable(keys: object, values: object) -> bool:
    """Whether the kernels can read packed keys and values as they lie: integers in groups of a power of
    two numbers, keys packed by channel, values by entry, as many of one as of the other."""
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
    """Raise what `entry_table` raises of its packed entries."""
    if len(packed) != len(keys):
        raise ValueError(f"{len(packed)} rows have packed entries; allowed: none, or {len(keys)}")
    for row, sides in enumerate(packed):
        if not is_readable(*sides):
            raise ValueError(
                f"row {row} is packed by {sides[0].quantization}; allowed: keys by channel, values by "
                "entry, groups of a power of two"
            )
        buffers = keys[row], values[row]
        found = [(*side.shape[::2], side.scale.dtype, side.quantization) for side in sides]
        wanted = [(*x.shape[::2], x.dtype, packed[0][0].quantization) for x in buffers]
        if found != wanted:
            raise ValueError(f"row {row} has packed keys and values {found}; allowed: {wanted}")


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
    """softmax(q . k * scaling + log_weight) . v of one token per row over the row's entries.

    The query heads of a group share one reading of their KV head's entries; nothing is repeated,
    padded or copied, and the work of a row is proportional to the entries it holds. The entry of the
    token itself must already be in the buffers and counted.

    Args:
        query: [rows, heads, dim]; query head i uses KV head i // (heads / kv_heads).
        table: where the rows' entries are (`entry_table`).
        lengths: entries of each row, packed ones included: [rows] int32 or int64 on the
            query's device (so that a captured CUDA graph can read new ones), or plain integers
            (cheaper where the torch implementation runs, which needs them on the host). Not checked
            against the buffers when a tensor on CUDA: that would stall the device. A row of length 0
            gives zeros, as does a head whose entries are all hidden.
        scaling: factor on q.k before the softmax.
        softcap: s of s * tanh(logit / s), applied after scaling; None for none.
        return_mass: return the attention each entry received, too (H2O); not of packed entries.
        implementation: auto (Triton on CUDA, torch elsewhere) | triton | torch.

    Returns:
        output [rows, heads, value_dim] in the query's dtype; and the softmax attention each entry
        received, mean over the query heads of its group, [rows, kv_heads, table.longest] float32,
        zero beyond a row's length (None unless asked for).

    Raises:
        ValueError: shapes that do not fit; a forced implementation that is not possible.
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
    held = table.keys[0], table.values[0]
    wide = _too_wide(heads // kv_heads, max(x.shape[2] for x in held), held[0].element_size())
    if not use_triton("weighted_decode_attention", implementation, *held, obstacle=wide):
        return _torch_attention(query, table, lengths, scaling, softcap, return_mass)
    from kvbench.kernels import _triton_decode

    out, mass = _triton_decode.attention(
        query.to(held[0].dtype),
        table.pointers,
        on_device(lengths, query.device),
        kv_heads=kv_heads,
        value_dim=held[1].shape[2],
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
    """Why a program cannot hold the queries of a group beside its keys and values; None where it can,
    on every GPU since compute capability 8.0 (tests/kernels/test_kernels_compile.py)."""
    members, columns = (1 << (size - 1).bit_length() for size in (group, dim))
    if members <= 64 or (members <= 128 and members * columns * itemsize <= 64 << 10):
        return None
    return f"{group} query heads of dim {dim} share a KV head: more than a program holds"


def on_device(lengths: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """`lengths` as an integer tensor [rows] on `device`."""
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
    """Row by row on views of the buffers: a batched product would need them padded and copied."""
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
        most = packed + table.keys[row].shape[1]
        if not packed <= n <= most:
            raise ValueError(f"row {row} has length {n}; allowed: {packed} to {most}")
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

    Which of the two comes first makes up to three times the difference on a CPU: the few queries where
    the keys lie in its cache, the keys otherwise."""
    if key.dtype != torch.float32 or key.numel() <= IN_CACHE:
        return products(query, key)
    return torch.bmm(key, query.mT).mT.contiguous()


def products(query: Tensor, key: Tensor) -> Tensor:
    """q . k of query [..., q, dim] with key [..., n, dim]: [..., q, n], float32 where they are in half
    precision, in which a product may overflow before it is scaled, and loses digits that exp shows."""
    if key.dtype not in (torch.float16, torch.bfloat16):
        return query @ key.mT
    query = query.float()
    if key.is_cuda:
        return query @ key.float().mT
    # On a processor some keys at a time, whose float32 stays in its cache.
    each = max(1, CACHED // max(1, key[..., :1, :].numel()))
    return torch.cat([query @ part.float().mT for part in key.split(each, dim=-2)], dim=-1)


IN_CACHE = 1 << 19
"""Numbers of a layer's keys that stay in a CPU's cache (2 MB) from one pass over them to the next."""


def append_entries(
    table: EntryTable,
    lengths: Tensor | Sequence[int],
    key: Tensor,
    value: Tensor,
    *,
    implementation: str = "auto",
) -> None:
    """Write one new entry per row into place `lengths[row]` of its buffers, with log-weight 0.

    One launch for all rows and no address computed on the host, so that a captured CUDA graph can
    append. `lengths` (before the append) is not changed; see `weighted_decode_attention` on its form.

    Args:
        key, value: [rows, kv_heads, dim], in the buffers' dtype.

    Raises:
        ValueError: shapes that do not fit; on the torch path, a buffer without room.
    """
    rows, kv_heads = table.rows, table.kv_heads
    for name, new, held in (("key", key, table.keys[0]), ("value", value, table.values[0])):
        if new.shape != (rows, kv_heads, held.shape[2]) or new.dtype != held.dtype:
            raise ValueError(
                f"{name} is {tuple(new.shape)} {new.dtype}; "
                f"allowed: {(rows, kv_heads, held.shape[2])} {held.dtype}"
            )
    if use_triton("append_entries", implementation, key, value):
        from kvbench.kernels import _triton_decode

        _triton_decode.append(table.pointers, on_device(lengths, key.device), key, value)
        return
    counts = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    for row, n in enumerate(counts):
        place, room = n - table.packed_counts[row], table.keys[row].shape[1]
        if not 0 <= place < room:
            least = n - place
            raise ValueError(
                f"row {row} has length {n} before a new entry; allowed: {least} to {least + room - 1}"
            )
        table.keys[row][:, place] = key[row]
        table.values[row][:, place] = value[row]
        weight = table.log_weights[row]
        if weight is not None:
            weight[:, n] = 0.0
