"""Streams through a bounded cache: golden numbers, masked passes, independence of chunks."""

from __future__ import annotations

import json
import math

import pytest
import torch
from support.golden import golden_model
from support.tiny import prompt_ids, tiny_model

from kvbench.engine.attention import UnsupportedModel
from kvbench.engine.streaming import StreamState, recomputed, rotation_of, stream
from kvbench.engine.switch import kvbench_attention_on
from kvbench.kv import KVError
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
        monkeypatch.setattr("kvbench.engine.streaming.CHUNK", 7)
        parts = streaming_nll(model, ids, 3, 10, positions)
        monkeypatch.setattr("kvbench.engine.streaming.CHUNK", 1)
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
        state = StreamState(4, 20, rotation_of(model))
        held = []
        for part in stream(model, ids, start=4, recent=20, state=state):
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
