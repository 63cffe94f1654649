"""Methods against values computed with the papers' released code (shared/golden)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.golden import arrays_of, cases_of, checked
from support.method_layers import attend, exact_capacity, run
from support.paths import GOLDEN
from torch import Tensor

from kvbench.kernels.balanced_walk import balanced_walk
from kvbench.kv import Budget, LayerKV
from kvbench.methods import build_method


@pytest.fixture
def balance() -> dict[str, Any]:
    return arrays_of(GOLDEN / "balancekv.npz")


@pytest.fixture
def selection() -> dict[str, Any]:
    return arrays_of(GOLDEN / "selection.npz")


def drawn(case: dict[str, Any], seed_key: str, **draws: Any) -> list[Tensor]:
    """Inputs of a case: of each name a shape and a scale, drawn in that order."""
    generator = np.random.default_rng(case[seed_key])
    arrays = {
        name: generator.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        for name, (shape, scale) in draws.items()
    }
    return checked(case, **arrays)


def balance_case(balance: dict[str, Any], name: str) -> tuple[Any, ...]:
    config = cases_of(balance)[name]
    shape = (config["b"], config["h"], config["n"], config["d"])
    scales = {"key": (shape, config["key_scale"]), "value": (shape, config["value_scale"])}
    keys, values = drawn(config, "data_seed", **scales)
    uniforms = [torch.from_numpy(balance[f"{name}_u{t}"]) for t in range(config["itrs"])]
    options = {"temperature": config["temp"]} | {
        k: config[k] for k in ("block_size", "gamma", "beta")
    }
    method = build_method("balancekv", "released", **options)
    return config, method, keys, values if config["use_value"] else None, uniforms


def signs_of(
    config: dict[str, Any], method: Any, keys: Tensor, values: Tensor | None, uniforms: Tensor
) -> Tensor:
    batch, heads, n, dim = keys.shape
    blocks, b = uniforms.shape[2:]
    index = torch.arange(blocks * b).clamp(max=n - 1)
    index = (torch.arange(batch * heads).view(-1, 1) * n + index).view(-1, b)
    return balanced_walk(
        keys.reshape(-1, dim),
        None if values is None else values.reshape(-1, dim),
        index,
        uniforms.reshape(-1, b),
        gamma=method.gamma if isinstance(method.gamma, float) else method.gamma[0],
        offset=0.025,
        temperature=config["temp"],
        beta=config["beta"],
        counts=(n - torch.arange(blocks) * b).clamp(0, b).repeat(batch * heads),
        centre="released",
    ).view(batch, heads, -1)[:, :, :n]


def test_balancekv_signs_survivors_order_and_weights(balance):
    cases = cases_of(balance)
    assert len(cases) == 14
    for name in cases.keys() - {"overflow"}:
        config, method, keys, values, uniforms = balance_case(balance, name)
        positions, weights = method.select(keys, values, uniforms)
        np.testing.assert_array_equal(positions.numpy(), balance[f"{name}_idx"], name)
        np.testing.assert_array_equal(weights.numpy(), balance[f"{name}_w"], name)
        signs = signs_of(config, method, keys, values, uniforms[0])
        np.testing.assert_array_equal(signs.numpy(), balance[f"{name}_sign0"] > 0, name)


def test_balancekv_overflow_is_where_we_differ(balance):
    """Keys too long for float32: in the plain formula, over whole rows, a sum is no number and its sign
    -1 (the golden values); ours are those in float64, which holds these exponentials."""
    case = balance_case(balance, "overflow")
    config, method, keys, values, uniforms = case
    signs, released = signs_of(*case[:4], uniforms[0]), balance["overflow_sign0"] > 0
    in_double = config, method, keys.double(), values.double()
    assert torch.equal(signs, signs_of(*in_double, uniforms[0]))
    for head, block in itertools.product(*map(range, uniforms[0].shape[1:3])):
        rows, draws = slice(64 * block, 64 * block + 64), uniforms[0][0, head, block]
        k, v = keys[0, head, rows], values[0, head, rows]
        plain, centred = torch.eye(1, 64)[0], k - k.mean(0)
        kernel = (centred @ centred.T / 8).exp() * (v @ v.T + 0.025)
        for i in range(1, 64):
            plain[i] = 1.0 if draws[i] < 0.5 - 4.0 * (kernel[i] @ plain) else -1.0
        np.testing.assert_array_equal(plain.numpy() > 0, released[0, head, rows])
    positions, weights = method.select(keys, values, uniforms)
    assert torch.equal(positions, method.select(*in_double[2:], uniforms)[0])
    assert positions.shape == balance["overflow_idx"].shape
    assert not np.array_equal(positions.numpy(), balance["overflow_idx"])
    assert all(len(head.unique()) == len(head) for head in positions.flatten(0, 1))
    assert set(weights.unique().tolist()) <= {1.0, 2.0, 4.0}


def test_balancekv_decode(balance):
    config = json.loads(str(balance["decode_json"]))
    shape = (config["b"], config["hkv"], config["n_total"], config["d"])
    one = (config["b"], config["hq"], 1, config["d"])
    scales = {"key": (shape, config["key_scale"]), "value": (shape, config["value_scale"])}
    scales["query"] = (one, config["query_scale"])
    keys, values, query = drawn(config, "data_seed", **scales)
    uniforms = [torch.from_numpy(balance[f"decode_u{t}"]) for t in range(config["itrs"])]
    options = {"block_size": config["block_size"], "gamma": config["gamma"]}
    method = build_method("balancekv", "released", **options)
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


def selected(selection: dict[str, Any], kind: str) -> Iterator[tuple[dict[str, Any], LayerKV]]:
    """Of a kind of cases each one's name, itself, and its layer at an index."""
    found = [c for c in cases_of(selection, "cases_json").values() if c["kind"] == kind]
    assert found
    for case in found:
        short = (case["b"], case["hkv"], case["n"], case["d"])
        wide = (case["b"], case["hq"], case["n"], case["d"])
        scales = {"q": (wide, case["query_scale"]), "k": (short, 1.0), "v": (short, 1.0)}
        queries, keys, values = drawn(case, "seed", **scales)
        for index in case.get("layers", [0]):
            shape = (index, case.get("num_layers", 1), case["d"] ** -0.5)
            yield case, LayerKV(keys, values, queries, *shape)


