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
    """Logits of a block of entries from the products q.k [GROUP, BLOCK] with the group's queries.

    Args:
        weights, weight_stride, weights_stored: what `weights_of_head` returned, from entry 0 on.
        entries: [BLOCK] int64, which entries.
        is_entry: [BLOCK] bool, false behind the chunk's last entry; the logit is -inf there.
    """
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
    """Write the results of a chunk for the query heads of a group: the values summed by exponentials
    out [GROUP, E], the largest logit and the sum of the exponentials [GROUP], to the places `slots`
    [GROUP]."""
    tl.store(partial_max + slots, largest, mask=in_group)
    tl.store(partial_sum + slots, total, mask=in_group)
    columns = tl.arange(0, E)
    tl.store(
        partial_out + slots[:, None] * VALUE_DIM + columns[None, :],
        out,
        mask=in_group[:, None] & (columns < VALUE_DIM)[None, :],
    )
