"""The table of where entries lie: how it divides them, and rows that it does not take. Its addresses are
tested with the kernels that read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.kernels import decode
from kvbench.kernels.decode import RowPointers

KEY = torch.zeros(2, 5, 4)
"""A row's keys, or its values: 2 KV heads, 5 entries, 4 numbers."""


@pytest.mark.parametrize(
    ("entries", "chunk"), [(100, 128), (8 * 128, 128), (8 * 128 + 1, 256), (10**6, 4096)]
)
def test_a_chunk_is_the_entries_of_a_program_rounded_up_to_a_power_of_two(
    entries: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 4)  # 16 programs
    keys = torch.zeros(1, 1, 1).expand(2, entries, 1)
    assert RowPointers([keys], [keys]).chunk == chunk


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
    assert RowPointers([keys], [keys]).aligned is aligned


@pytest.mark.parametrize(
    ("keys", "values", "log_weights", "message"),
    [
        ([], [], (), "0 rows of keys"),
        ([KEY, KEY.half()], [KEY, KEY.half()], (), "keys differ"),
        ([KEY.mT.contiguous().mT], [KEY], (), "not adjacent"),
        ([KEY], [KEY], [torch.zeros(2, 4)], "row 0 has keys, values, log-weights"),
    ],
)
def test_rows_that_do_not_fit_a_table_are_refused(
    keys: list[torch.Tensor], values: list[torch.Tensor], log_weights: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RowPointers(keys, values, log_weights)
