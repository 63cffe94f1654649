"""What several Triton kernels do with a tile, as functions that are compiled into each of them.

Sizes have the same names in all kernels: DIM and VALUE_DIM are the numbers of a key and of a value, D
and E are the least powers of two that are not less, because Triton's tiles have no other sides. Columns
between the two are masked. Counts and strides are in elements, never in bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(matrix, row_stride, rows, is_row, columns, DIM: tl.constexpr, D: tl.constexpr):
    """Load the tile [rows, columns] of a matrix whose rows have DIM adjacent numbers.

    Args:
        matrix: the address of the first row.
        row_stride: from one row to the next.
        rows: [r] int64, which rows.
        is_row: [r] bool; the tile is 0 where it is false.
        columns: [c], which columns; the tile is 0 in those from DIM on (there are some if D > DIM).
    """
    mask = is_row[:, None]
    if D != DIM:
        mask = mask & (columns < DIM)[None, :]
    return tl.load(matrix + rows[:, None] * row_stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def capped(logits, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(logits / softcap); the logits themselves if SOFTCAP is false."""
    if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1), which is 1 or -1 where exp overflows or is 0
        logits = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logits / softcap) + 1.0))
    return logits


@triton.jit
def online_softmax(logits, largest, total):
    """Take the next block of keys into the softmax of every query, without its normaliser.

    Exponentials are those of the logits less the largest logit so far, so that none overflows. When a
    later block has a larger one, the sums over the blocks before are multiplied by `rescale`.

    Args:
        logits: [queries, keys] float32, -inf for a key that does not count.
        largest: [queries], the largest logit of the blocks before; -inf before the first.
        total: [queries], the sum of the exponentials of the blocks before, less `largest`.

    Returns:
        the exponentials [queries, keys], `rescale` [queries], and `largest` and `total` with this
        block.
    """
    new_largest = tl.maximum(largest, tl.max(logits, 1))
    # Where no key has counted so far, -inf - -inf would be NaN.
    base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    exponentials = tl.exp(logits - base[:, None])
    rescale = tl.exp(largest - base)
    return exponentials, rescale, new_largest, total * rescale + tl.sum(exponentials, 1)
