"""The caches of a layer against brute force: packed, restricted, signed, ragged, shared, evicting,
compressed again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.attention import step
from support.method_layers import attend, make_layer, run
from support.paths import GOLDEN
from torch import Tensor

from kvbench.engine.attention import exact_attention
from kvbench.engine.cache import Cache
from kvbench.engine.hooks import hook_of
from kvbench.engine.kept import entries_of
from kvbench.engine.row import Row
from kvbench.kernels.qjl import QJL
from kvbench.kernels.quantize import Quantization, pack, unpack
from kvbench.kernels.turboquant import TurboQuant
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods import build_method
from kvbench.methods.base import Method


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("shape", [(2, 64, 32), (3, 5, 7), (1, 1, 1)])
def test_packed_numbers_are_within_half_a_step(bits, by_channel, shape):
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.rand(shape[-1]) * 10
    packed = pack(x, Quantization(bits, 16), by_channel=by_channel)
    back = unpack(packed)
    assert back.shape == x.shape
    size = min(16, shape[1 if by_channel else 2])
    steps = packed.scale.repeat_interleave(size, -1)[..., : shape[1 if by_channel else 2]]
    steps = steps.transpose(1, 2) if by_channel else steps
    assert bool(((back - x).abs() <= steps * 0.5001 + 1e-6).all())
    rows, columns = (shape[2], shape[1]) if by_channel else (shape[1], shape[2])
    groups = -(-columns // size)
    assert packed.nbytes == shape[0] * rows * (-(-columns * bits // 8) + 2 * groups * 4)


@pytest.mark.parametrize("scheme", [None, Quantization(4, 8, "entry"), TurboQuant(bits=4)])
@pytest.mark.parametrize("name", ["h2o", "streaming_llm", "local"])
def test_a_cache_evicts_as_lists_of_entries_do(scheme, name):
    """Each head as a list in float64: an entry is exact in its own step, and then as it was packed."""
    torch.manual_seed(0)
    dim, capacity, sink, steps = 16, 12, 2, 30
    keys, values = torch.randn(2, 9, dim), torch.randn(2, 9, dim)
    at = torch.arange(9).expand(1, 2, 9)
    start = torch.rand(1, 2, 9)
    method = build_method(name, decode="evict")
    whole = CompressedKV(keys[None], values[None], None, at, start)
    cache = Cache(whole, 2, hook_of(method, capacity, sink), capacity=capacity, scheme=scheme)

    def restored(rows: Tensor, side: Any) -> Tensor:
        if scheme is None:
            return rows.double()
        codec = scheme.codecs(rows, rows, layer=0, seed=0)[side]
        return codec.mix(torch.eye(rows.shape[1]).expand(len(rows), -1, -1)).double()

    first = restored(keys, 0), restored(values, 1)
    held = [
        [[p, first[0][h, p], first[1][h, p], float(start[0, h, p])] for p in range(9)]
        for h in range(2)
    ]
    for position in range(9, 9 + steps):
        q, k, v = torch.randn(4, 1, dim), torch.randn(2, 1, dim), torch.randn(2, 1, dim)
        output = step(cache, q, k, v, torch.tensor([position]), 0.25)
        packed = restored(k, 0)[:, 0], restored(v, 1)[:, 0]
        for head, entries in enumerate(held):
            entries.append([position, k[head, 0].double(), v[head, 0].double(), 0.0])
            logits = q.view(2, 2, dim)[head].double() @ torch.stack([e[1] for e in entries]).T
            weights = (0.25 * logits).softmax(-1)
            expected = weights @ torch.stack([e[2] for e in entries])
            torch.testing.assert_close(
                output.view(2, 2, dim)[head].double(), expected, atol=1e-5, rtol=1e-5
            )
            entries[-1][1:3] = packed[0][head], packed[1][head]
            for entry, weight in zip(entries, weights.mean(0).tolist(), strict=True):
                entry[3] += weight
            if len(entries) > capacity:
                ages = sorted(e[0] for e in entries)
                if name == "h2o":
                    free = [e for e in entries if e[0] < ages[-method.recent(capacity)]]
                    gone = min(free, key=lambda e: e[3])[0]
                else:
                    gone = ages[sink if name == "streaming_llm" else 0]
                entries[:] = [e for e in entries if e[0] != gone]
            kept = {int(p) for p in cache.positions[head, : cache.length]}
            assert kept == {e[0] for e in entries}
    assert cache.length == capacity
    packed = 2 * capacity * 2 * dim * 4 if scheme is None else scheme.nbytes(2, capacity, dim, 4)
    assert cache.nbytes() == packed + 2 * capacity * 4  # and scores


@pytest.mark.parametrize(
    ("name", "bits", "said"),
    [
        ("h2o", 4, "evicts while decoding; allowed: decode=grow, or entries packed one by one"),
        ("rkv", 4, "compresses again while decoding; allowed: one or the other"),
    ],
)
def test_quantize_is_refused_where_it_cannot_be(name, bits, said):
    with pytest.raises(KVError, match=said):
        build_method(name, quantize={"bits": bits}).quantization()


@pytest.mark.parametrize("heavy", [False, True])
def test_topk_attends_to_the_largest_logits_and_holds_everything(heavy):
    torch.manual_seed(0)
    keys, values = torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8)
    scores = (torch.rand(1, 2, 50) < 0.1).float() if heavy else None
    held = CompressedKV(keys, values, None, torch.arange(50).expand(1, 2, 50), scores)
    method = build_method("topk", heavy_hitters=heavy)
    cache = Cache(held, 1, hook_of(method, 12, 0), capacity=50)
    q, k, v = torch.randn(4, 1, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    output = step(cache, q, k, v, torch.tensor([50]), 0.35)
    for head in range(4):
        kv = head // 2
        logits = torch.cat([keys[0, kv], k[kv]]).double() @ q[head, 0].double() * 0.35
        seen = torch.zeros(51, dtype=torch.bool)
        if heavy:
            seen[:50] = scores[0, kv] > 0
        seen[logits.masked_fill(seen, -math.inf).topk(6 if heavy else 12).indices] = True
        weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
        expected = weights @ torch.cat([values[0, kv], v[kv]]).double()
        torch.testing.assert_close(output[head, 0].double(), expected, atol=1e-6, rtol=1e-6)


PACKED_BY = [
    (None, 64),
    (Quantization(4, 64), 64),
    (Quantization(2, 8), 64),
    (Quantization(4, 64), 5),
    (Quantization(4, 12), 64),
]


@pytest.mark.parametrize(("scheme", "n"), PACKED_BY, ids=str)
def test_a_step_attends_to_what_packed_numbers_stand_for(scheme, n):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, 2, n, 16)
    weights = torch.randn(1, 2, n)
    held = CompressedKV(keys, values, weights, torch.arange(n).expand(1, 2, n))
    cache = Cache(held, 3, capacity=n, scheme=scheme)
    q, k, v = torch.randn(4, 1, 16), torch.randn(2, 1, 16), torch.randn(2, 1, 16)
    assert cache.steps_by_kernel == (scheme is None)
    output = step(cache, q, k, v, torch.tensor([n]), 0.25)[:, 0]
    if scheme is not None:
        keys = unpack(pack(keys[0], scheme, by_channel=True))[None]
        values = unpack(pack(values[0], scheme, by_channel=False))[None]
    all_keys, all_values = torch.cat([keys[0], k], 1), torch.cat([values[0], v], 1)
    logits = q.view(2, 2, 16).double() @ all_keys.double().mT * 0.25
    logits[..., :n] += weights[0, :, None]
    expected = (logits.softmax(-1) @ all_values.double()).view(4, 16)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantized", [False, True])
def test_entries_that_count_differently_in_the_normaliser(quantized):
    """Signed denominators: the quotient by definition in float64, chunk and tokens alike."""
    torch.manual_seed(0)
    keys, values = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    denominators = 1 + torch.randn(1, 2, 20)
    denominators[0, 1] = -4.0  # nothing but new tokens counts, and not enough
    ends = (values.amin(2) / 4, values.amax(2) / 4)
    at = torch.arange(20).expand(1, 2, 20)
    held = CompressedKV(keys, values, None, at, denominators=denominators, value_range=ends)
    how = Quantization(4, 4) if quantized else None
    whole, single = (Cache(held, room, capacity=20, scheme=how) for room in (3, 0))
    if quantized:
        keys = unpack(pack(keys[0], how, by_channel=True))[None]
        values = unpack(pack(values[0], how, by_channel=False))[None]
    assert not whole.steps_by_kernel
    before = whole.nbytes()
    q, k, v = torch.randn(4, 3, 16), torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    output = step(whole, q, k, v, torch.arange(20, 23), 0.25)
    assert whole.nbytes() - before == 3 * 2 * (2 * 16 + 1) * 4
    for t in range(3):
        one = slice(t, t + 1)
        alone = step(single, q[:, one], k[:, one], v[:, one], torch.tensor([20 + t]), 0.25)
        torch.testing.assert_close(alone, output[:, one])
        for head in range(4):
            kv = head // 2
            all_keys = torch.cat([keys[0, kv], k[kv, : t + 1]]).double()
            all_values = torch.cat([values[0, kv], v[kv, : t + 1]]).double()
            b = torch.cat([denominators[0, kv], torch.ones(t + 1)]).double()
            e = (all_keys @ q[head, t].double() * 0.25).exp()
            low = torch.minimum(ends[0][0, kv], v[kv, : t + 1].amin(0)).double()
            high = torch.maximum(ends[1][0, kv], v[kv, : t + 1].amax(0)).double()
            below = float(e @ b)
            expected = e @ all_values / below if below > 0 else torch.zeros(16).double()
            torch.testing.assert_close(
                output[head, t].double(), expected.clamp(low, high), rtol=1e-4, atol=1e-5
            )


def test_a_sliding_layer_lets_go_of_what_its_window_has_passed():
    torch.manual_seed(0)
    keys, values = torch.randn(1, 2, 600, 8), torch.randn(1, 2, 600, 8)
    queries = torch.randn(4, 600, 8)
    held = CompressedKV(keys[:, :, :9], values[:, :, :9], None, torch.arange(9).expand(1, 2, 9))
    cache = Cache(held, 0, capacity=9, window=9)
    begin = 9
    for tokens in [1] * 300 + [40, 1, 250]:
        new, end = slice(begin, begin + tokens), begin + tokens
        at = torch.arange(begin, end)
        output = step(cache, queries[:, new], keys[0, :, new], values[0, :, new], at, 0.3)
        all_keys, all_values = (x[0, :, :end].repeat_interleave(2, 0) for x in (keys, values))
        distance = at[:, None] - torch.arange(end)
        logits = (queries[:, new] @ all_keys.mT * 0.3).masked_fill(
            (distance < 0) | (distance >= 9), -math.inf
        )
        torch.testing.assert_close(output, logits.softmax(-1) @ all_values, atol=1e-5, rtol=1e-5)
        begin = end
        assert cache.length <= 9 + 256 + tokens


def row_of(method: Method, budget: Budget, room: int = 0) -> Row:
    return Row("m", method, budget, 0, "x", room=room)


def hold(row: Row, kept: CompressedKV, capacity: int, layer: LayerKV | None = None) -> None:
    layer = layer or LayerKV(kept.keys, kept.values, None, 0, 1, 0.3)
    row._hold(0, kept, capacity, None, layer)


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
    row = row_of(build_method("adakv"), budget)
    hold(row, held, most)
    assert [cache.length for cache in row.caches[0]] == list(lengths)
    assert row.cache_bytes() == sum(lengths) * 2 * 8 * 4 == held.nbytes
    ((_, shown, weights),) = entries_of(row, [0])
    assert torch.equal(shown, at[0])
    assert torch.equal(weights, padding[0].exp())
    twin = row.clone()
    q, k, v = torch.randn(2 * heads, 5, 8), torch.randn(heads, 5, 8), torch.randn(heads, 5, 8)
    positions = torch.arange(50, 55)
    out = step(row, q, k, v, positions, 0.3)
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
        expected = attend(q[None, :, one], whole, 0.3)[0]
        torch.testing.assert_close(out[:, one].double(), expected, rtol=1e-5, atol=1e-6)
    assert row.held_entries(0).tolist() == [n + 5 for n in lengths]
    assert row.cache_bytes() == (sum(lengths) + 5 * heads) * 2 * 8 * 4
    mean = -(-sum(lengths) // heads)
    with pytest.raises(BudgetExceeded):
        hold(row_of(build_method("adakv"), budget), held, mean - 2)


@pytest.mark.parametrize(
    "extra",
    [{"scores": torch.ones(1, 2, 6)}, {"denominators": torch.ones(1, 2, 6)}, {"keys_only": 2}],
    ids=["scores", "denominators", "keys_only"],
)
def test_heads_of_different_lengths_hold_no_scores_signed_weights_or_lone_keys(extra):
    x, at = torch.randn(1, 2, 6, 8), torch.arange(6).expand(1, 2, -1)
    held = CompressedKV(x, x, None, at, lengths=torch.tensor([[6, 4]]))
    row = row_of(build_method("adakv"), Budget(rate=1.0, sink=0, window=0))
    hold(row, held, 6)
    with pytest.raises(KVError, match="heads of different lengths hold scores"):
        hold(row, replace(held, **extra), 6)


def schedule(method: Method, n: int, steps: int) -> list[int]:
    torch.manual_seed(0)
    layer = make_layer(n, kv_heads=2, num_layers=1)
    budget = Budget(size=method.to, sink=0, window=4)
    held = run(method, layer, budget) if method.phase == "tokens" else keep_all(layer)
    row = row_of(method, budget)
    hold(row, held, n, layer)
    (cache,), lengths = row.caches[0], []
    for t in range(steps):
        q, k, v = torch.randn(4, 1, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
        step(cache, q, k, v, torch.tensor([n + t]), layer.scaling)
        lengths.append(cache.length)
        positions = cache.positions[:, : cache.length]
        assert positions.diff(dim=-1).gt(0).all(), "true positions, ascending"
        assert int(positions.max()) == n + t
    return lengths


def test_schedules():
    listed = json.loads((GOLDEN / "decoding.json").read_text())["schedules"]
    for case in listed[:3]:
        steps, shared = min(case["steps"], 150), {"every": case["interval"], "to": case["target"]}
        for name, options, expected in (
            ("recompress", {"queries": 8}, "held_decoding_press"),
            ("rkv", {"window": 4}, "held_rkv"),
        ):
            method = build_method(name, **shared, **options)
            assert schedule(method, case["n"], steps) == case[expected][:steps]


def test_weights_multiply():
    layer = make_layer(60, kv_heads=2, num_layers=1)
    budget = Budget(size=30, sink=2, window=4)
    method = build_method("recompress", of="uniform", every=2, to=20)
    row = row_of(method, budget)
    hold(row, run(method, layer, budget), 30, layer)
    (cache,) = row.caches[0]
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
    assert row.cache_bytes() == 20 * 2 * (2 * 8 + 1) * 4 + 4 * 32 * 8 * 4, "the queries count"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [None, Quantization(4, 16), QJL(buffer=32), TurboQuant(bits=4)])
def test_steps_in_half_precision_round_no_logit(scheme, dtype):
    """Products that float16 does not hold, and logits of which bfloat16 would lose a tenth: a step and
    attention by blocks against float64 of what is held."""
    torch.manual_seed(0)
    n, dim, scaling = 96, 64, 3e-4
    q, keys, values = torch.randn(4, 1, dim), torch.randn(2, n + 1, dim), torch.randn(2, n + 1, dim)
    q, keys, values = (40 * q).to(dtype), (40 * keys).to(dtype), values.to(dtype)
    keys[:, 7] = q.view(2, 2, dim)[:, 0]  # of the most weight, and some others near it
    keys[:, 40:60] = (keys[:, 7:8] + torch.randn(2, 20, dim)).to(dtype)
    at = torch.arange(n)
    held = CompressedKV(keys[None, :, :n], values[None, :, :n], None, at.expand(1, 2, n))
    cache = Cache(held, 1, capacity=n, scheme=scheme)
    grouped = q.view(2, 2, dim)
    logits = grouped.double() @ keys.double().mT
    assert logits.amax() > 65504
    restored = values.double()
    if scheme is not None:
        packed = cache.packed
        logits[..., : packed[0].count] = packed[0].dot(grouped.float()).double()
        one = torch.eye(packed[1].count).expand(2, -1, -1)
        restored[:, : packed[1].count] = packed[1].mix(one).double()
    expected = ((logits * scaling).softmax(-1) @ restored).view(4, 1, dim)
    near = dict.fromkeys(("rtol", "atol"), 4e-3 if dtype == torch.bfloat16 else 5e-4)
    output = [step(cache, q, keys[:, n:], values[:, n:], torch.tensor([n]), scaling)]
    if scheme is None:
        blocks = exact_attention(q[None], keys[None], values[None], scaling=scaling, softcap=1e6)
        output.append(blocks[0])
    for out in output:
        torch.testing.assert_close(out.double(), expected, **near)
