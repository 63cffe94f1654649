"""What methods do after the prefill: restricted attention, packed caches, reading in chunks."""

from __future__ import annotations

import pytest
import torch
from support.attention import step
from support.forward import SMALL, generate, reference
from support.tiny import prompt_ids, tiny_model

from kvbench.engine.cache import LayerCache
from kvbench.kernels.quantize import Quantization, pack, unpack
from kvbench.kernels.turboquant import TurboQuant
from kvbench.kv import Budget, CompressedKV, KVError
from kvbench.methods import build_method


def ready(architecture="llama"):
    model = tiny_model(architecture)
    model.set_attn_implementation("kvbench")
    return model


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("shape", [(2, 64, 32), (1, 37, 20), (3, 5, 7), (1, 1, 1)])
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


def test_packing_constants_and_extremes_is_exact():
    x = torch.full((1, 8, 8), 3.25)
    assert torch.equal(unpack(pack(x, Quantization(2, 4), by_channel=True)), x)
    ends = torch.tensor([[[-1.0, 2.0, 0.0, 1.0]]])
    assert torch.equal(unpack(pack(ends, Quantization(2, 4), by_channel=False)), ends)


@pytest.mark.parametrize("name", ["exact", "snapkv", "uniform"])
def test_a_quantised_cache_holds_packed_bytes_and_answers_nearly_alike(name):
    model = ready()
    ids = prompt_ids(120)
    sizes = {}
    for bits in (None, 4, 2):
        quantize = None if bits is None else {"bits": bits, "group_size": 32}
        result = generate(model, ids, {"m": (build_method(name, quantize=quantize), SMALL)})["m"]
        assert result.failure is None
        sizes[bits] = result.cache_bytes
        assert result.compressed or bits is None
        grown = result.cache_bytes_end - result.cache_bytes
        per_token = 4 * 2 * 16 * 2 * 4 + (4 * 2 * 4 if name == "uniform" else 0)
        assert grown == (len(result.tokens) - 1) * per_token, "new tokens stay as they are"
    assert sizes[2] < sizes[4] < 0.5 * sizes[None]


