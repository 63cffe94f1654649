"""The engine on a GPU, real or pretend: the answers of the CPU, nothing left on another device."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.asking import Prompt, generate_each
from support.jobs import SMALL
from support.pretended import counted, needs_cuda, needs_pretend
from support.prompts import EVERY_METHOD, facts
from support.tiny import prompt_ids, tiny_model
from support.variants import VARIANTS, label

from kvbench import compress
from kvbench.engine import steps as captured
from kvbench.engine.answer import Stopping
from kvbench.engine.ask import read, score
from kvbench.engine.attention import LayerCall
from kvbench.engine.context import Context
from kvbench.engine.prefill import prefill
from kvbench.engine.rotary import rotary_of
from kvbench.engine.row import Row
from kvbench.kv import KVError
from kvbench.methods import build_method
from kvbench.methods.base import Method

pytestmark = [pytest.mark.cuda, needs_cuda]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
METHODS = {label(variant): variant for variant in VARIANTS} | EVERY_METHOD
METHODS["adakv"] = ("adakv", {})  # heads of unequal length
METHODS["adakv_4bit"] = ("adakv", {"quantize": {"bits": 4, "group_size": 16}})


def model_on(device: str | torch.device, layers: int = 2, kind: str = "llama") -> Any:
    model = tiny_model(kind, layers=layers)
    model.set_attn_implementation("kvbench")
    model.generation_config.eos_token_id = None  # no token ends an answer
    return model.to(device)


def answers(
    model: Any, names: Any, n: int = 72, new: int = 3, steps: Any = None, **how: Any
) -> Any:
    methods = {name: (build_method(METHODS[name][0], **METHODS[name][1]), SMALL) for name in names}
    ids = prompt_ids(n)
    prompts = [Prompt.of(ids[: n - 9], ids[n - 9 :], methods, Stopping(new), "x", **how)]
    (found,) = generate_each(model, prompts, seed=3, steps=steps)
    assert {name: result.failure for name, result in found.items()} == dict.fromkeys(found)
    return facts(found)


@pytest.mark.parametrize(
    ("names", "compress_after"),
    [(METHODS, "prompt"), (EVERY_METHOD, "context")],  # variants differ in what they compress to
    ids=["every variant", "every method"],
)
def test_every_method_answers_as_on_the_cpu(names, compress_after, monkeypatch):
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    rows = answers(model_on(CUDA), names, compress_after=compress_after)
    assert rows == answers(model_on(CPU), names, compress_after=compress_after)


@pytest.mark.parametrize(("part", "value"), [("k_proj", float("nan")), ("v_proj", float("inf"))])
@pytest.mark.parametrize("name", ["subgen", "balancekv", "wildcat"])
def test_what_is_not_finite_is_refused_with_its_layer(part, value, name, monkeypatch):
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    model = model_on(CUDA)
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, part).weight[-1] = value
    row = Row(name, build_method(name), SMALL, 0, "x", room=2)
    kind = {"k_proj": "keys", "v_proj": "values"}[part]
    heads = model.config.num_key_value_heads
    with pytest.raises(KVError, match=f"{kind} of layer 1, KV head {heads - 1} are not finite"):
        prefill(model, prompt_ids(72), [row])


@needs_pretend
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_the_prefills_attention_returns_its_normalisers(backend, monkeypatch):
    chosen = getattr(torch.nn.attention.SDPBackend, backend).value
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, **options: chosen)
    query, key, value = (torch.randn(1, 2, 40, 16).to(CUDA) for _ in range(3))
    out, normalisers = LayerCall(0, query, key, value, 0.25).exact_with_normalisers()
    logits = query.cpu() @ key.cpu().mT * 0.25
    logits.masked_fill_(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(normalisers.cpu(), logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.cpu(), logits.softmax(-1) @ value.cpu(), rtol=1e-4, atol=1e-4)


# --- what the host waits for and launches, counted ------------------------------------------------


def prefilled(model: Any, method: Method, batch: int, new: int) -> None:
    row = Row("m", method, SMALL, 0, "x", room=new)
    prefill(model, prompt_ids(72), [row])
    assert (row.failure, row.cost().compress_s > 0) == (None, True)


def generated(model: Any, method: Method, batch: int, new: int) -> None:
    ids = torch.tensor([prompt_ids(40, i) for i in range(batch)], device=CUDA)
    shown = torch.arange(40) >= torch.arange(2, 2 + batch)[:, None]  # the rest is padding
    with compress(model, method, sink=4, window=4):
        model.generate(ids, attention_mask=shown.long().to(CUDA), max_new_tokens=new)


def asked(model: Any, method: Method, batch: int, new: int) -> None:
    context = Context(model, method, SMALL, prompt_ids(40))
    context.ask_all([prompt_ids(5, i) for i in range(batch)], max_new_tokens=new)


def scored(model: Any, method: Method, batch: int, new: int) -> None:
    pair = {"m": (method, SMALL)}
    reading = read(model, prompt_ids(40), pair, seed=3, name="x", held_back=1, room=new)
    found = score(model, reading, [prompt_ids(new, i) for i in range(batch)])["m"]
    assert [one.failure for one in found] == [None] * batch


def cost(way: Callable[..., None], name: str, layers: int, batch: int, new: int) -> Any:
    """Waits and launches, and their lines."""
    model, method = model_on(CUDA, layers), build_method(METHODS[name][0], **METHODS[name][1])
    rotary_of(model, range(layers), 9, CUDA)  # asked once a model
    found = counted(lambda: way(model, method, batch, new), "sync", "launch")
    return [sum(n for x, n in found.items() if x.startswith(k)) for k in ("sync", "launch")], found


@needs_pretend
def test_a_captured_step_serves_later_prompts(monkeypatch):
    monkeypatch.setattr(captured, "WORTH_STEPS", 2)
    steps = captured.Steps()
    names = ["h2o", "balancekv", "streaming_llm", "adakv", "snapkv_2bit", "adakv_4bit"]
    monkeypatch.setattr(steps, "capture", capture := Mock(side_effect=steps.capture))
    on_gpu, on_cpu = model_on(CUDA), model_on(CPU)
    for n in (72, 69):
        monkeypatch.setenv("KVBENCH_KERNELS", "auto")
        rows = answers(on_gpu, names, n, new=12, steps=steps)
        monkeypatch.setenv("KVBENCH_KERNELS", "torch")
        assert rows == answers(on_cpu, names, n, new=12)
    assert capture.call_count == 1


@needs_pretend
def test_a_step_is_captured_on_the_gpu_of_its_model(monkeypatch):
    """torch captures on a stream of the first current GPU unless it is given one: nothing is recorded
    then of a model that lies on another."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    captures, capture = [], torch.cuda.graph

    def graph(graph: Any, stream: Any = None) -> Any:
        captures.append((stream and stream.device, torch.cuda.current_device()))
        return capture(graph)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(captured, "WORTH_STEPS", 2)
    rows = answers(model_on(last), ["exact", "snapkv"], new=12, steps=captured.Steps())
    assert captures == [(last, last.index)]
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    assert rows == answers(model_on(CPU), ["exact", "snapkv"], new=12)


