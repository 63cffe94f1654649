"""Eviction while decoding, for all rows of a layer at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvbench.kernels._choice import use_triton
from kvbench.kernels.addresses import Addresses
from kvbench.kernels.decode_attention import on_device


def evict_entries(
    table: Addresses,
    lengths: Tensor | Sequence[int],
    mass: Tensor | None,
    positions: Tensor,
    going: Tensor,
    *,
    implementation: str = "auto",
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
            (`Addresses.places`).
        going: [batch] int64, 0 for rows of the whole batch that have ended, which are not changed.
        implementation: auto (Triton on CUDA, torch elsewhere) | triton | torch.
    """
    if use_triton("evict_entries", implementation, table.keys[0], table.values[0]):
        from kvbench.kernels import _triton_evict

        _triton_evict.evict(
            table.pointers,
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
    is_going = going.tolist()
    for row, place in enumerate(table.places):
        if is_going[place]:
            received = None if mass is None else mass[row]
            _evict(table, row, counts[row], received, positions[place])


def _evict(
    table: Addresses,
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
