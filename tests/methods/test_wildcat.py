"""WildCat: golden values of the released code, its mathematics, and attention with signed weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from support.golden import arrays_of, assert_near, cases_of, checked
from support.method_layers import attend, make_layer, run
from support.paths import GOLDEN
from torch import Tensor

from kvbench.kernels.pivoted_cholesky import GRAM_LIMIT, Gaussian, nystroem, pivoted_cholesky
from kvbench.kv import Budget, CompressedKV, LayerKV
from kvbench.methods import build_method
from kvbench.methods.wildcat import Bins


def layer_of(keys: Tensor, values: Tensor, scaling: float | None = None) -> LayerKV:
    return LayerKV(keys, values, None, 0, 1, scaling or keys.shape[-1] ** -0.5)


def test_one_bin_as_released():
    golden = arrays_of(GOLDEN / "wildcat.npz")
    cases = cases_of(golden, "kernel_json")
    assert len(cases) == 8
    for name, case in cases.items():
        g = np.random.default_rng(case["seed"])
        bins, n, d, r = (case[k] for k in ("bins", "n", "d", "r"))
        keys = g.standard_normal((bins, n, d), dtype=np.float32) * np.float32(case["key_scale"])
        values = g.standard_normal((bins, n, d), dtype=np.float32)
        uniforms = g.random((r, bins, n), dtype=np.float32)
        if name == "low_rank":
            keys[..., 2:] = 0
        keys, values, uniforms = checked(case, keys=keys, values=values, uniforms=uniforms)
        options = {option: case[option] for option in ("temperature", "query_norm")}
        method = build_method("wildcat", "released", **options)
        layer = layer_of(keys[None], values[None], case["scale"])
        tau2 = method.tau2(keys.norm(dim=-1).amax(-1), torch.full((bins,), n), case["scale"])
        np.testing.assert_allclose(tau2, golden[f"{name}_tau2"], rtol=1e-6)
        plan = Bins(tuple(n * b for b in range(bins + 1)), (r,) * bins)
        pivots, numerators = method.coreset(
            keys[None], values[None], uniforms[:, None], plan, layer
        )
        first = torch.tensor(plan.edges[:-1])[:, None]
        np.testing.assert_array_equal(pivots.places[0] - first, golden[f"{name}_idx"])
        assert pivots.present.all()
        assert not pivots.shifts.any()
        for part, expected, key in (
            (numerators, "values", "values"),
            (pivots.denominators, "weights", "weights64"),
        ):
            near = max(1e-5, 20 * case[f"released_float32_rel_err_{expected}"])
            assert_near(part[0], golden[f"{name}_{key}"], near)


def whole_heads(
    file: dict[str, Any], case: dict[str, Any], draws: Any, shift: Any
) -> tuple[Any, ...]:
    b, hkv, hq, n, d = (case[k] for k in ("b", "hkv", "hq", "n", "d"))
    g = np.random.default_rng(case["seed"])
    keys = g.standard_normal((b, hkv, n, d), dtype=np.float32) * np.float32(case["key_scale"])
    values = g.standard_normal((b, hkv, n, d), dtype=np.float32)
    query = g.standard_normal((b, hq, 1, d), dtype=np.float32)
    uniforms = g.random(draws, dtype=np.float32)
    keys[..., 0] += np.float32(shift)
    inputs = {"keys": keys, "values": values, "query": query, "uniforms": uniforms}
    assert all(f"{part}_sha256" in case for part in ("keys", "values", "uniforms"))
    keys, values, query, uniforms = checked(case, **inputs)

    def check(kept: CompressedKV) -> None:
        name = case["name"]
        np.testing.assert_array_equal(kept.positions, file[f"{name}_idx"])
        assert_near(kept.values, file[f"{name}_values"], 2e-5)
        assert_near(kept.denominators, file[f"{name}_weights64"], 2e-5)
        assert_near(attend(query, kept, d**-0.5), file[f"{name}_out"], 2e-5)

    budget = Budget(rate=case["rate"], sink=case["sink"], window=case["window"])
    return layer_of(keys, values), budget, uniforms, check


def test_whole_heads_as_released():
    golden = arrays_of(GOLDEN / "wildcat.npz")
    cases = cases_of(golden, "press_json").values()
    assert len(cases) == 3
    for case in cases:
        rows, bins = case["b"] * case["hkv"], case["bins"]
        draws = (case["r"], rows * bins, case["bin_n"])
        layer, budget, uniforms, check = whole_heads(golden, case, draws, shift=3)
        options = {"bin_size": case["bin_r"], "temperature": case["temperature"]}
        method = build_method("wildcat", "released", **options)
        uniforms = uniforms.view(case["r"], case["b"], case["hkv"], bins, -1)
        kept = method.select(layer, budget, uniforms)
        check(kept)
        count = case["n_kept"]
        assert kept.positions.shape[2] == count == method.layer_capacity(budget, case["n"], 0, 1)
        at = kept.positions[..., None].expand_as(kept.keys)
        assert torch.equal(kept.keys, layer.keys.gather(2, at))


def test_even_bins():
    native = arrays_of(GOLDEN / "wildcat_native.npz")
    cases = cases_of(native)
    assert len(cases) == 3
    for name, case in cases.items():
        draws, shift = tuple(case["draws_shape"]), case["shifted_channel_0"]
        layer, budget, uniforms, check = whole_heads(native, case, draws, shift)
        size = 0 if name == "one_bin" else case["bin_r"]
        method = build_method("wildcat", bin_size=size, temperature=case["temperature"])
        bins = method.cut(budget, case["n"])
        assert [*bins.edges] == case["edges"]
        assert [*bins.entries] == case["kept_per_bin"]
        check(method.select(layer, budget, uniforms))


# -- its mathematics ---------------------------------------------------------------------------


def factored(keys: Tensor, steps: int, seed: int = 0) -> Any:
    uniforms = torch.rand(steps, *keys.shape[:2], generator=torch.Generator().manual_seed(seed))
    return pivoted_cholesky(Gaussian(keys), uniforms, None, None)


def test_first_pivot_is_drawn_in_proportion_to_the_kernel():
    keys = torch.randn(1, 12, 4, generator=torch.Generator().manual_seed(4)) / 2
    pivots, _, _ = factored(keys.repeat(8000, 1, 1), 1, seed=5)
    expected = keys[0].double().square().sum(-1).exp()
    found = torch.bincount(pivots[:, 0], minlength=12)
    assert stats.chisquare(found.numpy(), (8000 * expected / expected.sum()).numpy()).pvalue > 1e-3


BUDGET = Budget(rate=0.25, sink=4, window=6)


@pytest.mark.parametrize(
    "options", [{}, {"bins": "released"}, {"bin_size": 3, "normalise": True}], ids=str
)
def test_bins_spend_the_budget_and_may_be_rescaled_to_their_tokens(options):
    layer = make_layer(200, kv_heads=1, dim=64, scale=1.5)
    budget = Budget(rate=0.9, sink=4, window=6)
    outside = [*range(4), *range(-6, 0)]
    method = build_method("wildcat", **options)
    kept = run(method, layer, budget)
    assert torch.equal(kept.values[:, :, outside], layer.values[:, :, outside])
    assert kept.denominators[:, :, outside].eq(1).all()
    if "normalise" in options:
        assert float(kept.denominators.sum()) == pytest.approx(200, rel=1e-3)
    else:
        assert kept.entries.unique().tolist() == [method.layer_capacity(budget, 200, 0, 4)]


@pytest.mark.parametrize("bin_size", [3, 4, 5, 8])
def test_no_token_stands_twice_where_bins_of_unlike_sizes_are_kept_whole(bin_size):
    layer, budget = make_layer(53, kv_heads=2, dim=16), Budget(rate=0.95, sink=2, window=3)
    kept = run(build_method("wildcat", bin_size=bin_size), layer, budget)
    for head in range(2):
        real = kept.positions[0, head][kept.positions[0, head] >= 0].tolist()
        assert len(real) == len(set(real)) == budget.capacity(53)


@pytest.mark.parametrize("n", [40, GRAM_LIMIT + 5])
def test_rows_of_the_kernel_by_definition_in_sets_of_any_size(n):
    keys = torch.randn(2, n, 3, generator=torch.Generator().manual_seed(n))
    kernel, pivots = Gaussian(keys), torch.tensor([7, n - 1])
    kernel.factors = torch.tensor([0.5, 2.0])
    x = keys.double()
    apart = (x - x[torch.arange(2), pivots][:, None]).square().sum(-1)
    expected = (-kernel.factors[:, None] * apart / 2).exp()
    torch.testing.assert_close(kernel.row(pivots).double(), expected, atol=1e-5, rtol=1e-4)


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


@pytest.mark.parametrize("kind", ["large", "equal"])
def test_large_and_equal_keys_stay_finite(kind):
    """Large keys move into log-weights; bins without rank hold fewer entries, and are exact."""
    layer = make_layer(200, kv_heads=2, dim=16)
    if kind == "large":
        factor = torch.rand(1, 2, 200, 1, generator=torch.Generator().manual_seed(1)) * 60
        keys = layer.keys / layer.keys.norm(dim=-1, keepdim=True) * factor
    else:
        keys = layer.keys[:, :, :1].expand(-1, -1, 200, -1).contiguous()
    layer = replace(layer, keys=keys)
    kept = run(build_method("wildcat", bin_size=0), layer, BUDGET)
    assert kept.values.isfinite().all()
    assert kept.denominators.isfinite().all()
    out = attend(layer.queries, kept, 0.25)
    assert out.isfinite().all()
    assert (kept.log_weights is not None) or kind == "equal"
    if kind == "equal":
        exact = run(build_method("exact"), layer, BUDGET)
        torch.testing.assert_close(out, attend(layer.queries, exact, 0.25))


def test_what_large_exponents_leave_stands_in_log_weights():
    """In float16 more has to than in float32: weight and log-weight together are the same."""
    layer, random = make_layer(200, kv_heads=2, dim=16), torch.Generator().manual_seed(1)
    keys = torch.nn.functional.normalize(layer.keys, dim=-1)
    keys = (30 * torch.rand(1, 2, 200, 1, generator=random) * keys).half()
    half, full = (
        run(
            build_method("wildcat", bin_size=0),
            replace(layer, keys=keys.to(dtype), values=layer.values.half().to(dtype)),
            BUDGET,
        )
        for dtype in (torch.float16, torch.float32)
    )
    assert torch.equal(half.positions, full.positions)
    assert full.log_weights is None
    moved = half.log_weights.exp()
    assert (moved > 10).sum() > 10
    torch.testing.assert_close(half.denominators * moved, full.denominators)
    values = half.values.float() * moved[..., None]
    torch.testing.assert_close(values, full.values, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("n", "bin_size", "cut"), [(5, 3, 4), (40, 12, 37)])
def test_a_prompt_within_its_budget_is_granted_whole(n, bin_size, cut):
    """Bins as released leave some tokens out, but such a prompt is not cut into bins."""
    method = build_method("wildcat", "released", bin_size=bin_size)
    budget = Budget(rate=1.0, sink=0, window=1)
    assert 1 + sum(method.cut(budget, n).entries) == cut
    assert method.layer_capacity(budget, n, 0, 4) == n
    assert method.total_capacity(budget, n, 4) == 4 * n


def test_what_rounding_leaves_of_a_key_is_no_pivot():
    """Processors round products differently: of a key that equals a pivot up to 2e-7 may be left."""

    class Rounded(Gaussian):
        def row(self, pivots: Tensor) -> Tensor:
            exact = super().row(pivots)
            noise = torch.rand(exact.shape, generator=torch.Generator().manual_seed(3)) - 0.5
            return exact + 4e-7 * noise

    distinct = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    keys = distinct.repeat(1, 6, 1)
    uniforms = torch.rand(9, 3, 30, generator=torch.Generator().manual_seed(2))
    pivots, factor, found = pivoted_cholesky(Rounded(keys), uniforms, None, None)
    assert found.sum(-1).tolist() == [5] * 3
    assert nystroem(pivots, factor, found).isfinite().all()
