"""Attention matching: golden values of the released code."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from support.golden import arrays_of, assert_near, cases_of
from support.method_layers import attend, make_layer, run

from kvbench.kv import Budget, keep_all
from kvbench.methods import build_method
from kvbench.methods.attention_matching import match


def options_of(case):
    """A case's options by our names."""
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


def test_as_released(shared_file):
    golden = arrays_of(shared_file("golden/next/attention_matching.npz"))
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
        k, v, q = (torch.from_numpy(array)[None] for array in arrays)
        made = match(k, v, q, case["t"], d**-0.5, **options_of(case))
        chosen = made.positions[0]
        assert chosen.tolist() == golden[f"{name}_idx"].tolist(), name
        near = (
            1e-3 if name == "hak_two_steps" else 1e-4
        )  # its power iteration starts at random there
        logs, mixed = made.log_weights[0], made.values[0]
        np.testing.assert_allclose(logs, golden[f"{name}_beta"], atol=near, err_msg=name)
        np.testing.assert_allclose(mixed, golden[f"{name}_values"], atol=near, err_msg=name)
        asked = np.random.default_rng(case["seed"] + 1000).standard_normal((7, d))
        logits = torch.from_numpy(asked).float() @ k[0][chosen].mT * d**-0.5
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
