"""Methods against values computed with the papers' released code (shared/golden)."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.golden import arrays_of, cases_of, checked
from support.method_layers import attend, exact_capacity, run

from kvbench.kernels.balanced_walk import balanced_walk
from kvbench.kv import Budget, LayerKV
from kvbench.methods import build_method

BALANCE = [
    *("walk_g4_i1", "walk_g4_i2", "small_g05", "small_g02_pad", "odd_i3", "short_block"),
    *("no_value", "temp_beta", "per_iter_lists", "overflow", "tiny_n5", "tiny_n2"),
    *("deep_i4", "default_like"),
]


@pytest.fixture
def balance(shared_file):
    return arrays_of(shared_file("golden/balancekv.npz"))


@pytest.fixture
def selection(shared_file):
    return arrays_of(shared_file("golden/selection.npz"))


def drawn(case, seed_key, **draws):
    """Inputs of a case: of each name a shape and a scale, drawn in that order."""
    generator = np.random.default_rng(case[seed_key])
    arrays = {
        name: generator.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        for name, (shape, scale) in draws.items()
    }
    return checked(case, **arrays)


def balance_case(balance, name):
    config = cases_of(balance)[name]
    shape = (config["b"], config["h"], config["n"], config["d"])
    scales = {"key": (shape, config["key_scale"]), "value": (shape, config["value_scale"])}
    keys, values = drawn(config, "data_seed", **scales)
    uniforms = [torch.from_numpy(balance[f"{name}_u{t}"]) for t in range(config["itrs"])]
    method = build_method(
        "balancekv",
        "released",
        block_size=config["block_size"],
        gamma=config["gamma"],
        temperature=config["temp"],
        beta=config["beta"],
    )
    return config, method, keys, values if config["use_value"] else None, uniforms


def test_every_balance_configuration_is_listed(balance):
    assert [*cases_of(balance)] == BALANCE


@pytest.mark.parametrize("name", [name for name in BALANCE if name != "overflow"])
def test_balancekv_survivors_order_and_weights(balance, name):
    _, method, keys, values, uniforms = balance_case(balance, name)
    positions, weights = method.select(keys, values, uniforms)
    np.testing.assert_array_equal(positions.numpy(), balance[f"{name}_idx"])
    np.testing.assert_array_equal(weights.numpy(), balance[f"{name}_w"])


@pytest.mark.parametrize("name", [name for name in BALANCE if name != "overflow"])
def test_balancekv_signs(balance, name):
    """Signs of the first halving, token by token."""
    config, method, keys, values, uniforms = balance_case(balance, name)
    batch, heads, n, dim = keys.shape
    blocks, b = uniforms[0].shape[2:]
    index = torch.arange(blocks * b).clamp(max=n - 1)
    index = (torch.arange(batch * heads).view(-1, 1) * n + index).view(-1, b)
    counts = (n - torch.arange(blocks) * b).clamp(0, b).repeat(batch * heads)
    gamma = method.gamma if isinstance(method.gamma, float) else method.gamma[0]
    positive = balanced_walk(
        keys.reshape(-1, dim),
        None if values is None else values.reshape(-1, dim),
        index,
        uniforms[0].reshape(-1, b),
        gamma=gamma,
        offset=0.025,
        temperature=config["temp"],
        beta=config["beta"],
        counts=counts,
        centre="released",
    ).view(batch, heads, -1)[:, :, :n]
    np.testing.assert_array_equal(positive.numpy(), balance[f"{name}_sign0"] > 0)


def plain_float32_signs(keys, values, uniforms, gamma):
    """The released formula without any guard, in float32: [batch, heads, n] of +-1."""
    batch, heads, n, dim = keys.shape
    blocks, b = uniforms.shape[2:]
    assert n == blocks * b
    k = keys.view(batch, heads, blocks, b, dim)
    k = k - k.mean(3, keepdim=True)
    v = values.view(batch, heads, blocks, b, dim)
    kernel = torch.exp(k @ k.mT / dim**0.5) * (v @ v.mT + 0.025)
    signs = torch.zeros(batch, heads, blocks, b)
    signs[..., 0] = 1.0
    for i in range(1, b):
        p = 0.5 - gamma * (kernel[..., i, :] * signs).sum(-1)
        signs[..., i] = torch.where(uniforms[..., i] < p, 1.0, -1.0)
    return signs.view(batch, heads, n)


def test_balancekv_overflow_is_where_we_differ(balance):
    """Keys too long for float32: the plain formula drops blindly (the golden values), ours does not."""
    config, method, keys, values, uniforms = balance_case(balance, "overflow")
    released = plain_float32_signs(keys, values, uniforms[0], config["gamma"])
    np.testing.assert_array_equal(released.numpy(), balance["overflow_sign0"])

    positions, weights = method.select(keys, values, uniforms)
    in_double, _ = method.select(keys.double(), values.double(), uniforms)
    assert torch.equal(positions, in_double), "float64 holds these exponentials"
    assert positions.shape == balance["overflow_idx"].shape
    assert not np.array_equal(positions.numpy(), balance["overflow_idx"])
    for head in positions.flatten(0, 1):
        assert len(set(head.tolist())) == len(head)
        assert 0 <= int(head.min()) <= int(head.max()) < config["n"]
    assert set(weights.unique().tolist()) <= {1.0, 2.0, 4.0}


def test_balancekv_decode(balance):
    """One decode step on sink + survivors + window."""
    config = json.loads(str(balance["decode_json"]))
    shape = (config["b"], config["hkv"], config["n_total"], config["d"])
    one = (config["b"], config["hq"], 1, config["d"])
    scales = {"key": (shape, config["key_scale"]), "value": (shape, config["value_scale"])}
    scales["query"] = (one, config["query_scale"])
    keys, values, query = drawn(config, "data_seed", **scales)
    uniforms = [torch.from_numpy(balance[f"decode_u{t}"]) for t in range(config["itrs"])]
    method = build_method(
        "balancekv", "released", block_size=config["block_size"], gamma=config["gamma"]
    )
    sink, window, n = config["sink"], config["window"], config["n_total"]
    middle = slice(sink, n - window)
    positions, weights = method.select(keys[:, :, middle], values[:, :, middle], uniforms)
    np.testing.assert_array_equal(positions.numpy(), balance["decode_idx"])
    np.testing.assert_array_equal(weights.numpy(), balance["decode_w"])

    # The same draws through `compress`: it reads them, in order, from its generator.
    layer = LayerKV(keys, values, None, 0, 1, config["d"] ** -0.5)
    budget = Budget(rate=0.5 ** config["itrs"], sink=sink, window=window)
    queue = [draw[:1] for draw in uniforms]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.methods._draws.uniforms", lambda *args, **kwargs: queue.pop(0))
        kept = method.compress(layer, budget, torch.Generator())
    out = attend(query, kept, config["d"] ** -0.5)
    np.testing.assert_allclose(out.numpy(), balance["decode_out"], atol=1e-5)
    exact = attend(query, run(build_method("exact"), layer, budget), config["d"] ** -0.5)
    np.testing.assert_allclose(exact.numpy(), balance["decode_out_uncompressed"], atol=1e-5)


def selection_cases(kind):
    """Names known here, so that they show as parameters; a test checks that none is missing."""
    return {
        "snapkv": [
            *("snap_mha", "snap_mha_k7", "snap_mha_max3", "snap_gqa", "snap_gqa_max5"),
            *("snap_gqa_sharp", "snap_n_eq_cap", "snap_short", "snap_batch2_k1", "snap_min_cap"),
        ],
        "streamingllm": [
            *("stream_mha", "stream_gqa", "stream_n_eq_cap", "stream_n_cap_minus1"),
        ],
        "pyramidkv": [
            *("pyr32_long", "pyr32_clip", "pyr32_snapbranch", "pyr32_short", "pyr4_long"),
            *("pyr4_clip", "pyr4_snapbranch", "pyr32_gqa_max", "pyr4_gqa"),
        ],
        "kvpress_snapkv": [
            *("press_gqa", "press_mha_k7", "press_gqa_r09", "press_gqa_batch2", "press_gqa_sharp"),
        ],
    }[kind]


@pytest.mark.parametrize("kind", ["snapkv", "streamingllm", "pyramidkv", "kvpress_snapkv"])
def test_every_selection_case_is_listed(selection, kind):
    cases = json.loads(str(selection["cases_json"]))
    assert [c["name"] for c in cases if c["kind"] == kind] == selection_cases(kind)


def selection_layer(selection, name, layer_index=0):
    case = cases_of(selection, "cases_json")[name]
    short = (case["b"], case["hkv"], case["n"], case["d"])
    wide = (case["b"], case["hq"], case["n"], case["d"])
    scales = {"q": (wide, case["query_scale"]), "k": (short, 1.0), "v": (short, 1.0)}
    queries, keys, values = drawn(case, "seed", **scales)
    num_layers = case.get("num_layers", 1)
    layer = LayerKV(keys, values, queries, layer_index, num_layers, case["d"] ** -0.5)
    return case, layer


def assert_kept(kept, expected, group):
    """Equal sets per head; a choice that a group shares is compared with each of its heads."""
    positions = kept.positions.sort(-1).values
    if positions.shape[1] != expected.shape[1]:
        positions = positions.repeat_interleave(group, 1)
    np.testing.assert_array_equal(positions.numpy(), np.sort(expected, -1))


@pytest.mark.parametrize("name", selection_cases("snapkv"))
def test_snapkv(selection, name):
    case, layer = selection_layer(selection, name)
    method = build_method(
        "snapkv",
        kernel_size=case["kernel"],
        pooling=case["pooling"],
        granularity="query_head",
    )
    kept = run(method, layer, exact_capacity(case["capacity"], case["window"]))
    assert_kept(kept, selection[f"{name}_kept"], case["hq"] // case["hkv"])
    # Entries are moved with their positions.
    keys = layer.keys.repeat_interleave(kept.keys.shape[1] // case["hkv"], 1)
    index = kept.positions.unsqueeze(-1).expand_as(kept.keys)
    assert torch.equal(kept.keys, keys.gather(2, index))


@pytest.mark.parametrize("name", selection_cases("streamingllm"))
def test_streaming_llm(selection, name):
    case, layer = selection_layer(selection, name)
    budget = exact_capacity(case["capacity"], case["window"])
    kept = run(build_method("streaming_llm"), layer, budget)
    assert_kept(kept, selection[f"{name}_kept"], case["hq"] // case["hkv"])


@pytest.mark.parametrize("name", selection_cases("pyramidkv"))
def test_pyramidkv(selection, name):
    case, _ = selection_layer(selection, name)
    method = build_method(
        "pyramidkv", "released", kernel_size=case["kernel"], pooling=case["pooling"]
    )
    for index in case["layers"]:
        case, layer = selection_layer(selection, name, index)
        kept = run(method, layer, exact_capacity(case["capacity"], case["window"]))
        assert_kept(kept, selection[f"{name}_l{index}_kept"], case["hq"] // case["hkv"])


def test_pyramidkv_layer_budgets(selection):
    for table in json.loads(str(selection["captab_json"])):
        method = build_method("pyramidkv", "released", beta=table["beta"])
        budget = exact_capacity(table["capacity"], table["window"])
        lengths = selection[f"captab{table['index']}_n"]
        for n, expected in zip(lengths, selection[f"captab{table['index']}_kept"], strict=True):
            layers = table["num_layers"]
            found = [method.layer_capacity(budget, int(n), i, layers) for i in range(layers)]
            assert found == expected.tolist()
            assert method.total_capacity(budget, int(n), layers) == sum(found)


@pytest.mark.parametrize("name", selection_cases("kvpress_snapkv"))
def test_grouped_snapkv(selection, name):
    case, layer = selection_layer(selection, name)
    method = build_method("snapkv", kernel_size=case["kernel"], pooling=case["pooling"])
    kept = run(method, layer, exact_capacity(case["n_kept"], case["window"]))
    assert_kept(kept, selection[f"{name}_kept"], case["hq"] // case["hkv"])


def test_balancekv_as_wildcats_authors_ran_it():
    """The released code's entries, its values, and no log 2^T; whole halvings between powers of two."""
    torch.manual_seed(0)
    shape = (1, 2, 600, 8)
    layer = LayerKV(torch.randn(shape), torch.randn(shape), None, 0, 1, 8**-0.5)
    budget = Budget(rate=0.25, sink=32, window=32)
    released = run(build_method("balancekv", "released", block_size=256), layer, budget)
    theirs = run(build_method("balancekv", "wildcat"), layer, budget)
    assert torch.equal(released.positions, theirs.positions)
    assert torch.equal(released.values, theirs.values)
    assert theirs.log_weights is None
    kept = run(build_method("balancekv", "wildcat"), layer, Budget(rate=0.3, sink=32, window=32))
    assert torch.equal(kept.positions, theirs.positions), "ceil(-log2(0.3)) = 2 halvings"
