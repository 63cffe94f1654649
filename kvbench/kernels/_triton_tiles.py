"""Functions on tiles that are compiled into several Triton kernels.

Sizes have the same names in all kernels: DIM and VALUE_DIM are the numbers of a key and of a value, D
and E are the least powers of two that are not less, because Triton's tiles have no other sides. Columns
between the two are masked. Counts and strides are in elements, never in bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(matrix, row_stride, rows, is_row, columns, DIM: tl.constexpr, D: tl.constexpr):
    """Load the tile of a matrix (the address of its first row) at `rows` [r] int64 and `columns` [c]:
    [r, c], 0 in rows where `is_row` is false and in columns from DIM on."""
    mask = is_row[:, None]
    if D != DIM:
        mask = mask & (columns < DIM)[None, :]
    return tl.load(matrix + rows[:, None] * row_stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def capped(logits, softcap, SOFTCAP: tl.constexpr):
    # softcap * tanh(logits / softcap)
    if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1), which is 1 or -1 where exp overflows or is 0
        logits = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logits / softcap) + 1.0))
    return logits


@triton.jit
def online_softmax(logits, largest, total):
    """Take the next block of keys into the softmax of every query, without its normaliser.

    Exponentials are those of the logits less the largest logit so far, so that none overflows. When a
    later block has a larger one, the caller multiplies its sums over the blocks before by `rescale`.

    Args:
        logits: [queries, keys] float32, -inf for a key that does not count.
        largest: [queries], the largest logit of the blocks before; -inf before the first.
        total: [queries], the sum of the exponentials of the blocks before; 0 before the first.

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


@triton.jit
def weighted_logits(
    products,
    scaling,
    softcap,
    weights,
    weight_stride,
    weights_stored,
    entries,
    is_entry,
    SOFTCAP: tl.constexpr,
):
    """Logits [GROUP, BLOCK] of the entries at places `entries` [BLOCK] int64 from their products q.k,
    -inf where `is_entry` [BLOCK] is false; the weights are what `weights_of_head` returned."""
    logits = capped(products * scaling, softcap, SOFTCAP)
    weight = tl.load(weights + entries * weight_stride, mask=is_entry & weights_stored, other=0.0)
    return tl.where(is_entry[None, :], logits + weight[None, :], -float("inf"))


@triton.jit
def store_partial(
    partial_out,
    partial_max,
    partial_sum,
    slots,
    in_group,
    out,
    largest,
    total,
    VALUE_DIM: tl.constexpr,
    E: tl.constexpr,
):
    """Write the results of a chunk to the places `slots` [GROUP]: the values summed by exponentials
    [GROUP, E], the largest logit and the sum of the exponentials [GROUP]."""
    tl.store(partial_max + slots, largest, mask=in_group)
    tl.store(partial_sum + slots, total, mask=in_group)
    columns = tl.arange(0, E)
    tl.store(
        partial_out + slots[:, None] * VALUE_DIM + columns[None, :],
        out,
        mask=in_group[:, None] & (columns < VALUE_DIM)[None, :],
    )
