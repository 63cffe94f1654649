"""The table of where entries lie: how it divides them, and rows that it does not take. Its addresses are
tested with the kernels that read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.kernels import entry_table as table_module
from kvbench.kernels.entry_table import entry_table
from kvbench.kernels.quantize import Packed, Quantization, pack

KEY = torch.zeros(2, 5, 4)
"""A row's keys, or its values: 2 KV heads, 5 entries, 4 numbers."""
CODES = Quantization(4, 4)
PACKED_KEYS, PACKED_VALUES = pack(KEY, CODES, by_channel=True), pack(KEY, CODES, by_channel=False)


@pytest.mark.parametrize(
    ("entries", "chunk"), [(100, 128), (8 * 128, 128), (8 * 128 + 1, 256), (10**6, 4096)]
)
def test_a_chunk_is_the_entries_of_a_program_rounded_up_to_a_power_of_two(
    entries: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "multiprocessors", lambda device: 4)  # 16 programs
    keys = torch.zeros(1, 1, 1).expand(2, entries, 1)
    assert entry_table([keys], [keys]).chunk == chunk


@pytest.mark.parametrize(
    ("keys", "aligned"),
    [
        (torch.zeros(2, 5, 4), True),
        (torch.zeros(2, 5, 5), False),  # an entry of 20 bytes
        (torch.zeros(2, 5, 8)[..., 1:5], False),  # the first one is at byte 4
    ],
    ids=["aligned", "stride", "address"],
)
def test_entries_are_aligned_at_16_bytes(keys: torch.Tensor, aligned: bool) -> None:
    assert entry_table([keys], [keys]).aligned is aligned


@pytest.mark.parametrize(
    ("keys", "values", "log_weights", "message"),
    [
        ([], [], None, "0 rows of keys"),
        ([KEY, KEY.half()], [KEY, KEY.half()], None, "keys differ"),
        ([KEY.mT.contiguous().mT], [KEY], None, "not adjacent"),
        ([KEY], [KEY], [torch.zeros(2, 4)], "row 0 has keys, values, log-weights"),
    ],
)
def test_rows_that_do_not_fit_a_table_are_refused(
    keys: list[torch.Tensor], values: list[torch.Tensor], log_weights: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        entry_table(keys, values, log_weights)


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (
            [(PACKED_KEYS, PACKED_VALUES)] * 2,
            "2 rows have packed entries; allowed: none, or 1",
        ),
        (
            [(PACKED_VALUES, PACKED_KEYS)],
            "row 0 is packed by .*; allowed: keys by channel, values by entry",
        ),
        (
            [tuple(pack(KEY, Quantization(4, 3), by_channel=side) for side in (True, False))],
            "group_size=3.*; allowed: .*groups of a power of two",
        ),
        (
            [(pack(KEY[:1], CODES, by_channel=True), PACKED_VALUES)],
            "row 0 has packed keys",
        ),
    ],
    ids=["too many rows", "keys by entry", "odd groups", "fewer heads"],
)
def test_packed_entries_that_do_not_fit_a_table_are_refused(
    packed: list[tuple[Packed, Packed]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        entry_table([KEY], [KEY], packed=packed)
