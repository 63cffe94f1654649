"""Models that compute their attention themselves, through kvbench's: MPT, Bloom, Falcon."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forward import SMALL, generate, reference
from support.tiny import CONFIGS, Everything, on_kvbench, prompt_ids, tiny_model
from transformers import FalconConfig

from kvbench import compress
from kvbench.engine.adapters import AdaptedAttention, is_adapted
from kvbench.engine.attention import UnsupportedModel, exact_attention
from kvbench.engine.loading import ModelSpec
from kvbench.engine.streaming import stream
from kvbench.engine.weights import load_model
from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.position_bias import PositionBias
from kvbench.kv import Budget, CompressedKV
from kvbench.methods import available_methods, build_method
from kvbench.probes.fidelity import teacher_forced

ADAPTED = ("bloom", "falcon", "falcon_grouped", "falcon_rotary", "mpt")
CPU = torch.device("cpu")


def test_a_bias_is_that_of_each_head_and_position():
    bias = PositionBias(torch.tensor([1.0, 0.5]), divisor=2.0)
    assert bias.at(torch.arange(3)).tolist() == [[0, 0.5, 1], [0, 0.25, 0.5]]
    own = torch.tensor([[[4, 0], [2, 8]]])
    assert bias.at(own).tolist() == [[[2, 0], [0.5, 2]]]
    assert bias.of_head(1).at(own[0, 1:]).tolist() == [[0.5, 2]]
    rounded = PositionBias(torch.tensor([1.0]), torch.bfloat16)
    assert rounded.at(torch.tensor([257, 258])).tolist() == [[256, 258]]


def test_attention_and_its_column_sums_with_a_bias_equal_brute_force_in_float64():
    torch.manual_seed(0)
    n, heads = 530, 3  # more than one query block
    q, k, v = (torch.randn(1, heads, n, 8) for _ in range(3))
    bias = PositionBias(torch.tensor([0.5, 0.01, -0.1])).at(torch.arange(n))
    logits = q.double() @ k.double().mT * 0.4 + bias.double()[:, None]
    weights = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
    out = exact_attention(q, k, v, scaling=0.4, bias=bias)
    assert (out.double() - weights @ v.double()).abs().max() < 1e-4
    mass = attention_mass(q[:, :, -200:], k, scaling=0.4, bias=bias)
    assert (mass.double() - weights[:, :, -200:].sum(2)).abs().max() < 1e-3


@pytest.mark.parametrize("architecture", ["falcon", "mpt"])
@pytest.mark.parametrize("chunks", [True, False])
def test_what_is_kept_stands_where_it_stood(architecture, chunks, monkeypatch):
    """Teacher forcing over what StreamingLLM keeps is one pass of transformers' own attention that does
    not see the rest: positions of kept tokens are those of the prompt."""
    model, ids, continuation = tiny_model(architecture), prompt_ids(50), prompt_ids(6, seed=2)
    tokens = torch.tensor([[*ids, *continuation[:-1]]])
    n = tokens.shape[1]
    hidden = torch.ones(n, n).triu(1).bool()
    hidden[49:, 4:41] = True
    found_biases = {}
    if architecture == "mpt":  # takes a mask of its own; True hides
        mask: Any = hidden[None, None]
    else:  # takes ALiBi in the mask, which is added to the logits
        on_kvbench(model)

        class Seen:
            def attend(self, call):
                found_biases["bias"] = call.key_bias
                return call.exact()

        model(input_ids=tokens, kvbench=Seen())
        model = tiny_model(architecture)
        bias = found_biases["bias"][:, None].expand(-1, n, n).masked_fill(hidden, -torch.inf)
        for layer in model.transformer.h:
            layer.self_attention.register_forward_pre_hook(
                lambda module, args, kwargs: (args, {**kwargs, "attention_mask": bias[None]}),
                with_kwargs=True,
            )
        mask = None
    with torch.no_grad():
        want = model(input_ids=tokens, attention_mask=mask).logits[0, 49:].log_softmax(-1)
    if not chunks:
        monkeypatch.setattr("kvbench.engine.scoring.CHUNK_LOGITS", 1)  # a token a pass
    kept = build_method("streaming_llm", decode="grow")
    methods = {"s": (kept, Budget(size=12, sink=4, window=4))}
    found = teacher_forced(tiny_model(architecture), ids, continuation, methods)["s"]
    nll = -want.gather(1, torch.tensor(continuation)[:, None])[:, 0]
    assert found.failure is None
    assert found.nll == pytest.approx(nll.tolist(), abs=1e-4)
    assert max(found.kl) > 1e-3


@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_every_method_runs_or_says_why_not(compress_after):
    model, ids = on_kvbench(tiny_model("bloom")), prompt_ids(120)
    budget = Budget(rate=0.4, sink=4, window=4)
    needed = {"kvpress", "minference"}  # packages that a test of theirs needs
    methods = {
        name: (build_method(name), budget) for name in available_methods() if name not in needed
    }
    found = generate(model, ids, methods, new_tokens=6, compress_after=compress_after)
    failed = {name: str(one.failure) for name, one in found.items() if one.failure is not None}
    assert set(failed) == {"expected_attention", "kvzip"}
    assert "there is no tokenizer" in failed["kvzip"]
    assert "no rotary table" in failed["expected_attention"]
    alone = generate(
        model, ids, {"h2o": methods["h2o"]}, new_tokens=6, compress_after=compress_after
    )
    assert alone["h2o"].tokens == found["h2o"].tokens


@pytest.mark.parametrize("architecture", ADAPTED)
def test_a_padded_batch_inside_compress(architecture):
    model = tiny_model(architecture)
    one, two = prompt_ids(60), prompt_ids(45, seed=3)
    expected = [reference(model, ids, 8) for ids in (one, two)]
    batch = {
        "input_ids": torch.tensor([one, [0] * 15 + two]),
        "attention_mask": (torch.arange(60) >= torch.tensor([[0], [15]])).long(),
        "max_new_tokens": 8,
        "do_sample": False,
        "use_cache": True,  # off in MPT's own config
    }
    with compress(model, "exact") as session:
        twin = copy.deepcopy(model)
        assert model.generate(**batch)[:, 60:].tolist() == expected
    assert session.ratio == [1.0, 1.0]
    with compress(model, "snapkv", sink=4, window=4) as session:
        model.generate(**batch)
    assert max(session.ratio) < 0.5
    assert reference(model, one, 8) == expected[0]
    assert not any("forward" in vars(module) for module in model.modules())
    for module in twin.modules():  # a copy has attention of its own
        own = vars(module).get("forward")
        assert own is None or (isinstance(own, AdaptedAttention) and own.module is module)


@pytest.mark.parametrize("name", ["h2o", "recompress", "adakv", "uniform", "snapkv"])
def test_a_context_is_asked_saved_and_branched(name, tmp_path: Path):
    model = tiny_model("bloom")
    model.generation_config.eos_token_id = None
    context, question = prompt_ids(120), prompt_ids(30, seed=4)
    options: dict[str, Any] = {"every": 8, "to": 40} if name == "recompress" else {}
    file = tmp_path / "context.safetensors"
    with compress(model, name, sink=4, window=4, **options) as session:
        held = session.read(context)
        expected = held.ask(question, max_new_tokens=6)
        assert held.ask(question, max_new_tokens=6) == expected
        if name not in ("recompress", "adakv"):  # which no file takes
            held.save(file)
            loaded = session.load(file)
            assert loaded.cache_bytes == held.cache_bytes
            assert loaded.ask(question, max_new_tokens=6) == expected


def test_entries_that_are_no_tokens_are_refused():
    class Means(Everything):
        def compress(self, layer, budget, generator):
            nowhere = torch.full(layer.keys.shape[:3], -1)
            return CompressedKV(layer.keys, layer.values, None, nowhere)

    found = generate(on_kvbench(tiny_model("bloom")), prompt_ids(60), {"m": (Means(), SMALL)})["m"]
    assert "depends on positions (ALiBi); allowed: methods that keep tokens" in str(found.failure)


def test_loading_attaches_and_refuses():
    fields = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    spec = ModelSpec(
        name="f", path="x", random_weights=True, architecture={"model_type": "falcon", **fields}
    )
    model = load_model(spec, device=CPU, dtype=torch.float32)
    ids = prompt_ids(40)
    expected = reference(model, ids, 5)
    exact = {"e": (build_method("exact"), SMALL)}
    assert generate(model, ids, exact, new_tokens=5)["e"].tokens == expected
    model.train()
    with pytest.raises(UnsupportedModel, match=r"training mode; call model\.eval\(\)"):
        generate(model, ids, exact)
    shared = FalconConfig(alibi=True, multi_query=True, num_attention_heads=4, hidden_size=64)
    with pytest.raises(UnsupportedModel, match="4 query heads that share 1 KV heads"):
        is_adapted(shared)


def test_a_stream_of_a_model_with_alibi_keeps_its_positions():
    model, ids = on_kvbench(tiny_model("mpt")), prompt_ids(40)
    with torch.no_grad():
        plain = tiny_model("mpt")(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    want = -plain.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    found = torch.cat(list(stream(model, ids, start=4, recent=60, positions="absolute")))
    assert found.tolist() == pytest.approx(want.tolist(), abs=1e-4)
    with pytest.raises(UnsupportedModel, match="has ALiBi"):
        list(stream(model, ids, start=4, recent=60))


def test_every_adapted_architecture_is_among_the_tested():
    assert set(ADAPTED) <= set(CONFIGS)
    assert {name for name in CONFIGS if is_adapted(CONFIGS[name]())} == set(ADAPTED)
