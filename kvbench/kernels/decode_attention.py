"""Attention of one new token per row over entries that every row holds in buffers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvbench.kernels._choice import multiprocessors, use_triton
from kvbench.kernels.philox import to_device
from kvbench.kernels.quantize import CACHED
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
)
"""Of `EntryTable.pointers`: the addresses of the three buffers (log-weights: 0 where all are zero), the
strides over heads and over entries of each, in elements, and the entries reserved."""


@dataclass(frozen=True)
class EntryTable:
    """The addresses of the entries of each row. Made once by `entry_table`, used at every step.

    Rows of a decode step are forks and prompts that hold different numbers of entries, in buffers
    reserved when each was prefilled. Neither a padded batch tensor (reads and stores padding) nor
    one packed pool (would have to be moved when a row joins, leaves or grows) fits them; a table of
    addresses does: rows stay where they are, a pool's rows are as good as buffers of their own, and
    the same table serves every step, so a step does no Python work per row and can be captured in a
    CUDA graph. Only `lengths`, a tensor beside it, changes from step to step.

    Attributes:
        keys, values: one [kv_heads, reserved, dim] per row; `reserved` differs between rows.
        log_weights: one [kv_heads, reserved] float32 or None (all zero) per row; -inf hides an entry.
        longest: entries for which launches are made, at least what the largest buffer has room for.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    log_weights: tuple[Tensor | None, ...]
    longest: int

    @property
    def rows(self) -> int:
        return len(self.keys)

    @property
    def kv_heads(self) -> int:
        return self.keys[0].shape[0]

    @cached_property
    def chunk(self) -> int:
        """Entries of a program on a GPU.

        Four programs per multiprocessor keep all of them busy to the end although rows differ; a power
        of two from 128 (below, the second launch costs more than the first) to 4096.
        """
        places = self.kv_heads * sum(key.shape[1] for key in self.keys)
        share = -(-places // (4 * multiprocessors(self.keys[0].device)))
        return min(4096, max(128, 1 << (share - 1).bit_length()))

    @cached_property
    def aligned(self) -> bool:
        """True when every entry of every row begins at a multiple of 16 bytes."""
        return all(
            part.data_ptr() % 16 == 0
            and all(stride * part.element_size() % 16 == 0 for stride in part.stride()[:2])
            for part in (*self.keys, *self.values)
        )

    @cached_property
    def pointers(self) -> Tensor:
        """[rows, columns] int64 on the rows' device; `COLUMNS` names the columns."""
        table = []
        for key, value, weight in zip(self.keys, self.values, self.log_weights, strict=True):
            row = {
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
            table.append([row[name] for name in COLUMNS])
        return to_device(torch.tensor(table, dtype=torch.int64), self.keys[0].device)


def entry_table(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    log_weights: Sequence[Tensor | None] | None = None,
    *,
    longest: int = 0,
) -> EntryTable:
    """The table of these rows' buffers (or views of a pool), which are held, not copied.

    Make a new one when a row joins or leaves or a buffer is replaced by a larger one; appending to a
    buffer in place needs none.

    Args:
        keys, values: per row [kv_heads, reserved, dim]; all rows of one dtype, device, kv_heads and
            dim (of values: their own dim); numbers of an entry adjacent in memory.
        log_weights: per row [kv_heads, reserved] float32, or None where all are zero.
        longest: make launches for so many entries, if that is more than the largest buffer's.

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
    for row, (key, value, weight) in enumerate(zip(keys, values, weights, strict=True)):
        found = [(tuple(x.shape[:2]), x.dtype) for x in (key, value, weight) if x is not None]
        wanted = [found[0], found[0], (found[0][0], torch.float32)]
        if found != wanted[: len(found)]:
            raise ValueError(f"row {row} has keys, values, log-weights {found}; allowed: {wanted}")
    longest = max(longest, *(key.shape[1] for key in keys))
    table = EntryTable(tuple(keys), tuple(values), weights, longest)
    if keys[0].is_cuda:
        _ = table.pointers  # now: while a CUDA graph is captured nothing can come from the host
    return table


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
        lengths: entries of each row, from the start of its buffers: [rows] int32 or int64 on the
            query's device (so that a captured CUDA graph can read new ones), or plain integers
            (cheaper where the torch implementation runs, which needs them on the host). Not checked
            against the buffers when a tensor on CUDA: that would stall the device. A row of length 0
            gives zeros, as does a head whose entries are all hidden.
        scaling: factor on q.k before the softmax.
        softcap: s of s * tanh(logit / s), applied after scaling; None for none.
        return_mass: return the attention each entry received, too (H2O).
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
        key, value, weight = table.keys[row], table.values[row], table.log_weights[row]
        if not 0 <= n <= key.shape[1]:
            raise ValueError(f"row {row} has length {n}; its buffers hold 0 to {key.shape[1]}")
        if n == 0:
            continue
        logits = capped(_products(grouped[row], key[:, :n]).mul_(scaling), softcap)
        if weight is not None:
            logits += weight[:, None, :n]
        attention = logits.softmax(-1)
        if weight is not None:  # all entries may be hidden
            attention.masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)
        torch.bmm(attention.to(value.dtype), value[:, :n], out=out[row])
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
        if not 0 <= n < table.keys[row].shape[1]:
            raise ValueError(
                f"row {row} has length {n}; its buffers hold {table.keys[row].shape[1]}"
            )
        table.keys[row][:, n] = key[row]
        table.values[row][:, n] = value[row]
        weight = table.log_weights[row]
        if weight is not None:
            weight[:, n] = 0.0
