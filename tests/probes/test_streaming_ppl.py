"""Streams through a bounded cache: golden numbers, masked passes, independence of chunks."""

from __future__ import annotations

import json
import math

import pytest
import torch
from support.golden import golden_model
from support.tiny import prompt_ids, tiny_model

from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.attention import LayerCall, UnsupportedModel
from kvbench.engine.streams import (
    BandState,
    EvictingState,
    Rotation,
    read_text,
    recomputed,
    rotation_of,
    stream,
)
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.probes.streaming_ppl import streaming_nll


def test_golden(shared_file):
    golden = json.loads(shared_file("golden/tasks/streaming_ppl.json").read_text())
    model = golden_model(golden)
    for case in golden["cases"]:
        for positions in ("absolute", "cache"):
            found = streaming_nll(model, golden["ids"], case["start"], case["recent"], positions)
            assert found == pytest.approx(case[positions]["nll"], abs=1e-4)
            perplexity = math.exp(sum(found) / len(found))
            assert perplexity == pytest.approx(case[positions]["perplexity"], rel=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox", "opt"])
def test_chunks_change_nothing(architecture, monkeypatch):
    model, ids = tiny_model(architecture), prompt_ids(70)
    for positions in ("absolute", "cache"):
        whole = streaming_nll(model, ids, 3, 10, positions)
        monkeypatch.setattr("kvbench.engine.streams.CHUNK", 7)
        parts = streaming_nll(model, ids, 3, 10, positions)
        monkeypatch.setattr("kvbench.engine.streams.CHUNK", 1)
        single = streaming_nll(model, ids, 3, 10, positions)
        monkeypatch.undo()
        assert parts == pytest.approx(whole, abs=1e-4)
        assert single == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "opt"])
def test_absolute_positions_are_a_band_with_sinks(architecture):
    model, ids = tiny_model(architecture), prompt_ids(50)
    at = torch.arange(50)
    distance = at[:, None] - at[None]
    seen = (distance >= 0) & ((distance <= 9) | (at < 3))
    mask = torch.zeros(50, 50).masked_fill(~seen, -torch.inf)
    with torch.no_grad():
        options = {"position_ids": at[None]} if architecture == "opt" else {}
        logits = model(
            input_ids=torch.tensor([ids]), attention_mask=mask[None, None], **options
        ).logits[0]
    want = -logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
    found = streaming_nll(model, ids, 3, 9, "absolute")
    assert found == pytest.approx(want.tolist(), abs=1e-4)


def test_a_window_alone_is_the_same_in_either_count():
    model, ids = tiny_model("llama"), prompt_ids(60)
    absolute, cache = (streaming_nll(model, ids, 0, 8, kind) for kind in ("absolute", "cache"))
    assert absolute == pytest.approx(cache, abs=1e-4)


def test_texts_longer_than_the_model_in_flat_memory():
    model, ids = tiny_model("llama"), prompt_ids(1500)
    with pytest.raises(KVError, match="at most 512"):
        streaming_nll(model, ids, 4, 20, "absolute")
    with kvbench_attention_on(model):
        state = BandState(4, 20, rotation_of(model))
        held = []
        for part in stream(model, ids, state):
            assert torch.isfinite(part).all()
            held.append(state.held_bytes)
    assert set(held) == {4 * 2 * 2 * 24 * 16 * 4}  # layers, k and v, heads, entries, dim, bytes


def test_recomputation_sees_the_window_afresh():
    model, ids = tiny_model("llama"), prompt_ids(40)
    with kvbench_attention_on(model):
        found = torch.cat(list(recomputed(model, ids, recent=8, rows=5))).tolist()
    assert len(found) == 39
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[21:30]])).logits[0, -1].log_softmax(-1)
    assert found[29] == pytest.approx(-float(logits[ids[30]]), abs=1e-4)


def test_refusals():
    model, ids = tiny_model("llama"), prompt_ids(20)
    with pytest.raises(KVError, match="allowed: cache, absolute"):
        streaming_nll(model, ids, 1, 2, "own")
    with pytest.raises(KVError, match="recent 0"):
        streaming_nll(model, ids, 1, 0)
    with pytest.raises(UnsupportedModel, match="sliding"):
        streaming_nll(tiny_model("gemma2"), ids, 1, 4)


