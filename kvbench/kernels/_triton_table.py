"""How Triton kernels read a row's line of `RowPointers.pointers`, as functions that are compiled into
each of them."""

from __future__ import annotations

import triton
import triton.language as tl

from kvbench.kernels.decode import COLUMNS

TABLE_COLUMNS = tl.constexpr(len(COLUMNS))
KEYS = tl.constexpr(COLUMNS.index("keys"))
VALUES = tl.constexpr(COLUMNS.index("values"))
LOG_WEIGHTS = tl.constexpr(COLUMNS.index("log_weights"))
KEY_HEAD_STRIDE = tl.constexpr(COLUMNS.index("key_head_stride"))
KEY_ENTRY_STRIDE = tl.constexpr(COLUMNS.index("key_entry_stride"))
VALUE_HEAD_STRIDE = tl.constexpr(COLUMNS.index("value_head_stride"))
VALUE_ENTRY_STRIDE = tl.constexpr(COLUMNS.index("value_entry_stride"))
WEIGHT_HEAD_STRIDE = tl.constexpr(COLUMNS.index("weight_head_stride"))
WEIGHT_ENTRY_STRIDE = tl.constexpr(COLUMNS.index("weight_entry_stride"))
RESERVED = tl.constexpr(COLUMNS.index("reserved"))
SCORES = tl.constexpr(COLUMNS.index("scores"))
POSITIONS = tl.constexpr(COLUMNS.index("positions"))
NUMBER_HEAD_STRIDE = tl.constexpr(COLUMNS.index("number_head_stride"))
LIMIT = tl.constexpr(COLUMNS.index("limit"))
SINK = tl.constexpr(COLUMNS.index("sink"))
RECENT = tl.constexpr(COLUMNS.index("recent"))
HEAVIEST_LEAVES = tl.constexpr(COLUMNS.index("heaviest_leaves"))
PLACE = tl.constexpr(COLUMNS.index("place"))


@triton.jit
def row_pointer(table, row, column, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + row * TABLE_COLUMNS + column).to(tl.pointer_type(dtype))
    if ALIGNED:  # to 16 bytes: without this promise the compiler loads number by number
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def row_stride(table, row, column, ALIGNED: tl.constexpr, UNIT: tl.constexpr):
    stride = tl.load(table + row * TABLE_COLUMNS + column)
    if ALIGNED:  # UNIT numbers are 16 bytes
        stride = tl.multiple_of(stride, UNIT)
    return stride


@triton.jit
def weights_of_head(table, row, head):
    """The log-weights of a KV head of a row: the address of the first entry's, the stride from entry to
    entry, and false where all are zero and none are stored."""
    stored = tl.load(table + row * TABLE_COLUMNS + LOG_WEIGHTS) != 0
    weights = row_pointer(table, row, LOG_WEIGHTS, tl.float32, False)
    weights += head * tl.load(table + row * TABLE_COLUMNS + WEIGHT_HEAD_STRIDE)
    return weights, tl.load(table + row * TABLE_COLUMNS + WEIGHT_ENTRY_STRIDE), stored
