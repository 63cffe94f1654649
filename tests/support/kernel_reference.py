"""The kernels of a decode step in torch, over the same addresses.

`reference_kernels` puts it in the kernels' place, so that a batch as the kernels see it runs on a CPU in
a test's time, and answers as the caches do; `support.interpreted` runs the kernels themselves.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.engine import captured
from kvbench.kernels.decode import RowPointers
from kvbench.kernels.logits import products, softcapped, softmax


def attention(
    query: Tensor,
    table: RowPointers,
    lengths: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`weighted_decode_attention`, row by row."""
    counts = lengths.tolist()
    rows, heads, dim = query.shape
    kv_heads = table.kv_heads
    grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
    out = query.new_zeros(*grouped.shape[:3], table.values[0].shape[2])
    mass = (
        query.new_zeros(rows, kv_heads, table.longest, dtype=torch.float32) if return_mass else None
    )
    for row, n in enumerate(counts):
        weight = table.log_weights[row]
        key, value = table.keys[row][:, :n], table.values[row][:, :n]
        logits = products(grouped[row], key)
        logits = softcapped(logits.mul_(scaling), softcap)
        if weight is not None:
            logits += weight[:, None, :n]
        own_sinks = None if sinks is None else sinks[row].view(kv_heads, -1)
        attention = softmax(logits, own_sinks)
        if weight is not None:  # all entries may be hidden
            attention.masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)
        torch.bmm(attention.to(value.dtype), value, out=out[row])
        if mass is not None:
            torch.mean(attention, 1, out=mass[row, :, :n])
    return out.view(rows, heads, -1), mass


def append(table: RowPointers, lengths: Tensor, key: Tensor, value: Tensor) -> None:
    """`append_entries`."""
    counts = lengths.tolist()
    for row, n in enumerate(counts):
        table.keys[row][:, n] = key[row]
        table.values[row][:, n] = value[row]
        weight = table.log_weights[row]
        if weight is not None:
            weight[:, n] = 0.0


def evict(
    table: RowPointers,
    lengths: Tensor,
    mass: Tensor | None,
    positions: Tensor,
    going: Tensor,
) -> None:
    """`evict_entries`."""
    counts = lengths.tolist()
    is_going = going.tolist()
    for row, place in enumerate(table.places):
        if is_going[place]:
            received = None if mass is None else mass[row]
            _evict(table, row, counts[row], received, positions[place])


def _evict(
    table: RowPointers,
    row: int,
    new: int,
    mass: Tensor | None,
    position: Tensor,
) -> None:
    """`evict_entries` for one row in torch, whose new entry is at place `new` and has this position."""
    positions, scores = table.positions[row], table.scores[row]
    positions[:, new] = position
    if scores is not None and mass is not None:
        scores[:, new] = 0
        scores[:, : new + 1] += mass[:, : new + 1]
        scores = scores[:, : new + 1]
    if new < table.limits[row]:
        return
    leaving = table.rules[row].choose(scores, positions[:, : new + 1])[:, None]
    for part in (positions, table.scores[row], table.log_weights[row]):
        if part is not None:
            part.scatter_(1, leaving, part[:, new, None].clone())
    for part in (table.keys[row], table.values[row]):
        leaving_entry = leaving[..., None].expand(-1, -1, part.shape[2])
        part.scatter_(1, leaving_entry, part[:, new, None].clone())


def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows on a CPU decode as a batch of the kernels, in torch."""
    monkeypatch.setattr(captured, "uses_kernels", lambda device: True)
    monkeypatch.setattr(captured, "takes", lambda *_: True)
    monkeypatch.setattr(captured, "weighted_decode_attention", attention)
    monkeypatch.setattr(captured, "append_entries", append)
    monkeypatch.setattr(captured, "evict_entries", evict)