METHODS = {
    "snapkv": ("snapkv", None, {"granularity": "query_head"}, "capacity"),
    "streamingllm": ("streaming_llm", None, {}, "capacity"),
    "pyramidkv": ("pyramidkv", "released", {}, "capacity"),
    "kvpress_snapkv": ("snapkv", None, {}, "n_kept"),
}


@pytest.mark.parametrize("kind", METHODS)
def test_selection(selection, kind):
    """Equal sets per head; a choice that a group shares is compared with each of its heads."""
    name, preset, options, count = METHODS[kind]
    for case, layer in selected(selection, kind):
        if name != "streaming_llm":
            options = {**options, "kernel_size": case["kernel"], "pooling": case["pooling"]}
        method = build_method(name, preset, **options)
        kept = run(method, layer, exact_capacity(case[count], case["window"]))
        index = f"_l{layer.layer_index}" if "layers" in case else ""
        key = f"{case['name']}{index}_kept"
        expected, positions = np.sort(selection[key], -1), kept.positions.sort(-1).values
        if positions.shape[1] != expected.shape[1]:
            positions = positions.repeat_interleave(case["hq"] // case["hkv"], 1)
        np.testing.assert_array_equal(positions.numpy(), expected, key)
        # Entries are moved with their positions.
        keys = layer.keys.repeat_interleave(kept.keys.shape[1] // case["hkv"], 1)
        index = kept.positions.unsqueeze(-1).expand_as(kept.keys)
        assert torch.equal(kept.keys, keys.gather(2, index))


def test_pyramidkv_layer_budgets(selection):
    for table in json.loads(str(selection["captab_json"])):
        method = build_method("pyramidkv", "released", beta=table["beta"])
        budget, layers = exact_capacity(table["capacity"], table["window"]), table["num_layers"]
        lengths = selection[f"captab{table['index']}_n"]
        for n, expected in zip(lengths, selection[f"captab{table['index']}_kept"], strict=True):
            found = [method.layer_capacity(budget, int(n), i, layers) for i in range(layers)]
            assert found == expected.tolist()
            assert method.total_capacity(budget, int(n), layers) == sum(found)


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
