"""Hybrid models: full layers compressed, states of the others carried on by every row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from support.asking import teacher_forced
from support.forward import SMALL, generate, reference
from support.tiny import GROUPED, Everything, on_kvbench, prompt_ids, tiny_model
from torch import Tensor

from kvbench import compress
from kvbench.engine.architecture import check_supported, compressible_layers
from kvbench.engine.attention import UnsupportedModel, register
from kvbench.engine.prefill import capture_layers
from kvbench.engine.states import HYBRIDS, clone_of, states_in
from kvbench.methods import build_method

_LINEAR: dict[str, Any] = {
    **GROUPED,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA: dict[str, Any] = {
    **GROUPED,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
}
CONFIGS = {
    "bamba": lambda: t.BambaConfig(**_MAMBA, attn_layer_indices=[1, 3]),
    "falcon_h1": lambda: t.FalconH1Config(**_MAMBA, head_dim=16, mamba_d_ssm=128),
    "granitemoehybrid": lambda: t.GraniteMoeHybridConfig(
        **_MAMBA,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=0,
        shared_intermediate_size=96,
    ),
    "lfm2": lambda: t.Lfm2Config(
        **{k: v for k, v in GROUPED.items() if k != "tie_word_embeddings"},
        layer_types=["conv", "full_attention"] * 2,
    ),
    "nemotron_h": lambda: t.NemotronHConfig(
        **{k: v for k, v in GROUPED.items() if k != "num_hidden_layers"},
        layers_block_type=["mamba", "attention", "mlp", "attention"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=16,
    ),
    "olmo_hybrid": lambda: t.OlmoHybridConfig(
        **GROUPED, layer_types=["linear_attention", "full_attention"] * 2
    ),
    "qwen3_5_text": lambda: t.Qwen3_5TextConfig(**_LINEAR),
    "qwen3_next": lambda: t.Qwen3NextConfig(
        **_LINEAR, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


def hybrid(name: str = "qwen3_next") -> Any:
    register()
    torch.manual_seed(0)
    config = CONFIGS[name]()
    check_supported(config)
    return t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("name", "compress_after"),
    [
        *((name, ("all_but_last", "context")[i % 2]) for i, name in enumerate(HYBRIDS)),
        (HYBRIDS[0], "context"),
        (HYBRIDS[-1], "prompt"),
    ],
)
def test_generates_what_transformers_generates_and_counts_both(name, compress_after):
    model, ids = hybrid(name), prompt_ids(80)
    expected = reference(model, ids, 16)
    assert len(set(expected)) > 5, "a degenerate continuation would test nothing"
    cache = t.DynamicCache(config=model.config)
    model(input_ids=torch.tensor([ids[:70]]), past_key_values=cache)
    states = [part for layer in cache.layers for part in parts_of(layer)]
    on_kvbench(model)
    methods = {name: (build_method(name), SMALL) for name in ("exact", "snapkv")}
    methods["everything"] = (Everything(), SMALL)
    results = generate(model, ids, methods, new_tokens=16, compress_after=compress_after)
    assert all(one.failure is None for one in results.values())
    assert results["exact"].tokens == results["everything"].tokens == expected
    n = {"prompt": 80, "all_but_last": 79, "context": 70}[compress_after]
    layers, per_entry = len(compressible_layers(model)), 2 * 16 * 2 * 4
    held = sum(part.nbytes for part in states)
    assert held > 0
    assert results["exact"].cost.cache_bytes == layers * n * per_entry + held
    assert results["exact"].cost.exact_bytes == results["exact"].cost.cache_bytes
    assert results["snapkv"].cost.cache_bytes == layers * SMALL.capacity(n) * per_entry + held


def parts_of(layer: Any) -> list[Tensor]:
    kinds = (getattr(layer, kind, {}) for kind in ("conv_states", "recurrent_states"))
    return [part for parts in kinds for part in parts.values() if part is not None]


def test_every_hybrid_is_tested_and_a_clone_of_states_shares_nothing_with_them():
    assert tuple(sorted(CONFIGS)) == HYBRIDS
    assert {CONFIGS[name]().model_type for name in CONFIGS} == set(HYBRIDS)
    model, ids = hybrid(), prompt_ids(20)
    cache = t.DynamicCache(config=model.config)
    model(input_ids=torch.tensor([ids]), past_key_values=cache)
    states = states_in(cache)
    twins = clone_of(states)
    assert list(states) == list(twins) == [0, 2]
    for index, state in states.items():
        twin = twins[index]
        for name, value in vars(state).items():
            assert not isinstance(value, dict) or value is not getattr(twin, name), name
        for mine, theirs in zip(parts_of(state), parts_of(twin), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() != theirs.data_ptr()


def test_rows_of_a_batch_are_as_alone_and_scoring_is_one_pass():
    model, ids = hybrid(), prompt_ids(60)
    continuation = prompt_ids(9, seed=2)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*ids, *continuation]])).logits[0, 59:-1]
    expected = -logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
    on_kvbench(model)
    methods = {name: (build_method(name), SMALL) for name in ("exact", "h2o", "streaming_llm")}
    methods["kvzip"] = (build_method("kvzip", instructed=False), SMALL)  # repeats the prompt
    together = generate(model, ids, methods, compress_after="context")
    for name, pair in methods.items():
        alone = generate(model, ids, {name: pair}, compress_after="context")
        assert alone[name].tokens == together[name].tokens
    assert together["h2o"].tokens != together["exact"].tokens
    del methods["kvzip"]
    scored = teacher_forced(model, ids, continuation, methods)
    assert scored["exact"].nll == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "falcon_h1"])
def test_inside_compress(name):
    model = hybrid(name)
    model.generation_config.eos_token_id = None
    one, two = prompt_ids(60), prompt_ids(45, seed=3)
    expected = [reference(model, ids, 8) for ids in (one, two)]
    batch = {
        "input_ids": torch.tensor([one, [0] * 15 + two]),
        "attention_mask": (torch.arange(60) >= torch.tensor([[0], [15]])).long(),
        "max_new_tokens": 8,
        "do_sample": False,
    }
    plain = model.generate(**batch)[:, 60:].tolist()
    with compress(model, "exact") as session:
        assert model.generate(**batch)[:, 60:].tolist() == plain
    assert plain[0] == expected[0]
    assert session.ratio == [1.0, 1.0]
    with compress(model, "snapkv", sink=4, window=4) as session:
        model.generate(**batch, num_beams=2)
    assert max(session.ratio) < 0.9
    with compress(model, "exact") as session:
        beams = model.generate(**batch, num_beams=2)
    assert torch.equal(beams, model.generate(**batch, num_beams=2))


def test_what_is_refused():
    model = on_kvbench(hybrid())
    with pytest.raises(UnsupportedModel, match=r"layers \[0, 1\] hold no keys; .* \[1, 3\]"):
        capture_layers(model, prompt_ids(20), [0, 1])
    register()
    jamba = t.JambaConfig(**GROUPED, num_experts=1, attn_layer_period=2, attn_layer_offset=1)
    with pytest.raises(
        UnsupportedModel, match=r"type 'jamba' has layers that carry a state .* qwen3_next"
    ):
        check_supported(jamba)
    shared = tiny_model("gemma3")
    shared.config.num_kv_shared_layers = 2  # as Gemma 3n's
    with pytest.raises(UnsupportedModel, match="shares keys and values between layers"):
        compressible_layers(shared)
