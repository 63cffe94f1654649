"""Long answers: what a method holds while a thousand tokens are decoded, and what the process does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers as t
from support.asking import generate_one
from support.tiny import GROUPED, on_kvbench, prompt_ids

from kvbench.engine.answer import Stopping
from kvbench.engine.attention import register
from kvbench.kv import Budget
from kvbench.methods import build_method

NEW = int(os.environ.get("KVBENCH_NEW_TOKENS", 1_024))
ENTRY = 4 * 2 * 2 * 16 * 4
"""Bytes of a token: layers, KV heads, keys and values, head dimensions, float32."""
RING = {"rkv": 8, "recompress": 64}
"""Entries beyond the budget that a method may hold for queries and until it compresses again."""


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_the_cap_holds_at_every_step_and_memory_is_flat() -> None:
    register()
    torch.manual_seed(0)
    config = t.LlamaConfig(**{**GROUPED, "max_position_embeddings": NEW + 512})
    model = on_kvbench(t.AutoModelForCausalLM.from_config(config).eval())
    budget = Budget(size=128, sink=4, window=16)
    methods = {
        "exact": (build_method("exact"), budget),
        "h2o": (build_method("h2o"), budget),
        "streaming_llm": (build_method("streaming_llm"), budget),
        "rkv": (build_method("rkv"), budget),
        "recompress": (build_method("recompress", every=64, to=128), budget),
    }
    ids, seen = prompt_ids(300), []

    def watched(tokens: object) -> str:
        seen.append(resident())
        return ""

    stopping = Stopping(NEW, frozenset(), ("never said",), watched)
    results = generate_one(model, ids[:-1], ids[-1:], methods, stopping, seed=0, example_id="long")
    for name, result in results.items():
        assert result.failure is None, (name, result.failure)
        assert result.cost.new_tokens == NEW
        if name in ("exact", "streaming_llm"):  # the latter's cache grows by what is said
            continue
        most = (128 + RING.get(name, 0) + 1) * ENTRY * 1.5  # scores and positions count as well
        assert result.cost.cache_bytes_peak <= most, (name, result.cost.cache_bytes_peak, most)
        assert result.cost.cache_bytes_mean < results["exact"].cost.cache_bytes_mean / 2
    grown = resident() - seen[len(seen) // 8] if seen else 0
    assert grown <= 4 * NEW * ENTRY + (64 << 20)
