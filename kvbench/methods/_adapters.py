"""What the adapters to other packages share."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvbench.kv import CompressedKV, KVError, LayerKV, rows_at


def _bits(parts: tuple[Tensor, ...]) -> np.ndarray:
    """Rows of tensors [batch, heads, n, d] as one number of bytes each, [batch, heads, n]."""
    whole = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1).cpu().numpy()
    return whole.view(np.dtype((np.void, whole.shape[-1])))[..., 0]


def find_rows(kept: tuple[Tensor, ...], rows: tuple[Tensor, ...]) -> Tensor:
    """The place of each kept row among the original ones. Of equal rows the first kept one gets the
    first place, and so on.

    Args:
        kept: tensors [batch, copies * heads, c, d]: a row is what they hold at one place.
        rows: tensors [batch, heads, n, d], in the same order; every head was copied `copies` times.

    Returns:
        [batch, copies * heads, c] int64 in 0 .. n - 1, -1 for a row that is not among the originals.
    """
    wanted, originals = _bits(kept), _bits(rows)
    copies, n = wanted.shape[1] // originals.shape[1], originals.shape[2]
    places = np.empty(wanted.shape, dtype=np.int64)
    for row, head in np.ndindex(*wanted.shape[:2]):
        theirs, mine = originals[row, head // copies], wanted[row, head]
        order, back = theirs.argsort(kind="stable"), mine.argsort(kind="stable")
        mine = mine[back]
        repeats = np.arange(len(mine)) - mine.searchsorted(mine)
        place = (theirs.searchsorted(mine, sorter=order) + repeats).clip(max=n - 1)
        places[row, head, back] = np.where(theirs[order[place]] == mine, order[place], -1)
    return torch.from_numpy(places).to(kept[0].device)


def held_entries(keys: Tensor, values: Tensor, layer: LayerKV) -> CompressedKV:
    """What a package returned, as entries in the order of their prompt positions.

    A kept entry's position is that of the layer's key with the same bits (and value, where the
    package left the values as they were); -1 for a key the package made itself, which comes first.
    Finding them is bookkeeping, yet part of the seconds that compression took.

    Args:
        keys, values: [batch, copies * kv_heads, c, head_dim] as the package returned them, every
            KV head `copies` times.
    """
    positions = find_rows((keys, values), (layer.keys, layer.values))
    if (positions < 0).any():
        positions = find_rows((keys,), (layer.keys,))
    positions, order = positions.sort(dim=-1, stable=True)
    return CompressedKV(rows_at(keys, order), rows_at(values, order), None, positions)


def scaled_queries(layer: LayerKV, who: str) -> Tensor:
    """The prompt's queries times scaling * sqrt(head_dim), [batch, heads, m, head_dim]: a package
    that divides the logits by sqrt(head_dim) then uses the layer's own scaling.

    Raises:
        KVError: the layer has no queries or withholds the last, which `who` takes for those of the
            last tokens, or bounds its logits, which `who` does not.
    """
    if layer.queries is None:
        raise KVError(f"layer {layer.layer_index} has no queries; {who} needs them")
    if layer.withheld:
        raise KVError(
            f"layer {layer.layer_index} withholds the last {layer.withheld} queries, to measure on, "
            f"and {who} reads those of the last tokens; allowed there: task.held_out=false"
        )
    if layer.softcap is not None:
        raise KVError(
            f"layer {layer.layer_index} bounds its logits (softcap {layer.softcap}) and {who} "
            "does not; allowed: models without softcap"
        )
    factor = layer.scaling * math.sqrt(layer.queries.shape[-1])
    return layer.queries if math.isclose(factor, 1.0, rel_tol=1e-9) else layer.queries * factor
