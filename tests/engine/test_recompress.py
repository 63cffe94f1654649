"""Ragged heads hold no padding; caches are compressed again while decoding, on the schedules named."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from support.attention import step
from support.method_layers import attend, make_layer, run
from support.tiny import prompt_ids, tiny_model

from kvbench.engine.fork import Fork
from kvbench.engine.generate import run_forks
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, KVError, keep_all
from kvbench.methods import build_method


def fork_of(method, budget, room=0):
    return Fork("m", method, budget, 0, "x", room=room)


@pytest.mark.parametrize("lengths", [(40, 1, 0), (12, 12, 12), (0, 0, 7)])
def test_ragged_heads_are_the_padded_ones_without_the_padding(lengths):
    torch.manual_seed(0)
    most, heads = max(lengths), len(lengths)
    keys, values = torch.randn(1, heads, most, 8), torch.randn(1, heads, most, 8)
    real = torch.arange(most) < torch.tensor(lengths)[:, None]
    padding = torch.where(real, 0.0, -math.inf)[None]
    at = torch.where(real, torch.arange(most), -1)[None]
    held = CompressedKV(keys, values, padding, at, lengths=torch.tensor([lengths]))
    budget = Budget(rate=1.0, sink=0, window=0)
    fork = fork_of(build_method("adakv"), budget)
    fork.hold(0, held, most)
    cache = fork.layers[0]
    assert cache.entry_bytes() == sum(lengths) * 2 * 8 * 4 == held.nbytes
    shown = cache.padded()
    assert torch.equal(shown.positions, at[0])
    assert torch.equal(shown.log_weights, padding[0])
    twin = cache.clone()
    q, k, v = torch.randn(2 * heads, 5, 8), torch.randn(heads, 5, 8), torch.randn(heads, 5, 8)
    positions = torch.arange(50, 55)
    out = step(cache, q, k, v, positions, 0.3)
    for t in range(5):
        one = slice(t, t + 1)
        alone = step(twin, q[:, one], k[:, one], v[:, one], positions[one], 0.3)
        torch.testing.assert_close(alone, out[:, one])
        whole = CompressedKV(
            torch.cat([keys, k[None, :, : t + 1]], 2),
            torch.cat([values, v[None, :, : t + 1]], 2),
            torch.cat([padding, torch.zeros(1, heads, t + 1)], 2),
            torch.cat([at, positions[: t + 1].expand(1, heads, -1)], 2),
        )
        want = attend(q[None, :, one], whole, 0.3)[0]
        torch.testing.assert_close(out[:, one].double(), want, rtol=1e-5, atol=1e-6)
    assert cache.entries().tolist() == [n + 5 for n in lengths]
    assert cache.entry_bytes() == (sum(lengths) + 5 * heads) * 2 * 8 * 4


def test_a_ragged_layer_is_audited_by_its_sum():
    layer = make_layer(100, kv_heads=2)
    held = keep_all(layer)
    held = replace(held, lengths=torch.tensor([[90, 10]]))
    fork_of(build_method("adakv"), Budget()).hold(0, held, 50)
    with pytest.raises(BudgetExceeded):
        fork_of(build_method("adakv"), Budget()).hold(0, held, 48)


def schedule(method, n, steps):
    """Entries held after each generated token."""
    torch.manual_seed(0)
    layer = make_layer(n, kv_heads=2, num_layers=1)
    budget = Budget(size=method.to, sink=0, window=4)
    held = run(method, layer, budget) if method.phase == "tokens" else keep_all(layer)
    fork = fork_of(method, budget)
    fork.hold(0, held, n, prompt=layer)
    cache, lengths = fork.layers[0], []
    for t in range(steps):
        q, k, v = torch.randn(4, 1, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
        step(cache, q, k, v, torch.tensor([n + t]), layer.scaling)
        lengths.append(cache.length)
        positions = cache.positions[:, : cache.length]
        assert positions.diff(dim=-1).gt(0).all(), "true positions, ascending"
        assert int(positions.max()) == n + t
    return lengths


def test_schedules(shared_file):
    listed = json.loads(shared_file("golden/next/decoding.json").read_text())["schedules"]
    for case in listed[:3]:
        every, to = case["interval"], case["target"]
        steps = min(case["steps"], 150)
        press = build_method("recompress", every=every, to=to, queries=8)
        assert schedule(press, case["n"], steps) == case["held_decoding_press"][:steps]
        rkv = build_method("rkv", every=every, to=to, window=4)
        assert schedule(rkv, case["n"], steps) == case["held_rkv"][:steps]


def test_weights_multiply():
    layer = make_layer(60, kv_heads=2, num_layers=1)
    budget = Budget(size=30, sink=2, window=4)
    method = build_method("recompress", of="uniform", every=2, to=20)
    fork = fork_of(method, budget)
    fork.hold(0, run(method, layer, budget), 30, prompt=layer)
    cache = fork.layers[0]
    assert cache.log_weights is not None
    for t in range(2):
        q, k = torch.randn(4, 1, 8), torch.randn(2, 1, 8)
        step(cache, q, k, k, torch.tensor([60 + t]), 0.3)
    assert cache.length == 20
    weights = cache.log_weights[:, :20].exp()
    first, again = 54 / 24, 26 / 14
    allowed = torch.tensor([1.0, first, again, first * again])
    assert ((weights[..., None] - allowed).abs().amin(-1) < 1e-4).all()
    assert weights.amax() == pytest.approx(first * again, rel=1e-4)
    assert fork.cache_bytes() == 20 * 2 * (2 * 8 + 1) * 4 + 4 * 32 * 8 * 4, "the queries count"


@pytest.mark.parametrize("name", ["rkv", "recompress", "adakv"])
def test_answers_do_not_depend_on_the_batch(name):
    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    ids = prompt_ids(120)
    options = {} if name == "adakv" else {"every": 4, "to": 24}
    method = build_method(name, **options)
    budget = Budget(size=24, sink=2, window=6)

    def answers(methods):
        return run_forks(
            model, ids[:-5], ids[-5:], methods, Stopping(14), seed=0, example_id="x",
            compress_after="context",
        )  # fmt: skip

    alone = answers({"m": (method, budget)})["m"]
    assert alone.failure is None
    together = answers({"a": (build_method("exact"), budget), "m": (method, budget)})["m"]
    assert together.tokens == alone.tokens
    assert together.cache_bytes_end == alone.cache_bytes_end
    if name != "adakv":
        assert alone.cache_bytes_end < alone.exact_bytes


def test_what_cannot_be_combined_says_so():
    method = build_method("rkv", quantize={"bits": 4})
    with pytest.raises(KVError, match="compresses again while decoding; allowed: one or the other"):
        method.quantization()
