"""BalanceKV's and SubGen's streaming algorithms as caches of a stream."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.tiny import prompt_ids, tiny_model

from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.attention import LayerCall
from kvbench.engine.streams import EstimatedState, read_text
from kvbench.kv import Budget, BudgetExceeded, KVError
from kvbench.methods import build_method
from kvbench.methods.balancekv_streaming import batch_of_stream
from kvbench.probes.streaming_ppl import streaming_nll

NAMES = ("balancekv_streaming", "subgen_streaming")
SIZE = Budget(size=96, sink=4, window=8)


class Everything:
    """A `LayerStream` that drops nothing: attention must be exact. `extra`: entries it says it holds."""

    def __init__(self, extra=0):
        self.parts, self.entries, self.nbytes = [], extra, 0

    def extend(self, keys, values):
        self.parts.append((keys, values))

    def numerator(self):
        keys, values = (torch.cat(side, dim=1) for side in zip(*self.parts, strict=True))
        return keys, values, torch.zeros(keys.shape[:2])

    def denominator(self):
        keys, _, weights = self.numerator()
        return keys, weights


class Keeps:
    """The method of `Everything`."""

    def __init__(self, extra=0):
        self.extra = extra

    def reading(self, budget):
        return self.begin

    def begin(self, keys, values, *, room, tokens, generator):
        assert room == SIZE.size - SIZE.sink - SIZE.window - 10
        return Everything(self.extra)


@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
def test_with_an_algorithm_that_drops_nothing_attention_is_exact(chunk):
    torch.manual_seed(0)
    n = 300
    q, k, v = torch.randn(1, 4, n, 16), torch.randn(1, 2, n, 16), torch.randn(1, 2, n, 16)
    state = EstimatedState("keeps", Keeps().begin, SIZE, n, 0, "")
    out = []
    for begin in range(0, n, chunk):
        part = slice(begin, begin + chunk)
        out.append(state.attend(LayerCall(0, q[:, :, part], k[:, :, part], v[:, :, part], 0.25)))
        state.seen += min(chunk, n - begin)
        assert state._layers[0].keys.shape[1] <= SIZE.size
    want = LayerCall(0, q, k, v, 0.25).exact()
    torch.testing.assert_close(torch.cat(out, dim=2), want, atol=1e-5, rtol=1e-5)
    assert state._layers[0].algorithm is not None
    assert state._layers[0].keys.shape[1] < SIZE.sink + SIZE.window + 2 * state.waiting


def test_more_than_its_part_is_over_the_budget():
    q, k = torch.randn(1, 4, 200, 16), torch.randn(1, 2, 200, 16)
    state = EstimatedState("keeps", Keeps(extra=80).begin, SIZE, 200, 0, "")
    with pytest.raises(BudgetExceeded):
        state.attend(LayerCall(0, q, k, k, 0.25))


@pytest.mark.parametrize("name", NAMES)
def test_a_layers_samples_give_the_algorithms_own_estimate(name):
    """The two samples of all heads side by side are each head's own, padded, near the exact sums."""
    torch.manual_seed(1)
    keys, values = 0.5 * torch.randn(2, 200, 16), torch.randn(2, 200, 16)
    method = build_method(name)
    generator = torch.Generator().manual_seed(0)
    layer = method.layer_stream(
        keys[:, :60], values[:, :60], room=110, tokens=200, generator=generator
    )
    for part in torch.arange(200).split(23):
        layer.extend(keys[:, part], values[:, part])
        assert layer.entries <= 110
    query = torch.randn(2, 16)
    k, v, a = layer.numerator()
    z = (torch.exp((k @ query[:, :, None])[..., 0] * 0.25 + a)[..., None] * v).sum(1)
    weights = torch.softmax((keys @ query[:, :, None])[..., 0] * 0.25, -1)
    k, b = layer.denominator()
    tau = torch.exp((k @ query[:, :, None])[..., 0] * 0.25 + b).sum(1, keepdim=True)
    if name == "balancekv_streaming":
        for head, sample in enumerate(layer.samples()[0]):
            assert torch.equal(v[head, : len(sample.values)], sample.values)
            assert a[head, len(sample.values) :].eq(-torch.inf).all()
    error = (z / tau - (weights[:, None] @ values)[:, 0]).norm(dim=-1)
    assert bool((error < 2 * weights.norm(dim=-1) * values.flatten(1).norm(dim=-1)).all())
    exact = torch.exp((keys @ query[:, :, None])[..., 0] * 0.25).sum(1, keepdim=True)
    assert bool(((tau / exact - 1).abs() < 0.3).all()), "the normaliser is near the exact one"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "opt"])
def test_streams_of_a_model(name, architecture, monkeypatch):
    model, ids = tiny_model(architecture), prompt_ids(300)
    method = build_method(name)
    with kvbench_attention_on(model):
        read = read_text(model, ids, method, SIZE, "absolute")
        monkeypatch.setattr("kvbench.engine.streams.CHUNK", 7)
        again = read_text(model, ids[:150], method, replace(SIZE, size=150), "absolute").nll
    exact = torch.tensor(streaming_nll(model, ids, 0, 300, "absolute"))
    assert torch.isfinite(read.nll).all()
    torch.testing.assert_close(read.nll[:80], exact[:80], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(again[:130], exact[:130], atol=1e-4, rtol=1e-4)
    assert float((read.nll[100:] - exact[100:]).abs().max()) > 1e-4
    assert read.entries <= SIZE.size
    assert read.held_bytes < 0.6 * read.exact_bytes


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_the_model_change_nothing(name, monkeypatch):
    model, ids, method = tiny_model("llama"), prompt_ids(200), build_method(name)
    with kvbench_attention_on(model):
        whole = read_text(model, ids, method, SIZE, "absolute", seed=3).nll
        monkeypatch.setattr("kvbench.engine.streams.CHUNK", 7)
        parts = read_text(model, ids, method, SIZE, "absolute", seed=3).nll
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


def test_subgens_memory_does_not_grow_and_positions_are_its_own():
    model, ids = tiny_model("llama"), prompt_ids(500)
    method = build_method("subgen_streaming")
    with kvbench_attention_on(model):
        held = [
            read_text(model, ids[:n], method, SIZE, "absolute").held_bytes for n in (240, 360, 480)
        ]
        with pytest.raises(KVError, match="with absolute positions balancekv_streaming"):
            read_text(model, ids, method, SIZE, "cache")
        small = Budget(size=12, sink=2, window=2)
        with pytest.raises(KVError, match=r"a larger budget\.size"):
            read_text(model, ids, build_method("balancekv_streaming"), small, "absolute")
    assert max(held) <= 1.1 * min(held)


@pytest.mark.parametrize("tokens", [500, 5000, 50_000])
def test_the_batch_of_a_stream_fits(tokens):
    values = torch.randn(2, 100, 16)
    t = batch_of_stream(values, 400, tokens)
    assert t >= 2
    assert t % 2 == 0
    assert batch_of_stream(values, 400, 4 * tokens) <= t
    assert batch_of_stream(values, 3, tokens) == 0
