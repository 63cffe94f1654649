"""kvpress's own generation, as a row of the throughput probe."""

from __future__ import annotations

import pytest
import torch
from reference_layers import shipped_spec

from kvbench.engine.baselines import BASELINES
from kvbench.engine.loading import load_model
from kvbench.kv import Budget

pytest.importorskip("kvpress", reason="needs the package kvpress: make test-references")


@pytest.mark.parametrize("name", ["kvpress_snapkv", "kvpress_h2o"])
def test_a_press_generates_and_holds_what_our_budget_allows(name):
    model = load_model(shipped_spec(), device=torch.device("cpu"), dtype=torch.float32)
    config = model.config
    ids = torch.randint(5, 100, (2, 300), generator=torch.Generator().manual_seed(0))
    budget, new = Budget(rate=0.25), 8
    fields = BASELINES[name].generate(model, ids, new, budget)
    assert fields["new_tokens"] == new
    numbers = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    # both rows; the last token's entry is not in the cache
    assert fields["cache_bytes_end"] == 2 * numbers * 4 * (budget.capacity(300) + new - 1)
    assert config._attn_implementation == "kvbench"
