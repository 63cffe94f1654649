"""The machine: how many threads passes and methods run on, and what memory there is without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.method_layers import make_layer
from torch import Tensor, nn

from kvbench.engine import device
from kvbench.engine.check import compress
from kvbench.engine.device import SMALL_LAYER, small_pass, total_bytes, used_bytes
from kvbench.kv import Budget, CompressedKV, LayerKV
from kvbench.methods.exact import Exact

SMALL_TOKENS = 16
"""Of a model whose products are as large as a small pass allows for so many tokens."""


class OneProduct(nn.Module):
    """A model of one product; `seen` are the numbers of threads in the product and after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hidden: int) -> None:
        super().__init__()
        text = SimpleNamespace(
            hidden_size=hidden, intermediate_size=(1 << 24) // (SMALL_TOKENS * hidden)
        )
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.product = nn.Linear(hidden, 24)
        self.seen: list[int] = []
        monkeypatch.setattr(nn.functional, "linear", self.noted(nn.functional.linear))

    def noted(self, multiply: Any) -> Any:
        def spy(*args: Any) -> Tensor:
            self.seen.append(torch.get_num_threads())
            return multiply(*args)

        return spy

    def run(self, x: Tensor) -> Tensor:
        with torch.inference_mode(), small_pass(self, x.shape[0] * x.shape[1]):  # type: ignore[arg-type]
            out = self.product(x)
            self.seen.append(torch.get_num_threads())
        return out


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of two threads, whose number the user has not set, and in which any weight is large."""
    monkeypatch.setattr(device, "LARGE", 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("tokens", "variables", "seen"),
    [
        (8, {}, [2, 1]),
        (SMALL_TOKENS, {}, [2, 1]),
        (SMALL_TOKENS + 1, {}, [2, 2]),
        (8, {"OMP_NUM_THREADS": "2"}, [2, 2]),
    ],
    ids=["small", "largest small", "larger", "the user's own number"],
)
def test_in_a_small_pass_products_alone_run_on_all_threads(
    two_threads: None,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    variables: dict[str, str],
    seen: list[int],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model, x = OneProduct(monkeypatch, 64), torch.randn(tokens, 1, 64)
    out = model.run(x)
    assert model.seen == seen
    assert torch.get_num_threads() == 2
    assert torch.equal(out, model.product(x).detach())
    assert not model.product._forward_pre_hooks
    assert not model.product._forward_hooks


def test_products_of_small_weights_run_on_one_thread(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OneProduct(monkeypatch, 64)
    monkeypatch.setattr(device, "LARGE", 64 * 24 + 1)
    model.run(torch.randn(4, 1, 64))
    assert model.seen == [1, 1]


@pytest.mark.parametrize(("heads", "threads"), [(2, 1), (4, 2)], ids=["small", "large"])
def test_small_layers_are_compressed_on_one_thread(
    two_threads: None, heads: int, threads: int
) -> None:
    class Noted(Exact):
        def compress(self, layer: LayerKV, *given: Any) -> CompressedKV:
            seen.append(torch.get_num_threads())
            return super().compress(layer, *given)

    seen: list[int] = []
    layer = make_layer(n=SMALL_LAYER // (2 * 64), kv_heads=heads, dim=64)
    compress("noted", Noted(), layer, Budget(rate=0.25), torch.Generator(), {})
    assert seen == [threads]
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_that_may_be_used_is_that_of_the_process_and_what_is_free() -> None:
    cpu = torch.device("cpu")
    used, total = used_bytes(cpu), total_bytes(cpu)
    assert used is not None
    assert total is not None
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert used == pytest.approx(4096 * pages, rel=0.2)
    whole = Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[0]
    assert used < total <= 1.05 * 1024 * int(whole)
