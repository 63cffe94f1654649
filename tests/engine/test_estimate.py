"""The bytes of a cache that are predicted before a model is loaded are those that it then takes."""

from __future__ import annotations

import pytest
import torch
from support.forward import generate
from support.tiny import CONFIGS, on_kvbench, prompt_ids, tiny_model

from kvbench.engine.architecture import cache_bytes
from kvbench.kv import Budget
from kvbench.methods import build_method


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_the_exact_caches_bytes_within_a_sliding_window(architecture: str) -> None:
    """Beyond it they are compared wherever exact is what transformers generates."""
    methods = {"m": (build_method("exact"), Budget())}
    result = generate(on_kvbench(tiny_model(architecture)), prompt_ids(20), methods)["m"]
    predicted = cache_bytes(CONFIGS[architecture](), torch.float32, 20, 20)
    assert predicted == result.cost.exact_bytes


def test_of_a_budget_and_of_few_bits_in_every_layer() -> None:
    method = build_method("streaming_llm", quantize={"bits": 4, "group_size": 16})
    budget = Budget(rate=0.25, sink=8, window=8)
    found = generate(on_kvbench(tiny_model("llama")), prompt_ids(144), {"m": (method, budget)})["m"]
    sizes = 144, budget.capacity(144), method.quantization()
    predicted = cache_bytes(CONFIGS["llama"](), torch.float32, *sizes)
    assert predicted == found.cost.cache_bytes
