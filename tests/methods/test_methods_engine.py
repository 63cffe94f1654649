"""Every method through the engine: prefill, compression, decoding, audit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.asking import generate_one
from support.method_layers import make_layer, run
from support.tiny import prompt_ids, tiny_model
from support.variants import OTHERS, VARIANTS, label

import kvbench.methods
from kvbench.engine.answer import Stopping
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method

BUDGET = Budget(rate=0.4, sink=8, window=8)
PACKED = {"bits": 4, "group_size": 4}
MORE = [
    ("wildcat", {"bin_size": 3, "quantize": PACKED}),
    ("adakv", {"quantize": PACKED}),
    ("kvzip", {"chunk": 50, "instructed": False}),
    ("kvzip", {"level": "uniform", "instructed": False, "quantize": PACKED}),
    ("kvzip", {"score": "plus", "chunk": 50, "instructed": False}),
    ("kvgrad", {"chunk": 50, "instructed": False, "quantize": PACKED}),
    ("attention_matching", {"quantize": {"scheme": "turboquant", "bits": 4}}),
    ("attention_matching", {"queries": "repeat", "instructed": False, "quantize": PACKED}),
    ("adakv", {"of": "attention_matching", "quantize": PACKED}),
    ("recompress", {"of": "attention_matching", "every": 3, "to": 30}),
    ("rkv", {"every": 2, "to": 24}),
    ("recompress", {"of": "uniform", "every": 3, "to": 30}),
    ("solved", {"options": {"chunk": 50, "instructed": False}, "quantize": PACKED}),
    ("solved", {"of": "kvgrad", "options": {"instructed": False}, "quantize": PACKED}),
    ("solved", {"of": "kvzip_plus", "options": {"instructed": False}, "queries": "prompt"}),
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
    results = generate_one(model, ids[:-10], ids[-10:], methods, Stopping(4), **how)
    n = 150 if compress_after == "prompt" else 140
    for name, result in results.items():
        assert result.failure is None, f"{name}: {result.failure}"
        assert len(result.tokens) == 4, name
        if methods[name][0].saves_memory:
            assert result.cost.entries["mean"] <= BUDGET.capacity(n), name


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        (Budget(rate=1e-9, sink=0, window=0), "budget.rate 1e-09 of a prompt of 150 tokens is 0 "),
        (Budget(total_rate=0.006, sink=0, window=1), "budget.total_rate 0.006 .* tokens is 1 "),
        (Budget(size=1, sink=0, window=0), "budget.size 1 of a prompt of 150 tokens is 1 "),
    ],
)
def test_a_budget_of_no_entry_or_one_is_refused_in_a_line_for_the_user(budget, named):
    """No method decodes with it, and none speaks to its author."""
    model, ids = tiny_model("llama"), prompt_ids(150)
    model.set_attn_implementation("kvbench")
    methods = {label(v): (build_method(v[0], **v[1]), budget) for v in EVERY}
    results = generate_one(model, ids, [], methods, Stopping(2), seed=0, example_id="x")
    for name, result in results.items():
        if not methods[name][0].uses_budget:
            assert result.failure is None, name
            continue
        assert isinstance(result.failure, KVError), name
        assert re.match(f"{named}entries, .* allowed: at least 2$", str(result.failure)), name


def own_methods() -> dict[str, Any]:
    """Those that kvbench/methods/README.md shows, by the class's name."""
    text = (Path(kvbench.methods.__file__).parent / "README.md").read_text()
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        assert len(code.splitlines()) < 30
        exec(code, names)
    return {name: names[name]() for name in ("Runs", "Fading")}


def test_the_readmes_own_methods_merge_and_evict():
    model, ids = tiny_model("llama"), prompt_ids(150)
    model.set_attn_implementation("kvbench")
    budget = Budget(rate=0.25, sink=4, window=8)
    methods = {name: (method, budget) for name, method in own_methods().items()}
    results = generate_one(model, ids, [], methods, Stopping(12), seed=0, example_id="x")
    for name, result in results.items():
        assert result.failure is None, f"{name}: {result.failure}"
        assert len(result.tokens) == 12
        assert result.cost.entries["max"] == budget.capacity(150)
    assert results["Fading"].cost.cache_bytes_end == results["Fading"].cost.cache_bytes, (
        "it does not grow"
    )

    layer = make_layer(150)
    kept = run(methods["Runs"][0], layer, budget)
    weights = kept.log_weights.exp()
    torch.testing.assert_close(weights.sum(-1), torch.full_like(weights[..., 0], 150.0))
    sums = (weights[..., None] * kept.values).sum(2)
    torch.testing.assert_close(sums, layer.values.sum(2), rtol=1e-4, atol=1e-4)
