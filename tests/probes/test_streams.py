"""Streams through a bounded cache: golden numbers, masked passes, and the task."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.golden import golden_model
from support.jobs import Letters, records_of
from support.probing import probe_job
from support.tiny import prompt_ids, tiny_model

from kvbench.engine import streams
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.attention import LayerCall, UnsupportedModel
from kvbench.engine.streams import (
    BandState,
    EvictingState,
    read_text,
    recomputed,
    rotary,
    rotated,
    rotation_of,
    stream,
)
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.probes.stream import Stream
from kvbench.run.runner import Job, run_job
from kvbench.tasks.base import TaskError


def streaming_nll(
    model: Any, ids: list[int], start: int, recent: int, positions: str = "cache"
) -> list[float]:
    """-log p of every token but the first, through a cache of `start` first and `recent` last ones."""
    with kvbench_attention_on(model):
        rotation = rotation_of(model) if positions == "cache" else None
        return torch.cat(
            list(stream(model, ids, BandState(start, recent, rotation), positions))
        ).tolist()


def test_golden(shared_file):
    golden = json.loads(shared_file("golden/tasks/streaming_ppl.json").read_text())
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
    monkeypatch.setattr("kvbench.engine.streams.CHUNK", 7)
    for positions, nll in expected.items():
        assert streaming_nll(model, ids, 3, 10, positions) == pytest.approx(nll, abs=1e-4)


def test_texts_longer_than_the_model_in_flat_memory():
    model, ids = tiny_model("llama"), prompt_ids(1500)
    with kvbench_attention_on(model):
        state = BandState(4, 20, rotation_of(model))
        held_bytes = set()
        for part in stream(model, ids, state):
            assert torch.isfinite(part).all()
            held_bytes.add(state.held_bytes)
    assert held_bytes == {4 * 2 * 2 * 24 * 16 * 4}  # layers, k and v, heads, entries, dim, bytes


class Engine(StreamingLLM):
    """StreamingLLM by its own eviction, not as the band that it is."""

    def reading(self, budget: Budget) -> None:
        return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_is_checked_as_precisely_as_the_model_computes(dtype, monkeypatch):
    """Frequencies that are off by 1 in 2,000 are refused in float32; bfloat16 rounds more than that."""
    model = tiny_model("llama").to(dtype)
    with kvbench_attention_on(model):
        assert rotation_of(model) is not None
        monkeypatch.setattr(streams, "rotary", lambda frequencies: rotary(frequencies * 1.0005))
        if dtype == torch.float32:
            with pytest.raises(UnsupportedModel, match="otherwise than by fixed rotary"):
                rotation_of(model)
        else:
            assert rotation_of(model) is not None
        monkeypatch.setattr(streams, "rotary", lambda frequencies: rotary(frequencies * 1.5))
        with pytest.raises(UnsupportedModel, match="otherwise than by fixed rotary"):
            rotation_of(model)


@pytest.mark.parametrize(("architecture", "start"), [("llama", 0), ("gpt_neox", 3), ("opt", 3)])
def test_eviction_with_positions_in_the_cache_is_the_band(architecture, start):
    """The golden numbers are the band's; here entries are swapped, and their places found by age."""
    model, ids = tiny_model(architecture), prompt_ids(60)
    budget = Budget(size=14, sink=start, window=0)
    with kvbench_attention_on(model):
        read = read_text(model, ids, Engine(decode="evict"), budget)
    nll = streaming_nll(model, ids, start, 14 - start, "cache")
    assert read.nll.tolist() == pytest.approx(nll, abs=1e-4)
    assert read.entries == 14


