"""What the machine says of memory, where no GPU is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbench.engine.device import total_bytes, used_bytes

CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_that_may_be_used_is_that_of_the_process_and_what_is_free() -> None:
    used, total = used_bytes(CPU), total_bytes(CPU)
    assert used is not None
    assert total is not None
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert used == pytest.approx(4096 * pages, rel=0.2)
    whole = Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[0]
    assert used < total <= 1.05 * 1024 * int(whole)
