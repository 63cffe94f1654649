"""Triton kernel of Philox 4x64-10: `philox.philox` on CUDA.

Philox makes words in blocks of four, each from the key and the block's number. A program makes `LANES`
consecutive blocks, one a lane.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device

LANES = 256


@triton.jit
def _store(out, word, lane, place: tl.constexpr, count):
    """Write word `place` (0 to 3) of each lane's block as one number, or as two of float32, of `count`
    in all."""
    word_index = lane * 4 + place
    if out.dtype.element_ty == tl.float32:
        index = word_index * 2
        lower = (word & 0xFFFFFFFF).to(tl.uint32)
        tl.store(out + index, (lower >> 8).to(tl.float32) * 2.0**-24, mask=index < count)
        upper = (word >> 32).to(tl.uint32)
        tl.store(out + index + 1, (upper >> 8).to(tl.float32) * 2.0**-24, mask=index + 1 < count)
    elif out.dtype.element_ty == tl.float64:
        number = (word >> 11).to(tl.float64) * 2.0**-53
        tl.store(out + word_index, number, mask=word_index < count)
    else:
        tl.store(out + word_index, word.to(tl.int64, bitcast=True), mask=word_index < count)


@triton.jit(do_not_specialize=["key", "count"])
def philox_kernel(
    out,  # [count] int64, float64 or float32
    key,
    count,
    LANES: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    zeros = tl.zeros([LANES], tl.int64)
    # numpy's counter, too, is 1 for the first block.
    word0, word1, word2, word3 = tl.philox(key, lane + 1, zeros, zeros, zeros)
    _store(out, word0, lane, 0, count)
    _store(out, word1, lane, 1, count)
    _store(out, word2, lane, 2, count)
    _store(out, word3, lane, 3, count)


@on_its_device
def fill(out: Tensor, key: int) -> Tensor:
    """Fill `out` (contiguous; int64, float64 or float32; not empty) with the numbers of `key`, and
    return it: one launch."""
    count = out.numel()
    per_program = LANES * 4 * (8 // out.element_size())
    philox_kernel[(triton.cdiv(count, per_program),)](out, key, count, LANES=LANES, num_warps=4)
    return out
