"""scripts/recall_mini/force_needle.py on one short prompt of the shipped model."""

from __future__ import annotations

from pathlib import Path

import torch
from support.method_layers import make_layer

from kvbench.kv import Budget
from kvbench.methods import build_method

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "recall_mini"


def test_forcing_keeps_the_span_within_the_same_budget(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from force_needle import Forced

    layer, budget = make_layer(200, layer_index=1), Budget(rate=0.25, sink=4, window=8)
    forced = Forced(start=30, stop=50, layers=frozenset({1}))
    generator = torch.Generator()
    plain = build_method("snapkv").compress(layer, budget, generator).positions[0]
    kept = forced.compress(layer, budget, generator).positions[0]
    assert kept.shape == plain.shape
    for head in range(2):
        found, before = set(kept[head].tolist()), set(plain[head].tolist())
        assert set(range(30, 50)) <= found
        assert not set(range(30, 50)) <= before
        assert found - set(range(30, 50)) <= before, "in place of the lowest-scored"
    other = make_layer(200, layer_index=2)
    same = build_method("snapkv").compress(other, budget, generator).positions
    assert torch.equal(forced.compress(other, budget, generator).positions, same)


def test_one_layer_copies_the_needle(monkeypatch, capsys):
    """The span at that layer alone is enough, and everywhere else it is not."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from force_needle import main

    main(["--lengths", "400", "--depths", "50"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("needle in 1 prompts of 400 to 400 tokens")
    contained = {line[:44].strip(): float(line[44:].split()[0]) for line in lines[1:]}
    assert contained["exact"] == 1.0
    assert contained["snapkv, kernel_size 5"] == 0.0
    assert contained["snapkv, needle kept at layer 1 alone"] == 1.0
    assert contained["snapkv, needle kept at all layers but 1"] == 0.0
    assert contained["snapkv, needle kept at all layers"] == 1.0
