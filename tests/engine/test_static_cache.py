"""Exact decoding by transformers itself, beside kvbench's."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs import make_job
from support.prompts import prompt_ids
from support.tiny import on_kvbench, tiny_model

from kvbench.engine.attention import IMPLEMENTATION
from kvbench.engine.generate import Prompt, run_batch
from kvbench.engine.static_cache import generate_with_static_cache
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method

NEW = 12
PROMPTS = [prompt_ids(70)[:50], prompt_ids(90)[30:80]]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_neox"])
def test_transformers_own_decoding_has_the_tokens_and_bytes_of_exact(architecture: str) -> None:
    model = on_kvbench(tiny_model(architecture))
    methods = {"exact": (build_method("exact"), Budget(rate=1.0))}
    prompts = [Prompt(ids, [], methods, Stopping(NEW), "x") for ids in PROMPTS]
    exact = [answer["exact"] for answer in run_batch(model, prompts, seed=0)]
    witness = generate_with_static_cache(model, PROMPTS, NEW, attention="sdpa", compiled=True)
    for ours, theirs in zip(exact, witness, strict=True):
        assert theirs.tokens == ours.tokens
        for name in ("prompt_tokens", "new_tokens", "entries", "ratio", "batch"):
            assert getattr(theirs, name) == getattr(ours, name), name
        for name in ("cache_bytes", "cache_bytes_end", "cache_bytes_peak", "cache_bytes_mean"):
            assert getattr(theirs, name) == getattr(ours, name), name
        assert theirs.prefill_s > 0
        assert theirs.decode_s > 0
    assert model.config._attn_implementation == IMPLEMENTATION


def test_the_model_has_kvbenchs_attention_again_where_the_backend_is_not_there() -> None:
    model = on_kvbench(tiny_model("llama"))
    with pytest.raises(ValueError, match="nowhere"):
        generate_with_static_cache(model, PROMPTS, NEW, attention="nowhere", compiled=False)
    assert model.config._attn_implementation == IMPLEMENTATION


def test_only_the_throughput_task_measures_it(tmp_path: Path) -> None:
    methods = {"transformers": (build_method("transformers"), Budget(rate=0.5))}
    prompt = Prompt(PROMPTS[0], [], methods, Stopping(NEW), "x")
    with pytest.raises(
        KVError, match="decoded by transformers, whose times are compared; allowed: task=t"
    ):
        run_batch(on_kvbench(tiny_model("llama")), [prompt], seed=0)
    with pytest.raises(KVError, match="allowed: task=throughput"):
        make_job(tmp_path, {"transformers": methods["transformers"][0]})
    with pytest.raises(KVError, match=r"transformers.quantize is \{'bits': 4\}; allowed: null"):
        build_method("transformers", quantize={"bits": 4})
