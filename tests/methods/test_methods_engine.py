"""Every method through the engine: prefill, compression, decoding, audit."""

from __future__ import annotations

import pytest
from support.tiny import prompt_ids, tiny_model
from support.variants import OTHERS, VARIANTS, label

from kvbench.engine.generate import run_forks
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods import build_method

BUDGET = Budget(rate=0.4, sink=8, window=8)
PACKED = {"bits": 4, "group_size": 4}
MORE = [
    ("wildcat", {"bin_size": 3, "quantize": PACKED}),
    ("adakv", {"quantize": PACKED}),
    ("kvzip", {"chunk": 50, "instructed": False}),
    ("kvzip", {"level": "uniform", "instructed": False, "quantize": PACKED}),
    ("attention_matching", {"quantize": {"scheme": "turboquant", "bits": 4}}),
    ("attention_matching", {"queries": "repeat", "instructed": False, "quantize": PACKED}),
    ("adakv", {"of": "attention_matching", "quantize": PACKED}),
    ("recompress", {"of": "attention_matching", "every": 3, "to": 30}),
    ("rkv", {"every": 2, "to": 24}),
    ("recompress", {"of": "uniform", "every": 3, "to": 30}),
    ("qjl", {"quantize": {"scheme": "qjl", "group": 8, "buffer": 16, "outliers": 2}}),
    ("snapkv", {"quantize": {"scheme": "turboquant", "bits": 2, "outlier_bits": 3}}),
]
LEFT_OUT = [
    ("qjl", {}),  # groups of more tokens than there are
    ("wildcat", {"bins": "released", "bin_size": 3}),  # holds more than the budget
]
EVERY = [v for v in (*VARIANTS, *OTHERS, *MORE) if v not in LEFT_OUT]


@pytest.mark.parametrize(
    ("architecture", "compress_after"),
    [("llama", "prompt"), ("gemma2", "context"), ("gpt_neox", "prompt")],
)
def test_every_method_generates_within_its_budget(architecture, compress_after):
    model, ids = tiny_model(architecture), prompt_ids(150)
    model.set_attn_implementation("kvbench")
    methods = {label(v): (build_method(v[0], **v[1]), BUDGET) for v in EVERY}
    how = {"seed": 0, "example_id": "x", "compress_after": compress_after}
    results = run_forks(model, ids[:-10], ids[-10:], methods, Stopping(6), **how)
    n = 150 if compress_after == "prompt" else 140
    for name, result in results.items():
        assert result.failure is None, f"{name}: {result.failure}"
        assert len(result.tokens) == 6, name
        if methods[name][0].saves_memory:
            assert result.entries["mean"] <= BUDGET.capacity(n), name
