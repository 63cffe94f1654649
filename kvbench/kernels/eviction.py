"""Eviction while decoding, for all rows of a layer at once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvbench.kernels._choice import use_triton
from kvbench.kernels.decode_attention import on_device
from kvbench.kernels.row_pointers import RowPointers


def evict_entries(
    table: RowPointers,
    lengths: Tensor | Sequence[int],
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
        on_device(lengths, positions.device),
        mass,
        positions,
        going,
        keys=table.keys[0],
        values=table.values[0],
        longest=table.longest,
    )