def test_h2o_counts_places_by_age():
    """One layer as lists in float64: keys rotated to their rank by age, scores summed, the lightest of
    those that are not recent leaves."""
    torch.manual_seed(0)
    size, dim = 8, 16
    table = rotary(1.0 / 100 ** (torch.arange(8) / 8))
    method = build_method("h2o")
    state = EvictingState(method, Budget(size=size, sink=0, window=0), 40, table)
    entries_of_heads = [[], []]
    for step in range(40):
        q, k, v = torch.randn(1, 4, 1, dim), torch.randn(1, 2, 1, dim), torch.randn(1, 2, 1, dim)
        call = LayerCall(0, q, k, v, 0.25, None, None)
        outputs = state.attend(call)
        state.seen += 1
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
                entries.remove(min(entries[: -method.recent(size)], key=lambda e: e[3]))


def test_a_window_that_is_recomputed_is_a_method():
    model, ids, budget = tiny_model("llama"), prompt_ids(40), Budget(size=8, sink=0, window=0)
    method = build_method("local", recompute=True)
    with kvbench_attention_on(model):
        read = read_text(model, ids, method, budget)
        nll = torch.cat(list(recomputed(model, ids, recent=8, rows=5)))
    torch.testing.assert_close(read.nll, nll)
    with torch.no_grad():
        alone = model(input_ids=torch.tensor([ids[21:30]])).logits[0, -1].log_softmax(-1)
    assert float(nll[29]) == pytest.approx(-float(alone[ids[30]]), abs=1e-4)
    assert read.held_bytes == read.exact_bytes * 8 // 40
    with pytest.raises(KVError, match=r"local\.recompute is true; allowed: for streams"):
        method.compress(None, budget, torch.Generator())


SMALL_SIZE = Budget(size=16, sink=3, window=0)


def stream_job(tmp_path: Path, probe: Any, methods: dict[str, Any]) -> Job:
    job = probe_job(tmp_path, probe, methods, task="stream")
    return replace(
        job, methods={label: (method, SMALL_SIZE) for label, (method, _) in job.methods.items()}
    )


def files(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("a stitch in time saves nine " * 5)
    (tmp_path / "b.txt").write_text("the early bird catches the worm " * 3)
    return str(tmp_path / "*.txt")


@pytest.mark.parametrize("positions", ["cache", "absolute"])
def test_records_of_the_task(tmp_path, positions):
    probe = Stream(files=files(tmp_path), tokens=90, positions=positions)
    methods = {name: build_method(name) for name in ("exact", "streaming_llm", "local")}
    job = stream_job(tmp_path, probe, methods)
    records = records_of(run_job(job))
    ids = Letters().encode((tmp_path / "a.txt").read_text())[:90]
    for name, start, recent in (("exact", 0, 90), ("streaming_llm", 3, 13), ("local", 0, 16)):
        nll = streaming_nll(job.session.model, ids, start, recent, positions)
        record = records[name][0]
        assert record["score"] == pytest.approx(sum(nll) / 89, abs=1e-5)
        assert record["tokens 3–4"] == pytest.approx(sum(nll[2:4]) / 2, abs=1e-5)
        assert record["entries"]["max"] == min(90, start + recent)
        assert record["ratio"] == pytest.approx(min(90, start + recent) / 90, abs=1e-3)
    assert [r["text"] for r in records["local"]] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("name", "positions"), [("snapkv", "cache"), ("subgen_streaming", "absolute")]
)
def test_methods_that_cannot_read_a_stream_are_refused(name, positions):
    model = tiny_model("llama")
    with kvbench_attention_on(model), pytest.raises(KVError, match="cannot read a stream"):
        read_text(model, prompt_ids(500), build_method(name), SMALL_SIZE, positions)


def test_refusals(tmp_path):
    with pytest.raises(UnsupportedModel, match="sliding"):
        streaming_nll(tiny_model("gemma2"), prompt_ids(600), 1, 4)
    probe = Stream(files=files(tmp_path), positions="absolute")
    job = stream_job(tmp_path, probe, {"exact": build_method("exact")})
    job.session.__dict__["encoder"] = replace(job.session.encoder, max_positions=60)
    with pytest.raises(KVError, match="at most 60"):
        run_job(job)
    with pytest.raises(TaskError, match="one of them"):
        Stream(files=("a",), dataset_name="b")
