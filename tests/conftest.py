"""Shared fixtures. Tests need no network, no GPU and no more than the repository; those that read
the official data beside the checkout skip, with the reason, where it is absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fork_server import ForkServer

if not torch.cuda.is_available():  # before anything imports triton; see interpreted.py
    os.environ.setdefault("TRITON_INTERPRET", "1")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Same sums in the same order on every machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Starts processes that have imported everything already."""
    with ForkServer() as running:
        yield running


@pytest.fixture
def shared_file():
    """A function: the path of a file beside the checkout, or a skip that says what is missing."""

    def find(relative: str) -> Path:
        path = SHARED / relative
        if not path.exists():
            pytest.skip(f"needs {relative} of the shared folder beside the checkout")
        return path

    return find
