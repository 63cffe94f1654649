"""Keys and values in packed 2- or 4-bit integers (H2O, arXiv 2306.14048, Tables 6 and 7).

Asymmetric, by groups: a group's smallest value is its zero point, its range over 2^bits - 1 its scale.
Keys are quantised per channel (a group is `group_size` consecutive entries of one channel), values
per token (a group is `group_size` consecutive channels of one entry), because outliers of keys sit in
channels and those of values do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = (2, 4)


@dataclass(frozen=True)
class Quantization:
    """How entries are stored.

    Attributes:
        bits: 2 or 4 per number.
        group_size: numbers that share a scale and a zero point.
    """

    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits is {self.bits}")
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}")


@dataclass(frozen=True)
class Packed:
    """A tensor [heads, n, d] in packed integers.

    Attributes:
        codes: [heads, rows, ceil(columns * bits / 8)] uint8, several codes a byte.
        scale, zero: [heads, rows, groups] in the dtype of what was packed.
        shape: of the tensor; `by_channel`: rows are channels (keys), else entries (values).
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    shape: tuple[int, int, int]
    by_channel: bool
    quantization: Quantization

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        parts = (self.codes, self.scale, self.zero)
        return sum(part.numel() * part.element_size() for part in parts)


def packed_bytes(
    shape: tuple[int, int, int], quantization: Quantization, itemsize: int, *, by_channel: bool
) -> int:
    """What `pack` makes of a tensor [heads, n, d] of numbers of `itemsize` bytes: `Packed.nbytes`."""
    heads, n, d = shape
    rows, columns = (d, n) if by_channel else (n, d)
    if not columns:
        return 0
    groups = -(-columns // min(quantization.group_size, columns))
    codes = -(-columns * quantization.bits // 8)
    return heads * rows * (codes + 2 * groups * itemsize)


def pack(x: Tensor, quantization: Quantization, *, by_channel: bool) -> Packed:
    """Quantise x [heads, n, d]: per channel (groups run along n) or per entry (along d).

    A last group that is short stands alone; it is padded with its last number, which changes neither
    its scale nor its zero point.
    """
    bits, size = quantization.bits, min(quantization.group_size, x.shape[1 if by_channel else 2])
    rows = (x.transpose(1, 2) if by_channel else x).float()
    columns = rows.shape[-1]
    padded = F.pad(rows, (0, -columns % size), mode="replicate") if columns % size else rows
    groups = padded.unflatten(-1, (-1, size))
    zero = groups.amin(-1).to(x.dtype)
    scale = ((groups.amax(-1) - zero.float()) / (2**bits - 1)).to(x.dtype)
    step = torch.where(scale > 0, scale.float(), 1.0)
    codes = ((groups - zero.float()[..., None]) / step[..., None]).round_()
    codes = codes.clamp_(0, 2**bits - 1).flatten(-2)[..., :columns].to(torch.uint8)
    per_byte = 8 // bits
    codes = F.pad(codes, (0, -columns % per_byte)).unflatten(-1, (-1, per_byte))
    packed = torch.zeros_like(codes[..., 0])
    for place in range(per_byte):
        packed |= codes[..., place] << (bits * place)
    shape = (x.shape[0], x.shape[1], x.shape[2])
    return Packed(packed, scale, zero, shape, by_channel, quantization)


def unpack(packed: Packed) -> Tensor:
    """The numbers [heads, n, d] the codes stand for, each within half a step of what was packed."""
    bits = packed.quantization.bits
    along = packed.shape[1 if packed.by_channel else 2]
    size = min(packed.quantization.group_size, along)
    places = [(packed.codes >> (bits * place)) & (2**bits - 1) for place in range(8 // bits)]
    codes = torch.stack(places, dim=-1).flatten(-2)[..., :along].to(packed.scale.dtype)
    scale = packed.scale.repeat_interleave(size, dim=-1)[..., :along]
    zero = packed.zero.repeat_interleave(size, dim=-1)[..., :along]
    rows = torch.addcmul(zero, codes, scale)
    return rows.transpose(1, 2) if packed.by_channel else rows
