"""Triton kernel of Philox 4x64-10: a block of four words per lane, written as numbers of some dtype."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device

LANES = 256
"""Blocks of words that a program computes."""


@triton.jit
def _store(out, word, lane, place: tl.constexpr, count):
    """Word `place` of each lane's block, as one number, or as two of float32."""
    if out.dtype.element_ty == tl.float32:
        half = (word & 0xFFFFFFFF).to(tl.uint32)
        at = (lane * 4 + place) * 2
        tl.store(out + at, (half >> 8).to(tl.float32) * 2.0**-24, mask=at < count)
        half = (word >> 32).to(tl.uint32)
        tl.store(out + at + 1, (half >> 8).to(tl.float32) * 2.0**-24, mask=at + 1 < count)
    elif out.dtype.element_ty == tl.float64:
        at = lane * 4 + place
        tl.store(out + at, (word >> 11).to(tl.float64) * 2.0**-53, mask=at < count)
    else:
        at = lane * 4 + place
        tl.store(out + at, word.to(tl.int64, bitcast=True), mask=at < count)


@triton.jit(do_not_specialize=["key", "count"])
def philox_kernel(
    out,  # [count] int64, float64 or float32
    key,
    count,
    LANES: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    none = tl.zeros([LANES], tl.int64)
    a, b, c, d = tl.philox(key, lane + 1, none, none, none)
    _store(out, a, lane, 0, count)
    _store(out, b, lane, 1, count)
    _store(out, c, lane, 2, count)
    _store(out, d, lane, 3, count)


@on_its_device
def fill(out: Tensor, key: int) -> Tensor:
    """`out` (contiguous), filled with the numbers of `key`: one launch."""
    count = out.numel()
    per_program = LANES * 4 * (8 // out.element_size())
    philox_kernel[(triton.cdiv(count, per_program),)](out, key, count, LANES=LANES, num_warps=4)
    return out