class Engine(StreamingLLM):
    """StreamingLLM by its own eviction, not as the band that it is."""

    def reading(self, budget):
        return None


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "opt"])
@pytest.mark.parametrize("start", [0, 3])
def test_eviction_with_positions_in_the_cache_is_the_band(architecture, start):
    """The golden numbers are the band's; here entries are swapped, and their places found by age."""
    model, ids = tiny_model(architecture), prompt_ids(60)
    budget = Budget(size=14, sink=start, window=0)
    with kvbench_attention_on(model):
        found = read_text(model, ids, Engine(decode="evict"), budget)
    want = streaming_nll(model, ids, start, 14 - start, "cache")
    assert found.nll.tolist() == pytest.approx(want, abs=1e-4)
    assert found.entries == 14


def test_h2o_without_heavy_hitters_is_a_window_and_with_them_is_not():
    model, ids, budget = tiny_model("llama"), prompt_ids(60), Budget(size=14, sink=0, window=0)
    with kvbench_attention_on(model):
        local = read_text(model, ids, build_method("h2o", heavy_fraction=0.0), budget).nll
        half = read_text(model, ids, build_method("h2o"), budget)
    assert local.tolist() == pytest.approx(streaming_nll(model, ids, 0, 14, "cache"), abs=1e-4)
    assert float((half.nll - local).abs().max()) > 1e-3
    assert half.held_bytes == 4 * 2 * 14 * (
        2 * 16 * 4 + 4
    )  # layers, heads, entries, k and v, score


@pytest.mark.parametrize("positions", ["cache", "absolute"])
def test_before_anything_leaves_h2o_is_exact(positions):
    model, ids = tiny_model("llama"), prompt_ids(30)
    with kvbench_attention_on(model):
        budget = Budget(size=40, sink=0, window=0)
        found = read_text(model, ids, build_method("h2o"), budget, positions=positions).nll
    assert found.tolist() == pytest.approx(streaming_nll(model, ids, 0, 30, positions), abs=1e-4)


def test_h2o_counts_places_by_age():
    """One layer as lists in float64: keys rotated to their rank by age, scores summed, the lightest of
    those that are not recent leaves."""
    torch.manual_seed(0)
    size, dim = 8, 16
    rotation = Rotation(1.0 / 100 ** (torch.arange(8) / 8))
    method = build_method("h2o")
    state = EvictingState(method, Budget(size=size, sink=0, window=0), 40, rotation)
    held = [[], []]
    for step in range(40):
        q, k, v = torch.randn(1, 4, 1, dim), torch.randn(1, 2, 1, dim), torch.randn(1, 2, 1, dim)
        call = LayerCall(0, q, k, v, 0.25, None, None)
        got = state.attend(call)
        state.seen += 1
        for head, entries in enumerate(held):
            entries.append([step, k[0, head], v[0, head], 0.0])
            keys = torch.cat([rotation(e[1], torch.tensor([i])) for i, e in enumerate(entries)])
            query = rotation(q[0, 2 * head : 2 * head + 2], torch.tensor([len(entries) - 1]))[:, 0]
            weights = (0.25 * query.double() @ keys.double().T).softmax(-1)
            want = weights @ torch.cat([e[2] for e in entries]).double()
            torch.testing.assert_close(
                got[0, 2 * head : 2 * head + 2, 0].double(), want, atol=1e-5, rtol=1e-5
            )
            for entry, weight in zip(entries, weights.mean(0).tolist(), strict=True):
                entry[3] += weight
            if len(entries) > size:
                entries.remove(min(entries[: -method.recent(size)], key=lambda e: e[3]))


def test_a_window_that_is_recomputed_is_a_method():
    model, ids, budget = tiny_model("llama"), prompt_ids(40), Budget(size=8, sink=0, window=0)
    method = build_method("local", recompute=True)
    with kvbench_attention_on(model):
        found = read_text(model, ids, method, budget)
        want = torch.cat(list(recomputed(model, ids, recent=8)))
    assert torch.equal(found.nll, want)
    assert found.held_bytes == found.exact_bytes * 8 // 40
    with pytest.raises(KVError, match=r"local\.recompute is true; allowed: for streams"):
        method.compress(None, budget, torch.Generator())
