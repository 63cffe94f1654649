"""scripts/papers/streams.py against the released code's numbers and brute force."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
import torch
from engine.test_rotary import tiny
from support.golden import golden_model
from support.paths import GOLDEN, ROOT
from support.tiny import prompt_ids, tiny_model

from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.attention import LayerCall, UnsupportedModel
from kvbench.methods.h2o import H2O

sys.path.insert(0, str(ROOT / "scripts" / "papers"))

import streams
from streams import Band, HeavyHitters, read_text, recomputed, rotary, rotated, rotation_of, stream


def streaming_nll(
    model: Any, ids: list[int], start: int, recent: int, positions: str = "cache"
) -> list[float]:
    """-log p of every token but the first, through a cache of `start` first and `recent` last ones."""
    with kvbench_attention_on(model), torch.inference_mode():
        rotation = rotation_of(model) if positions == "cache" else None
        return torch.cat(
            list(stream(model, ids, Band(start, recent, rotation), positions))
        ).tolist()


def test_golden():
    golden = json.loads((GOLDEN / "streaming_ppl.json").read_text())
    model = golden_model(golden)
    for case in golden["cases"]:
        for positions in ("absolute", "cache"):
            nll = streaming_nll(model, golden["ids"], case["start"], case["recent"], positions)
            assert nll == pytest.approx(case[positions]["nll"], abs=1e-4)
            perplexity = math.exp(sum(nll) / len(nll))
            assert perplexity == pytest.approx(case[positions]["perplexity"], rel=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_chunks_change_nothing(architecture, monkeypatch):
    model, ids = tiny_model(architecture), prompt_ids(70)
    expected = {p: streaming_nll(model, ids, 3, 10, p) for p in ("absolute", "cache")}
    monkeypatch.setattr(streams, "CHUNK", 7)
    for positions, nll in expected.items():
        assert streaming_nll(model, ids, 3, 10, positions) == pytest.approx(nll, abs=1e-4)


def test_a_rotation_that_is_not_the_models_is_refused(monkeypatch):
    model = tiny_model("llama")
    with kvbench_attention_on(model), torch.inference_mode():
        assert rotation_of(model) is not None
        monkeypatch.setattr(streams, "rotary", lambda frequencies: rotary(frequencies * 1.0005))
        with pytest.raises(UnsupportedModel, match="otherwise than by fixed rotary"):
            rotation_of(model)


def test_h2o_counts_places_by_age():
    """One layer as lists in float64: keys rotated to their rank by age, scores summed, the lightest of
    those that are not recent leaves."""
    torch.manual_seed(0)
    size, dim = 8, 16
    table = rotary(1.0 / 100 ** (torch.arange(8) / 8))
    state = HeavyHitters(size, table)
    entries_of_heads = [[], []]
    for step in range(40):
        q, k, v = torch.randn(1, 4, 1, dim), torch.randn(1, 2, 1, dim), torch.randn(1, 2, 1, dim)
        outputs = state.attend(LayerCall(0, q, k, v, 0.25, None, None))
        for head, entries in enumerate(entries_of_heads):
            entries.append([step, k[0, head], v[0, head], 0.0])
            keys = rotated(torch.cat([e[1] for e in entries]), *table(torch.arange(len(entries))))
            query = rotated(q[0, 2 * head : 2 * head + 2], *table(torch.tensor([len(entries) - 1])))
            query = query[:, 0]
            weights = (0.25 * query.double() @ keys.double().T).softmax(-1)
            expected = weights @ torch.cat([e[2] for e in entries]).double()
            output = outputs[0, 2 * head : 2 * head + 2, 0].double()
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
            for entry, weight in zip(entries, weights.mean(0).tolist(), strict=True):
                entry[3] += weight
            if len(entries) > size:
                entries.remove(min(entries[: -H2O().recent(size)], key=lambda e: e[3]))


def test_a_window_that_is_recomputed_is_a_fresh_pass():
    model, ids = tiny_model("llama"), prompt_ids(40)
    with kvbench_attention_on(model), torch.inference_mode():
        nll = torch.cat(list(recomputed(model, ids, recent=8, rows=5)))
    with torch.no_grad():
        alone = model(input_ids=torch.tensor([ids[21:30]])).logits[0, -1].log_softmax(-1)
    assert len(nll) == 39
    assert float(nll[29]) == pytest.approx(-float(alone[ids[30]]), abs=1e-4)


@pytest.mark.parametrize("positions", ["cache", "absolute"])
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_stream_does_not_pass_the_change_of_a_rotary_table(kind, positions):
    model = tiny(kind)
    with kvbench_attention_on(model), torch.inference_mode():
        assert len(read_text(model, prompt_ids(60), "exact", 60, 0, positions)) == 59
        with pytest.raises(UnsupportedModel, match="beyond 64 tokens and the stream has 70"):
            read_text(model, prompt_ids(70), "exact", 70, 0, positions)
