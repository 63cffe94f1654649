"""Layers on which kvbench and the packages must agree: random ones, and the shipped model's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from support.method_layers import make_layer, rotary
from support.probing import shipped
from torch import Tensor

from kvbench.engine.prefill import capture_layers
from kvbench.kv import Budget, CompressedKV, LayerKV
from kvbench.methods.base import Method
from kvbench.run.encoding import encode_example
from kvbench.tasks.longeval_lines import LongEvalLines

LAYERS = 6
SHIPPED = shipped()

# batch, kv_heads, group, n, head_dim
SHAPES = [
    (1, 1, 1, 97, 8),
    (2, 3, 1, 300, 16),
    (1, 2, 2, 257, 32),
    (2, 1, 3, 401, 64),
    (1, 2, 4, 1024, 32),
]
SEEDS = range(4)
BUDGETS = [
    Budget(rate=0.25, sink=8, window=16),
    Budget(rate=0.1, sink=0, window=1),
    Budget(rate=0.5, sink=3, window=33),
]


def random_layer(
    shape: tuple[int, int, int, int, int],
    seed: int,
    *,
    layer_index: int = 0,
    num_layers: int = LAYERS,
    dtype: torch.dtype = torch.float32,
    scaling: float | None = None,
) -> LayerKV:
    batch, kv_heads, group, n, dim = shape
    heads = {"kv_heads": kv_heads, "group": group, "dim": dim}
    where = {"layer_index": layer_index, "num_layers": num_layers}
    layer = make_layer(n, batch=batch, dtype=dtype, seed=seed, **heads, **where)
    mixing = torch.randn(24, kv_heads * group * dim).to(dtype)
    scaling = dim**-0.5 if scaling is None else scaling
    return replace(layer, scaling=scaling, output=mixing.clone, rotary=rotary(dim))


@cache
def shipped_prompts() -> tuple[tuple[int, ...], ...]:
    encoder = SHIPPED.encoder
    examples = LongEvalLines(num_lines=(10, 30, 60), num_examples=1).examples(encoder)
    encoded = [encode_example(example, encoder) for example in examples]
    return tuple((*each.context_ids, *each.question_ids) for each in encoded)


@cache
def shipped_layers(prompt: int) -> tuple[LayerKV, ...]:
    model = SHIPPED.model
    count = model.config.num_hidden_layers
    captured = capture_layers(model, shipped_prompts()[prompt], range(count))
    return tuple(captured[index] for index in range(count))


def random_layers(shape: tuple[int, int, int, int, int], **options: float) -> list[LayerKV]:
    return [random_layer(shape, seed, **options) for seed in SEEDS]  # type: ignore[arg-type]


def kept(method: Method, layer: LayerKV, budget: Budget, seed: int = 0) -> CompressedKV:
    """What the method keeps, its entries checked: each the prompt's own at its position."""
    held = method.compress(layer, budget, torch.Generator().manual_seed(seed))
    positions, places = held.positions, torch.arange(held.positions.shape[-1])
    real = positions >= 0
    # where heads have different lengths, what follows them is padding
    expected = True if held.lengths is None else places < held.lengths[..., None]
    assert (real == expected).all()
    order = torch.where(real, positions, layer.n + places)
    assert (order.diff(dim=-1) > 0).all(), "ascending, so without repeats"
    assert int(positions.max()) < layer.n
    at = positions.clamp(min=0).unsqueeze(-1).expand_as(held.keys)
    copies = held.keys.shape[1] // layer.keys.shape[1]
    for mine, original in ((held.keys, layer.keys), (held.values, layer.values)):
        assert torch.equal(mine[real], original.repeat_interleave(copies, 1).gather(2, at)[real])
    return held


def queries_of(layer: LayerKV) -> Tensor:
    assert layer.queries is not None
    return layer.queries


@dataclass
class Tally:
    """Heads compared with a package, and those whose entries were the very same."""

    heads: int = 0
    same: int = 0


TALLY = Tally()


@pytest.fixture(scope="session", autouse=True)
def tally() -> Iterator[None]:
    """After the last test: hardly any head may differ, even by a tie."""
    yield
    assert TALLY.same >= 0.995 * TALLY.heads
    TALLY.heads = TALLY.same = 0  # every module that imports the fixture ends here


def assert_same_positions(ours: Tensor, theirs: Tensor, scores: Tensor | None = None) -> None:
    """The same positions for every head [batch, heads, c].

    The two sides add in different orders, so that two positions whose scores differ in the last
    bits may change places at the boundary: with `scores` [batch, heads, m <= n] those that differ
    must be tied to 1e-4; without, one entry of a head may differ.
    """
    assert ours.shape == theirs.shape
    differs = (ours != theirs).any(-1)
    TALLY.heads += differs.numel()
    TALLY.same += int((~differs).sum())
    for row, head in differs.nonzero().tolist():
        only = set(ours[row, head].tolist()) ^ set(theirs[row, head].tolist())
        assert len(only) == 2, f"head {head} differs in {len(only) // 2} entries"
        if scores is not None:
            first, second = scores[row, head, sorted(only)].tolist()
            assert math.isclose(first, second, rel_tol=1e-4), f"head {head}: {first}, {second}"


def assert_same_entries(
    ours: CompressedKV, theirs: CompressedKV, scores: Tensor | None = None
) -> None:
    """The same positions (see `assert_same_positions`), and where they agree the same bits."""
    assert_same_positions(ours.positions, theirs.positions, scores)
    agree = (ours.positions == theirs.positions).all(-1)
    assert torch.equal(ours.keys[agree], theirs.keys[agree])
    assert torch.equal(ours.values[agree], theirs.values[agree])
