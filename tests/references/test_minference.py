"""The cluster classes of the minference package as methods, beside ours of the same name."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_layers import (
    BUDGETS,
    LAYERS,
    SHAPES,
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
BUDGET = BUDGETS[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("cluster", "name", "options"),
    [
        ("snapkv", "snapkv", {"granularity": "query_head"}),
        ("pyramidkv", "pyramidkv", {"preset": "released"}),
        ("streaming_llm", "streaming_llm", {}),
    ],
)
def test_a_cluster_keeps_what_ours_keeps(
    shape: Any, cluster: str, name: str, options: dict[str, Any]
) -> None:
    """The released code's own choices are golden values (tests/methods); here they go through the
    adapter, which repeats keys for every query head."""
    ours, theirs = build_method(name, **options), build_method("minference", cluster=cluster)
    for layer in random_layers(shape, layer_index=1):
        held, mine = kept(theirs, layer, BUDGET), kept(ours, layer, BUDGET)
        if name == "streaming_llm":
            source = torch.arange(held.keys.shape[1]) // layer.group
            parts = {
                part: getattr(mine, part)[:, source] for part in ("keys", "values", "positions")
            }
            mine = replace(mine, **parts)
        assert_same_entries(mine, held, window_scores(layer, BUDGET.window, 5, "avgpool"))
        assert held.keys.shape[1] == queries_of(layer).shape[1], "bytes as stored: repeated keys"
        assert int(held.entries.max()) == theirs.layer_capacity(BUDGET, layer.n, 1, LAYERS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_snapkv_with_max_pooling(shape: Any) -> None:
    """Pooling by maximum makes plateaus of equal scores; where one crosses the boundary any of its
    positions will do. So the scores of what is kept must agree, not the positions."""
    options: dict[str, Any] = {"pooling": "maxpool", "kernel_size": 5}
    ours = build_method("snapkv", granularity="query_head", **options)
    theirs = build_method("minference", cluster="snapkv", **options)
    for layer in random_layers(shape):
        scores = window_scores(layer, BUDGET.window, 5, "maxpool")
        picked = [
            scores.gather(-1, kept(method, layer, BUDGET).positions[..., : -BUDGET.window])
            for method in (ours, theirs)
        ]
        torch.testing.assert_close(*(each.sort(-1).values for each in picked))


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
    for seed in range(4):
        layer = random_layer((1, 2, 2, 300, 16), seed, scaling=0.7)
        assert_same_entries(
            kept(build_method("snapkv", granularity="query_head"), layer, BUDGET),
            kept(build_method("minference"), layer, BUDGET),
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
    yield none, BUDGET, {}, "has no queries"
    yield cut, BUDGET, {}, "holds 4 prompt queries"
    yield replace(layer, softcap=30.0), BUDGET, {}, "softcap 30.0"
    yield layer, Budget(rate=0.25, sink=8, window=0), {}, "budget.window is 0"
    yield layer, Budget(rate=0.25, sink=0, window=8), {"cluster": "streaming_llm"}, "budget.sink"
    yield replace(layer, num_layers=1), BUDGET, {"cluster": "pyramidkv"}, "two or more"


def test_what_the_package_cannot_do_is_refused_in_one_line() -> None:
    for layer, budget, options, message in refusals():
        method = build_method("minference", **options)
        with pytest.raises(KVError, match=message) as error:
            method.compress(layer, budget, torch.Generator())
        assert "\n" not in str(error.value)
