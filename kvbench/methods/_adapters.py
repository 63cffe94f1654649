"""What the adapters to other packages share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvbench.kv import CompressedKV, KVError, LayerKV

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(*parts: Tensor) -> Tensor:
    """A 64-bit number for every row, the same for rows of the same bits.

    Integer arithmetic, so that neither the shape nor the order of the rows changes a bit of it.

    Args:
        parts: [batch, heads, n, d], any float dtype: a row is what they hold at one place.

    Returns:
        [batch, heads, n] int64.
    """
    total = torch.zeros(parts[0].shape[:3], dtype=torch.int64, device=parts[0].device)
    generator = torch.Generator().manual_seed(0)
    for part in parts:
        width = part.shape[-1] * part.element_size()
        whole = next(size for size in (8, 4, 2, 1) if width % size == 0)
        low, high = -(2**62), 2**62
        odd = torch.randint(low, high, (width // whole,), generator=generator) * 2 + 1
        odd = odd.to(part.device)
        for row in range(part.shape[0]):
            for head in range(part.shape[1]):  # one head at a time: the products are 8 bytes each
                bits = part[row, head].contiguous().view(_INTEGERS[whole])
                total[row, head] += (bits * odd).sum(-1)
    return total


def find_rows(kept: tuple[Tensor, ...], rows: tuple[Tensor, ...]) -> Tensor:
    """Where each kept row stands among the original ones; equal rows are told off in order.

    Args:
        kept: tensors [batch, copies * heads, c, d]: a row is what they hold at one place.
        rows: tensors [batch, heads, n, d], in the same order; every head was copied `copies` times.

    Returns:
        [batch, copies * heads, c] int64 in 0 .. n - 1, -1 for a row that is not among the originals.
    """
    count, (batch, heads, n, _) = kept[0].shape[2], rows[0].shape
    copies = kept[0].shape[1] // heads
    originals, order = (
        part.repeat_interleave(copies, 1) for part in fingerprints(*rows).sort(dim=-1, stable=True)
    )
    wanted, back = fingerprints(*kept).sort(dim=-1, stable=True)
    repeats = torch.arange(count, device=back.device) - torch.searchsorted(wanted, wanted)
    place = (torch.searchsorted(originals, wanted) + repeats).clamp(max=n - 1)
    found = torch.empty_like(back).scatter_(-1, back, order.gather(-1, place))
    same = torch.ones_like(found, dtype=torch.bool)
    index = found.view(batch, heads, -1, 1)
    for mine, original in zip(kept, rows, strict=True):
        here = original.gather(2, index.expand(-1, -1, -1, original.shape[-1]))
        same &= (here.view_as(mine) == mine).all(-1)
    return torch.where(same, found, -1)


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
