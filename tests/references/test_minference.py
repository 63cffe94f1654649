"""Our SnapKV, PyramidKV and StreamingLLM against the cluster classes of the minference package."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_layers import (
    BUDGETS,
    SHAPES,
    all_shipped_layers,
    assert_same_entries,
    kept,
    queries_of,
    random_layer,
    random_layers,
    tally,  # noqa: F401 - a fixture
)
from support.asking import generate_one
from support.tiny import on_kvbench, prompt_ids, tiny_model

from kvbench.engine.answer import Stopping
from kvbench.kv import Budget, KVError, LayerKV
from kvbench.methods import build_method
from kvbench.methods.snapkv import window_scores

if importlib.util.find_spec("minference") is None:
    pytest.skip("needs the package minference: make test-references", allow_module_level=True)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_budget = pytest.mark.parametrize("budget", BUDGETS, ids=str)


@each_shape
@each_budget
@pytest.mark.parametrize("kernel_size", [1, 5, 7])
def test_snapkv_per_query_head(shape: Any, budget: Any, kernel_size: Any) -> None:
    ours = build_method("snapkv", granularity="query_head", kernel_size=kernel_size)
    theirs = build_method("minference", cluster="snapkv", kernel_size=kernel_size)
    for layer in random_layers(shape):
        held = kept(theirs, layer, budget)
        scores = window_scores(layer, budget.window, kernel_size, "avgpool")
        assert_same_entries(kept(ours, layer, budget), held, scores)
        assert held.keys.shape[1] == queries_of(layer).shape[1], "bytes as stored: repeated keys"
        assert int(held.entries.max()) == budget.capacity(layer.n)


@each_shape
@each_budget
def test_snapkv_with_max_pooling(shape: Any, budget: Any) -> None:
    """Pooling by maximum makes plateaus of equal scores; where one crosses the boundary any of its
    positions will do. So the scores of what is kept must agree, not the positions."""
    options: dict[str, Any] = {"pooling": "maxpool", "kernel_size": 5}
    ours = build_method("snapkv", granularity="query_head", **options)
    theirs = build_method("minference", cluster="snapkv", **options)
    for layer in random_layers(shape):
        scores = window_scores(layer, budget.window, 5, "maxpool")
        picked = [
            scores.gather(-1, kept(method, layer, budget).positions[..., : -budget.window])
            for method in (ours, theirs)
        ]
        torch.testing.assert_close(*(each.sort(-1).values for each in picked))


@each_shape
@each_budget
@pytest.mark.parametrize("num_layers", [2, 5, 32])
def test_pyramidkv_released(shape: Any, budget: Any, num_layers: Any) -> None:
    ours = build_method("pyramidkv", preset="released")
    theirs = build_method("minference", cluster="pyramidkv")
    for index in sorted({0, 1, num_layers // 2, num_layers - 1}):
        layer = random_layer(shape, seed=index, layer_index=index, num_layers=num_layers)
        held = kept(theirs, layer, budget)
        scores = window_scores(layer, budget.window, 5, "avgpool")
        assert_same_entries(kept(ours, layer, budget), held, scores)
        capacity = theirs.layer_capacity(budget, layer.n, index, num_layers)
        assert int(held.entries.max()) == capacity


@each_shape
@pytest.mark.parametrize("budget", [b for b in BUDGETS if b.sink], ids=str)
def test_streaming_llm(shape: Any, budget: Any) -> None:
    theirs = build_method("minference", cluster="streaming_llm")
    for layer in random_layers(shape):
        ours = kept(build_method("streaming_llm"), layer, budget)
        held = kept(theirs, layer, budget)
        for head in range(held.keys.shape[1]):
            source = head // layer.group
            assert torch.equal(held.positions[:, head], ours.positions[:, source])
            assert torch.equal(held.keys[:, head], ours.keys[:, source])
            assert torch.equal(held.values[:, head], ours.values[:, source])


@each_budget
def test_on_the_shipped_model(budget: Any) -> None:
    pairs = (("snapkv", {"granularity": "query_head"}), ("pyramidkv", {"preset": "released"}))
    for layer in all_shipped_layers():
        scores = window_scores(layer, budget.window, 5, "avgpool")
        for name, options in pairs:
            held = kept(build_method("minference", cluster=name), layer, budget)
            assert_same_entries(kept(build_method(name, **options), layer, budget), held, scores)


def test_clusters_run_in_the_engine_and_their_bytes_are_counted_as_stored() -> None:
    model, ids = on_kvbench(tiny_model("llama")), prompt_ids(160)
    budget = Budget(rate=0.25, sink=4, window=4)
    methods = {
        cluster: (build_method("minference", cluster=cluster), budget)
        for cluster in ("snapkv", "pyramidkv", "streaming_llm")
    } | {
        "ours": (build_method("snapkv", granularity="query_head"), budget),
        "per_kv_head": (build_method("snapkv"), budget),
    }
    results = generate_one(
        model, ids[:150], ids[150:], methods, Stopping(8), seed=0, example_id="x"
    )
    for label, result in results.items():
        assert result.failure is None, f"{label}: {result.failure}"
        assert result.cost.compressed
    assert results["snapkv"].tokens == results["ours"].tokens
    assert results["snapkv"].cost.cache_bytes == results["ours"].cost.cache_bytes
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    assert results["snapkv"].cost.cache_bytes == group * results["per_kv_head"].cost.cache_bytes


def test_the_layers_own_scaling_holds() -> None:
    """The package always divides by sqrt(head_dim); through the adapter it does what the model does."""
    budget = BUDGETS[0]
    for seed in range(4):
        layer = random_layer((1, 2, 2, 300, 16), seed, scaling=0.7)
        assert_same_entries(
            kept(build_method("snapkv", granularity="query_head"), layer, budget),
            kept(build_method("minference"), layer, budget),
        )


def test_in_bfloat16_the_package_rounds_its_scores_and_kvbench_does_not() -> None:
    """The package stores attention weights in the queries' dtype before it adds them up; kvbench
    adds in float32. In bfloat16 that makes ties, so the two agree in most entries, not in all;
    kvbench agrees with the package run on float32 copies in every one."""
    budget = Budget(rate=0.25, sink=8, window=16)
    ours = build_method("snapkv", granularity="query_head")
    theirs = build_method("minference")
    same = total = 0
    for seed in range(4):
        half = random_layer((1, 2, 2, 1024, 32), seed, dtype=torch.bfloat16)
        tensors = {name: getattr(half, name).float() for name in ("keys", "values", "queries")}
        copies = replace(half, **tensors, shared={})
        mine = kept(ours, half, budget).positions
        assert torch.equal(mine, kept(theirs, copies, budget).positions)
        package = kept(theirs, half, budget).positions
        for row, other in zip(
            mine.flatten(0, 1).tolist(), package.flatten(0, 1).tolist(), strict=True
        ):
            same += len(set(row) & set(other))
            total += len(row)
    assert 0.9 < same / total < 1.0


def refusals() -> Iterator[tuple[LayerKV, Budget, dict[str, Any], str]]:
    layer = random_layer((1, 2, 2, 100, 8), 0)
    none, cut = replace(layer, queries=None), replace(layer, queries=queries_of(layer)[:, :, -4:])
    yield none, BUDGETS[0], {}, "has no queries"
    yield cut, BUDGETS[0], {}, "holds 4 prompt queries"
    yield replace(layer, softcap=30.0), BUDGETS[0], {}, "softcap 30.0"
    yield layer, Budget(rate=0.25, sink=8, window=0), {}, "budget.window is 0"
    yield layer, Budget(rate=0.25, sink=0, window=8), {"cluster": "streaming_llm"}, "budget.sink"
    yield replace(layer, num_layers=1), BUDGETS[0], {"cluster": "pyramidkv"}, "two or more"


def test_what_the_package_cannot_do_is_refused_in_one_line() -> None:
    for layer, budget, options, message in refusals():
        method = build_method("minference", **options)
        with pytest.raises(KVError, match=message) as error:
            method.compress(layer, budget, torch.Generator())
        assert "\n" not in str(error.value)
