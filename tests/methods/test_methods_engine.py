"""Every method through the engine: prefill, compression, decoding, audit."""

from __future__ import annotations

import pytest
from support.tiny import prompt_ids, tiny_model
from support.variants import VARIANTS, label

from kvbench.engine.generate import run_forks
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods import build_method

BUDGET = Budget(rate=0.4, sink=8, window=8)


@pytest.mark.parametrize(
    ("architecture", "compress_after"),
    [("llama", "prompt"), ("gemma2", "context"), ("gpt_neox", "prompt")],
)
def test_every_method_generates_within_its_budget(architecture, compress_after):
    model = tiny_model(architecture)
    model.set_attn_implementation("kvbench")
    ids = prompt_ids(150)
    variants = [
        *VARIANTS,
        ("balancekv_needle", {"block_size": 16, "dilation": 2}),
        ("subgen_streaming", {"t": 2}),
        ("balancekv_streaming", {}),
        ("wildcat", {"bin_size": 3}),
        ("wildcat", {"bin_size": 3, "quantize": {"bits": 4, "group_size": 4}}),
        ("qjl", {"quantize": {"scheme": "qjl", "group": 8, "buffer": 16, "outliers": 2}}),
        ("turboquant", {}),
        ("adakv", {}),
        ("adakv", {"quantize": {"bits": 4, "group_size": 8}}),
        ("kvzip", {"chunk": 50, "instructed": False}),
        (
            "kvzip",
            {"level": "uniform", "instructed": False, "quantize": {"bits": 4, "group_size": 8}},
        ),
        ("pages", {"size": 4}),
        ("rkv", {"every": 2, "to": 24}),
        ("recompress", {"of": "uniform", "every": 3, "to": 30}),
        ("snapkv", {"quantize": {"scheme": "turboquant", "bits": 2, "outlier_bits": 3}}),
    ]
    methods = {label(v): (build_method(v[0], **v[1]), BUDGET) for v in variants}
    results = run_forks(
        model,
        ids[:-10],
        ids[-10:],
        methods,
        Stopping(6),
        seed=0,
        example_id="x",
        compress_after=compress_after,
    )
    for name, result in results.items():
        assert result.failure is None, f"{name}: {result.failure}"
        assert len(result.tokens) == 6, name
        assert result.entries is not None
        n = 150 if compress_after == "prompt" else 140
        if methods[name][0].saves_memory:
            assert result.entries["mean"] <= BUDGET.capacity(n), name
