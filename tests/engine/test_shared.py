"""Rows that go on from the same entries: read once, and as if each had them alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import LayerCache
from kvbench.engine.shared import attend_branches, branch_of, merged, rows_by_base
from kvbench.kernels.quantize import Quantization
from kvbench.kv import CompressedKV
from kvbench.methods import build_method

HEADS, STORED, DIM, VALUE_DIM, COUNT = 4, 2, 8, 6, 21


def held(*, weighted: bool, keys_only: int = 0) -> CompressedKV:
    weights = torch.randn(1, STORED, COUNT)
    weights[:, 1, -3:] = -math.inf  # padding of a head that holds less
    return CompressedKV(
        torch.randn(1, STORED, COUNT, DIM),
        torch.randn(1, STORED, COUNT - keys_only, VALUE_DIM),
        weights if weighted else None,
        torch.arange(COUNT).expand(1, STORED, COUNT).clone(),
        keys_only=keys_only,
    )


def call(rows: int, tokens: int, softcap: float | None) -> LayerCall:
    return LayerCall(
        0,
        torch.randn(rows, HEADS, tokens, DIM),
        torch.randn(rows, STORED, tokens, DIM),
        torch.randn(rows, STORED, tokens, VALUE_DIM),
        0.4,
        softcap,
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["plain", "weighted", "keys only", "packed"])
def test_rows_on_one_base_attend_as_rows_of_their_own(kind: str, softcap: float | None) -> None:
    torch.manual_seed(0)
    kept = held(weighted=kind != "plain", keys_only=5 if kind == "keys only" else 0)
    packed = Quantization(4, 4) if kind == "packed" else None
    base = LayerCache(kept, 0, build_method("exact"), capacity=COUNT, quantization=packed)
    whole = [base.clone() for _ in range(3)]
    branches = [branch_of(base) for _ in range(3)]
    length = COUNT
    for rows, tokens in (([0, 1, 2], 4), ([1, 2], 1), ([1, 2], 1), ([0, 1, 2], 3)):
        step = call(len(rows), tokens, softcap)
        positions = torch.arange(length, length + tokens).expand(len(rows), -1)
        assert rows_by_base([branches[row] for row in rows]) == [list(range(len(rows)))]
        got = attend_branches([branches[row] for row in rows], step, positions)
        for place, row in enumerate(rows):
            alone = whole[row].step(step.of_row(place), positions[place])
            torch.testing.assert_close(got[place], alone, atol=2e-6, rtol=2e-6)
        length += tokens
    for branch, own in zip(branches, whole, strict=True):
        assert base.length == COUNT
        assert branch.entry_bytes() == own.entry_bytes() == merged(branch).entry_bytes()
        assert torch.equal(branch.positions[:, : own.length], own.positions[:, : own.length])
    one = call(1, 2, softcap)
    last = one, torch.tensor([90, 91])
    expected = whole[0].step(*last)
    for cache in (branches[0], branch_of(merged(branches[0])), branch_of(branches[0])):
        got = branch_of(cache).step(*last)
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


def test_what_evicts_or_slides_is_copied_and_goes_alone() -> None:
    torch.manual_seed(0)
    kept = replace(held(weighted=False), scores=torch.rand(1, STORED, COUNT))
    evicting = LayerCache(kept, 0, build_method("h2o"), capacity=COUNT)
    sliding = LayerCache(kept, 0, build_method("snapkv"), capacity=COUNT, window=9)
    for cache in (evicting, sliding):
        twins = [branch_of(cache) for _ in range(2)]
        assert [twin.before for twin in twins] == [None, None]
        assert twins[0].keys.data_ptr() != cache.keys.data_ptr()
        assert rows_by_base(twins) == []
    restricting = LayerCache(kept, 0, build_method("topk"), capacity=COUNT)
    assert rows_by_base([branch_of(restricting) for _ in range(2)]) == []
    single = LayerCache(kept, 0, build_method("snapkv"), capacity=COUNT)
    assert rows_by_base([branch_of(single), single, None]) == []
