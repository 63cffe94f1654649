"""How many threads a pass runs on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.engine.device import SMALL, threads_of


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process of two threads, whose number the user has not set."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def threads_in_a_pass(tokens: int, **sizes: int) -> int:
    config: Any = SimpleNamespace(**sizes)
    with threads_of(config, tokens):
        return torch.get_num_threads()


@pytest.mark.parametrize("sizes", [{}, {"intermediate_size": 256}], ids=["default", "given"])
def test_a_small_pass_runs_on_one_thread(two_threads: None, sizes: dict[str, int]) -> None:
    most = SMALL // (64 * 256)
    assert threads_in_a_pass(most, hidden_size=64, **sizes) == 1
    assert torch.get_num_threads() == 2, "only within the pass"
    assert threads_in_a_pass(most + 1, hidden_size=64, **sizes) == 2


def test_a_number_of_threads_that_is_set_stays(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_in_a_pass(1, hidden_size=64) == 2
