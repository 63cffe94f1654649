"""Functions that the adapters to other packages share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvbench.kv import CompressedKV, KVError, LayerKV, rows_at


def _bytes_of_rows(tensors: Sequence[Tensor]) -> np.ndarray:
    """Each row as one value of raw bytes, [batch, heads, n]; tensors [batch, heads, n, d] are joined
    along d."""
    rows = [tensor.contiguous().view(torch.uint8) for tensor in tensors]
    joined = torch.cat(rows, -1).cpu().numpy()
    return joined.view(np.dtype((np.void, joined.shape[-1])))[..., 0]


def find_rows(kept: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Find the place of each kept row among the original rows, by their bits. Of equal rows the first
    kept row gets the first place, and so on.

    Args:
        kept: tensors [batch, copies * heads, c, d], such as keys and values. A row is what all of them
            hold at one place.
        rows: the original tensors [batch, heads, n, d], in the same order. Every head was copied
            `copies` times.

    Returns:
        [batch, copies * heads, c] int64 in 0 .. n - 1, -1 for a row that is not among the originals.
    """
    kept_rows, original_rows = _bytes_of_rows(kept), _bytes_of_rows(rows)
    copies = kept_rows.shape[1] // original_rows.shape[1]
    places = np.empty(kept_rows.shape, dtype=np.int64)
    for prompt, head in np.ndindex(*kept_rows.shape[:2]):
        originals = original_rows[prompt, head // copies]
        places[prompt, head] = _places_among(kept_rows[prompt, head], originals)
    return torch.from_numpy(places).to(kept[0].device)


def _places_among(kept: np.ndarray, originals: np.ndarray) -> np.ndarray:
    """`find_rows` for the rows of one head, arrays [c] and [n]."""
    order = originals.argsort(kind="stable")
    kept_order = kept.argsort(kind="stable")
    kept_sorted = kept[kept_order]
    # How many equal kept rows come before each.
    repeats = np.arange(len(kept)) - kept_sorted.searchsorted(kept_sorted)
    ranks = originals.searchsorted(kept_sorted, sorter=order) + repeats
    candidates = order[ranks.clip(max=len(originals) - 1)]
    places = np.empty(len(kept), dtype=np.int64)
    places[kept_order] = np.where(originals[candidates] == kept_sorted, candidates, -1)
    return places


def locate_entries(keys: Tensor, values: Tensor, layer: LayerKV) -> CompressedKV:
    """Find the prompt positions of the entries that a package returned, and sort the entries by
    position.

    An entry has the position of the layer's key and value with the same bits; where the package changed
    values, that of the key with the same bits. A key that the package made itself has position -1 and
    comes first. The search counts as part of the time of compression.

    Args:
        keys, values: [batch, copies * kv_heads, c, head_dim] as the package returned them, every KV head
            `copies` times.
    """
    positions = find_rows((keys, values), (layer.keys, layer.values))
    if (positions < 0).any():
        positions = find_rows((keys,), (layer.keys,))
    positions, order = positions.sort(dim=-1, stable=True)
    return CompressedKV(rows_at(keys, order), rows_at(values, order), None, positions)


def scaled_queries(layer: LayerKV, who: str) -> Tensor:
    """The prompt's queries times scaling * sqrt(head_dim), [batch, heads, m, head_dim]. A package that
    divides the logits by sqrt(head_dim) then uses the layer's own scaling.

    Args:
        who: what messages call the package's class, which reads the queries of the prompt's last tokens
            and does not bound logits.
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
    if math.isclose(factor, 1.0, rel_tol=1e-9):
        return layer.queries
    return layer.queries * factor
