"""The engine on a GPU, real or pretend: the answers of the CPU, nothing left on another device."""

from __future__ import annotations

import pytest
import torch
from support.jobs import SMALL
from support.pretended import counted, needs_cuda, needs_pretend
from support.prompts import EVERY_METHOD, facts
from support.tiny import prompt_ids, tiny_model
from support.variants import VARIANTS, label

from kvbench.engine import graphs
from kvbench.engine.attention import LayerCall
from kvbench.engine.fork import Fork
from kvbench.engine.generate import Prompt, run_batch
from kvbench.engine.graphs import FIRST_STEPS, StepGraphs
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


@needs_pretend
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_the_prefill_s_attention_tells_its_normalisers(backend, monkeypatch):
    chosen = getattr(torch.nn.attention.SDPBackend, backend).value
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, **options: chosen)
    query, key, value = (torch.randn(1, 2, 40, 16).to(CUDA) for _ in range(3))
    out, normalisers = LayerCall(0, query, key, value, 0.25).exact_with_normalisers()
    logits = query.cpu() @ key.cpu().mT * 0.25
    logits.masked_fill_(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(normalisers.cpu(), logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.cpu(), logits.softmax(-1) @ value.cpu(), rtol=1e-4, atol=1e-4)


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
def test_a_row_that_decodes_alone_leaves_the_others_their_graph(monkeypatch):
    monkeypatch.setenv("KVBENCH_KERNELS", "auto")
    monkeypatch.setattr(graphs, "WORTH_STEPS", 2)
    model, names, found = model_on(CUDA), ["exact", "snapkv", "topk"], {}
    eager = answers(model, names, n=40, new=7, graphs=StepGraphs("eager"))
    replayed = counted(lambda: found.update(answers(model, names, n=40, new=7)), "launch graph")
    assert found == eager
    assert sum(replayed.values()) == 6 - FIRST_STEPS, "the steps after the first, of two rows"


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
