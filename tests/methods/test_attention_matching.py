"""Attention matching: golden values of the released code, brute force in float64, properties."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.golden import arrays_of, assert_near, cases_of
from support.method_layers import attend, make_layer, run
from support.paths import GOLDEN
from support.tiny import prompt_ids, tiny_model

from kvbench.engine.architecture import compressible_layers, kvbench_attention_on
from kvbench.engine.prefill import capture_layers, prefill
from kvbench.engine.row import Row
from kvbench.kv import Budget, CompressedKV, KVError, keep_all
from kvbench.methods import build_method
from kvbench.methods._least_squares import least_squares
from kvbench.methods._matching import Block, Matching


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    theirs = case["options"]
    low, high = theirs.get("nnls_lower_bound"), theirs.get("nnls_upper_bound")
    return {
        "keys": "omp" if case["kind"] == "omp" else "highest",
        "score": theirs.get("score_method", "rms"),
        "pooling": theirs.get("pooling"),
        "kernel_size": theirs.get("kernel_size", 7),
        "choose": theirs.get("k_choice", 1),
        "interval": theirs.get("nnls_interval", 1),
        "drop": theirs.get("drop_key_beta_cutoff"),
        "steps": theirs.get("nnls_iters", 0),
        "low": None if low is None else math.log(low),
        "high": None if high is None else math.log(high),
        "log_weights": theirs.get("beta_method", "fitted"),
        "values": "kept" if theirs.get("c2_method") == "direct" else "fitted",
    }


def test_as_released():
    golden = arrays_of(GOLDEN / "attention_matching.npz")
    for name, case in cases_of(golden, "cases_json").items():
        g = np.random.default_rng(case["seed"])
        n, d, m = case["T"], case["d"], case["n"]
        keys, values, shift, noise = (
            g.standard_normal(shape, dtype=np.float32) for shape in ((n, d), (n, d), (1, d), (m, d))
        )
        keys += np.float32(case["spread"]) * shift
        near_keys = np.float32(0.5) * keys[g.integers(0, n, m)]
        arrays = keys, values, np.float32(case["sharp"]) * noise + near_keys
        digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
        assert digest[:16] == case["sha"], name
        k, v, q = map(torch.from_numpy, arrays)
        options = options_of(case)
        block, matching = Block.of(k, v, q, d**-0.5), Matching(**options)
        selection = matching.select(block, case["t"])
        chosen, (logs, mixed) = selection.places, matching.solve(block, selection)
        assert chosen.tolist() == golden[f"{name}_idx"].tolist(), name
        near = (
            1e-3 if name == "hak_two_steps" else 1e-4
        )  # its power iteration starts at random there
        np.testing.assert_allclose(logs, golden[f"{name}_beta"], atol=near, err_msg=name)
        np.testing.assert_allclose(mixed, golden[f"{name}_values"], atol=near, err_msg=name)
        asked = np.random.default_rng(case["seed"] + 1000).standard_normal((7, d))
        logits = torch.from_numpy(asked).float() @ k[chosen].mT * d**-0.5
        assert_near((logits + logs).softmax(-1) @ mixed, golden[f"{name}_out"], near)


@pytest.mark.parametrize("options", [{}, {"keys": "omp"}], ids=["highest", "omp"])
def test_the_output_is_nearer_than_that_of_the_entries_as_they_are(options):
    layer = make_layer(n=120, dim=8)
    budget = Budget(rate=0.25, sink=4, window=4)
    exact = attend(layer.queries, keep_all(layer), layer.scaling)
    errors = []
    for changed in ({}, {"values": "kept", "log_weights": "zero"}):
        kept = run(build_method("attention_matching", **options, **changed), layer, budget)
        assert kept.keys.shape[2] == budget.capacity(120)
        errors.append(float((attend(layer.queries, kept, layer.scaling) - exact).norm()))
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize(
    ("rows", "columns", "ridge"), [(60, 12, 0.0), (12, 30, 0.0), (60, 12, 0.01), (12, 30, 0.01)]
)
def test_least_squares_by_definition(rows, columns, ridge):
    """By the pseudo-inverse in float64; of columns with the penalty's rows below them."""
    generator = torch.Generator().manual_seed(rows)
    matrix = torch.rand(rows, columns, generator=generator)
    target = torch.rand(rows, 3, generator=generator)
    penalty = ridge**0.5 * torch.linalg.matrix_norm(matrix.double(), 2)
    longer = torch.cat([matrix.double(), penalty * torch.eye(columns).double()])
    below = torch.zeros(columns, 3, dtype=torch.float64)
    expected = torch.linalg.pinv(longer) @ torch.cat([target.double(), below])
    assert_near(least_squares(matrix, target, ridge), expected, 1e-3)


def test_columns_that_are_equal_or_zero_are_solved_for_and_what_is_not_finite_refused():
    columns = torch.rand(40, 6, generator=torch.Generator().manual_seed(1))
    target = columns.sum(-1, keepdim=True)
    columns[:, 3], columns[:, 4] = columns[:, 2], 0.0
    nearest = torch.linalg.pinv(columns.double()) @ target.double()
    assert_near(columns @ least_squares(columns, target), columns.double() @ nearest, 1e-3)
    with pytest.raises(KVError, match="not finite"):
        least_squares(columns * torch.nan, target)


def test_a_block_bounds_its_logits_and_weighs_its_entries():
    layer = make_layer(30, kv_heads=1, group=1, scale=3.0)
    keys, values, queries = layer.keys[0, 0], layer.values[0, 0], layer.queries[0, 0]
    weights = torch.linspace(-1, 1, 30)
    block = Block.of(keys, values, queries, layer.scaling, 2.0, weights)
    logits = 2.0 * torch.tanh(queries.double() @ keys.double().mT * layer.scaling / 2.0) + weights
    assert_near((block.mass / block.total).mT, logits.softmax(-1), 1e-5)


