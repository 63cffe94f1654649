"""WildCat: golden values of the released code, its mathematics, and attention with signed weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from support.golden import arrays_of, assert_near, cases_of, checked
from support.method_layers import attend, make_layer, run

from kvbench.kernels.pivoted_cholesky import Gaussian, lambert_w, nystroem, pivoted_cholesky
from kvbench.kv import Budget, LayerKV
from kvbench.methods import build_method
from kvbench.methods.wildcat import Bins

KERNEL = ("lambert_small", "constant_small", "lambert_bin12", "constant_bin12", "big_keys")
KERNEL += ("small_keys", "with_query_norm", "low_rank")
PRESS = ("press_bin12", "press_bin3_remainder", "press_bin12_half")
NATIVE = ("uneven", "one_bin", "half")


@pytest.fixture
def golden(shared_file):
    return arrays_of(shared_file("golden/next/wildcat.npz"))


@pytest.fixture
def native(shared_file):
    return arrays_of(shared_file("golden/next/wildcat_native.npz"))


def layer_of(keys, values, scaling=None):
    return LayerKV(keys, values, None, 0, 1, scaling or keys.shape[-1] ** -0.5)


def test_every_case_is_listed(golden, native):
    assert [*cases_of(golden, "kernel_json")] == [*KERNEL]
    assert [*cases_of(golden, "press_json")] == [*PRESS]
    assert [*cases_of(native)] == [*NATIVE]
    every = [cases_of(golden, "kernel_json"), cases_of(golden, "press_json"), cases_of(native)]
    names = ("keys_sha256", "values_sha256", "uniforms_sha256")
    assert all(name in case for cases in every for case in cases.values() for name in names)


@pytest.mark.parametrize("name", KERNEL)
def test_one_bin_as_released(golden, name):
    case = cases_of(golden, "kernel_json")[name]
    g, (bins, n, d, r) = (
        np.random.default_rng(case["seed"]),
        (case[k] for k in ("bins", "n", "d", "r")),
    )
    keys = g.standard_normal((bins, n, d), dtype=np.float32) * np.float32(case["key_scale"])
    values = g.standard_normal((bins, n, d), dtype=np.float32)
    uniforms = g.random((r, bins, n), dtype=np.float32)
    if name == "low_rank":
        keys[..., 2:] = 0
    keys, values, uniforms = checked(case, keys=keys, values=values, uniforms=uniforms)
    method = build_method(
        "wildcat", "released", temperature=case["temperature"], query_norm=case["query_norm"]
    )
    layer = layer_of(keys[None], values[None], case["scale"])
    tau2 = method.tau2(keys.norm(dim=-1).amax(-1), torch.full((bins,), n), case["scale"])
    np.testing.assert_allclose(tau2, golden[f"{name}_tau2"], rtol=1e-6)
    plan = Bins(tuple(n * b for b in range(bins + 1)), (r,) * bins)
    made = method.coreset(keys[None], values[None], uniforms[:, None], plan, layer)
    first = torch.tensor(plan.edges[:-1])[:, None]
    np.testing.assert_array_equal(made.pivots[0] - first, golden[f"{name}_idx"])
    assert made.found.all()
    assert not made.shifts.any()
    for part, wanted in ((made.numerators, "values"), (made.denominators, "weights")):
        near = max(1e-5, 20 * case[f"released_float32_rel_err_{wanted}"])
        key = f"{name}_values" if wanted == "values" else f"{name}_weights64"
        assert_near(part[0], golden[key], near)


def heads_of(case, draws, shift):
    """Keys, values, a query and uniforms of a case."""
    b, hkv, hq, n, d = (case[k] for k in ("b", "hkv", "hq", "n", "d"))
    g = np.random.default_rng(case["seed"])
    keys = g.standard_normal((b, hkv, n, d), dtype=np.float32) * np.float32(case["key_scale"])
    values = g.standard_normal((b, hkv, n, d), dtype=np.float32)
    query = g.standard_normal((b, hq, 1, d), dtype=np.float32)
    uniforms = g.random(draws, dtype=np.float32)
    keys[..., 0] += np.float32(shift)
    return checked(case, keys=keys, values=values, query=query, uniforms=uniforms)


def assert_as_released(kept, query, file, name):
    np.testing.assert_array_equal(kept.positions, file[f"{name}_idx"])
    assert_near(kept.values, file[f"{name}_values"], 2e-5)
    assert_near(kept.denominators, file[f"{name}_weights64"], 2e-5)
    assert_near(attend(query, kept, query.shape[-1] ** -0.5), file[f"{name}_out"], 2e-5)


@pytest.mark.parametrize("name", PRESS)
def test_whole_heads_as_released(golden, name):
    case = cases_of(golden, "press_json")[name]
    b, hkv, n, d = (case[k] for k in ("b", "hkv", "n", "d"))
    draws = (case["r"], b * hkv * case["bins"], case["bin_n"])
    keys, values, query, uniforms = heads_of(case, draws, shift=3)
    method = build_method(
        "wildcat", "released", bin_size=case["bin_r"], temperature=case["temperature"]
    )
    budget = Budget(rate=case["rate"], sink=case["sink"], window=case["window"])
    layer = layer_of(keys, values)
    kept = method.select(layer, budget, uniforms.view(case["r"], b, hkv, case["bins"], -1))
    assert_as_released(kept, query, golden, name)
    assert kept.positions.shape[2] == case["n_kept"] == method.layer_capacity(budget, n, 0, 1)
    assert torch.equal(kept.keys, keys.gather(2, kept.positions[..., None].expand(-1, -1, -1, d)))


@pytest.mark.parametrize("name", NATIVE)
def test_even_bins(native, name):
    case = cases_of(native)[name]
    draws = tuple(case["draws_shape"])
    keys, values, query, uniforms = heads_of(case, draws, shift=case["shifted_channel_0"])
    size = 0 if name == "one_bin" else case["bin_r"]
    method = build_method("wildcat", bin_size=size, temperature=case["temperature"])
    budget = Budget(rate=case["rate"], sink=case["sink"], window=case["window"])
    bins = method.cut(budget, case["n"])
    assert [*bins.edges] == case["edges"]
    assert [*bins.entries] == case["kept_per_bin"]
    kept = method.select(layer_of(keys, values), budget, uniforms)
    assert_as_released(kept, query, native, name)


# -- its mathematics ---------------------------------------------------------------------------


def factored(keys, steps, seed=0, wanted=None):
    kernel = Gaussian(keys)
    uniforms = torch.rand(steps, *keys.shape[:2], generator=torch.Generator().manual_seed(seed))
    return kernel, pivoted_cholesky(kernel, uniforms, None, wanted)


def test_weights_interpolate_and_the_residual_falls():
    keys = torch.randn(5, 30, 6, generator=torch.Generator().manual_seed(1)) / 2
    _, (pivots, factor, found) = factored(keys, 8)
    assert found.all()
    assert all(len(set(row.tolist())) == 8 for row in pivots)
    weights = nystroem(pivots, factor, found)
    at = pivots[:, None].expand(-1, 8, -1)
    torch.testing.assert_close(
        weights.gather(2, at), torch.eye(8).expand(5, 8, 8), rtol=0, atol=1e-4
    )
    left = 1 - factor.double().square().cumsum(1)
    assert (left.diff(dim=1) <= 0).all()
    # What the coreset leaves of exp(h_j) is rho_j exp(h_j), never negative.
    k = keys.double()
    h = k.square().sum(-1)
    exact = (k @ k.mT).exp()
    w = weights.double() * ((h[:, None] - h.gather(1, pivots)[..., None]) / 2).exp()
    through = (w * exact.gather(1, pivots[..., None].expand(-1, -1, 30))).sum(1)
    torch.testing.assert_close(
        h.exp() - through, left[:, -1].clamp(min=0) * h.exp(), atol=1e-4, rtol=1e-3
    )


def test_first_pivot_is_drawn_in_proportion_to_the_kernel():
    generator = torch.Generator().manual_seed(4)
    keys = torch.randn(1, 12, 4, generator=generator).repeat(8000, 1, 1) / 2
    _, (pivots, _, _) = factored(keys, 1, seed=5)
    wanted = keys[0].square().sum(-1).exp()
    wanted = 8000 * wanted / wanted.sum()
    found = torch.bincount(pivots[:, 0], minlength=12)
    assert (
        stats.chisquare(
            found.numpy(), wanted.double().numpy() * 8000 / float(wanted.double().sum())
        ).pvalue
        > 1e-3
    )


def test_lambert_w_inverts():
    w = torch.logspace(-3, 3, 60, dtype=torch.float64)
    y = w[w < 500] * w[w < 500].exp()
    torch.testing.assert_close(
        lambert_w(y[y.isfinite()]), w[w < 500][y.isfinite()], rtol=1e-9, atol=0
    )


BUDGET = Budget(rate=0.25, sink=4, window=6)


@pytest.mark.parametrize("n", [41, 42, 200])
@pytest.mark.parametrize("options", [{}, {"bins": "released"}, {"bin_size": 3, "normalise": True}])
def test_sink_and_window_are_exact_and_bins_spend_the_budget(n, options):
    layer = make_layer(n, kv_heads=1, dim=64, scale=1.5)
    method, budget = build_method("wildcat", **options), Budget(rate=0.9, sink=4, window=6)
    kept = run(method, layer, budget)
    if options.get("bin_size") != 3:  # there a bin may have fewer tokens than its share
        assert kept.entries.unique().tolist() == [method.layer_capacity(budget, n, 0, 4)]
    outside, ends = [*range(4), *range(-6, 0)], [*range(4), *range(n - 6, n)]
    assert torch.equal(kept.values[:, :, outside], layer.values[:, :, ends])
    assert kept.denominators[:, :, outside].eq(1).all()
    if options.get("bins") != "released":
        assert kept.positions.diff(dim=-1).gt(0).all()
    if "normalise" in options:
        assert float(kept.denominators.sum()) == pytest.approx(n, rel=1e-3)


def test_attention_is_exact_where_the_coreset_spans_the_keys():
    """As many distinct keys as entries, or values of any scale; a common shift changes nothing."""
    layer = make_layer(112, kv_heads=2, dim=16)
    few = replace(layer, keys=layer.keys[:, :, :10].repeat(1, 1, 12, 1)[:, :, :112])
    exact = run(build_method("exact"), few, BUDGET)
    method = build_method("wildcat", bin_size=12)
    kept = run(method, few, BUDGET)
    assert int(kept.entries.max()) <= BUDGET.capacity(112)
    query = layer.queries[:, :, -8:]
    torch.testing.assert_close(
        attend(query, kept, 0.25), attend(query, exact, 0.25), rtol=2e-3, atol=2e-3
    )
    kept = run(method, layer, BUDGET)
    shifted = run(method, replace(layer, keys=layer.keys + torch.randn(1, 2, 1, 16)), BUDGET)
    assert torch.equal(kept.positions, shifted.positions)
    torch.testing.assert_close(kept.denominators, shifted.denominators, rtol=1e-3, atol=1e-3)
    tenfold = run(method, replace(layer, values=8 * layer.values), BUDGET)
    assert torch.equal(tenfold.values, 8 * kept.values)


def test_large_keys_move_into_log_weights():
    layer = make_layer(200, kv_heads=2, dim=16)
    norms = layer.keys.norm(dim=-1, keepdim=True)
    factor = torch.rand(norms.shape, generator=torch.Generator().manual_seed(1)) * 60
    layer = replace(layer, keys=layer.keys / norms * factor)
    kept = run(build_method("wildcat", bin_size=0), layer, BUDGET)
    assert kept.log_weights is not None
    assert kept.values.isfinite().all()
    assert attend(layer.queries, kept, 0.25).isfinite().all()


def test_bins_without_rank_hold_fewer():
    layer = make_layer(200)
    same = replace(layer, keys=layer.keys[:, :, :1].expand(-1, -1, 200, -1).contiguous())
    kept = run(build_method("wildcat"), same, BUDGET)
    assert kept.log_weights is None or not kept.log_weights.isnan().any()
    assert kept.denominators.isfinite().all()
    exact = run(build_method("exact"), same, BUDGET)
    torch.testing.assert_close(
        attend(layer.queries, kept, layer.scaling), attend(layer.queries, exact, layer.scaling)
    )