@needs_pretend
@pytest.mark.parametrize(
    ("way", "name"),
    [
        *((prefilled, n) for n in ("streaming_llm", "snapkv", "h2o", "pyramidkv", "uniform")),
        (generated, "snapkv"),
    ],
)
def test_compression_waits_at_no_layer(way, name, monkeypatch):
    """Whether keys and logits are finite, entries and clocks are read once per prompt."""
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    ((few, _), _), ((many, _), found) = cost(way, name, 1, 2, 1), cost(way, name, 3, 2, 1)
    assert many == few, found
    assert few <= (7 if way is prefilled else 15)  # one a row: no position is held twice


@needs_pretend
@pytest.mark.parametrize(
    ("way", "name", "waits", "a_layer"),
    [
        *((generated, name, 1, 45) for name in ("snapkv", "h2o")),
        *((asked, name, 1, 0) for name in ("exact", "h2o")),  # a graph
        (scored, "snapkv", 0, 0),  # tokens are fed together
    ],
)
def test_a_token_waits_for_itself_and_no_launch_is_one_row_s(
    way, name, waits, a_layer, monkeypatch
):
    monkeypatch.setenv("KVBENCH_KERNELS", "auto")
    monkeypatch.setattr(captured, "WORTH_STEPS", 2)

    def a_token(layers: int, batch: int) -> float:
        (few, _), (many, found) = (cost(way, name, layers, batch, new) for new in (6, 8))
        assert many[0] - few[0] == 2 * waits, found
        return (many[1] - few[1]) / 2

    alone, together = a_token(1, 1), a_token(1, 4)
    assert together == alone
    assert a_token(2, 4) - together <= a_layer


@needs_pretend
def test_a_length_is_planned_outside_the_clock_of_its_prefill(monkeypatch):
    """A library prepares its attention kernel at the first call with a length."""
    calls, clock = [], time.perf_counter
    exact = LayerCall.exact_with_normalisers
    monkeypatch.setattr(
        LayerCall,
        "exact_with_normalisers",
        lambda call: calls.append((clock(), call.query.shape)) or exact(call),
    )
    begun = []
    monkeypatch.setattr("kvbench.engine.prefill.synchronize", lambda _: begun.append(clock()))
    prefilled(model_on(CUDA), build_method("snapkv"), 1, 1)
    # `rotary_of` asks attention, too, for a token at a time.
    (planned, shape), (first, same), *_ = [call for call in calls if call[1][2] == 72]
    assert planned < begun[0] < first
    assert shape == same
