"""The engine on a GPU, real or pretend: the answers of the CPU, nothing left on another device."""

from __future__ import annotations

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from support.jobs import SMALL
from support.pretended import counted, needs_cuda, needs_pretend
from support.prompts import EVERY_METHOD, facts
from support.tiny import prompt_ids, tiny_model
from support.variants import VARIANTS, label

from kvbench.engine.decoding import DecodeState
from kvbench.engine.fork import Fork
from kvbench.engine.generate import Prompt, run_batch
from kvbench.engine.prefill import prefill
from kvbench.engine.stopping import Stopping
from kvbench.kv import KVError
from kvbench.methods import build_method

pytestmark = [pytest.mark.cuda, needs_cuda]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
METHODS = {label(variant): variant for variant in VARIANTS} | EVERY_METHOD


def model_on(device, layers=2, kind="llama"):
    model = tiny_model(kind, layers=layers)
    model.set_attn_implementation("kvbench")
    return model.to(device)


def answers(model, names, n=72, new=3, **how):
    methods = {name: (build_method(METHODS[name][0], **METHODS[name][1]), SMALL) for name in names}
    ids = prompt_ids(n)
    prompts = [Prompt(ids[: n - 9], ids[n - 9 :], methods, Stopping(new), "x")]
    (found,) = run_batch(model, prompts, seed=3, **how)
    assert {name: result.failure for name, result in found.items()} == dict.fromkeys(found)
    return facts(found)


@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_every_method_answers_as_on_the_cpu(compress_after, monkeypatch):
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    found = answers(model_on(CUDA), METHODS, compress_after=compress_after)
    assert found == answers(model_on(CPU), METHODS, compress_after=compress_after)


def test_a_model_on_two_gpus_answers_as_on_the_cpu(monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("KVBENCH_KERNELS", "auto")
    model = model_on(CUDA)
    layers = model.model.layers
    last = torch.device("cuda", 1)
    for place, layer in enumerate(layers):
        device = last if place >= len(layers) // 2 else CUDA
        add_hook_to_module(layer.to(device), AlignDevicesHook(execution_device=device))
    for module in (model.model.norm, model.lm_head, model.model.embed_tokens):
        add_hook_to_module(module, AlignDevicesHook(execution_device=CUDA))
    add_hook_to_module(model.model.rotary_emb, AlignDevicesHook(execution_device=CUDA))
    found = answers(model, ("exact", "h2o", "balancekv"), n=40, new=2)
    assert found == answers(model_on(CPU), ("exact", "h2o", "balancekv"), n=40, new=2)


@pytest.mark.parametrize(("part", "value"), [("k_proj", float("nan")), ("v_proj", float("inf"))])
@pytest.mark.parametrize("name", ["subgen", "balancekv", "wildcat"])
def test_what_is_not_finite_is_refused_with_its_layer(part, value, name, monkeypatch):
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    model = model_on(CUDA)
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, part).weight[-1] = value
    fork = Fork(name, build_method(name), SMALL, 0, "x", room=2)
    kind = {"k_proj": "keys", "v_proj": "values"}[part]
    heads = model.config.num_key_value_heads
    with pytest.raises(KVError, match=f"{kind} of layer 1, KV head {heads - 1} are not finite"):
        prefill(model, prompt_ids(72), [fork])


# --- what the host waits for, counted -------------------------------------------------------------


@needs_pretend
@pytest.mark.parametrize(
    "name", ["exact", "streaming_llm", "snapkv", "h2o", "pyramidkv", "uniform"]
)
def test_compression_waits_at_no_layer(name, monkeypatch):
    """Whether keys are finite, entries, seals and clocks are read once per prompt."""
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")

    def waits(layers):
        method = build_method(METHODS[name][0], **METHODS[name][1])
        model, fork = model_on(CUDA, layers), Fork(name, method, SMALL, 0, "x", room=2)
        found = counted(lambda: prefill(model, prompt_ids(72), [fork]), "sync")
        assert fork.failure is None
        assert fork.compress_s > 0
        return sum(found.values()), found

    (few, _), (many, found) = waits(1), waits(3)
    assert many == few, found
    assert few <= 1 + 6


@needs_pretend
@pytest.mark.parametrize("name", ["exact", "snapkv", "h2o"])
def test_a_decode_step_waits_for_its_token_only(name, monkeypatch):
    monkeypatch.setenv("KVBENCH_KERNELS", "auto")
    model = model_on(CUDA)

    def waits(new):
        found = counted(lambda: answers(model, [name], n=40, new=new), "sync")
        return sum(found.values()), found

    (few, _), (many, found) = waits(2), waits(5)
    assert many - few == 3, found


EVICTING = {"h2o": {}, "streaming_llm": {"decode": "evict"}, "local": {"decode": "evict"}}


def launches_per_layer(method, rows, monkeypatch):
    """Of the attention of a decode step whose rows are as many prompts of 40 tokens or more."""
    found, attend = [], DecodeState.attend

    def watched(state, call):
        monkeypatch.setenv("KVBENCH_KERNELS", "triton")
        said = []
        found.append(sum(counted(lambda: said.append(attend(state, call)), "launch").values()))
        monkeypatch.setenv("KVBENCH_KERNELS", "torch")
        return said[0]

    monkeypatch.setattr(DecodeState, "attend", watched)
    prompts = [
        Prompt(prompt_ids(40 + i), [], {"m": (method, SMALL)}, Stopping(3), f"p{i}")
        for i in range(rows)
    ]
    answers = run_batch(model_on(CUDA, layers=1), prompts, seed=0)
    monkeypatch.setattr(DecodeState, "attend", attend)
    assert [answer["m"].failure for answer in answers] == [None] * rows
    assert len(set(found)) == 1
    assert len(found) == 2
    return found[0]


@needs_pretend
@pytest.mark.parametrize("name", EVICTING)
def test_evicting_takes_four_launches_a_layer_at_most(name, monkeypatch):
    """More than a cache that grows takes, whatever the number of rows."""
    monkeypatch.setenv("KVBENCH_KERNELS", "torch")
    grows = launches_per_layer(build_method("exact"), 2, monkeypatch)
    method = build_method(name, **EVICTING[name])
    few, many = (launches_per_layer(method, rows, monkeypatch) for rows in (2, 8))
    assert few == many
    assert grows < few <= grows + 4
