"""scripts/papers/error_scaling.py: formulas against direct computation, and slopes of known laws."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pytest
import torch
from support.paths import ROOT

from kvbench.engine.row import layer_generator
from kvbench.errors import UserError
from kvbench.kv import Budget, LayerKV
from kvbench.methods import build_method

sys.path.insert(0, str(ROOT / "scripts" / "papers"))

import error_scaling
from _bounded import BoundedData, bound_scale
from _common import Run


def test_bounded_data_has_its_norms_and_is_the_same_every_time() -> None:
    data = BoundedData(
        head_dim=8, key_norm=3.0, query_norm=2.0, value_norm=1.5, heads=2, clusters=3
    )
    layer, queries = data.layer(50, 7, "x", 1)
    again, _ = data.layer(50, 7, "x", 1)
    other, _ = data.layer(50, 7, "x", 2)
    assert layer.keys.shape == (1, 2, 50, 8)
    assert queries.shape == (1, 2, 7, 8)
    for tensor, norm in ((layer.keys, 3.0), (layer.values, 1.5), (queries, 2.0)):
        torch.testing.assert_close(tensor.norm(dim=-1), torch.full(tensor.shape[:3], norm))
    assert torch.equal(layer.keys, again.keys)
    assert not torch.equal(layer.keys, other.keys)
    near = torch.pdist(layer.keys[0, 0]) < 2.5
    assert 0.2 < near.float().mean() < 0.6, "a third of the pairs share a cluster"


def test_the_error_is_that_of_equation_2() -> None:
    """Every query and head by loops, from nothing but the definition."""
    run = Run(
        "x", [], "", "", n=40, kept=[10], queries=3, draws=1, data={"d": {"head_dim": 4}}, layers=[]
    )
    (sample,) = error_scaling.samples(run)
    (row,) = error_scaling.rows_of(sample, [10], {"uniform": {}})
    layer, queries = BoundedData(head_dim=4).layer(40, 3, "d", 0)
    compressed = build_method("uniform").compress(
        layer, Budget(rate=0.25, sink=0, window=0), layer_generator(0, "d/draw0/10", 0)
    )
    keys, values = layer.keys[0, 0].double().numpy(), layer.values[0, 0].double().numpy()
    chosen = compressed.positions[0, 0].tolist()
    assert len(chosen) == 10
    errors = []
    for query in queries[0, 0].double().numpy():
        e = np.exp(keys @ query / 2.0)  # sqrt(d) = 2
        exact = e @ values / e.sum()
        part = e[chosen] * 4.0  # the weights cancel: there is neither sink nor window
        z = part @ values[chosen] / part.sum()
        scale = np.sqrt(np.square(e / e.sum()).sum()) * np.sqrt(np.square(values).sum())
        errors.append(np.linalg.norm(z - exact) / scale)
    assert row["scaled_error"] == pytest.approx(np.mean(errors), rel=1e-9)
    assert row["held"] == 10
    assert row["ratio"] == pytest.approx((10 * 9) / (40 * 8)), "the log-weights count"


def test_the_bounds_scale_with_grouped_queries() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 9, 4, generator=generator)
    queries = torch.randn(1, 6, 5, 4, generator=generator)
    scale = bound_scale(LayerKV(keys, values, None, 0, 1, 0.5), queries)
    for head in range(6):
        p = (queries[0, head].double() @ keys[0, head // 3].double().T * 0.5).softmax(-1)
        expected = p.norm(dim=-1) * values[0, head // 3].double().norm()
        torch.testing.assert_close(scale[0, head], expected, rtol=1e-12, atol=0)


def test_slopes_are_those_of_each_repetition_and_their_interval_is_students() -> None:
    rng = np.random.default_rng(0)
    laws = {"uniform": -0.5, "balancekv": -1.0}
    noise = {name: 0.1 * rng.normal(size=4) for name in laws}
    frame = pd.DataFrame(
        {
            "dataset": "d",
            "method": name,
            "replicate": f"p{prompt}-draw{draw}",
            "prompt": f"p{prompt}",
            "held": held,
            "scaled_error": held ** (law + noise[name][prompt] + 0.05 * (-1) ** draw),
        }
        for name, law in laws.items()
        for prompt in range(4)
        for draw in range(2)
        for held in (64.0, 128.0, 256.0)
    )
    frame = pd.concat([frame, frame.assign(method="exact", scaled_error=0.0)])
    found = error_scaling.slopes(frame)
    for name, law in laws.items():
        slopes = found[found["method"] == name]["slope"]
        assert slopes.to_numpy() == pytest.approx(law + noise[name])
        half = 3.182446 * slopes.std() / 2  # Student's t of 3 degrees, 95 %
        mean = slopes.mean()
        text = error_scaling.with_intervals(found).loc["d", name]
        assert text == f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"
    assert "exact" not in set(found["method"])


def test_options_grow_with_the_memory_and_names_that_are_not_there_are_refused() -> None:
    options = {"name": "balancekv", "per_kept": {"block_size": 0.5}}
    assert error_scaling.sized("wide", options, 16) == build_method("balancekv", block_size=8)
    with pytest.raises(UserError, match=r"data has 'd 5'.*allowed: d 4, bound 1"):
        error_scaling.data_sets(["d 5"])
    with pytest.raises(UserError, match=r"kept is \[65\]; allowed: at most n, 64"):
        error_scaling.main(["n=64", "kept=[65]"])
