"""Decode steps that are replayed: the same tokens. The bookkeeping is tested everywhere, by steps that
run again where a graph would be replayed; the graphs themselves where there is a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.pretended import needs_real
from support.prompts import facts, methods, unlike_prompts
from support.tiny import prompt_ids, tiny_model

from kvbench.engine import graphs, rows
from kvbench.engine.generate import Prompt, Question, run_batch, run_conversations
from kvbench.engine.graphs import StepGraphs
from kvbench.engine.loading import ModelSpec
from kvbench.engine.sampling import Sampling
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.run.session import Session

ALONE = ("topk", "exact_4bit", "snapkv_2bit", "subgen_streaming", "balancekv_streaming")
"""Methods whose rows decode one by one."""


def model_on(device, architecture="llama", dtype=torch.float32):
    model = tiny_model(architecture).to(device, dtype)
    model.set_attn_implementation("kvbench")
    return model


def capturable_prompts(new_tokens=40):
    prompts = unlike_prompts()
    return [
        replace(
            prompt,
            methods={k: v for k, v in prompt.methods.items() if k not in ALONE},
            stopping=replace(prompt.stopping, max_new_tokens=new_tokens - 7 * i),
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture
def pretended(monkeypatch):
    """Steps count as captured on a CPU, and are run again instead of replayed."""
    captured = []

    def capture(self, model, state, step):
        captured.append(len(state.forks))
        return lambda: step()

    def obstacle(self, model, state):
        return None if state.all_together else "row by row"

    monkeypatch.setattr(StepGraphs, "capture", capture)
    monkeypatch.setattr(StepGraphs, "obstacle", obstacle)
    monkeypatch.setattr(graphs, "WORTH_STEPS", 4)
    return captured


@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_rows_that_ended_change_nothing_for_those_that_go_on(pretended, compress_after):
    model, prompts = model_on("cpu"), capturable_prompts()
    how = {"seed": 1, "compress_after": compress_after}
    eager = run_batch(model, prompts, **how)
    assert not pretended
    graph = run_batch(model, prompts, **how, graphs=StepGraphs("auto"))
    assert len(pretended) >= 2, "captured anew when half of the rows had ended"
    assert pretended == sorted(pretended, reverse=True)
    for got, want in zip(graph, eager, strict=True):
        assert facts(got) == facts(want)
        assert {r.failure for r in got.values()} == {None}


def test_drawn_tokens_are_those_of_steps_that_are_not_captured(pretended):
    """What a token is drawn with is told to the device before each step."""
    model, warm = model_on("cpu"), Sampling(temperature=1.0, top_p=0.9)
    prompts = [
        replace(prompt, conversations=[[Question((), prompt.stopping, f"q{n}")]])
        for n, prompt in enumerate(capturable_prompts())
    ]
    eager = run_conversations(model, prompts, seed=1, sampling=warm)
    graph = run_conversations(model, prompts, seed=1, sampling=warm, graphs=StepGraphs("auto"))
    assert pretended
    for got, want in zip(graph, eager, strict=True):
        assert [[r.tokens for r in each] for each in got.values()] == [
            [r.tokens for r in each] for each in want.values()
        ]


def test_the_clock_of_decoding_covers_making_batches_and_capturing(pretended, monkeypatch):
    """Both are seconds of the generation, as they are in transformers' own."""
    model, prompt = model_on("cpu"), capturable_prompts()[0]
    prompt = replace(prompt, methods={"exact": prompt.methods["exact"]})
    now = [0.0]

    def slow(seconds, real):
        def run(*args):
            now[0] += seconds
            return real(*args)

        return run

    monkeypatch.setattr(rows.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(rows.DecodeState, "_sort", slow(1.0, rows.DecodeState._sort))
    monkeypatch.setattr(StepGraphs, "capture", slow(8.0, StepGraphs.capture))
    (answer,) = run_batch(model, [prompt], seed=1, graphs=StepGraphs("auto"))
    layers = model.config.num_hidden_layers
    assert answer["exact"].decode_s == layers * 1.0 + 8.0


def test_a_capture_that_fails_leaves_the_stream_it_ran_on(monkeypatch):
    """torch.cuda.graph does not, where ending the capture raises."""
    streams = ["the default one"]

    @contextmanager
    def graph(_):
        streams.append("of the capture")
        yield
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    model = model_on("cpu")
    steps, state = StepGraphs("graph"), SimpleNamespace(restore=lambda: None)
    assert steps.capture(model, state, lambda: torch.zeros(1)) is None
    assert streams[-1] == "the default one"


def test_what_decodes_row_by_row_is_not_captured(pretended):
    model = model_on("cpu")
    prompt = replace(unlike_prompts()[0], stopping=Stopping(30))
    eager = run_batch(model, [prompt], seed=1)
    graph = run_batch(model, [prompt], seed=1, graphs=StepGraphs("auto"))
    assert not pretended
    assert facts(graph[0]) == facts(eager[0])


def test_a_cache_that_fills_up_is_captured_from_there(pretended):
    """Its row goes alone until it is full, and with the others afterwards; the answers are the same."""
    model = model_on("cpu")
    room = Budget(size=50, sink=4, window=4)
    names = ("h2o", "streaming_llm", "local")
    evicting = {name: (build_method(name, decode="evict"), room) for name in names}
    prompts = [Prompt(prompt_ids(n), [], evicting, Stopping(40), f"p{n}") for n in (30, 40, 45)]
    eager = run_batch(model, prompts, seed=1)
    assert not pretended
    graph = run_batch(model, prompts, seed=1, graphs=StepGraphs("auto"))
    assert pretended == [9]  # once all are full, after 20 tokens
    for got, want in zip(graph, eager, strict=True):
        assert facts(got) == facts(want)
        assert {(r.failure, r.compressed) for r in got.values()} == {(None, True)}


def test_a_row_that_times_out_stands_still_like_one_that_ended(pretended, monkeypatch):
    model = model_on("cpu", "opt")  # its positions are a table: beyond its end is an error
    prompts = capturable_prompts()[:1]
    count, real = [0], rows._time_out

    def slow(those, elapsed):
        count[0] += 1
        if count[0] == 8:
            those[0].fork.fail(TimeoutError("slow"))
        real(those, elapsed)

    monkeypatch.setattr(rows, "_time_out", slow)
    answer = run_batch(model, prompts, seed=1, graphs=StepGraphs("auto"))[0]
    assert isinstance(answer["exact"].failure, TimeoutError)
    assert {r.failure for label, r in answer.items() if label != "exact"} == {None}
    monkeypatch.setattr(rows, "_time_out", real)
    eager = run_batch(model, prompts, seed=1)[0]
    assert {k: v for k, v in facts(answer).items() if k != "exact"} == {
        k: v for k, v in facts(eager).items() if k != "exact"
    }


def test_the_cpu_captures_nothing_and_graph_is_refused_there():
    assert StepGraphs("graph").obstacle(model_on("cpu"), None) == "the model is not on a GPU"
    with pytest.raises(
        KVError, match="decode is 'graph' and the device is cpu; allowed there: auto"
    ):
        Session(ModelSpec(name="x", path="x"), torch.device("cpu"), torch.float32, decode="graph")
    with pytest.raises(KVError, match="decode is 'fast'; allowed: auto, eager, graph"):
        Session(ModelSpec(name="x", path="x"), torch.device("cpu"), torch.float32, decode="fast")


@pytest.mark.cuda
@needs_real
@pytest.mark.parametrize("architecture", ["llama", "opt", "qwen3"])
@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_replayed_steps_give_the_tokens_of_eager_ones(architecture, compress_after, monkeypatch):
    model, prompts = model_on("cuda", architecture), capturable_prompts(60)
    captured, real = [], StepGraphs.capture

    def capture(self, model, state, step):
        captured.append(real(self, model, state, step))
        return captured[-1]

    monkeypatch.setattr(StepGraphs, "capture", capture)
    how = {"seed": 1, "compress_after": compress_after}
    eager = run_batch(model, prompts, **how)
    for _ in range(2):
        graph = run_batch(model, prompts, **how, graphs=StepGraphs("graph"))
        for got, want in zip(graph, eager, strict=True):
            assert facts(got) == facts(want)
    assert len(captured) >= 2
    assert None not in captured


@pytest.mark.cuda
@needs_real
def test_a_step_that_cannot_be_captured_runs_as_it_is_and_says_so_once(monkeypatch, caplog):
    model, prompts = model_on("cuda"), capturable_prompts(40)
    eager = run_batch(model, prompts, seed=1)
    real = model.forward

    def waits(*args, **kwargs):
        output = real(*args, **kwargs)
        output.logits.sum().item()  # no stream can be captured over this
        return output

    monkeypatch.setattr(model, "forward", waits)
    steps = StepGraphs("graph")
    for _ in range(2):
        answer = run_batch(model, prompts, seed=1, graphs=steps)
        for got, want in zip(answer, eager, strict=True):
            assert facts(got) == facts(want)
    assert sum("decodes without CUDA graphs" in r.message for r in caplog.records) == 1


def test_every_method_is_either_captured_or_known_to_go_alone():
    assert set(ALONE) < set(methods())