def test_a_packed_cache_attends_to_what_it_unpacks():
    torch.manual_seed(0)
    keys, values = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    how = Quantization(4, 8)
    held = CompressedKV(keys, values, None, torch.arange(40).expand(1, 2, 40))
    plain = CompressedKV(
        unpack(pack(keys[0], how, by_channel=True))[None],
        unpack(pack(values[0], how, by_channel=False))[None],
        None,
        held.positions,
    )
    method = build_method("exact")
    packed = LayerCache(held, 0, method, capacity=40, quantization=how)
    unpacked = LayerCache(plain, 0, method, capacity=40)
    for more in range(3):  # the buffers grow beyond what was reserved
        q, k = torch.randn(4, 1, 16), torch.randn(2, 1, 16)
        at = torch.tensor([40 + more])
        got, want = (step(c, q, k, k, at, 0.25) for c in (packed, unpacked))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "scheme", [Quantization(4, 8, "entry"), Quantization(2, 4, "entry"), TurboQuant(bits=4)]
)
@pytest.mark.parametrize("name", ["h2o", "streaming_llm", "local"])
def test_a_packed_cache_evicts_as_lists_of_restored_entries_do(scheme, name):
    """Each head as a list in float64: an entry is exact in its own step, and then as it was packed."""
    torch.manual_seed(0)
    dim, capacity, sink, steps = 16, 12, 2, 30
    keys, values = torch.randn(2, 9, dim), torch.randn(2, 9, dim)
    at = torch.arange(9).expand(1, 2, 9)
    start = torch.rand(1, 2, 9)
    method = build_method(name, decode="evict")
    cache = LayerCache(
        CompressedKV(keys[None], values[None], None, at, start),
        2,
        method,
        capacity=capacity,
        sink=sink,
        quantization=scheme,
    )

    def restored(rows, side):
        codec = scheme.codecs(rows, rows, layer=0, seed=0)[side]
        return codec.mix(torch.eye(rows.shape[1]).expand(len(rows), -1, -1)).double()

    first = restored(keys, 0), restored(values, 1)
    held = [
        [[p, first[0][h, p], first[1][h, p], float(start[0, h, p])] for p in range(9)]
        for h in range(2)
    ]
    for position in range(9, 9 + steps):
        q, k, v = torch.randn(4, 1, dim), torch.randn(2, 1, dim), torch.randn(2, 1, dim)
        got = step(cache, q, k, v, torch.tensor([position]), 0.25)
        packed = restored(k, 0)[:, 0], restored(v, 1)[:, 0]
        for head, entries in enumerate(held):
            entries.append([position, k[head, 0].double(), v[head, 0].double(), 0.0])
            logits = q.view(2, 2, dim)[head].double() @ torch.stack([e[1] for e in entries]).T
            weights = (0.25 * logits).softmax(-1)
            want = weights @ torch.stack([e[2] for e in entries])
            torch.testing.assert_close(
                got.view(2, 2, dim)[head].double(), want, atol=1e-5, rtol=1e-5
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
    assert cache.length == cache.first == capacity
    scores = 0 if cache.scores is None else 2 * capacity * 4
    assert cache.entry_bytes() == scheme.nbytes(2, capacity, dim, 4) + scores


def test_h2o_in_four_bits_answers_and_its_bytes_are_those_stored():
    model, found = ready(), {}
    for scheme in (None, {"bits": 4, "group_size": 16, "keys": "entry"}):
        method = build_method("h2o", quantize=scheme)
        result = generate(model, prompt_ids(120), {"m": (method, SMALL)})["m"]
        assert result.failure is None
        found[scheme is None] = result
    assert found[False].entries == found[True].entries
    assert found[False].cache_bytes == found[False].cache_bytes_end < 0.5 * found[True].cache_bytes


def test_quantize_is_refused_where_it_cannot_be():
    with pytest.raises(KVError, match=r"bits is 3; allowed: bits 2 or 4"):
        build_method("snapkv", quantize={"bits": 3}).quantization()
    with pytest.raises(
        KVError, match="evicts while decoding; allowed: decode=grow, or entries packed one by one"
    ):
        build_method("h2o", quantize={"bits": 4}).quantization()
    assert build_method("h2o", decode="grow", quantize={"bits": 4}).quantization() is not None


@pytest.mark.parametrize("heavy", [False, True])
def test_topk_attends_to_the_largest_logits_and_holds_everything(heavy):
    torch.manual_seed(0)
    keys, values = torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8)
    scores = (torch.rand(1, 2, 50) < 0.1).float() if heavy else None
    held = CompressedKV(keys, values, None, torch.arange(50).expand(1, 2, 50), scores)
    cache = LayerCache(held, 1, build_method("topk", heavy_hitters=heavy), capacity=50, granted=12)
    q, k, v = torch.randn(4, 1, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    got = step(cache, q, k, v, torch.tensor([50]), 0.35)
    for head in range(4):
        kv = head // 2
        all_keys = torch.cat([keys[0, kv], k[kv]]).double()
        all_values = torch.cat([values[0, kv], v[kv]]).double()
        logits = all_keys @ q[head, 0].double() * 0.35
        if heavy:
            fixed = torch.cat([scores[0, kv], torch.zeros(1)]) > 0
            free = logits.masked_fill(fixed, float("-inf")).topk(6).indices
            seen = fixed.clone()
            seen[free] = True
        else:
            seen = torch.zeros(51, dtype=torch.bool)
            seen[logits.topk(12).indices] = True
        want = logits.masked_fill(~seen, float("-inf")).softmax(-1) @ all_values
        torch.testing.assert_close(got[head, 0].double(), want, atol=1e-6, rtol=1e-6)


def test_topk_in_generation_is_exact_when_it_may_see_everything():
    model = tiny_model("llama")
    ids = prompt_ids(80)
    expected = reference(model, ids, 16)
    model.set_attn_implementation("kvbench")
    nearly_all = Budget(rate=0.99, sink=4, window=4)
    methods = {
        "all": (build_method("topk"), nearly_all),
        "few": (build_method("topk", heavy_hitters=True), Budget(rate=0.05, sink=1, window=1)),
    }
    results = generate(model, ids, methods)
    assert all(r.failure is None for r in results.values())
    assert results["few"].tokens != expected
    assert results["few"].cache_bytes > results["few"].exact_bytes  # its marks are counted, too
    assert results["all"].cache_bytes == results["all"].exact_bytes


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
    method = build_method("exact")
    whole = LayerCache(held, 3, method, capacity=20, quantization=how)
    if quantized:
        keys = unpack(pack(keys[0], how, by_channel=True))[None]
        values = unpack(pack(values[0], how, by_channel=False))[None]
    single = LayerCache(held, 0, method, capacity=20, quantization=how)
    assert not whole.takes_one_by_kernel
    before = whole.entry_bytes()
    q, k, v = torch.randn(4, 3, 16), torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    got = step(whole, q, k, v, torch.arange(20, 23), 0.25)
    assert whole.entry_bytes() - before == 3 * 2 * (2 * 16 + 1) * 4
    for t in range(3):
        one = slice(t, t + 1)
        alone = step(single, q[:, one], k[:, one], v[:, one], torch.tensor([20 + t]), 0.25)
        torch.testing.assert_close(alone, got[:, one])
        for head in range(4):
            kv = head // 2
            all_keys = torch.cat([keys[0, kv], k[kv, : t + 1]]).double()
            all_values = torch.cat([values[0, kv], v[kv, : t + 1]]).double()
            b = torch.cat([denominators[0, kv], torch.ones(t + 1)]).double()
            e = (all_keys @ q[head, t].double() * 0.25).exp()
            low = torch.minimum(ends[0][0, kv], v[kv, : t + 1].amin(0)).double()
            high = torch.maximum(ends[1][0, kv], v[kv, : t + 1].amax(0)).double()
            below = float(e @ b)
            want = e @ all_values / below if below > 0 else torch.zeros(16).double()
            torch.testing.assert_close(
                got[head, t].double(), want.clamp(low, high), rtol=1e-4, atol=1e-5
            )
