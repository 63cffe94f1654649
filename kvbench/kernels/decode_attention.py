"""Attention of one new token per row over the row's entries, which lie in buffers of its own.

The Triton kernel cuts the entries into chunks and combines the softmax over each of them (flash
decoding).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton
from kvbench.kernels.quantize import CACHED
from kvbench.kernels.row_pointers import RowPointers


def weighted_decode_attention(
    query: Tensor,
    table: RowPointers,
    lengths: Tensor | Sequence[int],
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
        lengths: the number of entries of each row: [rows] int32 or int64 on the query's device (a
            captured CUDA graph can then read new ones), or plain integers (which save a copy where torch
            runs, since it needs them on the host). The Triton kernel does not compare them with the
            buffers, because the host would have to wait for the device; it reads no entry beyond
            `reserved`. A row of length 0 gives zeros, as does a head whose entries are all hidden.
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
        on_device(lengths, query.device),
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


def on_device(lengths: Tensor | Sequence[int], device: torch.device) -> Tensor:
    if isinstance(lengths, Tensor):
        return lengths.to(device)
    return torch.tensor(lengths, dtype=torch.int64, device=device)


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


def append_entries(
    table: RowPointers,
    lengths: Tensor | Sequence[int],
    key: Tensor,
    value: Tensor,
) -> None:
    """Write one new entry per row behind its others, at place `lengths[row]`, with log-weight 0.

    On CUDA this is one launch for all rows, and the host computes no address, so that a captured CUDA
    graph can append.

    Args:
        lengths: the number of entries of each row before the new one, see `weighted_decode_attention`;
            not changed.
        key, value: [rows, kv_heads, dim], in the buffers' dtype.

    Raises:
        ValueError: shapes that do not fit; in torch also a buffer without room (on CUDA the row then
            stays as it is).
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

    _triton_decode.append(table.pointers, on_device(lengths, key.device), key, value)