def test_entries_solved_for_in_parts():
    """It answers the prompt's queries nearly as well as all entries solved for at once."""
    layer = make_layer(80, kv_heads=1, group=4, dim=4)
    kept = [
        run(
            build_method("attention_matching", queries_per_entry=count),
            layer,
            Budget(rate=0.2, sink=2, window=2),
        )
        for count in (64, 0)
    ]
    assert torch.equal(kept[0].positions, kept[1].positions)
    exact = attend(layer.queries, keep_all(layer), layer.scaling)
    apart, at_once = ((attend(layer.queries, one, layer.scaling) - exact).norm() for one in kept)
    assert at_once < apart < 2 * at_once


def test_entries_solved_for_in_parts_stand_in_the_order_of_their_choice():
    """So few queries that each entry is a part of its own."""
    layer = make_layer(12, kv_heads=1, group=1, dim=4)
    keys, values, queries = layer.keys[0, 0], layer.values[0, 0], layer.queries[0, 0, :3]
    block = Block.of(keys, values, queries, layer.scaling)
    keeping = Matching(queries_per_entry=5, values="kept")
    selection = keeping.select(block, 4)
    assert not torch.equal(selection.places, selection.places.sort().values), "not ascending"
    kept = keeping.solve(block, selection)
    assert torch.equal(kept.values, values[selection.places])
    solved = Matching(queries_per_entry=5).solve(block, selection)
    assert torch.equal(solved.log_weights, kept.log_weights)
    assert torch.isfinite(solved.values).all()


def test_weights_of_entries_that_have_some_multiply():
    layer = make_layer(120, dim=8)
    weights = torch.randn(1, 2, 120, generator=torch.Generator().manual_seed(1))
    budget = Budget(rate=0.25, sink=4, window=4)
    exact = attend(layer.queries, replace(keep_all(layer), log_weights=weights), layer.scaling)
    errors = []
    for known in (weights, None):
        kept = run(build_method("attention_matching"), replace(layer, log_weights=known), budget)
        weighted = kept.log_weights + weights.gather(-1, kept.positions)
        held = replace(kept, log_weights=weighted)
        errors.append(float((attend(layer.queries, held, layer.scaling) - exact).norm()))
    assert errors[0] < 0.7 * errors[1]


def test_heads_of_different_lengths_store_the_weights_of_their_entries():
    layer, budget = make_layer(100), Budget(rate=0.3, sink=4, window=4)
    kept = run(build_method("adakv", of="attention_matching", safeguard=0.0), layer, budget)
    assert kept.lengths.unique().numel() == 2
    stored = 0
    for head, length in enumerate(kept.lengths[0].tolist()):
        here = (slice(None), slice(head, head + 1), slice(length))
        parts = (kept.keys, kept.values, kept.log_weights, kept.positions)
        stored += CompressedKV(*(part[here] for part in parts)).nbytes
    assert kept.nbytes == stored


def test_layers_share_as_in_pyramidkv_beyond_sink_and_window():
    budget, n = Budget(rate=0.25, sink=9, window=6), 200
    shares = build_method("attention_matching", pyramid=4).layer_capacities(budget, n, 6)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1] >= 15
    assert sum(shares) == 6 * budget.capacity(n)


def assert_held(row: Row, layer: int, expected: CompressedKV) -> None:
    (held,) = row.caches[layer]
    assert torch.equal(held.positions[:, : held.length], expected.positions[0])
    assert_near(held.values[:, : held.length], expected.values[0], 1e-3)
    assert_near(held.log_weights[:, : held.length], expected.log_weights[0], 1e-3)


@pytest.mark.parametrize(
    "options", [{}, {"keys": "omp"}, {"keys": "omp", "choose": 3, "interval": 2}]
)
def test_the_engine_holds_what_was_matched(options):
    ids, budget = prompt_ids(120), Budget(rate=0.3, sink=5, window=4)
    method, model = build_method("attention_matching", **options), tiny_model("llama")
    layers = compressible_layers(model)
    row = Row("matched", method, budget, 0, "x", room=2)
    with kvbench_attention_on(model):
        prefill(model, ids, [row])
        seen = capture_layers(model, ids, layers)
    assert row.failure is None
    for layer in layers:
        expected = run(method, seen[layer], budget)
        assert_held(row, layer, expected)


def test_queries_of_a_repetition_are_those_of_a_pass_over_prompt_and_chunk():
    ids, chunk, budget = prompt_ids(120), 70, Budget(rate=0.3, sink=5, window=4)
    repeat = build_method("attention_matching", "repeat", chunk=chunk, instructed=False)
    model = tiny_model("llama")
    layers = compressible_layers(model)
    row = Row("repeat", repeat, budget, 0, "x", room=0)
    with kvbench_attention_on(model):
        prefill(model, ids, [row])
        prompt = capture_layers(model, ids, layers)
        passes = [
            capture_layers(model, [*ids, *ids[start : start + chunk]], layers)
            for start in range(budget.sink, len(ids), chunk)
        ]
    assert row.failure is None
    for layer in layers:
        queries = torch.cat([seen[layer].queries[:, :, len(ids) :] for seen in passes], dim=2)
        shown = replace(prompt[layer], queries=queries, shared={})
        expected = run(build_method("attention_matching"), shown, budget)
        assert_held(row, layer, expected)
    with pytest.raises(KVError, match="queries is repeat and layer"):
        run(repeat, prompt[layers[0]], budget)
