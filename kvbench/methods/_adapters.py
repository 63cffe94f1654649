"""What the adapters to other packages share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvbench.kv import CompressedKV, KVError, LayerKV

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(rows: Tensor) -> Tensor:
    """A 64-bit number for every row, the same for rows of the same bits.

    Integer arithmetic, so that neither the shape nor the order of the rows changes a bit of it.

    Args:
        rows: [..., d], any float dtype.

    Returns:
        [...] int64.
    """
    bits = rows.contiguous().view(_INTEGERS[rows.element_size()]).long()
    generator = torch.Generator().manual_seed(0)
    low, high = -(2**62), 2**62
    odd = torch.randint(low, high, rows.shape[-1:], generator=generator) * 2 + 1
    return (bits * odd.to(rows.device)).sum(-1)


def find_rows(kept: Tensor, rows: Tensor) -> Tensor:
    """Where each kept row stands among the original ones; equal rows are told off in order.

    Args:
        kept: [..., c, d].
        rows: [..., n, d], the same leading dimensions.

    Returns:
        [..., c] int64 in 0 .. n - 1, -1 for a row that is not among the original ones.
    """
    count, n = kept.shape[-2], rows.shape[-2]
    originals, order = fingerprints(rows).sort(dim=-1, stable=True)
    wanted, back = fingerprints(kept).sort(dim=-1, stable=True)
    repeats = torch.arange(count, device=kept.device) - torch.searchsorted(wanted, wanted)
    place = (torch.searchsorted(originals, wanted) + repeats).clamp(max=n - 1)
    found = torch.empty_like(back).scatter_(-1, back, order.gather(-1, place))
    same = rows.gather(-2, found.unsqueeze(-1).expand_as(kept)) == kept
    return torch.where(same.all(-1), found, -1)


def held_entries(
    keys: Tensor, values: Tensor, original_keys: Tensor, original_values: Tensor
) -> CompressedKV:
    """What a package returned, as entries in the order of their prompt positions.

    A kept entry's position is that of the original key with the same bits (and value, where the
    package left the values as they were); -1 for a key the package made itself, which comes first.

    Args:
        keys, values: [batch, heads, c, head_dim] as the package returned them.
        original_keys, original_values: [batch, heads, n, head_dim] as it got them.
    """
    both = torch.cat([original_keys, original_values], dim=-1)
    positions = find_rows(torch.cat([keys, values], dim=-1), both)
    if (positions < 0).any():
        positions = find_rows(keys, original_keys)
    positions, order = positions.sort(dim=-1, stable=True)
    index = order.unsqueeze(-1)
    return CompressedKV(
        keys.gather(2, index.expand(-1, -1, -1, keys.shape[-1])),
        values.gather(2, index.expand(-1, -1, -1, values.shape[-1])),
        None,
        positions,
    )


def scaled_queries(layer: LayerKV, who: str) -> Tensor:
    """The prompt's queries times scaling * sqrt(head_dim), [batch, heads, m, head_dim]: a package
    that divides the logits by sqrt(head_dim) then uses the layer's own scaling.

    Raises:
        KVError: the layer has no queries, or bounds its logits, which `who` does not.
    """
    if layer.queries is None:
        raise KVError(f"layer {layer.layer_index} has no queries; {who} needs them")
    if layer.softcap is not None:
        raise KVError(
            f"layer {layer.layer_index} bounds its logits (softcap {layer.softcap}) and {who} "
            "does not; allowed: models without softcap"
        )
    factor = layer.scaling * math.sqrt(layer.queries.shape[-1])
    return layer.queries if math.isclose(factor, 1.0, rel_tol=1e-9) else layer.queries * factor
